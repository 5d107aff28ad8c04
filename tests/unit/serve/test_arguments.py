"""What ``LLM`` is given: every wrong value is one clear error, before anything is read; vLLM's names have their way."""

import inspect
import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxspec import LLM, SamplingParams
from jaxspec.errors import ConfigError, JaxspecError, RequestError
from jaxspec.serve import progress_bar
from jaxspec.serve.arguments import as_int, parse_buckets, parse_capacity
from jaxspec.serve.engine_spec import EngineSpec
from jaxspec.serve.progress_bar import show_progress
from jaxspec.serve.prompts import Prompts
from jaxspec.serve.request import CompletionOutput, RequestOutput
from jaxspec.serve.vllm_arguments import FOREIGN
from tests.unit.serve.tiny_model import write_tiny_model

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "buckets as a number": ({"prefill_buckets": 32}, r"must be chunk sizes such as \(32, 64, 256\), got 32"),
    "buckets as text": ({"prefill_buckets": "32"}, r"prefill_buckets must be chunk sizes .*, got '32'"),
    "no buckets": ({"prefill_buckets": []}, r"prefill_buckets must be chunk sizes .*, got \[\]"),
    "a bucket of 0": ({"prefill_buckets": (0, 8)}, r"each of prefill_buckets must be an integer of at least 1, got 0"),
    "a bucket of 1.5": ({"prefill_buckets": (1.5,)}, r"each of prefill_buckets must be an integer .*, got 1\.5"),
    "length as text": ({"max_model_len": "64"}, r"max_model_len must be an integer, got '64'"),
    "length as a float": ({"max_model_len": 64.5}, r"max_model_len must be an integer, got 64\.5"),
    "length as a bool": ({"max_model_len": True}, r"max_model_len must be an integer, got True"),
    "seed as text": ({"seed": "a"}, r"seed must be an integer, got 'a'"),
    "no seed": ({"seed": None}, r"seed must be an integer, got None"),
    "rows as text": ({"max_num_seqs": "8"}, r"max_num_seqs must be an integer of at least 1, got '8'"),
    "no rows": ({"max_num_seqs": None}, r"max_num_seqs must be an integer of at least 1, got None"),
    "steps as a float": ({"steps_per_dispatch": 8.0}, r"steps_per_dispatch must be an integer of at least 1, got 8\.0"),
    "page as None": ({"kv_page_size": None}, r"kv_page_size must be an integer of at least 0, got None"),
    "mesh as text": ({"mesh": "expert=2"}, r'mesh must be a mapping of axes to sizes, .* got \'expert=2\''),
    "mesh as a list": ({"mesh": [2]}, r"mesh must be a mapping of axes to sizes"),
    "dtype as JAX has it": ({"dtype": jnp.float32}, r"dtype must be a name such as \"auto\", got <class"),
    "kernels": ({"kernels": None}, r"kernels must be a name such as \"auto\", got None"),
    "transport": ({"expert_transport": 3}, r"expert_transport must be a name such as \"auto\", got 3"),
    "quantization": ({"quantization": 8}, r"quantization must be a name or None, got 8"),
    "placement": ({"expert_placement": 3}, r"expert_placement must be a file or None, got 3"),
    "on_load": ({"on_load": True}, r"on_load must be a function or None, got True"),
    "compile_cache": ({"compile_cache": 3}, r"compile_cache must be True, False or a directory, got 3"),
    "speculation": ({"speculative_config": "ngram"}, r"speculative_config: a mapping is needed, got str"),
    "unknown": ({"temprature": 1, "zzz": 2}, r"unknown arguments \['temprature', 'zzz'\]; known are \['compile_c"),
    "a huge value": ({"seed": [7] * 1000}, r"^LLM: seed must be an integer, got list \[7, 7.{1,80}\.\.\.$"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str):
    given, message = WRONG[name]
    with pytest.raises(ConfigError, match=message):
        LLM("nowhere", **given)


@pytest.mark.parametrize("model", [None, "", "  ", 5, ["a"], {}])
def test_what_is_no_model(model: Any):
    with pytest.raises(ConfigError, match=r"^LLM: model must be a directory with config\.json and \.safetensors files"):
        LLM(model)


def test_numbers_of_numpy_are_numbers():
    assert as_int("a", np.int64(4), 1) == 4
    assert type(as_int("a", np.int32(4))) is int
    assert parse_buckets(np.array([32, 8, 8])) == (8, 32)
    assert parse_capacity(np.int64(64), 512) == 64
    assert parse_capacity(None, 512) == 512
    for wrong in (np.float32(4), np.bool_(True), 4.0):
        with pytest.raises(ConfigError, match="LLM: a must be an integer, got "):
            as_int("a", wrong)


