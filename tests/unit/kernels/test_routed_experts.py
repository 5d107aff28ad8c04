"""Routed experts' kernel: a row's result is the same bits whatever is computed beside it; layers, shares, bad input."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.nn.activations import ACTIVATIONS
from jaxspec.nn.ffn import Activation
from pallas_kernels.product import Product
from pallas_kernels.quantized import Format, Quantized
from pallas_kernels.routed_experts.api import Tiles, routed_experts, tiles_for
from pallas_kernels.routed_experts.cases import Shape, gpt_oss
from pallas_kernels.row_blocks import IN_ONE_PROGRAM, most_blocks, sort
from pallas_kernels.select import SlowKernelWarning, UnsupportedKernel

E, A, D, F = 6, 2, 256, 320
BF16 = jnp.dtype("bfloat16")
TILES = Tiles(16, Product(64, 32, 4, 2), Product(128, 64, 4, 2))
SHAPES = {form: Shape(64, E, A, D, F, form, activation=gpt_oss) for form in ("bfloat16", "fp8", "int8")}
SHAPES["mxfp4"] = Shape(64, E, A, D, F, "mxfp4", bias=True, activation=gpt_oss)


@cache
def program(form: str) -> Callable[..., np.ndarray]:
    """The kernel, compiled once for each set of shapes."""
    shape = SHAPES[form]

    @jax.jit
    def run(x: jax.Array, choice: jax.Array, weight: jax.Array, weights: Any, layer: jax.Array | None) -> jax.Array:
        how: dict[str, Any] = {"activation": shape.activation, "dtype": shape.dtype, "tiles": TILES}
        return routed_experts(x, choice, weight, weights, layer=layer, implementation="interpret", **how)

    return lambda x, choice, weight, weights, layer=None: np.asarray(run(x, choice, weight, weights, layer))


def same(got: np.ndarray, wanted: np.ndarray):
    assert got.tobytes() == wanted.tobytes()


@pytest.mark.served
@pytest.mark.parametrize("form", SHAPES)
def test_a_row_does_not_see_its_neighbours(form: str):
    x, choice, weight, weights, _ = SHAPES[form].random(jax.random.key(3))
    run = partial(program(form), weights=weights)
    together = run(x, choice, weight)
    assert np.ptp(together) > 0
    for row in (0, 17, 63):
        alone = slice(row, row + 1)
        same(run(x[alone], choice[alone], weight[alone]), together[alone])
    turned = np.random.default_rng(0).permutation(64)
    same(run(x[turned], choice[turned], weight[turned]), together[turned])
    others = choice.at[1:].set(jnp.asarray([4, 1], jnp.int32))  # 63 rows of the same experts, most experts idle
    same(run(x, others, weight)[:1], together[:1])
    lonely = choice.at[1:].set(-1)  # and nobody but the first row
    same(run(x, lonely, weight), np.where(np.arange(64)[:, None] == 0, together, np.float32(0)))


@pytest.mark.served
@pytest.mark.parametrize("rows", [2, 33])
def test_any_number_of_rows_gives_the_same(rows: int):
    x, choice, weight, weights, _ = SHAPES["bfloat16"].random(jax.random.key(4))
    together = program("bfloat16")(x, choice, weight, weights)
    same(program("bfloat16")(x[-rows:], choice[-rows:], weight[-rows:], weights), together[-rows:])


def test_blocks_of_16_and_of_32_rows_give_the_same():
    shape = SHAPES["bfloat16"]
    *args, _ = shape.random(jax.random.key(6))
    how: dict[str, Any] = {"activation": shape.activation, "dtype": shape.dtype, "implementation": "interpret"}
    low, tall = (np.asarray(routed_experts(*args, tiles=replace(TILES, rows=rows), **how)) for rows in (16, 32))
    same(low, tall)


def test_tiles_sum_alike_for_any_decoding_rows():
    *_, weights, _ = SHAPES["bfloat16"].abstract()
    tiles = {rows: tiles_for(weights, rows, 2) for rows in (1, 2, 64, 511, 512, 4096)}
    few, many = 16, 32  # rows of a block that sum alike
    assert {replace(t, rows=few) for rows, t in tiles.items() if rows <= 512} == {replace(tiles[1], rows=few)}
    assert [t.rows for t in tiles.values()] == [few, few, many, many, many, 64]


def test_a_layer_of_the_stack_is_that_layer():
    x, choice, weight, weights, _ = SHAPES["bfloat16"].random(jax.random.key(5))
    stack = {name: jnp.stack([jnp.full_like(w, jnp.nan), w]) for name, w in weights.items()}
    got = program("bfloat16")(x, choice, weight, stack, jnp.int32(1))
    same(got, program("bfloat16")(x, choice, weight, weights))


def test_shares_of_the_experts_add_up():
    x, choice, weight, weights, _ = SHAPES["bfloat16"].random(jax.random.key(6))
    halves = [{name: w[first : first + 3] for name, w in weights.items()} for first in (0, 3)]
    low, high = (program("bfloat16")(x, choice - 3 * n, weight, half) for n, half in enumerate(halves))
    same(low + high, program("bfloat16")(x, choice, weight, weights))


@pytest.mark.parametrize("rows", [20, 100, IN_ONE_PROGRAM + 1])
def test_rows_are_sorted_and_cut_into_blocks(rows: int):
    rng, height = np.random.default_rng(rows), 16
    draw = rng.integers(-1, 12, rows).astype(np.int32)  # 11 is no group, nor is -1
    draw[draw == 5] = 6
    order_R, blocks = jax.jit(lambda g: sort(g, 11, height, "interpret"))(jnp.asarray(draw))
    order, group, first, count = (np.asarray(a) for a in (order_R, blocks.group_N, blocks.first_N, blocks.count_N))
    known = np.flatnonzero((draw >= 0) & (draw < 11))
    assert order[: len(known)].tolist() == known[np.argsort(draw[known], kind="stable")].tolist()
    taken = [range(f, f + c) for f, c in zip(first, count, strict=True) if c]
    assert [place for block in taken for place in block] == list(range(len(known)))
    for g, block in zip(group[count > 0], taken, strict=True):
        assert set(draw[order[list(block)]].tolist()) == {int(g)}
    used = [-(-int((draw == g).sum()) // height) for g in range(11)]
    assert (count > 0).sum() == sum(used) <= most_blocks(rows, 11, height) == len(count)


@pytest.mark.parametrize(
    "activation",
    [*map(Activation, ACTIVATIONS), Activation("silu", 10.0), Activation("swigluoai", 7.0)],
    ids=str,
)
def test_activations_of_all_families_lower_for_a_gpu(activation: Activation):
    *arguments, _ = Shape(4, 4, 2, 128, 128, "bfloat16").abstract()
    with gpu():
        run = jax.jit(partial(routed_experts, activation=activation, dtype=BF16, implementation="triton"))
        text = run.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert all(name in text for name in ("sort_rows", "experts_gate_up", "experts_down"))


def gpu() -> Any:
    """From jax 0.11 Pallas wants to know which GPU it lowers for."""
    from jax.sharding import AbstractDevice, AbstractMesh

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def test_what_the_kernel_cannot_do_goes_to_the_reference():
    x, choice, weight, weights, _ = Shape(3, 2, 1, 48, 48, "fp8", block=24).random(jax.random.key(0))
    how: dict[str, Any] = {"activation": gpt_oss, "dtype": BF16}
    with pytest.warns(SlowKernelWarning, match="24 numbers per scale along the product's sum"):
        got = routed_experts(x, choice, weight, weights, implementation="interpret", **how)
    same(np.asarray(got), np.asarray(routed_experts(x, choice, weight, weights, implementation="xla", **how)))
    down = weights["down_EFD"]
    wrong = Quantized(
        jnp.zeros((2, 48, 24), jnp.uint8), jnp.zeros((2, 48, 2), jnp.uint8), Format("fp4", (1, 32), True, -1)
    )
    assert wrong.shape == down.shape
    with pytest.warns(SlowKernelWarning, match="packed along axis -1, not along that of the product's sum, -2"):
        routed_experts(x, choice, weight, weights | {"down_EFD": wrong}, implementation="interpret", **how)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"choice": jnp.zeros((4, 2), jnp.int32)}, "must fit together"),
        ({"choice": jnp.zeros((3, 2), jnp.int16)}, "choices must be int32, got int16"),
        ({"x": jnp.zeros((3, 40))}, "rows of 40 numbers for experts of width 48"),
        ({"gate_up_ED2F": jnp.zeros((2, 48, 2, 60))}, "gate_up_ED2F must be (2, 48, 2, 64) beside down_EFD"),
        ({"up_EDF": jnp.zeros(1)}, "not known ['up_EDF']"),
        ({"implementation": "cuda"}, "kernels: must be one of"),
    ],
)
def test_bad_input_is_told(change: dict[str, Any], message: str):
    x, choice, weight, weights, _ = Shape(3, 2, 2, 48, 64, "float32").random(jax.random.key(0))
    call: dict[str, Any] = {"x": x, "choice": choice, "weight": weight, "implementation": "xla"} | change
    own = weights | {name: w for name, w in change.items() if name.endswith("F")}
    with pytest.raises(UnsupportedKernel) as error:
        routed_experts(
            call["x"], call["choice"], call["weight"], own, activation=gpt_oss, dtype=jnp.dtype("float32"),
            implementation=call["implementation"],
        )  # fmt: skip
    assert message in str(error.value)
