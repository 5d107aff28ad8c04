"""Routed experts' second kernel for GPUs: which rows it is for, what a row's result depends on, what it leaves."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.errors import ConfigError
from jaxspec.nn.experts import GROUPED_ROWS, choose_kernel, sorted_height
from jaxspec.nn.policy import make_policy, policy_for
from pallas_kernels import blocks, mosaic
from pallas_kernels.mosaic import Tile
from pallas_kernels.routed_experts.api import MOSAIC, routed_experts, tiles_for
from pallas_kernels.routed_experts.cases import Shape, silu
from pallas_kernels.routed_experts.kernel_mosaic import MosaicTiles, fitting, obstacles
from pallas_kernels.select import SlowKernelWarning, UnsupportedKernel, choose

BF16 = jnp.dtype("bfloat16")
SHAPE = Shape(12, 2, 1, 256, 128, "bfloat16")
TILES = MosaicTiles(64, Tile(128, 2), Tile(256, 2))
ON_GPU = make_policy(BF16, kernels="triton")


@cache
def weights() -> dict[str, Any]:
    return SHAPE.random(jax.random.key(0))[3]


def run(x: Any, choice: Any, weight: Any, **how: Any) -> np.ndarray:
    @jax.jit
    def call(x: jax.Array, choice: jax.Array, weight: jax.Array, weights: Any) -> jax.Array:
        how_all = {"activation": silu, "dtype": BF16, "implementation": "mosaic_interpret", "tiles": TILES} | how
        return routed_experts(x, choice, weight, weights, **how_all)

    return np.asarray(call(x, choice, weight, weights()))


@pytest.mark.usefixtures("sums_in_order")
def test_a_row_does_not_see_its_neighbors_nor_the_height_of_blocks():
    x, choice, weight, *_ = SHAPE.random(jax.random.key(1))
    together = run(x, choice, weight)
    assert np.ptp(together) > 0
    alone = run(x[7:8], choice[7:8], weight[7:8])
    assert alone.tobytes() == together[7:8].tobytes()
    turned = np.random.default_rng(0).permutation(len(x))
    tall = run(x[turned], choice[turned], weight[turned], tiles=replace(TILES, rows=128))
    assert tall.tobytes() == together[turned].tobytes()


def test_choices_of_no_expert_add_nothing():
    x, choice, weight, *_ = SHAPE.random(jax.random.key(2))
    some = np.asarray(choice).copy()
    some[3], some[5] = -1, 2
    got, wanted = run(x, jnp.asarray(some), weight), run(x, jnp.asarray(some), weight, implementation="xla", tiles=None)
    assert not got[[3, 5]].any()
    assert np.abs(got - wanted).max() < 4e-3 * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"form": "fp8"}, "gate_up_ED2F: fp8, the Mosaic kernel reads plain bfloat16 alone"),
        ({"form": "float32"}, "products of float32: the Mosaic kernel multiplies bfloat16 alone"),
        ({"width": 192}, "model width: 192, not a multiple of 128"),
        ({"hidden": 320}, "hidden units: 320, not a multiple of 128"),
    ],
)
def test_what_it_cannot_do_is_told_and_left_to_triton(change: dict[str, Any], reason: str):
    shape = replace(SHAPE, **change)
    own = shape.abstract()[3]
    assert reason in obstacles(own, shape.dtype)
    policy = make_policy(shape.dtype, kernels="triton", mosaic=True)
    choice = choose_kernel(2048, 1, own, policy, stacked=False)
    assert choice.implementation == "triton"
    assert choice.reason.startswith("no Mosaic kernel: ")
    assert reason in choice.reason


def test_a_case_of_neither_kernel_goes_to_the_reference():
    x, choice, weight, own, _ = Shape(5, 2, 1, 48, 48, "fp8", block=24).random(jax.random.key(0))
    with pytest.warns(SlowKernelWarning, match="24 numbers per scale"):
        routed_experts(x, choice, weight, own, activation=silu, dtype=BF16, implementation="mosaic_interpret")


def test_it_computes_where_it_is_asked_for():
    policy = policy_for("bfloat16", "cuda", "mosaic")
    assert policy.compute.kernels == "triton", "everything else is Triton's"
    chosen = {rows: choose_kernel(rows, 1, weights(), policy, stacked=False) for rows in (1, 2048, GROUPED_ROWS + 1)}
    assert [choice.implementation for choice in chosen.values()] == ["mosaic", "mosaic", "triton"]
    assert "have gradients" in chosen[GROUPED_ROWS + 1].reason
    assert sorted_height(2048, 1, weights(), policy, stacked=False) == MosaicTiles().rows
    assert choose("route", "", "mosaic", "cuda", []).reason == "no Mosaic kernel: there is none of this operation"
    with pytest.raises(ConfigError, match="'mosaic' are for a GPU"):
        policy_for("bfloat16", "cpu", "mosaic")


def test_a_card_of_another_generation_leaves_it(monkeypatch: pytest.MonkeyPatch):
    class Card:
        platform, compute_capability = "gpu", "10.0"

    monkeypatch.setattr(mosaic.jax, "devices", lambda: [Card()])
    assert obstacles(weights(), BF16) == ["wgmma is for compute capability 9.0, this card has 10.0"]


@pytest.mark.parametrize(("time_us", "faster"), [(80.0, True), (120.0, False)])
def test_a_measurement_of_this_card_decides_for_prefill(
    time_us: float, faster: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(blocks, "folder", lambda: tmp_path)
    monkeypatch.setattr(blocks, "card", lambda: "H100")
    entry = 'card = "H100"\nshape = "E2 D256 F128"\nform = "bfloat16"\ndate = "2027-01-31"\ncommand = "tuner"\n'
    times = f"time_us = {time_us}\ndefault_time_us = 100.0\ntiles = {{rows = 128, up = {{stages = 3}}}}\n"
    (tmp_path / f"{MOSAIC}.toml").write_text(f"[[measured]]\n{entry}{times}")
    blocks.measured.cache_clear()
    try:
        chosen = {rows: choose_kernel(rows, 1, weights(), ON_GPU, stacked=False) for rows in (512, 513, 5000)}
        tiles = tiles_for(weights(), 513, 1, by="mosaic")
    finally:
        blocks.measured.cache_clear()
    assert [choice.implementation for choice in chosen.values()] == [
        "triton",
        "mosaic" if faster else "triton",
        "triton",
    ]
    assert chosen[513].reason.startswith("measured on 2027-01-31: 80 us, Triton 100") == faster
    assert tiles == MosaicTiles(128, Tile(128, 3), Tile(256))


def test_nothing_is_measured_so_triton_computes():
    assert choose_kernel(2048, 1, weights(), ON_GPU, stacked=False).implementation == "triton"


def test_sizes_that_no_instruction_has_are_refused():
    x, choice, weight, *_ = SHAPE.random(jax.random.key(3))
    for tiles in (replace(TILES, rows=32), replace(TILES, up=Tile(64)), replace(TILES, down=Tile(256, 1))):
        with pytest.raises(UnsupportedKernel, match="must be a multiple of 64, columns one of 128 that divides"):
            run(x, choice, weight, tiles=tiles)


def test_tiles_fit_the_columns():
    assert [fitting(Tile(256), columns).columns for columns in (2048, 2560, 3584 + 128)] == [256, 256, 128]