@pytest.mark.parametrize("wanted", [0, -1, 1, 513])
def test_a_length_that_cannot_be(wanted: int):
    with pytest.raises(ConfigError, match=f"max_model_len must be from 2 to the model's 512, got {wanted}"):
        parse_capacity(wanted, 512)


ASKED = {
    "tensor_parallel_size": (2, r"mesh=\{\"tensor\": N\}"),
    "data_parallel_size": (2, r"mesh=\{\"data\": N\}"),
    "enable_expert_parallel": (True, r"mesh=\{\"expert\": N\}"),
    "pipeline_parallel_size": (2, "layers are not spread"),
    "gpu_memory_utilization": (0.9, "max_num_seqs .*max_model_len .*num_kv_pages .*kv_page_size"),
    "enforce_eager": (True, "compiled beforehand"),
    "trust_remote_code": (True, "never run"),
    "block_size": (16, "kv_page_size"),
    "max_num_batched_tokens": (4096, "prefill_buckets"),
    "prefix_caching_hash_algo": ("sha256", "BLAKE2b"),
    "tokenizer": ("other", "the model directory's"),
    "enable_lora": (True, "merge them"),
    "disable_log_stats": (False, "get_metrics"),
    "swap_space": (4, "swapped"),
    "load_format": ("dummy", r"\.safetensors"),
}


@pytest.mark.parametrize("name", ASKED)
def test_arguments_of_vllm_have_a_way_here(name: str):
    value, way = ASKED[name]
    with pytest.raises(ConfigError, match=rf"^LLM: {name}={value!r} is not known here: .*{way}"):
        LLM("nowhere", **{name: value})


def test_arguments_of_vllm_that_change_nothing_are_accepted():
    for name, (_, same) in FOREIGN.items():
        for value in same:
            with pytest.raises(ConfigError, match="nowhere: no such directory"):
                LLM("nowhere", compile_cache=False, **{name: value})
    with pytest.raises(ConfigError, match="tensor_parallel_size=True"):
        LLM("nowhere", tensor_parallel_size=True)


def test_no_name_is_ours_and_foreign():
    assert not set(inspect.signature(LLM).parameters) & set(FOREIGN)


def prompts(text: Any = None) -> Prompts:
    model: Any = SimpleNamespace(net=SimpleNamespace(arch=SimpleNamespace(vocab_size=64)), generation={}, directory="m")
    return Prompts(model, text, EngineSpec(rows=2, capacity=32), {0}, 0, 0)


PARAMS: dict[str, tuple[Any, str]] = {
    "a dict": ({"temperature": 0}, r"SamplingParams are needed, got dict; SamplingParams\(\*\*settings\)"),
    "dicts": ([{"temperature": 0}], r"SamplingParams are needed, got dict; SamplingParams"),
    "text": ("greedy", "SamplingParams are needed, got str"),
    "a number": (0.7, "SamplingParams are needed, got float"),
    "too many": ([SamplingParams()] * 2, "2 for 1 prompts; give one, or one per prompt"),
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMS)
def test_what_are_no_sampling_params(name: str):
    given, message = PARAMS[name]
    with pytest.raises(RequestError, match=f"^sampling_params: {message}"):
        prompts().requests([[1, 2]], given)


KEYS: dict[str, tuple[dict[Any, Any], str]] = {
    "images": ({"prompt_token_ids": [1], "multi_modal_data": {}}, "key 'multi_modal_data' is not known; only text"),
    "salt": ({"prompt_token_ids": [1], "cache_salt": ""}, "cache_salt is a text, not empty, or None, got ''"),
    "unknown": ({"prompt_token_ids": [1], "temperature": 0}, r"key 'temperature' is not known; known are \['add_"),
    "tools": ({"prompt": "a", "tools": [{}]}, r"\['tools'\] go with messages only"),
    "two prompts": ({"prompt": "a", "messages": [{}]}, "messages do not go with another prompt"),
    "no text": ({"prompt": 5, "prompt_token_ids": [1]}, "the text of prompt_token_ids is a text or None, got 5"),
    "nothing": ({"prompt": None}, r'needs "prompt", "messages" or "prompt_token_ids", got \[\'prompt\'\]'),
    "odd keys": ({1: 2, "a": 3}, r'needs "prompt", .* got \[\'1\', \'a\'\]'),
}


