"""LongRoPE: within the original context by its short divisors, in an engine for longer texts by the long ones."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.errors import ConfigError
from jaxspec.models.catalog import arch_of
from jaxspec.models.text_length import for_texts
from jaxspec.nn.rope import frequencies
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams
from tests.oracle.conftest import SharedPrograms

PHIMOE = Path(__file__).parents[2] / "golden" / "phimoe"
CONFIG = json.loads((PHIMOE / "config.json").read_text())
SCALING = CONFIG["rope_scaling"]
ORIGINAL, LONGEST = SCALING["original_max_position_embeddings"], CONFIG["max_position_embeddings"]


@pytest.mark.parametrize(
    ("longest", "which", "most"),
    [(None, "short", ORIGINAL), (ORIGINAL, "short", ORIGINAL), (ORIGINAL + 1, "long", LONGEST)],
)
def test_divisors_by_the_longest_text(longest: int | None, which: str, most: int):
    arch = for_texts(arch_of(CONFIG), longest)
    inverse, factor = frequencies(arch.layers[1].attention.rope)
    plain = CONFIG["rope_theta"] ** (-np.arange(4) / 4)
    np.testing.assert_allclose(inverse, plain / SCALING[f"{which}_factor"], rtol=1e-12)
    assert (factor, arch.max_position) == (SCALING[f"{which}_mscale"], most)
    assert for_texts(arch, None) == arch_of(CONFIG), "a model that another engine has loaded turns back"


def test_others_turn_as_they_did():
    arch = arch_of(json.loads((PHIMOE.parent / "qwen3_moe" / "config.json").read_text()))
    assert for_texts(arch, 2) is arch


@pytest.mark.parametrize("drop", ["long_factor", "max_position_embeddings"])
def test_long_texts_of_which_nothing_is_said(drop: str):
    config = CONFIG | ({drop: ORIGINAL} if drop in CONFIG else {"rope_scaling": {**SCALING, drop: None}})
    assert for_texts(arch_of(config), 200).max_position == ORIGINAL


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"long_factor": [1.0]}, r"long_factor must be 4 numbers, not 1"),
        ({"long_factor": [1.0, 0, 1.0, 1.0]}, r"long_factor must be a finite number above 0"),
        ({"long_mscale": None}, r"missing \['rope_scaling.long_mscale'\]"),
        ({"long_mscale": -1.0}, r"long_mscale must be a finite number of at least 0"),
    ],
)
def test_long_settings_that_cannot_be(changes: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        arch_of({**CONFIG, "rope_scaling": {**SCALING, **changes}})


def test_an_engine_for_long_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As one whose short divisors and context are those: logits to the bit, also far beyond the original context."""
    monkeypatch.setattr("jaxspec.serve.engine.Programs", SharedPrograms)
    scaling = {**SCALING, "short_factor": SCALING["long_factor"], "short_mscale": SCALING["long_mscale"]}
    long = {"original_max_position_embeddings": LONGEST}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **long, "rope_scaling": {**scaling, **long}}))
    shutil.copy(PHIMOE / "model.safetensors", tmp_path)
    settings: dict[str, Any] = {"max_model_len": 200, "max_num_seqs": 1, "max_logprobs": 0, "dtype": "float32"}
    settings["prefill_buckets"] = (64,)
    ids = np.random.default_rng(0).integers(2, 96, 150).tolist()
    always, far = LLM(tmp_path, **settings), LLM(PHIMOE, **settings)
    np.testing.assert_array_equal(far.logits(ids), always.logits(ids))
    greedy = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    [wanted], [plain] = (llm.generate([{"prompt_token_ids": ids}], greedy) for llm in (always, far))
    assert plain.outputs[0].token_ids == wanted.outputs[0].token_ids
    speculative = {"method": "ngram", "num_speculative_tokens": 3}
    drafting = LLM(PHIMOE, speculative_config=speculative, **settings)
    [drafted] = drafting.generate([{"prompt_token_ids": ids}], greedy)
    drafting.update_target(PHIMOE)
    [again] = drafting.generate([{"prompt_token_ids": ids}], greedy)
    assert drafted.outputs[0].token_ids == again.outputs[0].token_ids == plain.outputs[0].token_ids
    with pytest.raises(ConfigError, match=r"max_model_len must be from 2 to the model's 256, got 300"):
        LLM(PHIMOE, **{**settings, "max_model_len": 300})
