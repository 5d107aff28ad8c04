"""Named cases of few-row products: small ones of every form, and dense weights of published models."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Implementation
from pallas_kernels.case import Case
from pallas_kernels.few_rows_dense.api import few_rows_dense, products_of_rows
from pallas_kernels.select import Choice
from pallas_kernels.weight_cases import abstract_weight, nbytes, random_weight


@dataclass(frozen=True)
class Sizes:
    """A shape of the operation.

    Attributes:
      rows, depth, columns: M, D and N.
      form: how the weight is stored, see ``weight_cases.format_of``.
      layers: L of the stack, 0 for none.
      bias: whether there is one.
      block: side of the squares that share an fp8 scale.
    """

    rows: int
    depth: int
    columns: int
    form: str = "bfloat16"
    layers: int = 0
    bias: bool = False
    block: int = 128

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the products' factors."""
        return jnp.dtype(jnp.float32 if self.form == "float32" else jnp.bfloat16)


def _abstract(s: Sizes) -> tuple[Any, ...]:
    weight = abstract_weight(s.form, (s.layers,) if s.layers else (), (s.depth, s.columns), s.block)
    bias = jax.ShapeDtypeStruct((s.columns,), jnp.bfloat16) if s.bias else None
    layer = jax.ShapeDtypeStruct((), jnp.int32) if s.layers else None
    return jax.ShapeDtypeStruct((s.rows, s.depth), jnp.float32), weight, bias, layer


def _random(s: Sizes, key: jax.Array) -> tuple[Any, ...]:
    rows, weights, biases = jax.random.split(key, 3)
    _, weight, bias, layer = _abstract(s)
    made = None if bias is None else jax.random.normal(biases, bias.shape, jnp.float32).astype(bias.dtype)
    number = None if layer is None else jnp.int32(s.layers - 1)
    return jax.random.normal(rows, (s.rows, s.depth), jnp.float32), random_weight(weights, weight), made, number


def _call(s: Sizes, implementation: Implementation) -> Any:
    def call(x_MD: jax.Array, w: Any, bias_N: Any, layer: Any) -> jax.Array:
        return few_rows_dense(x_MD, w, bias_N, dtype=s.dtype, layer=layer, implementation=implementation)

    return call


def _read_bytes(s: Sizes, x_MD: Any, w: Any, bias_N: Any, layer: Any) -> int:
    return nbytes({"w": w}) // max(s.layers, 1)


def _case(name: str, size: Literal["tiny", "real"], s: Sizes) -> Case:
    # Both sum the same rounded factors in float32, in another order. A quantized weight is rounded to bfloat16 after
    # its scale by the reference and before it by the kernel: half a unit in the last of 8 bits per factor, averaged.
    plain = 1e-5 if s.form == "float32" else 2e-5
    tolerance = plain if s.form in ("float32", "bfloat16") else 4e-3
    make = partial(Case, name, size, tolerance=tolerance, read_bytes=partial(_read_bytes, s))
    return make(partial(_abstract, s), partial(_random, s), partial(_call, s))


def _together(name: str, size: Literal["tiny", "real"], s: Sizes, *columns: int) -> Case:
    """Several weights of the same rows by one launch, here each sum by itself."""
    each = [replace(s, columns=n) for n in columns]

    def abstract() -> tuple[Any, ...]:
        x_MD, _, _, layer = _abstract(s)
        return x_MD, [_abstract(one)[1] for one in each], layer

    def random(key: jax.Array) -> tuple[Any, ...]:
        x_MD, _, _, layer = _random(s, key)
        return x_MD, [_random(one, jax.random.fold_in(key, one.columns))[1] for one in each], layer

    def call(implementation: Implementation) -> Any:
        choice = Choice("few_rows_dense", name, implementation, "a case")

        def run(x_MD: jax.Array, weights: Any, layer: Any) -> list[jax.Array]:
            parts = products_of_rows(x_MD, weights, dtype=s.dtype, layer=layer, implementation=choice)
            return [jnp.sum(part_SMN, axis=0) for part_SMN in parts]

        return run

    return Case(name, size, abstract, random, call, 2e-5 if s.form == "bfloat16" else 4e-3)


CASES: tuple[Case, ...] = (
    _case("one_row", "tiny", Sizes(1, 64, 48)),
    _case("rows_past_a_block", "tiny", Sizes(21, 96, 32)),
    _case("rows_past_a_program", "tiny", Sizes(70, 64, 32)),
    _case("ragged_depth_and_bias", "tiny", Sizes(4, 200, 40, bias=True)),
    _case("cut_along_the_depth", "tiny", Sizes(4, 2048, 48)),
    _case("one_column", "tiny", Sizes(5, 64, 1)),
    _case("stack", "tiny", Sizes(4, 64, 48, layers=3)),
    _case("float32", "tiny", Sizes(4, 200, 48, "float32")),
    _case("fp8_stack", "tiny", Sizes(4, 96, 80, "fp8", layers=2, block=32)),
    _case("fp8_one_scale_per_tile", "tiny", Sizes(4, 256, 128, "fp8")),
    _case("fp8_cut", "tiny", Sizes(20, 1024, 80, "fp8", block=32)),
    _case("int8_bias", "tiny", Sizes(4, 96, 80, "int8", bias=True)),
    _together("three_weights", "tiny", Sizes(21, 544, 0, layers=2), 80, 16, 200),
    _case("qwen3_30b_qkv_1", "real", Sizes(1, 2048, 5120, layers=48)),
    _case("qwen3_30b_qkv_16", "real", Sizes(16, 2048, 5120, layers=48)),
    _case("qwen3_30b_qkv_256", "real", Sizes(256, 2048, 5120, layers=48)),
    _case("qwen3_30b_out_4", "real", Sizes(4, 4096, 2048, layers=48)),
    _case("qwen3_30b_router_4", "real", Sizes(4, 2048, 128, layers=48)),
    _case("qwen3_30b_head_4", "real", Sizes(4, 2048, 151936)),
    _case("gpt_oss_120b_qkv_4", "real", Sizes(4, 2880, 5120, layers=36, bias=True)),
    _case("gpt_oss_120b_out_64", "real", Sizes(64, 4096, 2880, layers=36, bias=True)),
    _case("mixtral_8x7b_out_4", "real", Sizes(4, 4096, 4096, layers=32)),
    _case("deepseek_v3_q_b_4", "real", Sizes(4, 1536, 24576, "fp8", layers=58)),
    _case("deepseek_v3_out_32", "real", Sizes(32, 16384, 7168, "fp8", layers=58)),
    _case("deepseek_v3_kv_a_256", "real", Sizes(256, 7168, 576, "fp8", layers=58)),
    _together("deepseek_v3_latents_4", "real", Sizes(4, 7168, 0, "fp8", layers=58), 1536, 576),
    _together("deepseek_v2_lite_latents_1", "real", Sizes(1, 2048, 0, layers=26), 3072, 576),
    _case("qwen3_30b_qkv_int8_4", "real", Sizes(4, 2048, 5120, "int8", layers=48)),
)
