"""Activations by their published names, against their formulas in float64."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf, ndtr

from jaxspec.errors import ConfigError
from jaxspec.models.catalog import arch_of
from jaxspec.nn.activations import ACTIVATIONS, ALIASES, activation_named
from jaxspec.nn.ffn import DenseFfn, FfnSpec
from jaxspec.nn.policy import make_policy

GOLDEN = Path(__file__).parents[2] / "golden"
FLOAT = jnp.dtype("float32")
Formula = Callable[[np.ndarray], np.ndarray]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(x / 2))


def by_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


FORMULAS: dict[str, Formula] = {
    "silu": lambda x: x * sigmoid(x),
    "swish": lambda x: x * sigmoid(x),
    "gelu": lambda x: x * 0.5 * (1 + erf(x / np.sqrt(2))),
    "gelu_python": lambda x: x * 0.5 * (1 + erf(x / np.sqrt(2))),
    "gelu_new": by_tanh,
    "gelu_pytorch_tanh": by_tanh,
    "gelu_python_tanh": by_tanh,
    "gelu_accurate": by_tanh,
    "gelu_fast": lambda x: 0.5 * x * (1 + np.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x))),
    "quick_gelu": lambda x: x * sigmoid(1.702 * x),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "relu_squared": lambda x: np.maximum(x, 0) ** 2,
}


def test_every_name_has_a_formula():
    assert set(FORMULAS) == {*ACTIVATIONS, *ALIASES}


@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_values_are_those_of_the_formula(name: str):
    x = np.concatenate([np.linspace(-12, 12, 4001), [-1e4, -90.0, -1e-20, 0.0, 1e-20, 90.0, 1e4]]).astype(np.float32)
    found = np.asarray(jax.jit(ACTIVATIONS[activation_named(name)])(x), np.float64)
    np.testing.assert_allclose(found, FORMULAS[name](x.astype(np.float64)), rtol=1e-6, atol=2e-6)
    assert np.isfinite(found).all()


def test_gelu_is_right_far_out():
    """Where the normal tail is all there is, to a part in a hundred thousand."""
    x = np.linspace(-9, -2, 701).astype(np.float32)
    wanted = x.astype(np.float64) * ndtr(x.astype(np.float64))
    np.testing.assert_allclose(jax.jit(ACTIVATIONS["gelu"])(x), wanted, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_slopes_are_those_of_the_formula(name: str):
    x, step = np.linspace(-6, 6, 240).astype(np.float32), 1e-6
    wide = x.astype(np.float64)
    wanted = (FORMULAS[name](wide + step) - FORMULAS[name](wide - step)) / (2 * step)
    found = jax.vmap(jax.grad(ACTIVATIONS[name]))(x)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert float(jax.grad(ACTIVATIONS[name])(0.0)) == pytest.approx(0.0 if name.startswith("relu") else 0.5)


@pytest.mark.parametrize("name", sorted(FORMULAS))
@pytest.mark.parametrize("family", ["llama3", "opt"])
def test_a_config_gets_what_it_names(family: str, name: str):
    """The feed-forward layer of a tiny model, gated and plain."""
    config = json.loads((GOLDEN / family / "config.json").read_text())
    key = "activation_function" if family == "opt" else "hidden_act"
    spec = arch_of({**config, key: name}).layers[0].ffn
    assert isinstance(spec, FfnSpec)
    layer, rng = DenseFfn(spec, 32, make_policy(FLOAT)), np.random.default_rng(1)
    x = rng.normal(size=(3, 32)).astype(np.float32)
    shapes = nn.unbox(jax.eval_shape(layer.init, jax.random.key(0), x))
    params: Any = jax.tree.map(lambda s: rng.normal(size=s.shape).astype(np.float32), shapes)
    own = {k: np.asarray(v, np.float64) for k, v in params["params"].items()}
    if family == "opt":
        hidden = FORMULAS[name](x @ own["up_DF"] + own["up_bias_F"])
        wanted = hidden @ own["down_FD"] + own["down_bias_D"]
    else:
        both = np.einsum("td,dkf->ktf", x, own["gate_up_D2F"])
        wanted = (FORMULAS[name](both[0]) * both[1]) @ own["down_FD"]
    np.testing.assert_allclose(layer.apply(params, x), wanted, rtol=2e-5, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("name", ["gpt_oss", "swigluoai", "gelu_10", "mish", "SiLU", "", None, 3, ["silu"]])
def test_other_names_are_refused(name: Any):
    with pytest.raises(ConfigError, match=r"activation .* is not known; known are \['gelu', 'gelu_accurate'"):
        activation_named(name)
