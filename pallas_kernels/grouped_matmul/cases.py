"""Cases of the grouped matrix product: forms of weights and gradients on tiny sizes, prefill of published models."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.case import Case
from pallas_kernels.grouped_matmul.api import Tiles, grouped_matmul
from pallas_kernels.product import Product
from pallas_kernels.weight_cases import abstract_weight, nbytes, random_weight

SMALL = Tiles(16, Product(64, 32, 4, 2), Product(32, 16, 4, 2), 32)


@dataclass(frozen=True)
class Shape:
    """Sizes of one case."""

    rows: int
    groups: int
    depth: int
    columns: int
    form: str
    layers: int = 0
    block: int = 128

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of products: float32 for float32 weights, else bfloat16."""
        return jnp.dtype("float32" if self.form == "float32" else "bfloat16")

    def abstract(self) -> tuple[Any, ...]:
        """Rows, group sizes, weights and layer, as shapes and dtypes."""
        lead = (*([self.layers] if self.layers else []), self.groups)
        x = jax.ShapeDtypeStruct((self.rows, self.depth), self.dtype)
        size = jax.ShapeDtypeStruct((self.groups,), jnp.int32)
        weight = abstract_weight(self.form, lead, (self.depth, self.columns), self.block)
        return x, size, weight, jax.ShapeDtypeStruct((), jnp.int32) if self.layers else None

    def random(self, key: jax.Array) -> tuple[Any, ...]:
        """Normal rows and uneven groups, one of them empty, that leave a few rows over."""
        x, _, weight, layer = self.abstract()
        rows, cuts, values = jax.random.split(key, 3)
        grouped = self.rows - self.rows // 8
        ends = jnp.sort(jax.random.randint(cuts, (self.groups - 2,), 0, grouped + 1, jnp.int32))
        ends = jnp.concatenate([jnp.zeros(1, jnp.int32), ends, jnp.full(1, grouped, jnp.int32)])
        sizes = jnp.diff(ends, prepend=jnp.zeros(1, jnp.int32))
        made = jax.random.normal(rows, x.shape, jnp.float32).astype(x.dtype)
        place = None if layer is None else jnp.int32(self.layers - 1)
        return made, sizes, random_weight(values, weight), place


def _case(name: str, size: Literal["tiny", "real"], shape: Shape, tolerance: float, *, gradients: bool = False) -> Case:
    def call(implementation) -> Callable[..., Any]:
        tiles = SMALL if size == "tiny" else None
        run = partial(grouped_matmul, dtype=shape.dtype, implementation=implementation, tiles=tiles)
        if not gradients:
            return lambda x, sizes, weight, layer: run(x, sizes, weight, layer=layer)

        def loss(x, weight, sizes, layer) -> jax.Array:
            return 0.5 * jnp.sum(jnp.square(run(x, sizes, weight, layer=layer)))

        return lambda x, sizes, weight, layer: jax.grad(loss, argnums=(0, 1))(x, weight, sizes, layer)

    def read_bytes(x, sizes, weight, _layer) -> int:
        used = int((np.asarray(sizes) > 0).sum())
        return x.nbytes + used * (nbytes({"w": weight}) // (max(1, shape.layers) * shape.groups))

    return Case(name, size, shape.abstract, shape.random, call, tolerance, None if gradients else read_bytes)


# Float32: sums of about a hundred terms in another order differ by a few roundings of 6e-8; gradients are made of two.
FLOAT32 = 3e-6
# Bfloat16: products of 8-bit numbers are exact in float32, so that a product differs no more than in float32.
BFLOAT16 = 3e-6
# Gradients in bfloat16: the kernels round the cotangent, by up to 2 ** -9, and the gradient of a row once, where the
# reference sums roundings over groups.
ROUNDED = 8e-3

CASES: tuple[Case, ...] = (
    _case("float32", "tiny", Shape(40, 4, 80, 48, "float32"), FLOAT32),
    _case("bfloat16", "tiny", Shape(70, 5, 96, 80, "bfloat16", layers=2), BFLOAT16),
    _case("mxfp8", "tiny", Shape(40, 3, 96, 80, "mxfp8", block=32), BFLOAT16),
    _case("float32_gradients", "tiny", Shape(40, 4, 48, 40, "float32", layers=2), FLOAT32, gradients=True),
    _case("qwen3_30b_a3b_up", "real", Shape(8192, 128, 2048, 1536, "bfloat16", layers=2), BFLOAT16),
    _case("qwen3_30b_a3b_gradients", "real", Shape(8192, 128, 768, 2048, "bfloat16"), ROUNDED, gradients=True),
    _case("mixtral_8x7b_down", "real", Shape(2048, 8, 14336, 4096, "bfloat16", layers=2), BFLOAT16),
    _case("deepseek_v3_of_8_down", "real", Shape(4096, 32, 2048, 7168, "fp8", layers=2), BFLOAT16),
    _case("gpt_oss_20b_down", "real", Shape(4096, 32, 2880, 2880, "mxfp4", layers=2), BFLOAT16),
)
