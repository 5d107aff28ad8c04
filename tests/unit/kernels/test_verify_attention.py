"""The attention kernel: what XLA's attention gives, and the same bits in every company."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.addressing import CacheSize, LayerCache, init_layer
from jaxspec.cache.window import Window
from jaxspec.native.product import kernels
from jaxspec.nn.attention import Attention, AttentionSpec
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.latent_attention import LatentAttention, LatentSpec
from jaxspec.nn.policy import Policy, make_policy
from jaxspec.nn.rope import RopeSpec
from jaxspec.nn.sparse_index import IndexSpec
from pallas_kernels.blocks import trying
from pallas_kernels.select import UnsupportedKernel
from pallas_kernels.verify_attention.api import OP, obstacles, verify_attention
from pallas_kernels.verify_attention.cases import TREE, Sizes, depths, paths
from pallas_kernels.verify_attention.kernel import Tiles
from tests.unit.native.test_attention import as_promised

FLOAT32 = jnp.dtype("float32")
SMALL = Tiles(rows=16, block=8, split=16)
# Rows grow trees of their own, of one depth.
TREES = (TREE, (-1, 0, 0, 0, 0, 4, 5, 4), (-1, 0, 1, 2, 1, 1, 0, 2))
ROWS, LENGTH, START_B = 3, 48, np.array([29, 14, 0], np.int32)  # the first row's drafts cross the end of a split


@pytest.fixture(autouse=True)
def small_tiles() -> Iterator[None]:
    with trying(OP, SMALL):
        yield


@dataclass(frozen=True)
class Kind:
    """A way to keep and to read a cache, and how its pages are filled from logical positions."""

    sizes: Sizes
    capacity: int = 48
    how: str = "interpret"

    def run(self, q_BTHC, logical_BSGC: np.ndarray, start_B, row: int | None = None, trees=None, capacity: int = 0):
        """Attention of queries whose nodes stand from ``start_B`` on; with ``row`` of that row alone."""
        capacity = capacity or self.capacity
        depth_BT = np.arange(q_BTHC.shape[1]) if trees is None else [depths(tree) for tree in trees]
        position_BT = start_B[:, None] + np.asarray(depth_BT, np.int32)
        pages = [self._pages(x, start_B if row is None else START_B, capacity) for x in self._parts(logical_BSGC)]
        where = {} if trees is None else {"start_B": start_B, "path_BTJ": np.stack([paths(tree) for tree in trees])}
        table_BJ = self.table(capacity)
        if self.sizes.page:
            where["table_BJ"] = table_BJ if row is None else table_BJ[row : row + 1]
        elif row is not None:
            where["row_B"] = np.array([row], np.int32)
        sinks_H = np.linspace(-1, 2, self.sizes.heads, dtype=np.float32) if self.sizes.sinks else None
        call = _program(self.sizes, self.how)
        return np.asarray(call(q_BTHC, *pages, *[None] * (2 - len(pages)), position_BT, sinks_H=sinks_H, **where))

    def table(self, capacity: int) -> np.ndarray:
        per_row = capacity // (self.sizes.page or capacity)
        return np.random.default_rng(2).permutation(ROWS * per_row).reshape(ROWS, per_row).astype(np.int32)

    def _parts(self, logical: np.ndarray) -> list[np.ndarray]:
        return [logical] if self.sizes.value_width else [logical, np.roll(logical, 5, axis=-1) + np.float32(0.25)]

    def _pages(self, logical_BSGC: np.ndarray, start_B, capacity: int) -> np.ndarray:
        """What nobody wrote holds noise, as a cache does that was used before."""
        sizes, rng = self.sizes, np.random.default_rng(3)
        slots_BGSC = rng.normal(0, 9, (ROWS, sizes.kv_heads, capacity, sizes.key_width)).astype(np.float32)
        for row in range(ROWS):
            end = min(start_B[row] + len(TREE), logical_BSGC.shape[1])
            for position in range(max(end - capacity, 0), end):
                slots_BGSC[row, :, position % capacity] = logical_BSGC[row, position]
        pages = slots_BGSC
        if sizes.page:
            cut = slots_BGSC.reshape(ROWS, sizes.kv_heads, -1, sizes.page, sizes.key_width).swapaxes(1, 2)
            pages = np.empty((cut.shape[0] * cut.shape[1], *cut.shape[2:]), np.float32)
            pages[self.table(capacity)] = cut
        kept = jnp.asarray(pages).astype(sizes.compute)
        return np.asarray(kept if sizes.cached != "uint16" else jax.lax.bitcast_convert_type(kept, jnp.uint16))


@cache
def _program(sizes: Sizes, how: str):
    static = {"value_width": sizes.value_width, "span": sizes.span, "ring": sizes.span is not None}
    static |= {"dtype": jnp.dtype(sizes.compute), "implementation": how}
    call = as_promised if how == "native" else verify_attention
    return jax.jit(partial(call, scale=0.3, block=8, **static))


GQA = Sizes(4, 2, 16, cached="float32", compute="float32")
BITS = {"cached": "uint16", "compute": "bfloat16"}
KINDS = {
    "pool": Kind(replace(GQA, page=16)),
    "window-in-splits": Kind(replace(GQA, span=21)),
    "chunks-in-splits": Kind(replace(GQA, span=-20)),
    "window-bits": Kind(replace(GQA, span=11, sinks=True, **BITS), 24),
    "latent-bits": Kind(replace(GQA, kv_heads=1, key_width=24, value_width=16, page=16, **BITS)),
}
if kernels().handle is not None:
    KINDS |= {f"native-{name}": replace(kind, how="native") for name, kind in KINDS.items()}


def noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.served
@pytest.mark.parametrize("name", KINDS)
def test_a_row_has_the_same_bits_in_every_company(name: str):
    kind = KINDS[name]
    sizes, count = kind.sizes, 6
    q = noise(0, ROWS, count, sizes.heads, sizes.key_width)
    logical = noise(1, ROWS, LENGTH, sizes.kv_heads, sizes.key_width)
    together = kind.run(q, logical, START_B)
    assert np.isfinite(together).all()
    for row in range(ROWS):
        for t in range(count):
            alone = kind.run(q[row : row + 1, t : t + 1], logical, START_B[row : row + 1] + np.int32(t), row)
            np.testing.assert_array_equal(alone[0, 0], together[row, t], err_msg=f"row {row}, position {t}")
    if name.endswith("pool"):
        np.testing.assert_array_equal(kind.run(q, logical, START_B, capacity=96), together)


@pytest.mark.served
@pytest.mark.parametrize("name", KINDS)
def test_a_node_has_the_bits_that_its_path_has_as_a_chain(name: str):
    kind = KINDS[name]
    sizes = kind.sizes
    q = noise(4, ROWS, len(TREE), sizes.heads, sizes.key_width)
    logical = noise(5, ROWS, LENGTH, sizes.kv_heads, sizes.key_width)
    nodes = kind.run(q, logical, START_B, trees=TREES)
    for node in range(len(TREE)):
        for row, start in enumerate(START_B):
            path = np.unique(paths(TREES[row])[node])
            chain = logical.copy()
            chain[row, start : start + len(path)] = logical[row, start + path]
            position = START_B[row : row + 1] + np.int32(len(path) - 1)
            alone = kind.run(q[row : row + 1, node : node + 1], chain, position, row)
            np.testing.assert_array_equal(alone[0, 0], nodes[row, node], err_msg=f"row {row}, node {node}")


@pytest.mark.served
def test_many_queries_in_parts_have_the_same_bits(monkeypatch: pytest.MonkeyPatch):
    kind = KINDS["pool"]
    q = noise(6, ROWS, 6, kind.sizes.heads, kind.sizes.key_width)
    logical = noise(7, ROWS, LENGTH, kind.sizes.kv_heads, kind.sizes.key_width)
    whole = kind.run(q, logical, START_B)
    monkeypatch.setattr("pallas_kernels.verify_attention.api.PIECES_BYTES", 3 * 3 * 4 * 4 * 16 * 4)
    _program.cache_clear()
    np.testing.assert_array_equal(kind.run(q, logical, START_B), whole)


ROPE = RopeSpec(1e4, 8)
PLAIN = AttentionSpec(heads=6, kv_heads=2, head_dim=16, rope=ROPE)
LAYERS = {
    "plain": PLAIN,
    "ring-sinks": replace(PLAIN, window=11, sinks=True),
    "latent": LatentSpec(heads=4, plain_dim=16, value_dim=12, rank=24, rope=ROPE, scale=0.2, query_rank=32),
}
LAYERS["indexed"] = replace(LAYERS["latent"], index=IndexSpec(3, 12, 7, ROPE))


@pytest.mark.parametrize(
    ("name", "shape"),
    [("plain", "chain"), ("ring-sinks", "tree"), ("latent", "tree"), ("indexed", "chain"), ("indexed", "tree")],
)
def test_a_layer_computes_with_the_kernel_what_it_computes_with_xla(name: str, shape: str):
    spec, pool = LAYERS[name], (2 * 3, 16) if shape == "tree" else None
    trees = TREES[:2] if shape == "tree" else None
    table_BJ = None if pool is None else np.array([[4, 0, 3], [1, 5, 2]], np.int32)
    start_B, count = np.array([30, 9], np.int32), len(TREE) if trees else 5
    depth_BT = [depths(tree) for tree in trees] if trees else np.arange(count)
    position_BT = start_B[:, None] + np.asarray(depth_BT, np.int32)
    path_BTJ = np.stack([paths(tree) for tree in trees]) if trees else None
    layer = init_layer(spec.streams, CacheSize(2, 48, 8, 8, pool), FLOAT32, layers=2)
    pages = {name: noise(8, *x.shape) for name, x in layer.items()}
    each = next(iter(pages.values())).shape[0] // 2
    window = Window(start_B, table_BJ, layer=np.int32(1), layer_pages=each, path_BTJ=path_BTJ, block=8)
    x_BTD = noise(9, 2, count, 64)
    kind: type[nn.Module] = LatentAttention if isinstance(spec, LatentSpec) else Attention
    plain = kind(spec, 64, 1e-5, make_policy(FLOAT32))  # pyright: ignore[reportCallIssue]
    params = jax.eval_shape(partial(plain.init, jax.random.key(0)), x_BTD, Inputs(position_BT, position_BT))
    params = jax.tree.map(lambda p: noise(10, *p.shape) / np.float32(4), params)

    def run(policy: Policy) -> tuple[jax.Array, LayerCache]:
        module = kind(spec, 64, 1e-5, policy)  # pyright: ignore[reportCallIssue]
        out, written, _ = jax.jit(module.apply)(params, x_BTD, Inputs(position_BT, position_BT, window, pages))
        return out, written

    wanted, old = run(make_policy(FLOAT32))
    found, new = run(make_policy(FLOAT32, kernels="interpret"))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    for name, before in pages.items():  # two programs, which may fuse a rotation's product and sum or not
        np.testing.assert_array_equal(new[name] != before, old[name] != before)
        np.testing.assert_allclose(new[name], old[name], rtol=0, atol=3e-7 * np.abs(old[name]).max())


def test_bytes_read_count_each_visible_entry_once():
    sizes = Sizes(4, 2, 16, rows=2, count=4, capacity=64, cached="float32", committed=40)
    for changes, positions in (({}, 44 + 31), ({"span": 13}, 16 + 16), ({"parents": TREE, "count": 8}, 48 + 35)):
        case = replace(sizes, **changes)
        arguments = list(case.abstract())
        arguments[3] = np.array([[40], [27]]) + case.depth_T
        assert case.read_bytes(*arguments) == positions * 2 * 2 * 16 * 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"selected": True}, "indexer"),
        ({"cached": "int8"}, "int8"),
        ({"page": 40}, "whole blocks of 64"),
        ({"block": 8, "page": 8}, "power of two of 8"),
        ({"key_width": 72, "value_width": 64}, "leave 8"),
        ({"key_width": 2048}, "2048 channels"),
    ],
)
def test_obstacles_say_what_stands_in_the_way(changes: dict, words: str):
    def found(key_width=128, value_width=128, cached="bfloat16", page=8192, **more) -> list[str]:
        pages = jax.ShapeDtypeStruct((1, 1, page, key_width), jnp.dtype(cached))
        return obstacles(pages, value_width=value_width, **{"block": 64, "wanted": "triton"} | more)

    assert found() == []
    (sentence,) = found(**changes)
    assert words in sentence


def test_shapes_that_do_not_belong_together_are_refused():
    q, k, position_BT = np.zeros((2, 3, 4, 16)), np.zeros((2, 2, 8, 16)), np.zeros((2, 3), np.int32)
    call = partial(verify_attention, scale=1.0, dtype=FLOAT32, implementation="xla")
    for arguments, changes, words in (
        ((q[..., :8], k, k, position_BT), {}, "one width"),
        ((q, k, k[:1], position_BT), {}, "equal pages"),
        ((q, k, None, position_BT), {"value_width": 17}, "1 to 16"),
        ((q, k, k, position_BT[:1]), {}, r"\[2, 3\]"),
        ((q, k, k, position_BT), {"ring": True, "table_BJ": position_BT}, "no page table"),
        (
            (q, k, k, position_BT),
            {"path_BTJ": position_BT[:, :2, None], "start_B": position_BT[:, 0]},
            r"trees \(2, 2, 1\) need",
        ),
    ):
        with pytest.raises(UnsupportedKernel, match=words):
            call(*arguments, **changes)
