"""Logits of heads that draft blocks as speculators computes them; run by an interpreter that has it.

usage: block_logits.py INPUTS.npz HEAD...

Loads every head by speculators' own loader and writes ``logits.npz`` into its directory.
"""

import json
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from draft_logits import check

warnings.simplefilter("ignore")


def loaded(head):
    from speculators import SpeculatorModelConfig
    from speculators.models.dflash import core
    from speculators.models.dflash2.core import DFlash2DraftModel
    from speculators.models.dspark.core import DSparkDraftModel

    kinds = {"dflash": core.DFlashDraftModel, "dflash2": DFlash2DraftModel, "dspark": DSparkDraftModel}
    config = SpeculatorModelConfig.from_pretrained(head)
    config.transformer_layer_config._attn_implementation = "eager"
    kind = kinds[json.loads((Path(head) / "config.json").read_text())["speculators_model_type"]]
    return kind.from_pretrained(head, config=config, dtype=torch.float32).eval(), core


def fields(model, hidden, logits, token, anchor):
    """What drafts are drawn from after the text's own tokens, by block and row."""
    size = model.block_size
    at = (anchor[:, None] + torch.arange(size)[None]).reshape(-1)
    text = token[0, at].view(-1, size)
    before = text if model.config.sample_from_anchor else torch.cat([text[:, :1], text[:, :-1]], dim=1)
    hidden, logits = hidden.view(*text.shape, -1), logits.view(*text.shape, -1)
    found = {"hidden": hidden}
    if getattr(model, "markov_head", None) is not None:
        logits = logits + model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
    if getattr(model, "confidence_head", None) is not None:
        read = [hidden]
        if model.config.confidence_head_with_markov:
            read.append(model.markov_head.prev_embeddings(before))
        found["confidence"] = model.confidence_head(torch.cat(read, dim=-1))
    if getattr(model, "candidate_selector", None) is not None:
        ids, scores = model.candidate_selector.select(logits, hidden, before)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, ids, scores)
    return found | {"logits": logits}


@torch.no_grad()
def main(inputs, *heads):
    given = np.load(inputs)
    feature, token = torch.from_numpy(given["feature"]), torch.from_numpy(given["token"]).long()
    anchor, document = torch.from_numpy(given["anchor"]).long(), torch.from_numpy(given["document"]).long()
    for head in heads:
        model, core = loaded(head)
        check(model, head, ("embed_tokens", "lm_head"))
        core.select_anchors = lambda *_: (anchor, torch.ones(len(anchor), dtype=torch.bool))
        last = torch.zeros(1, token.shape[1], model.hidden_size)
        hidden, logits, *_ = model._backbone_forward(
            feature, token, torch.ones_like(token), last, document, torch.from_numpy(given["position"]).long(),
            max_anchors=len(anchor),
        )  # fmt: skip
        out = fields(model, hidden, logits, token, anchor)
        np.savez(Path(head) / "logits.npz", **{name: x.numpy() for name, x in out.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
