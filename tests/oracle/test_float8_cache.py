"""A float8 KV cache: its error, its size, and that speculation and prefixes change nothing under it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.cache.addressing import CacheSize, from_stored, init_layer, read, write
from jaxspec.cache.float8 import dequantize, float8_streams, quantize
from jaxspec.cache.window import Window
from jaxspec.errors import ConfigError
from jaxspec.nn.attention import AttentionSpec
from jaxspec.serve.request import RequestOutput
from tests.oracle.test_families_lossless import GOLDENS

pytestmark = pytest.mark.filterwarnings("ignore::pallas_kernels.select.SlowKernelWarning")
SETTINGS: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 2, "prefill_buckets": (8,), "dtype": "float32"}
FAMILY, LATENT = "gpt_oss", "deepseek_v3"
CONFIGS: dict[str, Any] = {
    "chain": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
    "tree": {"method": "ngram", "speculative_token_tree": [2, 2], "prompt_lookup_min": 1},
    "draft model": {"method": "draft_model", "model": str(GOLDENS[FAMILY]), "num_speculative_tokens": 3},
}
SLOW = ("tree", "draft model")
POOL = {"kv_page_size": 16, "num_kv_pages": 8}  # as many as two rows at full length


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(GOLDENS[FAMILY], kv_cache_dtype="fp8", enable_prefix_caching=False, **SETTINGS)


def outputs_of(llm: LLM) -> list[RequestOutput]:
    """Greedy and sampled texts; more requests than rows, and prompts that begin alike."""
    rng = np.random.default_rng(0)
    first = rng.integers(1, 90, 17).tolist()
    prompts = [first + rng.integers(1, 90, size).tolist() for size in (3, 9, 4, 5, 2)]
    params = [SamplingParams(temperature=0.8 * (n % 2), seed=n, max_tokens=20, ignore_eos=True) for n in range(5)]
    return llm.generate(prompts, params)


def texts(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("name", ["chain", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
@pytest.mark.parametrize("pool", [{}, pytest.param(POOL, marks=pytest.mark.slow)], ids=["rows", "pages"])
def test_speculation_and_prefixes_change_no_text(plain: LLM, name: str, pool: dict[str, int]):
    llm = LLM(GOLDENS[FAMILY], kv_cache_dtype="fp8_e4m3", speculative_config=CONFIGS[name], **SETTINGS, **pool)
    first, again, plainly = outputs_of(llm), outputs_of(llm), texts(outputs_of(plain))
    assert sum(output.metrics.num_accepted_tokens for output in first) > 0
    assert texts(first) == plainly
    assert all(output.num_cached_tokens for output in again)
    assert texts(again) == plainly


def test_a_new_target_of_the_same_directory(plain: LLM):
    before = texts(outputs_of(plain))
    plain.update_target(GOLDENS[FAMILY])
    assert texts(outputs_of(plain)) == before


@pytest.mark.slow
@pytest.mark.parametrize("topology", [{"num_speculative_tokens": 5}, {"speculative_token_tree": [2, 2, 1]}], ids=str)
def test_a_head_changes_no_text(topology: dict[str, Any]):
    settings: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 2, "kv_cache_dtype": "fp8"}
    plain = LLM("demo", **settings)
    head = {"method": "shared_expert", "model": "demo", **topology}
    drafting = LLM(plain.model, speculative_config=head, **{**settings, "kv_cache_dtype": "auto"})
    prompts = ["def read(path):\n", "class Account:\n", "import os\n", "for name in sorted("]
    params = [SamplingParams(temperature=0.7 * (n % 2), seed=n, max_tokens=64, ignore_eos=True) for n in range(4)]
    outputs = drafting.generate(prompts, params)
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 64
    assert texts(outputs) == texts(plain.generate(prompts, params))


def test_the_cache_is_smaller(plain: LLM):
    for cache in plain.engine.state.layers:
        assert {name: x.dtype.name for name, x in cache.items()} == {
            "k": "uint8", "v": "uint8", "k_scale": "float32", "v_scale": "float32",
        }  # fmt: skip
        assert cache["k_scale"].size * cache["k"].shape[3] == cache["k"].size


def test_a_stored_token_has_the_same_bits_in_any_chunk_and_row():
    x = jax.random.normal(jax.random.key(0), (3, 8, 2, 16)) * 3
    streams = float8_streams(*AttentionSpec(4, 2, 16).streams.values())

    @jax.jit
    def store(cache: Any, new: Any, start: Any) -> Any:
        values, scales = quantize(new)
        window = Window(start)
        return {n: write(cache[n], streams[n], window, y) for n, y in (("k", values), ("k_scale", scales))}

    def empty(rows: int) -> Any:
        return init_layer(streams, CacheSize(rows, 16, 8, block=8), jnp.dtype("float32"))

    whole, alone = store(empty(3), x, jnp.zeros(3, jnp.int32)), empty(1)
    for at in range(8):
        alone = alone | store(alone, x[1:2, at : at + 1], jnp.full(1, at, jnp.int32))
    for name in ("k", "k_scale"):
        assert np.array_equal(np.asarray(whole[name][1]), np.asarray(alone[name][0]))
    entry = jnp.broadcast_to(jnp.arange(8), (3, 8))
    back = dequantize(*(read(whole[n], streams[n], Window(jnp.zeros(3, jnp.int32)), entry) for n in ("k", "k_scale")))
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    # Three bits of mantissa; below 2^-6 of the scale's units numbers are 2^-9 apart.
    assert np.all(np.abs(back - x) <= np.maximum(np.abs(x) / 16, largest / 448 / 1024) * (1 + 1e-5))
    assert from_stored(whole["k"]).dtype == jnp.float8_e4m3fn


def test_vectors_of_zeros_and_tiny_numbers_are_finite():
    values, scales = quantize(jnp.array([[[[0.0, 0.0]], [[1e-38, -1e-42]]]]))
    assert np.isfinite(np.asarray(dequantize(values, scales))).all()


def test_other_caches_are_refused():
    with pytest.raises(ConfigError, match=r"kv_cache_dtype 'fp8' is for keys and values .* caches latent; take 'auto'"):
        LLM(GOLDENS[LATENT], kv_cache_dtype="fp8", **SETTINGS)
