"""Cases of routed experts: every form of weight on tiny sizes, and the published models that the project targets."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.case import Case
from pallas_kernels.product import Product
from pallas_kernels.routed_experts.api import Tiles, routed_experts
from pallas_kernels.routed_experts.kernel_mosaic import obstacles
from pallas_kernels.select import INSTEAD
from pallas_kernels.weight_cases import abstract_weight, nbytes, random_weight

SMALL = Tiles(16, Product(32, 32, 4, 2), Product(64, 32, 4, 2))


def silu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """SwiGLU (Shazeer 2020)."""
    return gate / (1 + jnp.exp(-gate)) * up


def clamped(gate: jax.Array, up: jax.Array) -> jax.Array:
    """SwiGLU within bounds."""
    return silu(jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0))


def gpt_oss(gate: jax.Array, up: jax.Array) -> jax.Array:
    """gpt-oss: bounded, a steeper gate, and one more of up."""
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return (up + 1) * (gate / (1 + jnp.exp(-1.702 * gate)))


@dataclass(frozen=True)
class Shape:
    """Sizes of one case.

    Attributes:
      rows, experts, top_k, width, hidden: M, E, A, D and F.
      form: how weights are stored, see ``weight_cases.format_of``.
      bias: whether both products have one.
      layers: of the stack, 0 for no stack.
      chosen: experts that choices are drawn from, E by default; more on one of several devices.
      block: side of the squares of fp8.
      activation: of gate and up.
    """

    rows: int
    experts: int
    top_k: int
    width: int
    hidden: int
    form: str
    bias: bool = False
    layers: int = 0
    chosen: int = 0
    block: int = 128
    activation: Callable[[jax.Array, jax.Array], jax.Array] = silu

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of products: float32 for float32 weights, else bfloat16."""
        return jnp.dtype("float32" if self.form == "float32" else "bfloat16")

    def abstract(self) -> tuple[Any, ...]:
        """Rows, choices, combine weights, experts and layer, as shapes and dtypes."""
        lead, m, a = (*([self.layers] if self.layers else []), self.experts), self.rows, self.top_k
        weights = {
            "gate_up_ED2F": abstract_weight(self.form, lead, (self.width, 2, self.hidden), self.block),
            "down_EFD": abstract_weight(self.form, lead, (self.hidden, self.width), self.block),
        }
        if self.bias:
            weights["gate_up_bias_E2F"] = jax.ShapeDtypeStruct((*lead, 2, self.hidden), self.dtype)  # pyright: ignore
            weights["down_bias_ED"] = jax.ShapeDtypeStruct((*lead, self.width), self.dtype)  # pyright: ignore
        x = jax.ShapeDtypeStruct((m, self.width), self.dtype)
        choice, weight = (jax.ShapeDtypeStruct((m, a), dtype) for dtype in (jnp.int32, jnp.float32))
        return x, choice, weight, weights, jax.ShapeDtypeStruct((), jnp.int32) if self.layers else None

    def random(self, key: jax.Array) -> tuple[Any, ...]:
        """Normal rows, uniform choices without repetition, and weights of unit scale."""
        x, choice, _, weights, layer = self.abstract()
        keys = dict(zip(("x", "choice", *sorted(weights)), jax.random.split(key, 2 + len(weights)), strict=True))
        score = jax.random.normal(keys["choice"], (self.rows, self.chosen or self.experts), jnp.float32)
        best, ids = jax.lax.top_k(score, self.top_k)
        made = {name: random_weight(keys[name], like) for name, like in weights.items()}
        rows = jax.random.normal(keys["x"], x.shape, jnp.float32).astype(x.dtype)
        place = None if layer is None else jnp.int32(self.layers - 1)
        return rows, ids.astype(choice.dtype), jax.nn.softmax(best, axis=-1), made, place


def _case(name: str, size: Literal["tiny", "real"], shape: Shape, tolerance: float) -> Case:
    def call(implementation) -> Callable[..., jax.Array]:
        tiles = SMALL if size == "tiny" and implementation not in INSTEAD else None
        run = partial(routed_experts, activation=shape.activation, dtype=shape.dtype)
        return lambda x, choice, weight, weights, layer: run(
            x, choice, weight, weights, layer=layer, implementation=implementation, tiles=tiles
        )

    def read_bytes(_x, choice, _weight, weights, _layer) -> int:
        touched = np.unique(np.asarray(choice))
        share = max(1, shape.layers) * shape.experts
        return int(((touched >= 0) & (touched < shape.experts)).sum()) * (nbytes(weights) // share)

    mosaic = not obstacles(shape.abstract()[3], shape.dtype)
    return Case(name, size, shape.abstract, shape.random, call, tolerance, read_bytes, mosaic)


# Float32: sums of about a hundred terms in another order differ by a few roundings of 6e-8.
FLOAT32 = 3e-6
# Bfloat16: where sums differ in their last bits, a hidden unit may be rounded to its neighbor, 2 ** -8 away. What is
# stored with scales is widened without rounding by both, so that it needs no more.
BFLOAT16 = 4e-3

TINY = (
    _case("float32_of_several_devices", "tiny", Shape(9, 3, 4, 96, 40, "float32", chosen=8), FLOAT32),
    _case("bfloat16", "tiny", Shape(21, 4, 2, 96, 40, "bfloat16", layers=2), BFLOAT16),
    _case(
        "bfloat16_of_whole_tiles",
        "tiny",
        Shape(23, 3, 2, 128, 128, "bfloat16", bias=True, layers=2, activation=gpt_oss),
        BFLOAT16,
    ),
    _case("fp8", "tiny", Shape(7, 3, 2, 96, 48, "fp8", block=32, layers=2, activation=clamped), BFLOAT16),
    _case("int8", "tiny", Shape(7, 3, 2, 96, 40, "int8"), BFLOAT16),
    _case("mxfp4", "tiny", Shape(11, 3, 2, 96, 64, "mxfp4", bias=True, layers=2, activation=gpt_oss), BFLOAT16),
    _case("mxfp4_of_one_scale", "tiny", Shape(5, 3, 2, 32, 32, "mxfp4", bias=True, activation=gpt_oss), BFLOAT16),
)
REAL = tuple(
    _case(f"{model}_{rows}", "real", shape(rows), BFLOAT16)
    for model, sizes, shape in (
        ("qwen3_30b_a3b", (1, 64, 2048), lambda m: Shape(m, 128, 8, 2048, 768, "bfloat16", layers=2)),
        (
            "gpt_oss_120b",
            (1, 64),
            lambda m: Shape(m, 128, 4, 2880, 2880, "mxfp4", bias=True, layers=2, activation=gpt_oss),
        ),
        (
            "gpt_oss_20b",
            (1024,),
            lambda m: Shape(m, 32, 4, 2880, 2880, "mxfp4", bias=True, layers=2, activation=gpt_oss),
        ),
        ("mixtral_8x7b", (8, 2048), lambda m: Shape(m, 8, 2, 4096, 14336, "bfloat16", layers=2)),
        ("deepseek_v3_of_8", (8, 256), lambda m: Shape(m, 32, 8, 7168, 2048, "fp8", layers=2, chosen=256)),
        ("qwen2_57b_a14b", (64,), lambda m: Shape(m, 64, 8, 3584, 2560, "bfloat16", layers=2)),
    )
    for rows in sizes
)
CASES: tuple[Case, ...] = TINY + REAL