@pytest.mark.parametrize("name", KEYS)
def test_keys_of_a_prompt_that_nobody_reads(name: str):
    prompt, message = KEYS[name]
    with pytest.raises(RequestError, match=f"^prompt: {message}"):
        prompts().request(prompt, None)
    (sample,) = prompts().request({"prompt_token_ids": [1], "prompt": None, "cache_salt": None}, None)
    assert sample.output.prompt_token_ids == [1]


@pytest.mark.parametrize("ids", [5, "ab", b"ab", np.asarray(5), [], None, {1}, [[1]], [1.0], np.asarray([[1, 2]])])
def test_what_are_no_ids(ids: Any):
    with pytest.raises(RequestError, match=r"^prompt: "):
        prompts().check_ids(ids)


@pytest.mark.parametrize("given", [b"ab", np.asarray(5), 5, None, iter([[1]])])
def test_what_are_no_prompts(given: Any):
    with pytest.raises(RequestError, match=r"^prompts: a text, token ids, a mapping or a list of them is needed, got"):
        prompts().requests(given, None)


def test_a_name_that_is_no_text():
    name: Any = 5
    with pytest.raises(RequestError, match=r"^request_id: a text is needed, got 5"):
        prompts().request([1], None, request_id=name)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lora_request": object()}, "^lora_request: there are no LoRA"),
        ({"priority": [1, 0]}, "^priority: requests are"),
    ],
)
def test_requests_with_what_is_not_there(given: dict[str, Any], message: str):
    llm: Any = SimpleNamespace(prompts=prompts())
    with pytest.raises(RequestError, match=message):
        LLM.generate(llm, [[1]], **given)


def outputs(count: int) -> list[RequestOutput]:
    return [RequestOutput(str(i), None, [1], [CompletionOutput(0)]) for i in range(count)]


class Bar:
    """Takes down what tqdm would show."""

    def __init__(self, **settings: Any):
        self.settings, self.done, self.closed = settings, 0, 0

    def update(self, more: int) -> None:
        self.done += more

    def close(self) -> None:
        self.closed += 1


def test_a_bar_of_the_callers_own():
    made: list[Bar] = []
    running = outputs(3)
    with show_progress(running, wanted=lambda **settings: made.append(Bar(**settings)) or made[-1]) as look:
        assert look is not None
        look()
        running[1].finished = True
        look()
        look()
        assert made[0].done == 1
        running[0].finished = running[2].finished = True
    assert (made[0].settings["total"], made[0].done, made[0].closed) == (3, 3, 1)


def test_a_bar_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch):
    for wanted, count, terminal in ((True, 3, False), (True, 1, True), (False, 3, True), (None, 3, True)):
        monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda terminal=terminal: terminal))
        with show_progress(outputs(count), wanted=wanted) as look:
            assert look is None
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(progress_bar, "Console", lambda **_: Console(file=screen, force_terminal=True, width=100))
    monkeypatch.setattr(progress_bar, "PATIENCE_S", 1000.0)
    with show_progress(outputs(3), wanted=True) as look:
        assert look is not None
        look()
    assert not screen.getvalue(), "quick calls show nothing"
    monkeypatch.setattr(progress_bar, "PATIENCE_S", 0.0)
    running = outputs(3)
    odd: Any = "yes"
    with show_progress(running, wanted=True) as look:
        assert look is not None
        running[0].finished = True
        look()
        assert "1/3" in screen.getvalue()
    with pytest.raises(RequestError, match="use_tqdm: True, False or a function"), show_progress(running, wanted=odd):
        pass


CACHED = """
import sys, jax
from jaxspec import LLM
settings = dict(max_model_len=32, max_num_seqs=1, prefill_buckets=(8,), max_logprobs=0)
llm = LLM(sys.argv[1], **settings)
print(jax.config.jax_compilation_cache_dir)
print(llm.get_tokenizer().eos_token, llm.get_default_sampling_params().temperature)
"""


def test_programs_are_kept_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, kept = write_tiny_model(tmp_path / "model"), tmp_path / "cache" / "jaxspec" / "xla"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    run = [sys.executable, "-c", CACHED, str(model)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(kept), "<end>", "1.0"]
    entries = {file.name for file in kept.glob("*-cache")}
    assert entries, "what was compiled is there"


def test_a_cache_of_the_callers_own(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"this process keeps compiled programs in .* already, not in .*own"):
        LLM("nowhere", compile_cache=tmp_path / "own")
    with pytest.raises(JaxspecError, match="no such directory"):
        LLM("nowhere", compile_cache=False)
