"""Named cases of products per head: small ones of every kind, and layers of published models."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Implementation
from pallas_kernels.case import Case
from pallas_kernels.heads_dense.api import Cut, heads_dense
from pallas_kernels.quantized import Format, Quantized, abstract_quantized
from pallas_kernels.weight_cases import nbytes


@dataclass(frozen=True)
class Sizes:
    """A shape of the operation.

    Attributes:
      rows, heads, channels, rank: M, H, X and R.
      cut: what is multiplied.
      parts: S.
      form: ``fp8`` has a float32 scale per square block, ``int8`` one per channel; any other word is a plain dtype.
      layers: L of the stack, 0 for none.
      block: side of the squares.
      turned: whether further channels are rotated.
      factor: whether rows have one.
    """

    rows: int
    heads: int
    channels: int
    rank: int
    cut: Cut
    parts: int = 1
    form: str = "bfloat16"
    layers: int = 0
    block: int = 128
    turned: bool = False
    factor: bool = False

    @property
    def format(self) -> Format | None:
        """Storage of the weight, None where it is plain."""
        blocks = {"fp8": (1, self.block, self.block), "int8": (1, 1, self.rank)}.get(self.form)
        return None if blocks is None else Format("fp8" if self.form == "fp8" else "int8", blocks)


def _abstract(s: Sizes) -> tuple[Any, ...]:
    cut, shape = s.cut, ((s.layers,) if s.layers else ()) + (s.heads, s.channels, s.rank)
    dtype = "bfloat16" if s.format else s.form
    w = abstract_quantized(shape, s.format) if s.format else jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    each = s.rank if cut.from_rank else cut.count + cut.further
    where = {name: jax.ShapeDtypeStruct((s.rows, cut.further // 2), jnp.float32) for name in ("cos", "sin") if s.turned}
    if s.factor:
        where["factor"] = jax.ShapeDtypeStruct((s.rows,), jnp.float32)
    layer = jax.ShapeDtypeStruct((), jnp.int32) if s.layers else None
    return jax.ShapeDtypeStruct((s.parts, s.rows, s.heads * each), jnp.float32), w, where, layer


def _random(s: Sizes, key: jax.Array) -> tuple[Any, ...]:
    part, w, where, layer = _abstract(s)
    keys = jax.random.split(key, 5)
    if isinstance(w, Quantized):
        numbers = jax.random.normal(keys[0], w.shape) * (40 if s.form == "int8" else 1)
        data = jnp.clip(numbers, -127, 127).astype(w.format.dtype)
        w = Quantized(data, jax.random.uniform(keys[1], w.scale.shape, jnp.float32, 0.5, 1.5), w.format)
    else:
        w = jax.random.normal(keys[0], w.shape).astype(w.dtype)
    made = {}
    if s.turned:
        angle = jax.random.normal(keys[2], where["cos"].shape)
        made = {"cos": jnp.cos(angle), "sin": jnp.sin(angle)}
    if s.factor:
        made["factor"] = jax.random.uniform(keys[3], (s.rows,), jnp.float32, 1.0, 2.0)
    number = None if layer is None else jnp.int32(s.layers - 1)
    return jax.random.normal(keys[4], part.shape), w, made, number


def _call(s: Sizes, implementation: Implementation) -> Any:
    def call(part_SMN: jax.Array, w: Any, where: Any, layer: Any) -> jax.Array:
        dtype = jnp.dtype(jnp.float32 if s.form == "float32" else jnp.bfloat16)
        return heads_dense(part_SMN, w, s.cut, dtype=dtype, layer=layer, where=where, implementation=implementation)

    return call


def _read_bytes(s: Sizes, part_SMN: Any, w: Any, where: Any, layer: Any) -> int:
    return nbytes({"w": w}) // max(s.layers, 1) * s.cut.count // s.channels


def _case(name: str, size: Literal["tiny", "real"], s: Sizes) -> Case:
    # The same rounded factors in another order of sums; a row's sum of several parts or product with its factor may be
    # rounded to the neighbor, 2 ** -8 of it away, and then one of the sum's numbers is.
    tolerance = 4e-3 if s.form != "float32" and (s.parts > 1 or s.factor) else 2e-5
    make = partial(Case, name, size, tolerance=tolerance, read_bytes=partial(_read_bytes, s))
    return make(partial(_abstract, s), partial(_random, s), partial(_call, s))


def _both(name: str, rows: int, heads: int, sizes: tuple[int, int, int, int], **more: Any) -> tuple[Case, Case]:
    """Queries and values of one published model, whose plain, value, latent and rotated channels are given."""
    plain, value, rank, turned = sizes
    whole = partial(Sizes, rows, heads, plain + value, rank, **more)
    return (
        _case(f"{name}_queries_{rows}", "real", whole(Cut(0, plain, further=turned, interleaved=True), turned=True)),
        _case(f"{name}_values_{rows}", "real", whole(Cut(plain, value, from_rank=True))),
    )


TURNED = Cut(0, 16, further=8)

CASES: tuple[Case, ...] = (
    _case("queries", "tiny", Sizes(3, 4, 28, 24, TURNED, turned=True)),
    _case("values", "tiny", Sizes(3, 4, 28, 24, Cut(16, 12, from_rank=True))),
    _case("float32_pairs_parts_factor", "tiny", Sizes(
        5, 2, 40, 80, Cut(0, 24, further=12, interleaved=True), parts=3, form="float32", turned=True, factor=True,
    )),
    _case("not_turned_rows_past_a_program", "tiny", Sizes(70, 2, 16, 32, TURNED, parts=2)),
    _case("fp8_stack_queries", "tiny", Sizes(4, 3, 64, 160, Cut(0, 48, further=16), form="fp8", layers=2, block=32)),
    _case("fp8_stack_values", "tiny", Sizes(
        20, 3, 64, 160, Cut(32, 32, from_rank=True), form="fp8", layers=2, block=32,
    )),
    _case("fp8_scales_begin_within_a_tile", "tiny", Sizes(
        4, 2, 56, 72, Cut(24, 32, from_rank=True), form="fp8", block=8,
    )),
    _case("int8_queries", "tiny", Sizes(4, 2, 64, 96, Cut(0, 32, further=8), form="int8", turned=True)),
    _case("int8_values", "tiny", Sizes(4, 2, 64, 96, Cut(32, 32, from_rank=True), form="int8")),
    *_both("deepseek_v3", 1, 128, (128, 128, 512, 64), form="fp8", layers=58),
    *_both("deepseek_v3", 16, 128, (128, 128, 512, 64), form="fp8", layers=58),
    *_both("deepseek_v3", 256, 128, (128, 128, 512, 64), form="fp8", layers=58),
    *_both("deepseek_v2_lite", 4, 16, (128, 128, 512, 64), layers=26, parts=1),
    *_both("glm_5", 4, 64, (192, 256, 512, 64), form="fp8", layers=75, block=64),
    *_both("glm_4_7_flash", 4, 20, (192, 256, 512, 64), layers=46),
    *_both("mistral_small_4", 32, 32, (64, 128, 256, 64), layers=36),
    *_both("kimi_k2_int8", 4, 64, (128, 128, 512, 64), form="int8", layers=60),
)  # fmt: skip
