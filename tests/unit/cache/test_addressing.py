"""The cache: writes, reads and compaction in both layouts, and attention over it against dense numpy."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.addressing import UNROLLED_ROWS, CacheSize, LayerCache, StreamSpec, entries, init_layer, read, write
from jaxspec.cache.tree_reads import compact, read_block
from jaxspec.cache.window import Window
from jaxspec.nn.attend import attend
from jaxspec.nn.attention import AttentionSpec
from jaxspec.nn.cached_attention import source_of
from jaxspec.nn.inputs import Inputs
from jaxspec.topology import Topology, chain, tree
from tests.leaf_paths import leaf_paths

CAPACITY, HEADS, KV_HEADS, WIDTH, BLOCK = 32, 4, 2, 4, 4
SPEC = AttentionSpec(HEADS, KV_HEADS, WIDTH)
STREAM = SPEC.streams["k"]
MANY = UNROLLED_ROWS + 2
FLOAT32 = jnp.dtype(jnp.float32)


@dataclass(frozen=True)
class Layout:
    """How rows lie in pages: without a table, one page per row in any order, or small pages in any order."""

    name: str
    rows: int

    @property
    def page(self) -> int:
        return BLOCK if self.name == "paged" else CAPACITY

    @property
    def table_BJ(self) -> np.ndarray | None:
        if self.name == "plain":
            return None
        per_row = CAPACITY // self.page
        order = np.random.default_rng(0).permutation(self.rows * per_row + 2)  # two pages belong to nobody
        return order[: self.rows * per_row].reshape(self.rows, per_row).astype(np.int32)

    @property
    def pool(self) -> tuple[int, int] | None:
        return None if self.table_BJ is None else (self.rows * CAPACITY // self.page + 2, self.page)

    def empty(self) -> LayerCache:
        return init_layer(SPEC.streams, CacheSize(self.rows, CAPACITY, 0, BLOCK, self.pool), FLOAT32)

    def window(self, start_B: np.ndarray, **settings) -> Window:
        table_BJ = self.table_BJ
        return Window(
            jnp.asarray(start_B), None if table_BJ is None else jnp.asarray(table_BJ), block=BLOCK, **settings
        )

    def logical(self, pages_PGZC: jax.Array) -> np.ndarray:
        """The rows as they are meant, [B, G, S, C]."""
        pages = np.asarray(pages_PGZC)
        if self.table_BJ is None:
            return pages
        return np.concatenate([pages[self.table_BJ[:, j]] for j in range(self.table_BJ.shape[1])], axis=2)

    def holding(self, k_BGSC: np.ndarray, v_BGSC: np.ndarray) -> LayerCache:
        """A cache with the given contents."""
        window = self.window(np.zeros(self.rows, np.int32))
        return write_both(self.empty(), window, *(jnp.asarray(x.swapaxes(1, 2)) for x in (k_BGSC, v_BGSC)))


def write_both(cache: LayerCache, window: Window, k_BTGC, v_BTGC) -> LayerCache:
    new = {"k": k_BTGC, "v": v_BTGC}
    return {name: write(cache[name], STREAM, window, new[name]) for name in cache}


LAYOUTS = [Layout(name, rows) for name in ("plain", "whole rows", "paged") for rows in (3, MANY)] + [Layout("paged", 1)]
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.name}-{layout.rows}")


def starts(rows: int) -> np.ndarray:
    """Lengths on, before and behind the edges of pages."""
    return np.resize(np.array([7, 0, 4, 21, 3, 16], np.int32), rows)


def noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@each_layout
def test_write_then_read(layout: Layout):
    rows, count, start_B = layout.rows, 6, starts(layout.rows)  # wider than a small page
    k, v = noise(1, rows, count, KV_HEADS, WIDTH), noise(2, rows, count, KV_HEADS, WIDTH)
    window = layout.window(start_B)
    layer = jax.jit(write_both)(layout.empty(), window, k, v)
    wanted = np.zeros((2, rows, KV_HEADS, CAPACITY, WIDTH), np.float32)
    for row, start in enumerate(start_B):
        wanted[0, row, :, start : start + count] = k[row].swapaxes(0, 1)
        wanted[1, row, :, start : start + count] = v[row].swapaxes(0, 1)
    np.testing.assert_array_equal(layout.logical(layer["k"]), wanted[0])
    np.testing.assert_array_equal(layout.logical(layer["v"]), wanted[1])
    assert np.count_nonzero(layer["k"]) == k.size, "pages of nobody stay as they are"
    load = jax.jit(read_block, static_argnums=(1, 4))
    for index in range(CAPACITY // BLOCK):
        block = load(layer["k"], STREAM, window, jnp.int32(index), rows)
        np.testing.assert_array_equal(block, wanted[0][:, :, index * BLOCK : (index + 1) * BLOCK])


@each_layout
def test_compaction_moves_the_accepted_path(layout: Layout):
    topology, rows, start_B = tree((2, 2)), layout.rows, starts(layout.rows)
    k, v = noise(1, rows, KV_HEADS, CAPACITY, WIDTH), noise(2, rows, KV_HEADS, CAPACITY, WIDTH)
    paths = [(0, *path) for path in leaf_paths(topology)] + [(0, 1, 0), (0, 2, 0), (0, 0, 0)]
    path_BT = np.array([paths[(row + 2) % len(paths)] for row in range(rows)], np.int32)
    move = jax.jit(lambda cache, window, path_BT: compact(cache, SPEC.streams, window, path_BT))
    layer = move(layout.holding(k, v), layout.window(start_B), path_BT)
    accepted = np.count_nonzero(path_BT, axis=1)
    for found, old in ((layout.logical(layer["k"]), k), (layout.logical(layer["v"]), v)):
        for row, start in enumerate(start_B):
            kept = path_BT[row, : accepted[row] + 1]
            np.testing.assert_array_equal(found[row, :, :start], old[row, :, :start], err_msg="committed")
            moved = found[row, :, start : start + len(kept)]
            np.testing.assert_array_equal(moved, old[row][:, start + kept], err_msg=f"path {kept}")
            np.testing.assert_array_equal(found[row, :, start + 7 :], old[row, :, start + 7 :], err_msg="behind")


def dense_attention(q_BTHC, k_BGSC, v_BGSC, start_B, topology: Topology, nodes: range, reach: int | None) -> np.ndarray:
    """One query at a time: its row's committed keys and its ancestors, within the window."""
    out = np.zeros(q_BTHC.shape)
    group = HEADS // KV_HEADS
    for row, start in enumerate(start_B):
        for t, node in enumerate(nodes):
            position = start + topology.depth[node]
            slots = list(range(start)) + [start + n for n in np.unique(topology.path_TJ[node])]
            place = list(range(start)) + [start + topology.depth[n] for n in np.unique(topology.path_TJ[node])]
            seen = [s for s, p in zip(slots, place, strict=True) if reach is None or p > position - reach]
            for head in range(HEADS):
                keys = k_BGSC[row, head // group, seen].astype(np.float64)
                score = keys @ q_BTHC[row, t, head] / np.sqrt(WIDTH)
                prob = np.exp(score - score.max())
                out[row, t, head] = prob / prob.sum() @ v_BGSC[row, head // group, seen]
    return out


def attention(q_BTHC, cache: LayerCache, window: Window, position_BT, spec: AttentionSpec) -> jax.Array:
    whole = replace(spec, window=None)  # the caches of these tests hold every position
    inputs = Inputs(position_BT, position_BT, window, cache)
    source = source_of((cache["k"], cache["v"]), whole.streams["k"], inputs, WIDTH, spec.window)
    return attend(
        q_BTHC, [source], kv_heads=KV_HEADS, value_width=WIDTH, scale=WIDTH**-0.5, dtype=FLOAT32,
        tree=window.path_BTJ is not None,
    )  # fmt: skip


def see(topology: Topology, nodes: range) -> np.ndarray | None:
    return None if topology.is_chain else topology.path_TJ[None, nodes.start : nodes.stop]


UNEVEN = Topology((-1, 0, 0, 1, 3, 2, 4))
SHAPES = {"plain": chain(0), "chain": chain(5), "tree": tree((2, 2)), "uneven tree": UNEVEN}


@pytest.mark.parametrize("reach", [None, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_equals_numpy_in_every_layout(shape: str, reach: int | None):
    topology = SHAPES[shape]
    spec = AttentionSpec(HEADS, KV_HEADS, WIDTH, window=reach)
    rows, nodes, start_B = 4, range(topology.nodes), starts(4)
    k, v = noise(1, rows, KV_HEADS, CAPACITY, WIDTH), noise(2, rows, KV_HEADS, CAPACITY, WIDTH)
    q = noise(3, rows, topology.nodes, HEADS, WIDTH)
    position_BT = start_B[:, None] + np.asarray(topology.depth, np.int32)[None]
    run = jax.jit(partial(attention, spec=spec))
    found = []
    for name in ("plain", "paged"):
        layout = Layout(name, rows)
        found.append(run(q, layout.holding(k, v), layout.window(start_B, path_BTJ=see(topology, nodes)), position_BT))
    np.testing.assert_array_equal(found[0], found[1])
    wanted = dense_attention(q, k, v, start_B, topology, nodes, reach)
    np.testing.assert_allclose(found[0], wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize("layout", [Layout("plain", 3), Layout("paged", 3)], ids=lambda layout: layout.name)
def test_each_row_may_have_a_tree_of_its_own(layout: Layout):
    """Bitwise what it gets where all rows have that tree."""
    tops, start_B = [UNEVEN, Topology((-1, 0, 1, 2, 3, 0, 5)), Topology((-1, 0, 0, 0, 3, 4, 4))], starts(3)
    k, v = noise(1, 3, KV_HEADS, CAPACITY, WIDTH), noise(2, 3, KV_HEADS, CAPACITY, WIDTH)
    q, cache = noise(3, 3, 7, HEADS, WIDTH), layout.holding(k, v)
    depth_BT = np.asarray([top.depth for top in tops], np.int32)
    path_BTJ = np.zeros((3, 7, 5), np.int32)
    for row, top in enumerate(tops):
        path_BTJ[row, :, : top.max_depth + 1] = top.path_TJ
    run = jax.jit(partial(attention, spec=SPEC))
    together = run(q, cache, layout.window(start_B, path_BTJ=path_BTJ), start_B[:, None] + depth_BT)
    for row, top in enumerate(tops):
        window = layout.window(start_B, path_BTJ=path_BTJ[row : row + 1])
        alone = run(q, cache, window, start_B[:, None] + depth_BT[row])
        np.testing.assert_array_equal(together[row], alone[row])
        wanted = dense_attention(q, k, v, start_B, top, range(7), None)
        np.testing.assert_allclose(together[row], wanted[row], rtol=0, atol=2e-6)


@pytest.mark.parametrize("reach", [None, 3])
def test_a_tree_written_level_by_level(reach: int | None):
    topology, rows = tree((2, 2)), 2
    spec = AttentionSpec(HEADS, KV_HEADS, WIDTH, window=reach)
    layout, start_B = Layout("plain", rows), starts(rows)
    k, v = noise(1, rows, KV_HEADS, CAPACITY, WIDTH), noise(2, rows, KV_HEADS, CAPACITY, WIDTH)
    layer = layout.holding(np.where(np.arange(CAPACITY)[:, None] < start_B[:, None, None, None], k, 99), v)
    q = noise(3, rows, topology.nodes, HEADS, WIDTH)
    run = jax.jit(partial(attention, spec=spec))
    for nodes in (range(1), range(1, 3), range(3, 7)):
        window = layout.window(start_B, path_BTJ=see(topology, nodes), offset=nodes.start)
        slots = start_B[:, None] + np.asarray(nodes)
        new = [np.stack([x[row][:, slots[row]].swapaxes(0, 1) for row in range(rows)]) for x in (k, v)]
        layer = write_both(layer, window, *map(jnp.asarray, new))
        position_BT = start_B[:, None] + np.asarray(topology.depth, np.int32)[None, nodes.start : nodes.stop]
        found = run(q[:, nodes.start : nodes.stop], layer, window, position_BT)
        wanted = dense_attention(q[:, nodes.start : nodes.stop], k, v, start_B, topology, nodes, reach)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6, err_msg=str(nodes))


def test_one_row_reads_its_own_pages():
    layout, rows = Layout("paged", 3), 3
    k, v = noise(1, rows, KV_HEADS, CAPACITY, WIDTH), noise(2, rows, KV_HEADS, CAPACITY, WIDTH)
    layer, window = layout.holding(k, v), layout.window(starts(rows))
    alone = Window(window.start_B[1:2], window.table_BJ[1:2], jnp.ones(1, jnp.int32), block=BLOCK)
    for index in (0, 5):
        block = read_block(layer["k"], STREAM, alone, jnp.int32(index), 1)
        np.testing.assert_array_equal(block[0], k[1][:, index * BLOCK : (index + 1) * BLOCK])


@pytest.mark.parametrize("rows", [3, MANY])
def test_a_ring_keeps_its_reach(rows: int):
    """Whatever was written in whatever steps, the positions within reach of the next one are those last written."""
    spec, slack = StreamSpec(KV_HEADS, WIDTH, reach=5), 6
    size = entries(spec, 1000, slack, BLOCK)
    assert size == 12
    pages = init_layer({"x": spec}, CacheSize(rows, 1000, slack, BLOCK), FLOAT32)["x"]
    truth = np.zeros((rows, 200, KV_HEADS, WIDTH), np.float32)
    put, take = jax.jit(write, static_argnums=1), jax.jit(read, static_argnums=1)
    load = jax.jit(read_block, static_argnums=(1, 4))
    rng, start_B = np.random.default_rng(4), np.resize(np.arange(0, 20, 3, dtype=np.int32), rows)
    for step in range(30):
        count = int(rng.integers(1, slack + 1))
        new = noise(step, rows, count, KV_HEADS, WIDTH)
        window = Window(jnp.asarray(start_B), block=BLOCK)
        pages = put(pages, spec, window, new)
        for row, start in enumerate(start_B):
            truth[row, start : start + count] = new[row]
        seen_BT = np.maximum(start_B[:, None] + np.arange(-5, count), 0).astype(np.int32)
        wanted = truth[np.arange(rows)[:, None], seen_BT]
        np.testing.assert_array_equal(take(pages, spec, window, seen_BT), wanted)
        block = int(start_B[1]) // BLOCK
        inside = [p for p in range(block * BLOCK, (block + 1) * BLOCK) if start_B[1] - 5 <= p < start_B[1] + count]
        found = np.asarray(load(pages, spec, window, jnp.int32(block), rows))[1].swapaxes(0, 1)
        np.testing.assert_array_equal(found[[p - block * BLOCK for p in inside]], truth[1, inside])
        start_B = start_B + rng.integers(0, count + 1, rows).astype(np.int32)  # the rest was rejected


def test_entries_of_several_positions():
    spec = StreamSpec(1, WIDTH, stride=4)
    assert entries(spec, 100, 6, 32) == 32
    pages = init_layer({"x": spec}, CacheSize(2, 100, 6, 32), FLOAT32)["x"]
    new, first_B = noise(1, 2, 3, 1, WIDTH), np.array([4, 19], np.int32)
    window = Window(jnp.asarray([17, 78], jnp.int32), block=32)
    pages = write(pages, spec, window, jnp.asarray(new), jnp.asarray(first_B))
    found = read(pages, spec, window, jnp.asarray(first_B[:, None] + np.arange(3, dtype=np.int32)))
    np.testing.assert_array_equal(found, new)
    np.testing.assert_array_equal(read_block(pages, spec, window, jnp.int32(2), 2)[1, :, 3:6], new[1].swapaxes(0, 1))


@pytest.mark.parametrize("stream", [STREAM, replace(STREAM, reach=5)], ids=["pages", "ring"])
def test_layers_behind_one_another_do_not_meet(stream: StreamSpec):
    rows, layers = 2, 3
    pages = init_layer({"x": stream}, CacheSize(rows, CAPACITY, 6, BLOCK), FLOAT32, layers=layers)["x"]
    each = pages.shape[0] // layers
    start_B, row_B = jnp.asarray([3], jnp.int32), jnp.ones(1, jnp.int32)
    new = [jnp.asarray(noise(y, 1, 5, KV_HEADS, WIDTH)) for y in range(layers)]
    for y in range(layers):
        window = Window(start_B, row_B=row_B, layer=jnp.int32(y), layer_pages=each, block=BLOCK)
        pages = write(pages, stream, window, new[y])
    for y in range(layers):
        window = Window(start_B, row_B=row_B, layer=jnp.int32(y), layer_pages=each, block=BLOCK)
        np.testing.assert_array_equal(read(pages, stream, window, jnp.arange(3, 8, dtype=jnp.int32)[None]), new[y])
        whole = Window(jnp.zeros(rows, jnp.int32), layer=window.layer, layer_pages=each, block=BLOCK)
        block = read_block(pages, stream, whole, jnp.int32(1), rows)
        np.testing.assert_array_equal(block[1], new[y][0, 1:5].swapaxes(0, 1))
        assert not np.any(block[0])


@pytest.mark.parametrize("stream", [STREAM, StreamSpec(KV_HEADS, WIDTH, reach=9)], ids=["pages", "ring"])
def test_rows_written_at_once_are_those_written_one_by_one(stream: StreamSpec):
    rows, count = 3, 5
    empty = init_layer({"k": stream}, CacheSize(rows, CAPACITY, count, BLOCK), jnp.dtype(jnp.bfloat16))["k"]
    new_BTGC = jnp.asarray(np.random.default_rng(0).normal(size=(rows, count, KV_HEADS, WIDTH)), jnp.float32)
    window = Window(jnp.asarray([0, 6, 13], jnp.int32), block=BLOCK)
    apart, together = (write(empty, stream, w, new_BTGC) for w in (window, replace(window, use_scatter=True)))
    assert np.any(np.asarray(apart))
    assert np.array_equal(apart, together)
