"""Attention's second kernel for GPUs: what a query's bits depend on, what it computes and what it leaves to Triton."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.addressing import StreamSpec
from jaxspec.cache.window import Window
from jaxspec.nn.cached_attention import attend_cached
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.policy import Policy, make_policy
from jaxspec.sharding.mesh import make_mesh
from pallas_kernels import blocks
from pallas_kernels.blocks import trying
from pallas_kernels.select import Choice, UnsupportedKernel, recording
from pallas_kernels.verify_attention.api import (
    MOSAIC,
    mosaic_is_faster,
    mosaic_obstacles,
    mosaic_tiles_for,
    verify_attention,
)
from pallas_kernels.verify_attention.cases import paths
from pallas_kernels.verify_attention.kernel_mosaic import MosaicTiles

BF16 = jnp.dtype("bfloat16")
WIDTH, PAGE, START = 64, 64, 100
SHORT = MosaicTiles(split=64, stages=2)
HOW: dict[str, Any] = {"scale": 0.2, "dtype": BF16, "implementation": "mosaic_interpret"}


@pytest.fixture
def short_pieces() -> Iterator[None]:
    with trying(MOSAIC, SHORT):
        yield


def noise(seed: int, *shape: int, dtype: Any = np.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def prompt(q_BTHC: jax.Array, start_B: list[int], table_BJ: list[list[int]], **how: Any) -> np.ndarray:
    """Positions of prompts over a shared pool of pages of one kv head."""
    pages = [noise(seed, 8, 1, PAGE, WIDTH, dtype=BF16) for seed in (1, 2)]
    position_BT = jnp.asarray(start_B, jnp.int32)[:, None] + jnp.arange(q_BTHC.shape[1], dtype=jnp.int32)
    call = jax.jit(partial(verify_attention, prompt=True, **HOW | how))
    return np.asarray(call(q_BTHC, *pages, position_BT, table_BJ=jnp.asarray(table_BJ, jnp.int32)))


@pytest.mark.served
@pytest.mark.slow
@pytest.mark.usefixtures("short_pieces", "sums_in_order")
def test_a_position_has_the_same_bits_in_every_chunk_beside_any_row_and_in_more_pages():
    q, table = noise(0, 2, 40, 2, WIDTH), [[5, 0, 3], [1, 6, 2]]
    together = prompt(q, [START, 7], table)
    assert np.isfinite(together).all()
    assert np.ptp(together) > 0
    alone = prompt(q[:1, 20:25], [START + 20], [[*table[0], 7]])
    assert alone.tobytes() == together[:1, 20:25].tobytes()


@pytest.mark.usefixtures("short_pieces")
def test_pieces_of_a_window_equal_the_reference():
    q = noise(0, 1, 5, 2, WIDTH)
    how = {"span": 90, "sinks_H": jnp.asarray([0.5, -1.0])}
    got, wanted = (
        prompt(q, [START], [[5, 0, 3]], **how | {"implementation": by}) for by in ("mosaic_interpret", "xla")
    )
    assert np.abs(got - wanted).max() < 2**-7 * np.abs(wanted).max()


@pytest.mark.served
@pytest.mark.slow
@pytest.mark.usefixtures("sums_in_order")
def test_a_node_has_the_bits_that_its_path_has_as_a_chain():
    tree, wide = (-1, 0, 0), {"value_width": 384}
    q, pages = noise(3, 1, 3, 64, 448), noise(4, 1, 1, 192, 448, dtype=BF16)
    start, path = jnp.asarray([126], jnp.int32), jnp.asarray(paths(tree))[None]
    run = jax.jit(lambda q, pages, position, **tree: verify_attention(q, pages, None, position, **wide, **HOW, **tree))
    nodes = np.asarray(run(q, pages, jnp.asarray([[126, 127, 127]], jnp.int32), start_B=start, path_BTJ=path))
    chain = pages.at[0, 0, 127].set(pages[0, 0, 128])  # the last node in the place of its depth
    alone = np.asarray(run(q[:, 2:], chain, jnp.asarray([[127]], jnp.int32)))
    assert alone.tobytes() == nodes[:, 2:].tobytes()


@pytest.mark.parametrize("tiles", [MosaicTiles(block=32), MosaicTiles(split=96)])
def test_sizes_that_no_product_has_are_refused(tiles: MosaicTiles):
    with trying(MOSAIC, tiles), pytest.raises(UnsupportedKernel, match="block must be a multiple of 64, and split one"):
        prompt(noise(0, 1, 5, 2, WIDTH), [START], [[5, 0, 3, 1]])


def shapes(heads: int, kv_heads: int, width: int, value_width: int | None, page: int, cached: str) -> tuple[Any, Any]:
    made = partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(cached))
    return made((4, kv_heads, page, width)), None if value_width else made((4, kv_heads, page, width))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"prompt": False}, "a step with 8 heads to one of keys: TMA does not gather"),
        ({"prompt": False, "heads": 128, "kv_heads": 1, "width": 576, "value_width": 512}, None),
        ({"dtype": jnp.dtype("float32")}, "products of float32, a cache of bfloat16"),
        ({"cached": "uint16"}, "a cache of uint16: the Mosaic kernel reads bfloat16 alone"),
        ({"page": 96}, "pages of 96 positions are not whole blocks of 64"),
        ({"width": 80}, "keys of 80 and values of 80 channels: the Mosaic kernel takes multiples of 64 and 64"),
        ({"width": 640, "value_width": 576}, "multiples of 64 and 128, and values of at most 512"),
    ],
)
def test_what_it_cannot_do_is_told(change: dict[str, Any], reason: str | None):
    case = {"heads": 32, "kv_heads": 4, "width": 128, "value_width": None, "page": 256, "cached": "bfloat16"}
    case |= {"dtype": BF16, "prompt": True} | change
    how = {name: case.pop(name) for name in ("dtype", "prompt")}
    pages = shapes(**case)
    reasons = mosaic_obstacles(case["heads"], pages, value_width=case["value_width"] or case["width"], **how)
    assert reasons == [] if reason is None else any(reason in one for one in reasons)


def test_stages_fit_into_shared_memory():
    for width, value_width, stages in ((128, None, 4), (256, None, 2), (576, 512, 2)):
        pages = shapes(8, 1, width, value_width, 64, "bfloat16")
        assert mosaic_tiles_for(8, pages, value_width or width, prompt=True).stages == stages


def chosen(policy: Policy, *, committed: bool, heads: int = 8) -> Choice:
    """What computes the attention of a layer, of a prompt or of a step."""
    stream, row = StreamSpec(1, WIDTH), jnp.zeros(1, jnp.int32) if committed else None
    pages = [jax.ShapeDtypeStruct((1, 1, 128, WIDTH), BF16)] * 2
    position = jnp.zeros((1, 5), jnp.int32)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        window = Window(jnp.zeros(1, jnp.int32), row_B=row, block=64, committed=committed)
        return attend_cached(q, (k, v), Inputs(position, position, window, {}), stream, policy, scale=1.0)

    with recording() as choices:
        jax.eval_shape(attend, jax.ShapeDtypeStruct((1, 5, heads, WIDTH), jnp.float32), *pages)
    return choices[-1]


def test_it_computes_prompts_where_it_is_asked_for_and_steps_of_few_heads_never():
    policy = make_policy(BF16, kernels="triton", mosaic=True)
    assert chosen(policy, committed=True).implementation == "mosaic"
    step = chosen(policy, committed=False)
    assert step.implementation == "triton"
    assert step.reason.startswith("no Mosaic kernel: a step with 8 heads")
    on_two = policy.update(mesh=make_mesh({"tensor": 2}).abstract_mesh)
    prompt = chosen(on_two, committed=True)
    assert (prompt.implementation, prompt.case[:6]) == ("mosaic", "H4 G1 "), "each device has its own heads"


@pytest.mark.parametrize(
    ("heads", "measured", "time_us", "by"),
    [
        (8, "", 80.0, ["mosaic", "triton"]), (8, "", 120.0, ["triton", "triton"]),
        (8, " steps", 80.0, ["triton", "triton"]), (128, " steps", 80.0, ["triton", "mosaic"]),
        (128, "", 80.0, ["mosaic", "triton"]),
    ],
)  # fmt: skip
def test_a_measurement_of_this_card_decides_for_prompts_and_for_steps(
    heads: int, measured: str, time_us: float, by: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(blocks, "folder", lambda: tmp_path)
    monkeypatch.setattr(blocks, "card", lambda: "H100")
    shape = f"H{heads} G1 C64 V64{measured}"
    entry = f'card = "H100"\nshape = "{shape}"\nform = "bfloat16"\ndate = "2027-01-31"\ncommand = "tuner"\n'
    times = f"time_us = {time_us}\ndefault_time_us = 100.0\ntiles = {{split = 1024}}\n"
    (tmp_path / f"{MOSAIC}.toml").write_text(f"[[measured]]\n{entry}{times}")
    blocks.measured.cache_clear()
    try:
        policy = make_policy(BF16, kernels="triton")
        choices = [chosen(policy, committed=committed, heads=heads) for committed in (True, False)]
        asked = [chosen(policy.update(mosaic=False), committed=committed, heads=heads) for committed in (True, False)]
        pages = shapes(heads, 1, WIDTH, None, 64, "bfloat16")
        tiles = [mosaic_tiles_for(heads, pages, WIDTH, prompt=prompt) for prompt in (True, False)]
    finally:
        blocks.measured.cache_clear()
    assert [choice.implementation for choice in choices] == by
    assert {choice.implementation for choice in asked} == {"triton"}, "who asks for Triton gets it"
    for choice in choices:
        assert choice.reason.startswith("measured on 2027-01-31: 80 us, Triton 100") == (
            choice.implementation == "mosaic"
        )
    assert [one.split for one in tiles] == [2048 if measured else 1024, 512]


def test_where_nothing_is_measured_triton_computes(monkeypatch: pytest.MonkeyPatch):
    """An H200 takes what was measured there, and no other card."""
    for card, by in (("NVIDIA H100 80GB HBM3", ""), ("NVIDIA H200", "measured on 2026-11-28")):
        monkeypatch.setattr(blocks, "card", lambda card=card: card)
        pages = shapes(128, 1, 576, 512, 64, "bfloat16")
        assert mosaic_is_faster(128, pages[0], 512, prompt=False).startswith(by)
        assert bool(mosaic_is_faster(128, pages[0], 512, prompt=True)) == bool(by)
        assert not mosaic_is_faster(20, pages[0], 512, prompt=False)
