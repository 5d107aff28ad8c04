"""Activations of feed-forward layers by the names that published configs give them."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.errors import ConfigError
from jaxspec.nn.steady import exp, silu
from jaxspec.shapes import Array

# erfc(z) = t exp(-z^2) P(t) with t = 2 / (2 + z), to 1.1e-8 of its value for every z >= 0; P is fitted to that form.
ERFC = (
    0.28209479479727295, 0.28209385255732927, 0.24688059157517844, 0.17537674621481306, 0.09300124113475627,
    -0.05723534356369936, 0.1270969276548199, -0.4469893037193199, 0.48619009645043265, -0.23086348156698167,
    0.04235386784811639,
)  # fmt: skip


def gelu(x: Array) -> Array:
    """``x Phi(x)`` with the normal distribution's own Phi (Hendrycks 2016), of operations that kernels have too."""
    z = jnp.abs(x) * np.float32(0.5**0.5)
    t = 2 / (2 + z)
    tail = jnp.full_like(t, ERFC[-1])
    for factor in ERFC[-2::-1]:
        tail = tail * t + np.float32(factor)
    beyond = 0.5 * t * exp(-z * z) * tail  # of the mass on the far side of |x|
    return x * jnp.where(x < 0, beyond, 1 - beyond)


def gelu_tanh(x: Array) -> Array:
    """GELU's approximation ``x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2``; the bracket is a logistic one."""
    return x / (1 + exp(np.float32(-2 * (2 / np.pi) ** 0.5) * (x + np.float32(0.044715) * x * x * x)))


def quick_gelu(x: Array) -> Array:
    """``x sigmoid(1.702 x)``."""
    return x / (1 + exp(np.float32(-1.702) * x))


def relu(x: Array) -> Array:
    """Returns x where it is positive, else 0."""
    return jnp.where(x > 0, x, 0)


def relu2(x: Array) -> Array:
    """Returns the square of x where it is positive, else 0 (So 2021)."""
    positive = relu(x)
    return positive * positive


ACTIVATIONS = {"silu": silu, "gelu": gelu, "gelu_pytorch_tanh": gelu_tanh, "quick_gelu": quick_gelu, "relu": relu,
               "relu2": relu2}  # fmt: skip
# Other names of the same functions, all of them transformers' but the last.
ALIASES = {
    "swish": "silu", "gelu_python": "gelu", "gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh",
    "gelu_accurate": "gelu_pytorch_tanh", "gelu_python_tanh": "gelu_pytorch_tanh", "relu_squared": "relu2",
}  # fmt: skip


def activation_named(name: Any) -> str:
    """The key of ``ACTIVATIONS`` that a published name means.

    Raises:
      ConfigError: it is not known.
    """
    key = ALIASES.get(name, name) if isinstance(name, str) else None
    if key not in ACTIVATIONS:
        raise ConfigError(f"config: activation {name!r} is not known; known are {sorted((*ACTIVATIONS, *ALIASES))}")
    return key
