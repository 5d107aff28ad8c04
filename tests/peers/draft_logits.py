"""Logits of draft heads as SpecForge or speculators compute them; run by an interpreter that has them.

usage: draft_logits.py specforge|speculators|peagle INPUTS.npz HEAD...

Loads every head by the peer's own loader and writes ``logits.npz`` into its directory.
"""

import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

warnings.simplefilter("ignore")


def of_specforge(head, feature, token, rounds):
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

    loaded = LlamaForCausalLMEagle3.from_pretrained(head, dtype=torch.float32, attention_backend="sdpa")
    check(loaded, head)
    # transformers 5 leaves the tables of rotation, which are in no file, unset in a model that it loads.
    model = LlamaForCausalLMEagle3(loaded.config, attention_backend="sdpa").eval()
    model.load_state_dict(loaded.state_dict())
    state, length = model.project_hidden_states(feature), token.shape[1]
    position = torch.arange(length)[None]
    mask = model.prepare_decoder_attention_mask(torch.ones(1, length, dtype=torch.bool), state, 1, length, 0)
    memory, found = [[], []], []
    for shift in range(rounds):
        embedded = model.embed_input_ids(ahead(token, shift))
        state = model.backbone(embedded, state, memory, mask, position)
        found.append(model.compute_logits(state))
    return found, model


def of_speculators(head, feature, token, rounds):
    from speculators.models.eagle3 import Eagle3DraftModel

    model, found = loaded_by_speculators(Eagle3DraftModel, head)
    length = token.shape[1]
    document, position = torch.zeros(1, length, dtype=torch.long), torch.arange(length)[None]
    model(feature, token, document, position_ids=position, ttt_steps=rounds)
    return found, model


def of_peagle(head, feature, token, rounds):
    from speculators.losses import resolve_loss_config
    from speculators.models.peagle import PEagleDraftModel, core

    model, found = loaded_by_speculators(PEagleDraftModel, head)
    length = token.shape[1]
    counts = [length - depth for depth in range(rounds)]
    anchor = torch.cat([torch.arange(count) for count in counts])
    depth = torch.cat([torch.full((count,), depth) for depth, count in enumerate(counts)])
    core.generate_cod_sample_indices = lambda **_: (anchor, depth)  # all places of all depths, none at random
    last, document = torch.zeros(1, length, model.hidden_size), torch.zeros(1, length, dtype=torch.long)
    model(
        feature, token, document, verifier_last_hidden_states=last, num_depths=rounds,
        loss_config=resolve_loss_config("kl_div", "eager"),
    )  # fmt: skip
    out = torch.full((rounds, 1, length, found[0].shape[-1]), torch.nan)
    out[depth, 0, anchor] = found[0][0]
    return list(out), model


def loaded_by_speculators(kind, head):
    """A head, and a list that its logits will be put into."""
    from speculators import SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(head)
    config.transformer_layer_config._attn_implementation = "eager"
    model = kind.from_pretrained(head, config=config, dtype=torch.float32)
    check(model, head)
    found = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, out: found.append(out))
    return model, found


def check(model, head, of_target=()):
    """Every tensor of the file must stand in the model, and the model's come from the file, or here from the target."""
    model.eval()
    loaded, stored = model.state_dict(), load_file(Path(head) / "model.safetensors")
    wrong = [name for name in loaded if name not in stored and not name.startswith(("verifier_", *of_target))]
    wrong += [name for name in stored if name not in loaded or not torch.equal(stored[name], loaded[name])]
    if wrong:
        sys.exit(f"{head}: {sorted(wrong)} differ between the file and what the peer loaded")


def ahead(token, by):
    """Tokens that stand ``by`` places later, 0 past the end."""
    return torch.cat([token[:, by:], token.new_zeros(1, by)], dim=1)


@torch.no_grad()
def main(peer, inputs, *heads):
    given = np.load(inputs)
    feature, token = torch.from_numpy(given["feature"]), torch.from_numpy(given["token"]).long()
    run = {"specforge": of_specforge, "speculators": of_speculators, "peagle": of_peagle}[peer]
    for head in heads:
        logits, model = run(head, feature, token, int(given["rounds"]))
        ids = model.d2t + torch.arange(len(model.d2t))
        np.savez(Path(head) / "logits.npz", logits=torch.stack(logits).numpy(), ids=ids.numpy())


if __name__ == "__main__":
    main(*sys.argv[1:])
