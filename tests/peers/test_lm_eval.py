"""The harness's own Hugging Face model and ours, on the same tiny target, agree.

Opt-in: ``JAXSPEC_LM_EVAL_PYTHON=PYTHON pytest tests/peers/test_lm_eval.py``, a Python with lm_eval 0.4.13, torch,
transformers and jaxspec's own dependencies.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from scripts.house_report import ROOT
from tests.unit.serve.tiny_model import write_tiny_model

PYTHON = os.environ.get("JAXSPEC_LM_EVAL_PYTHON", "")
LENGTH = 32


@pytest.mark.skipif(not PYTHON, reason="JAXSPEC_LM_EVAL_PYTHON names no Python with lm_eval and torch")
def test_scores_and_texts_are_those_of_the_harness_own_model(tmp_path: Path):
    directory = write_tiny_model(tmp_path / "tiny")
    script = ROOT / "tests" / "peers" / "harness_models.py"
    done = subprocess.run(
        [PYTHON, str(script), str(directory), str(LENGTH)], capture_output=True, text=True, timeout=900, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    both = json.loads(done.stdout.strip().splitlines()[-1])
    ours, theirs = both["ours"], both["theirs"]
    for (value, greedy), (wanted, wanted_greedy) in zip(ours["loglikelihood"], theirs["loglikelihood"], strict=True):
        assert value == pytest.approx(wanted, abs=1e-4)
        assert greedy == wanted_greedy
    assert ours["rolling"] == pytest.approx(theirs["rolling"], abs=1e-4)
    assert ours["generated"] == theirs["generated"]
