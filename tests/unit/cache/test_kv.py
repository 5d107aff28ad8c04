"""The cache: writes, reads and compaction in both layouts, and attention over it against dense numpy."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.kv import UNROLLED_ROWS, LayerKV, Window, compact, init_layers, read_block, write
from jaxspec.nn.attention import AttentionSpec, attend
from jaxspec.nn.rope import RopeSpec
from jaxspec.topology import Topology, chain, tree

CAPACITY, HEADS, KV_HEADS, WIDTH, BLOCK = 32, 4, 2, 4, 4
SPEC = AttentionSpec(HEADS, KV_HEADS, WIDTH, RopeSpec(10000.0, WIDTH))
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

    def empty(self) -> LayerKV:
        pages = self.rows if self.table_BJ is None else self.rows * CAPACITY // self.page + 2
        return init_layers(1, pages, KV_HEADS, self.page, WIDTH, FLOAT32)[0]

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

    def holding(self, k_BGSC: np.ndarray, v_BGSC: np.ndarray) -> LayerKV:
        """A cache with the given contents."""
        window = self.window(np.zeros(self.rows, np.int32))
        return write(self.empty(), window, *(jnp.asarray(x.swapaxes(1, 2)) for x in (k_BGSC, v_BGSC)))


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
    layer = jax.jit(write)(layout.empty(), window, k, v)
    wanted = np.zeros((2, rows, KV_HEADS, CAPACITY, WIDTH), np.float32)
    for row, start in enumerate(start_B):
        wanted[0, row, :, start : start + count] = k[row].swapaxes(0, 1)
        wanted[1, row, :, start : start + count] = v[row].swapaxes(0, 1)
    np.testing.assert_array_equal(layout.logical(layer.k_PGZC), wanted[0])
    np.testing.assert_array_equal(layout.logical(layer.v_PGZC), wanted[1])
    assert np.count_nonzero(layer.k_PGZC) == k.size, "pages of nobody stay as they are"
    read = jax.jit(read_block, static_argnums=3)
    for index in range(CAPACITY // BLOCK):
        block = read(layer.k_PGZC, window, jnp.int32(index), rows)
        np.testing.assert_array_equal(block, wanted[0][:, :, index * BLOCK : (index + 1) * BLOCK])


@each_layout
def test_compaction_moves_the_accepted_path(layout: Layout):
    topology, rows, start_B = tree((2, 2)), layout.rows, starts(layout.rows)
    k, v = noise(1, rows, KV_HEADS, CAPACITY, WIDTH), noise(2, rows, KV_HEADS, CAPACITY, WIDTH)
    paths = [(0, *path) for path in topology.paths()] + [(0, 1, 0), (0, 2, 0), (0, 0, 0)]
    path_BT = np.array([paths[(row + 2) % len(paths)] for row in range(rows)], np.int32)
    (layer,) = jax.jit(compact)((layout.holding(k, v),), layout.window(start_B), path_BT)
    accepted = np.count_nonzero(path_BT, axis=1)
    for found, old in ((layout.logical(layer.k_PGZC), k), (layout.logical(layer.v_PGZC), v)):
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
            slots = list(range(start)) + [start + n for n in np.flatnonzero(topology.ancestors_TT[node])]
            place = list(range(start)) + [
                start + topology.depth[n] for n in np.flatnonzero(topology.ancestors_TT[node])
            ]
            seen = [s for s, p in zip(slots, place, strict=True) if reach is None or p > position - reach]
            for head in range(HEADS):
                keys = k_BGSC[row, head // group, seen].astype(np.float64)
                score = keys @ q_BTHC[row, t, head] / np.sqrt(WIDTH)
                prob = np.exp(score - score.max())
                out[row, t, head] = prob / prob.sum() @ v_BGSC[row, head // group, seen]
    return out


def see(topology: Topology, nodes: range) -> tuple[tuple[bool, ...], ...] | None:
    if topology.is_chain:
        return None
    return tuple(tuple(bool(v) for v in topology.ancestors_TT[n, : nodes.stop]) for n in nodes)


UNEVEN = Topology((-1, 0, 0, 1, 3, 2, 4))
SHAPES = {"plain": chain(0), "chain": chain(5), "tree": tree((2, 2)), "uneven tree": UNEVEN}


@pytest.mark.parametrize("reach", [None, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_equals_numpy_in_every_layout(shape: str, reach: int | None):
    topology = SHAPES[shape]
    spec = AttentionSpec(HEADS, KV_HEADS, WIDTH, SPEC.rope, window=reach)
    rows, nodes, start_B = 4, range(topology.nodes), starts(4)
    k, v = noise(1, rows, KV_HEADS, CAPACITY, WIDTH), noise(2, rows, KV_HEADS, CAPACITY, WIDTH)
    q = noise(3, rows, topology.nodes, HEADS, WIDTH)
    position_BT = start_B[:, None] + np.asarray(topology.depth, np.int32)[None]
    run = jax.jit(partial(attend, spec=spec))
    found = []
    for name in ("plain", "paged"):
        layout = Layout(name, rows)
        found.append(run(q, layout.holding(k, v), layout.window(start_B, ancestors=see(topology, nodes)), position_BT))
    np.testing.assert_array_equal(found[0], found[1])
    wanted = dense_attention(q, k, v, start_B, topology, nodes, reach)
    np.testing.assert_allclose(found[0], wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize("reach", [None, 3])
def test_a_tree_written_level_by_level(reach: int | None):
    topology, rows = tree((2, 2)), 2
    spec = AttentionSpec(HEADS, KV_HEADS, WIDTH, SPEC.rope, window=reach)
    layout, start_B = Layout("plain", rows), starts(rows)
    k, v = noise(1, rows, KV_HEADS, CAPACITY, WIDTH), noise(2, rows, KV_HEADS, CAPACITY, WIDTH)
    layer = layout.holding(np.where(np.arange(CAPACITY)[:, None] < start_B[:, None, None, None], k, 99), v)
    q = noise(3, rows, topology.nodes, HEADS, WIDTH)
    run = jax.jit(partial(attend, spec=spec))
    for nodes in (range(1), range(1, 3), range(3, 7)):
        window = layout.window(start_B, ancestors=see(topology, nodes), offset=nodes.start)
        slots = start_B[:, None] + np.asarray(nodes)
        new = [np.stack([x[row][:, slots[row]].swapaxes(0, 1) for row in range(rows)]) for x in (k, v)]
        layer = write(layer, window, *map(jnp.asarray, new))
        position_BT = start_B[:, None] + np.asarray(topology.depth, np.int32)[None, nodes.start : nodes.stop]
        found = run(q[:, nodes.start : nodes.stop], layer, window, position_BT)
        wanted = dense_attention(q[:, nodes.start : nodes.stop], k, v, start_B, topology, nodes, reach)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6, err_msg=str(nodes))


def test_one_row_reads_its_own_pages():
    layout, rows = Layout("paged", 3), 3
    k, v = noise(1, rows, KV_HEADS, CAPACITY, WIDTH), noise(2, rows, KV_HEADS, CAPACITY, WIDTH)
    layer, window = layout.holding(k, v), layout.window(starts(rows))
    alone = Window(window.start_B[1:2], window.table_BJ[1:2], block=BLOCK)
    for index in (0, 5):
        block = read_block(layer.k_PGZC, alone, jnp.int32(index), 1)
        np.testing.assert_array_equal(block[0], k[1][:, index * BLOCK : (index + 1) * BLOCK])
