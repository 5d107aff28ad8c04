"""Logits that are not finite end their own request with an error; neighbors and later requests stay as they are."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.decode import scrub as scrub_module
from jaxspec.errors import RequestError
from jaxspec.serve import compiled
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams
from tests.oracle.conftest import CAPACITY, VOCAB, SharedPrograms

SICK = 50  # the token whose embedding is NaN
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": CAPACITY, "max_num_seqs": 2, "prefill_buckets": (8, 32), "max_logprobs": 1,
}  # fmt: skip
LOOKUP = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "rows": {"speculative_config": LOOKUP},
    "pages": {"kv_page_size": 16, "num_kv_pages": 26},
    "standard": {"speculative_config": {**LOOKUP, "rejection_sample_method": "standard"}},
}


def prompts() -> list[list[int]]:
    """Requests 1 and 4 have the sick token; all others use their rows before or after them, or beside."""
    rng = np.random.default_rng(4)
    made = [rng.integers(1, SICK, length).tolist() for length in (20, 5, 1, 40, 12, 2)]
    made[1][2] = made[4][11] = SICK
    return made


def without(directory: Path, target: Path, name: str, where: Any) -> Path:
    """A copy of a model with a NaN at one place of one of its tensors."""
    shutil.copytree(target, directory)
    tensors = load_file(directory / "model.safetensors")
    tensors[name][where] = np.nan
    save_file(tensors, directory / "model.safetensors")
    return directory


def run(model: Path, temperature: float, monkeypatch: pytest.MonkeyPatch, **settings: Any):
    monkeypatch.setattr("jaxspec.serve.engine.Programs", SharedPrograms)
    # Loading refuses such weights. What they stand for, an overflow while computing, no loader sees.
    monkeypatch.setattr("jaxspec.checkpoint.load.fill.all_finite", lambda x: True)
    llm = LLM(model, **SETTINGS, **settings)
    # The sick token is never said: an error is the prompt's then, and the healthy model's texts are the wanted ones.
    bias = {"logit_bias": {SICK: -100.0}}
    params = [SamplingParams(temperature=temperature, seed=n, max_tokens=18, ignore_eos=True, **bias) for n in range(6)]
    outputs = [output.outputs[0] for output in llm.generate(prompts(), params)]
    assert not llm.engine.busy
    return llm, outputs


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sick_token_ends_its_own_requests_only(
    target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, temperature: float
):
    sick = without(tmp_path / "sick", target_dir, "model.embed_tokens.weight", SICK)
    _, wanted = run(target_dir, temperature, monkeypatch, **LAYOUTS[layout])
    _, outputs = run(sick, temperature, monkeypatch, **LAYOUTS[layout])
    for n, (output, healthy) in enumerate(zip(outputs, wanted, strict=True)):
        if n in (1, 4):
            assert (output.token_ids, output.finish_reason) == ([], "error")
            place = len(prompts()[n]) - 1
            assert (output.error or "").startswith(f"the model's logits are not finite at position {place}")
        else:
            assert (output.token_ids, output.finish_reason) == (healthy.token_ids, "length")
            assert output.error is None


def test_caches_must_be_scrubbed(target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A NaN that stays in a cache ends requests that never met it: the reason why caches are scrubbed."""
    sick = without(tmp_path / "sick", target_dir, "model.embed_tokens.weight", SICK)
    monkeypatch.setattr(compiled, "scrub", lambda state: state)
    assert compiled.scrub is not scrub_module.scrub
    _, outputs = run(sick, 0.0, monkeypatch)
    assert [o.finish_reason for o in outputs].count("error") > 2


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_head_with_a_nan_says_nothing(
    target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
):
    """One word of the vocabulary is NaN, whatever the text: not token 0 forever."""
    sick = without(tmp_path / "sick", target_dir, "lm_head.weight", (9, 3))
    llm, outputs = run(sick, temperature, monkeypatch, **LAYOUTS["rows"])
    assert [(o.token_ids, o.finish_reason) for o in outputs] == [([], "error")] * 6
    assert all("look for NaN or infinity in the weights" in (o.error or "") for o in outputs)
    with pytest.raises(RequestError, match="score: text 1: the model's logits are not finite in the prompt"):
        llm.score([[1], [2, 3, 4]])
    assert not llm.engine.busy


def test_an_expert_with_a_nan_ends_a_text_where_it_is_chosen(
    target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The same place alone and beside others; what was said before is the healthy model's."""
    name = next(n for n in load_file(target_dir / "model.safetensors") if "layers.1" in n and "experts.0.down" in n)
    sick = without(tmp_path / "sick", target_dir, name, (3, 3))
    _, wanted = run(target_dir, 0.8, monkeypatch)
    llm, outputs = run(sick, 0.8, monkeypatch)
    assert {o.finish_reason for o in outputs} >= {"error"}
    for n, (output, healthy) in enumerate(zip(outputs, wanted, strict=True)):
        assert output.token_ids == healthy.token_ids[: len(output.token_ids)]
        params = SamplingParams(temperature=0.8, seed=n, max_tokens=18, ignore_eos=True, logit_bias={SICK: -100.0})
        alone = llm.generate([prompts()[n]], params)[0].outputs[0]
        assert (alone.token_ids, alone.error) == (output.token_ids, output.error)
    assert VOCAB > SICK
