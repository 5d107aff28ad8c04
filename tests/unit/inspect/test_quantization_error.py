"""The logit error of quantized weights: none where nothing changes, little with 8 bits, and said in full."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint.load.model import load_model
from jaxspec.errors import ConfigError, RequestError
from jaxspec.inspect import quantization_error as module
from jaxspec.inspect.quantization_error import quantization_error
from jaxspec.models.transformer import teacher_forced
from jaxspec.nn.policy import make_policy, policy_for

GOLDEN = Path(__file__).parents[2] / "golden"
IDS = np.random.default_rng(0).integers(0, 64, 20).tolist()


@pytest.mark.parametrize("kernels", ["xla", "auto"])
def test_what_is_kept_as_published_has_no_error(kernels: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "policy_for", partial(policy_for, kernels=kernels))
    found = quantization_error(GOLDEN / "deepseek_v3_fp8", "auto", IDS, "float32")
    assert found["positions"] == len(IDS)
    if kernels == "xla":  # a kernel multiplies by scales after the sums, which rounds otherwise
        assert found["max_abs_logit_error"] == 0
    assert found["max_kl_nats"] < 1e-9
    assert found["argmax_agreement"] == 1
    assert found["quantized_weight_bytes"] < found["weight_bytes"]


@pytest.mark.parametrize("kind", ["fp8", pytest.param("int8", marks=pytest.mark.slow)])
def test_errors_are_those_of_the_logits(kind: str):
    directory, f32 = GOLDEN / "qwen2_moe", jnp.dtype("float32")
    forced = jax.jit(teacher_forced, static_argnums=0)
    found = quantization_error(directory, kind, IDS, "float32")
    logits = []
    for quantization in ("none", kind):
        model = load_model(directory, make_policy(f32), quantization=quantization)
        at = np.arange(len(IDS), dtype=np.int32)[None]
        logits.append(np.asarray(forced(model.net, model.params, np.asarray([IDS], np.int32), at)[0][0]))
    error = np.abs(logits[1] - logits[0])
    assert found["max_abs_logit_error"] == pytest.approx(error.max(), rel=0.02)
    assert found["mean_abs_logit_error"] == pytest.approx(error.mean(), rel=0.02)
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (x.astype(np.float64) for x in logits))
    kl = (p * np.log(p / q)).sum(-1)
    assert found["mean_kl_nats"] == pytest.approx(kl.mean(), rel=0.05)
    assert 0 < found["mean_abs_logit_error"] < 0.2 * found["logit_std"]
    assert 0.5 < found["argmax_agreement"] <= 1


def test_bad_input():
    vocab = json.loads((GOLDEN / "qwen3" / "config.json").read_text())["vocab_size"]
    with pytest.raises(ConfigError, match="dtype must be"):
        quantization_error(GOLDEN / "qwen3", "fp8", IDS, "float16")
    for ids in ([], [vocab], [-1]):
        with pytest.raises(RequestError, match=f"ids from 0 to {vocab - 1} are needed"):
            quantization_error(GOLDEN / "qwen3", "fp8", ids)
    with pytest.raises(ConfigError, match="known are auto"):
        quantization_error(GOLDEN / "qwen3", "fp4", IDS)
