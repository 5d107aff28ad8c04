"""The head that ships for the mixture is whole, and drafts about as well as was measured when it was made."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec.checkpoint.heads.compact import COMPACT, FILE, expand
from jaxspec.checkpoint.heads.directory import load_head
from jaxspec.models.draft_head import DraftHead
from jaxspec.nn.policy import make_policy
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams
from jaxspec.serve.upcycled_model import HEAD
from lab.upcycle.measure_head import MODEL, chats, code, figures

MOST_BYTES = 8_000_000
VOCAB, WIDTH = 49_152, 576


def test_it_is_whole_and_small(tmp_path: Path):
    about = json.loads((HEAD / "provenance.json").read_text())
    assert hashlib.sha256((HEAD / COMPACT).read_bytes()).hexdigest() == about["weights_sha256"]
    assert sum(file.stat().st_size for file in HEAD.iterdir()) < MOST_BYTES
    assert "lm_head.weight" not in np.load(HEAD / COMPACT), "that is the target's embedding"
    rows = np.ones((VOCAB, WIDTH), np.float32)
    (tmp_path / "target").mkdir()
    save_file({"model.embed_tokens.weight": rows}, tmp_path / "target" / FILE)
    expand(HEAD, tmp_path / "target", tmp_path / "whole")
    head = load_head(tmp_path / "whole", None, make_policy("float32"))
    assert isinstance(head.net, DraftHead)
    assert head.kind == "eagle3"
    assert head.ids_W is not None
    assert head.net.spec.draft_vocab == len(head.ids_W)
    norms: Any = head.params["params"]["norm_D"]
    assert np.isfinite(norms).all()
    assert float(np.abs(norms).max()) > 0


@pytest.mark.slow
@pytest.mark.served
def test_it_drafts_as_well_as_when_it_was_made():
    head = {"method": "eagle3", "model": MODEL, "num_speculative_tokens": 5}
    llm = LLM(MODEL, speculative_config=head, dtype="bfloat16", max_num_seqs=8, max_model_len=512)
    greedy = SamplingParams(temperature=0.0, max_tokens=64)
    for prompts, least in ((chats(llm, 16), 1.5), (code(llm, 16), 1.75)):
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
        assert figures(outputs, outputs)["tokens_per_pass"] > least
