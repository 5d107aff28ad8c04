"""Bad input: one clear error at the door, nothing generated, nothing lost, and the engine goes on."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.errors import CapacityError, CheckpointError, ConfigError, RequestError
from jaxspec.serve import engine as engine_module
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams
from tests.oracle.conftest import CAPACITY, CONFIG, VOCAB, SharedPrograms, write_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
GOOD = [5, 6, 7]
SETTINGS = {"dtype": "float32", "max_model_len": CAPACITY, "max_num_seqs": 3, "prefill_buckets": (8, 32)}


@pytest.fixture(scope="module")
def llm(target_dir: Path) -> LLM:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "Programs", SharedPrograms)
        config = {"method": "ngram", "num_speculative_tokens": 4}
        return LLM(target_dir, speculative_config=config, max_logprobs=3, **SETTINGS)


@pytest.fixture(scope="module")
def mute(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """The same model without a tokenizer."""
    directory = tmp_path_factory.mktemp("mute")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(target_dir / name, directory / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "Programs", SharedPrograms)
        return LLM(directory, max_logprobs=0, **SETTINGS)


@pytest.fixture(scope="module")
def wanted(llm: LLM) -> list[int]:
    return llm.generate([GOOD], GREEDY)[0].outputs[0].token_ids


def check_it_goes_on(llm: LLM, wanted: list[int]) -> None:
    assert not llm.engine.busy
    assert llm.engine.rows == [None] * 3
    assert llm.generate([GOOD], GREEDY)[0].outputs[0].token_ids == wanted


PROMPTS: dict[str, tuple[Any, str]] = {
    "empty ids": ([], r"at least one token is needed, got \[\]"),
    "empty text": ("", r"at least one token is needed"),
    "too long": (
        [1] * CAPACITY,
        rf"{CAPACITY} tokens leave no room within {CAPACITY}; shorten it or raise max_model_len",
    ),
    "far too long": ([1] * 5000, r"5000 tokens leave no room"),
    "id too large": ([1, VOCAB, 2], rf"integers from 0 to {VOCAB - 1}, got \[{VOCAB}\]"),
    "negative id": ([1, -1], rf"integers from 0 to {VOCAB - 1}, got \[-1\]"),
    "float id": ([1, 2.5], r"integers from 0 to .*, got \[2\.5\]"),
    "bool id": ([1, True], r"integers from 0 to .*, got \[True\]"),
    "text in ids": ([1, "a"], r"integers from 0 to .*, got \['a'\]"),
    "unknown mapping": (
        {"text": "abc"},
        r'needs "prompt", "messages" or "prompt_token_ids", got \[\'text\'\]',
    ),
    "mapping with a number": ({"prompt": 5}, r"at least one token is needed, got 5"),
    "lone surrogate": ("ab\ud800", r"not valid Unicode at character 2"),
    "chat without template": (
        {"messages": [{"role": "user", "content": "a"}]},
        r"no chat template; give a plain prompt",
    ),
    "message without role": ({"messages": [{"content": "a"}]}, r'each needs "role" and "content"'),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_bad_prompts(llm: LLM, wanted: list[int], name: str):
    prompt, message = PROMPTS[name]
    before = llm.get_metrics()
    with pytest.raises(RequestError, match=message):
        llm.generate([GOOD, prompt, GOOD], GREEDY)
    with pytest.raises(RequestError, match=message):
        next(llm.stream(prompt, GREEDY))
    assert llm.get_metrics() == before
    check_it_goes_on(llm, wanted)


@pytest.mark.parametrize("prompts", [5, None, 1.5])
def test_bad_kinds_of_prompts(llm: LLM, wanted: list[int], prompts: Any):
    with pytest.raises(RequestError, match=r"prompts: a text, token ids, a mapping or a list of them is needed, got"):
        llm.generate(prompts, GREEDY)
    check_it_goes_on(llm, wanted)


def test_no_prompts_are_no_outputs(llm: LLM):
    assert llm.generate([], GREEDY) == []


def test_arrays_are_prompts(llm: LLM, wanted: list[int]):
    assert llm.generate(np.asarray(GOOD), GREEDY)[0].outputs[0].token_ids == wanted


PARAMETERS: dict[str, tuple[dict[str, Any], str]] = {
    "stop id too large": ({"stop_token_ids": [VOCAB]}, rf"from 0 to {VOCAB - 1}, got \[{VOCAB}\]"),
    "negative stop id": ({"stop_token_ids": [-1]}, rf"from 0 to {VOCAB - 1}"),
    "too many stop ids": (
        {"stop_token_ids": list(range(1, 20))},
        r"at most 15 besides the model's own, got 19",
    ),
    "too many logprobs": ({"logprobs": 4}, r"at most 3, got 4; raise LLM\(max_logprobs=\)"),
    "min_tokens beyond the capacity": (
        {"min_tokens": 500, "max_tokens": 500},
        rf"500 after 3 prompt tokens exceed {CAPACITY}",
    ),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_that_this_engine_refuses(llm: LLM, wanted: list[int], name: str):
    values, message = PARAMETERS[name]
    with pytest.raises(RequestError, match=message):
        llm.generate([GOOD, GOOD], [GREEDY, SamplingParams(**values)])
    check_it_goes_on(llm, wanted)


def test_parameters_of_the_wrong_number_or_kind(llm: LLM, wanted: list[int]):
    with pytest.raises(RequestError, match="2 for 3 prompts; give one, or one per prompt"):
        llm.generate([GOOD] * 3, [GREEDY, GREEDY])
    with pytest.raises(RequestError, match="SamplingParams are needed, got dict"):
        llm.generate([GOOD], [{"temperature": 0.0}])
    check_it_goes_on(llm, wanted)


VALUES: list[tuple[str, Any]] = [
    *(("n", v) for v in (0, -1, 1.5, "2", True)),
    *(("temperature", v) for v in (-0.1, float("nan"), float("inf"), "hot", None)),
    *(("top_p", v) for v in (0, 1.01, -1, float("nan"), "x")),
    *(("top_k", v) for v in (-2, 1.5, "x", 2**40)),
    *(("min_p", v) for v in (-0.1, 1.1, float("nan"))),
    *(("repetition_penalty", v) for v in (0, -1, float("nan"), float("inf"))),
    *(("presence_penalty", v) for v in (2.1, -2.1, float("nan"))),
    *(("frequency_penalty", v) for v in (2.1, -2.1, "x")),
    *(("seed", v) for v in (-2, 1.5, "x")),
    *(("stop", v) for v in ("", ["a", ""], [5], 5, {"a": 1})),
    *(("stop_token_ids", v) for v in ([1.5], ["a"], 5, "abc")),
    *(("max_tokens", v) for v in (0, -1, 1.5)),
    *(("min_tokens", v) for v in (-1, 129, 1.5)),
    *(("logprobs", v) for v in (-1, 1.5, True)),
    *(
        ("speculative", v)
        for v in ("yes", 3, {}, {"k": 1}, {"num_speculative_tokens": -1}, {"num_speculative_tokens": 1.5})
    ),
]


@pytest.mark.parametrize(("name", "value"), VALUES, ids=[f"{n}={v}" for n, v in VALUES])
def test_bad_sampling_parameters(name: str, value: Any):
    with pytest.raises(RequestError, match=rf"^sampling: {name} must be .+, got "):
        SamplingParams(**{name: value})


def test_a_model_without_tokenizer(mute: LLM):
    ids = mute.generate([GOOD], GREEDY)[0].outputs[0].token_ids
    with pytest.raises(RequestError, match="has no tokenizer; give prompt_token_ids"):
        mute.generate(["abc"], GREEDY)
    with pytest.raises(RequestError, match="has no tokenizer; give prompt_token_ids"):
        mute.chat([{"role": "user", "content": "a"}], GREEDY)
    with pytest.raises(RequestError, match="has no tokenizer; use stop_token_ids"):
        mute.generate([GOOD], SamplingParams(stop="a"))
    with pytest.raises(RequestError, match=r"logprobs: .*max_logprobs"):
        mute.generate([GOOD], SamplingParams(logprobs=0))
    check_it_goes_on(mute, ids)


def test_logits_of_too_long_texts(llm: LLM, wanted: list[int]):
    with pytest.raises(RequestError, match=f"{CAPACITY + 1} tokens, the capacity is {CAPACITY}; raise max_model_len"):
        llm.logits([1] * (CAPACITY + 1))
    check_it_goes_on(llm, wanted)


NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
CONFIGS: dict[str, tuple[Any, str]] = {
    "not a mapping": ("ngram", r"a mapping is needed, got str"),
    "unknown key": (
        {**NGRAM, "num_drafts": 3},
        r"unknown keys \['num_drafts'\]; known are \['calibration', 'disable_by_batch_size', .*'verify_budget'\]",
    ),
    "unknown method": (
        {**NGRAM, "method": "magic"},
        r"method 'magic' is not known; known are \['ngram', 'suffix', 'mtp', 'early_exit', 'draft_model'",
    ),
    "no method": ({"num_speculative_tokens": 2}, r"method None is not known"),
    "unknown rule": (
        {**NGRAM, "rejection_sample_method": "loose"},
        r"'loose' is not known; known are \[.*'match'",
    ),
    "no length": (
        {"method": "ngram"},
        r"must be \"auto\" or an integer from 1 to 16, got None; leave speculative_config out",
    ),
    "length 0": (
        {**NGRAM, "num_speculative_tokens": 0},
        r"from 1 to 16, got 0; leave speculative_config out",
    ),
    "length 17": ({**NGRAM, "num_speculative_tokens": 17}, r"from 1 to 16, got 17"),
    "length 2.5": ({**NGRAM, "num_speculative_tokens": 2.5}, r"from 1 to 16, got 2\.5"),
    "length true": ({**NGRAM, "num_speculative_tokens": True}, r"from 1 to 16, got True"),
    "empty tree": (
        {"method": "ngram", "speculative_token_tree": []},
        r"branching factors must be at least 1, got \(\)",
    ),
    "tree with 0": (
        {"method": "ngram", "speculative_token_tree": [2, 0]},
        r"must be at least 1, got \(2, 0\)",
    ),
    "huge tree": ({"method": "ngram", "speculative_token_tree": [1000] * 5}, r"more than 65 nodes"),
    "tree as text": (
        {"method": "ngram", "speculative_token_tree": "2,2"},
        r"must be a list of branching factors, got '2,2'",
    ),
    "block with a tree": (
        {"method": "ngram", "speculative_token_tree": [2], "rejection_sample_method": "block"},
        r"block verification is for chains; ask for num_speculative_tokens",
    ),
    "draft model without a directory": (
        {"method": "draft_model", "num_speculative_tokens": 2},
        r'"draft_model" needs "model", the directory of the draft model',
    ),
    "ngram with a model": (
        {**NGRAM, "model": "somewhere"},
        r'"ngram" takes no "model"; leave one of them out',
    ),
    "lookup that is quantized": ({**NGRAM, "quantization": "int8"}, r'"ngram" takes no "quantization"; leave one'),
    "drafter in 4 bits": (
        {"method": "eagle3", "model": "somewhere", "num_speculative_tokens": 2, "quantization": "int4"},
        r'quantization must be "none", "fp8" or "int8", got \'int4\'',
    ),
    "head without a directory": (
        {"method": "eagle3", "num_speculative_tokens": 2},
        r'"eagle3" needs "model", the directory of the head',
    ),
    "hybrid without a directory": (
        {"method": "hybrid", "num_speculative_tokens": 2},
        r'"hybrid" needs "model", the directory of the draft model or head',
    ),
    "early exit without a layer": (
        {"method": "early_exit", "num_speculative_tokens": 2},
        r'"early_exit" and "exit_layer" go together; give both or neither',
    ),
    "exit layer 0": (
        {"method": "early_exit", "exit_layer": 0, "num_speculative_tokens": 2},
        r"exit_layer must be an integer from 1, got 0",
    ),
    "exit layer past the last": (
        {"method": "early_exit", "exit_layer": 9, "num_speculative_tokens": 2},
        r"exit_layer must be from 1 to \d+, for the target has \d+ layers; got 9",
    ),
    "exit layer of another method": ({**NGRAM, "exit_layer": 1}, r'"exit_layer" go together'),
    "lookup reversed": ({**NGRAM, "prompt_lookup_min": 5, "prompt_lookup_max": 3}, r"got 5, 3"),
    "lookup as text": (
        {**NGRAM, "prompt_lookup_min": "x"},
        r"prompt_lookup_min must be an integer from 1 to 16, got 'x'",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_bad_speculative_configs(target_dir: Path, name: str):
    config, message = CONFIGS[name]
    with pytest.raises(ConfigError, match=message):
        LLM(target_dir, speculative_config=config, **SETTINGS)


def test_missing_directories(target_dir: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nowhere: no such directory; a model is a directory"):
        LLM(tmp_path / "nowhere")
    draft = {"model": str(tmp_path / "nothing"), "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match=r"nothing: no such directory"):
        LLM(target_dir, speculative_config=draft, **SETTINGS)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(CheckpointError, match=r"safetensors"):
        LLM(target_dir, speculative_config={**draft, "model": str(tmp_path)}, **SETTINGS)


def test_a_draft_model_of_another_vocabulary(target_dir: Path, tmp_path: Path):
    draft = write_model(tmp_path / "draft", {**CONFIG, "vocab_size": VOCAB + 8, "num_hidden_layers": 1}, 2)
    message = rf"a vocabulary of {VOCAB + 8}, the target of {VOCAB}; use a draft model trained with the target's"
    with pytest.raises(ConfigError, match=message):
        LLM(target_dir, speculative_config={"model": str(draft), "num_speculative_tokens": 2}, **SETTINGS)


def test_a_head_is_not_a_draft_model(target_dir: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 2}))
    with pytest.raises(ConfigError, match=r"holds a draft head, not a model; give its kind as method"):
        LLM(target_dir, speculative_config={"model": str(tmp_path), "num_speculative_tokens": 2}, **SETTINGS)


def test_what_drafts_without_parameters_takes_none(llm: LLM, mute: LLM):
    for engine, drafter in ((llm, "Ngram"), (mute, "NoDrafts")):
        with pytest.raises(ConfigError, match=f"update_draft: {drafter} has no parameters"):
            engine.update_draft({})


ENGINES: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"dtype": "int4"}, r"dtype 'int4' is not known; known are"),
    "too long": ({"max_model_len": 513}, r"from 2 to the model's 512, got 513"),
    "too short": ({"max_model_len": 1}, r"from 2 to the model's 512, got 1"),
    "no rows": ({"max_num_seqs": 0}, r"max_num_seqs must be an integer of at least 1, got 0"),
    "no steps": ({"steps_per_dispatch": 0}, r"steps_per_dispatch must be an integer of at least 1, got 0"),
    "logprobs": ({"max_logprobs": -1}, r"max_logprobs must be an integer of at least 0, got -1"),
    "buckets": ({"prefill_buckets": ()}, r"prefill_buckets must be chunk sizes such as \(32, 64, 256\), got \(\)"),
    "page": ({"kv_page_size": -1}, r"kv_page_size must be an integer of at least 0, got -1"),
    "prefix switch": ({"enable_prefix_caching": 1}, r"enable_prefix_caching must be True, False or None, got 1"),
    "prefix size": ({"prefix_cache_tokens": 0}, r"prefix_cache_tokens must be an integer of at least 1, got 0"),
    "prefixes off": (
        {"enable_prefix_caching": False, "prefix_cache_tokens": 64},
        r"prefix_cache_tokens=64 does not go with enable_prefix_caching=False; leave one out",
    ),
    "no prefixes": (
        {"enable_prefix_caching": True, "prefill_buckets": (5, 7)},
        r"enable_prefix_caching=True is not possible here: prefill_buckets share no factor of at least 8",
    ),
    "cache": ({"kv_cache_dtype": "fp8_e5m2"}, r"kv_cache_dtype 'fp8_e5m2' is not known; known are .*fp8_e4m3"),
    "pages alone": ({"num_kv_pages": 9}, r"num_kv_pages=9 needs kv_page_size"),
}


@pytest.mark.parametrize("name", ENGINES)
def test_bad_engine_settings(target_dir: Path, name: str):
    values, message = ENGINES[name]
    with pytest.raises(ConfigError, match=message):
        LLM(target_dir, **{**SETTINGS, **values})


def test_a_page_pool_of_one_page(target_dir: Path):
    with pytest.raises(CapacityError, match="at least 2 pages of at least 1 token are needed, got 1 of 16"):
        LLM(target_dir, **SETTINGS, kv_page_size=16, num_kv_pages=1)
