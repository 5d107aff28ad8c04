"""Named cases of verify_attention: small ones of every feature, and the shapes of published models."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backend import Implementation
from pallas_kernels.cache_entries import stored
from pallas_kernels.case import Case
from pallas_kernels.verify_attention.api import verify_attention
from pallas_kernels.verify_attention.reference import first_seen
from pallas_kernels.where import Where

# The root, two children, and children of both: as wide as it is deep.
TREE = (-1, 0, 0, 1, 1, 2, 3, 5)


@dataclass(frozen=True, kw_only=True)
class Rows(ABC):
    """Rows whose queries read their caches, as cases of several operations have them.

    Attributes:
      rows, count: B and T; with ``parents`` the nodes of a tree.
      capacity: entries of a row, or of its ring.
      stride: positions per entry.
      cached: dtype of the pages.
      compute: dtype of the products' factors.
      page: size of the pages of a shared pool, None where every row has one page.
      layers: layers one after another in the pages; the last of them is read.
      row: the one page that a prompt reads, or that of the first row of a pool, None where every row reads its own.
      parents: parent of each node of a tree.
      committed: length of the longest row in positions.
    """

    rows: int = 2
    count: int = 4
    capacity: int = 8192
    stride: int = 1
    cached: str = "bfloat16"
    compute: str = "bfloat16"
    page: int | None = None
    layers: int = 1
    row: int | None = None
    parents: tuple[int, ...] | None = None
    committed: int = 4096

    @abstractmethod
    def shapes(self) -> dict[str, Any]:
        """Shapes and dtypes by name, None for what is not there; those of ``Where`` come last."""

    @abstractmethod
    def numbers(self) -> dict[str, Any]:
        """Whole numbers besides those of ``Where``."""

    @abstractmethod
    def run(self, x: dict[str, Any], where: Where, implementation: Implementation) -> Any:
        """The operation on arguments by name."""

    def draw(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Draws the other numbers, float32."""
        return jax.random.normal(key, shape)

    @property
    def depth_T(self) -> np.ndarray:
        """Offset of each query from the committed length."""
        return np.arange(self.count, dtype=np.int32) if self.parents is None else depths(self.parents)

    @property
    def start_B(self) -> np.ndarray:
        """Committed lengths; rows have different ones."""
        return np.maximum(self.committed - np.arange(self.rows) * (self.committed // (self.rows + 1)), 0)

    @property
    def position_BT(self) -> np.ndarray:
        """Positions of the queries."""
        return self.start_B[:, None] + self.depth_T

    @property
    def seen_BT(self) -> np.ndarray:
        """Entries up to each query."""
        return (self.position_BT + 1) // self.stride

    @property
    def per_row(self) -> int:
        """Pages of a row."""
        return 1 if self.page is None else -(-self.capacity // self.page)

    def pages(self, heads: int, width: int) -> jax.ShapeDtypeStruct:
        """Returns the shape of the pages of all layers."""
        own = self.rows if self.row is None else self.row + 1
        shape = self.layers * own * self.per_row, heads, self.page or self.capacity, width
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.cached))

    def where_shapes(self) -> dict[str, Any]:
        """Shapes and dtypes of what says where entries lie, but for a tree's paths."""
        whole = partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(jnp.int32))
        return {
            "start": whole((self.rows,)) if self.parents else None,
            "table": whole((self.rows, self.per_row)) if self.page else None,
            "row": whole((self.rows,)) if self.row is not None else None,
            "base": whole(()) if self.layers > 1 else None,
        }

    def abstract(self) -> tuple[Any, ...]:
        """The arguments as shapes and dtypes."""
        return tuple(self.shapes().values())

    def random(self, key: jax.Array) -> tuple[Any, ...]:
        """Arguments at random; rows of different lengths; shuffled pages."""
        made = self.shapes()
        per_layer = made["k"].shape[0] // self.layers
        given = {"start": self.start_B, "row": np.full(self.rows, self.row or 0), "base": (self.layers - 1) * per_layer}
        given |= {"table": np.random.default_rng(0).permutation(per_layer)} | self.numbers()
        for draw, (name, like) in zip(jax.random.split(key, len(made)), made.items(), strict=True):
            if like is not None and name in given:
                made[name] = jnp.asarray(np.reshape(given[name], like.shape), jnp.int32)
            elif like is not None:
                made[name] = stored(self.draw(draw, like.shape), like.dtype)
        return tuple(made.values())

    def call(self, implementation: Implementation) -> Any:
        """The operation on these arguments."""
        return partial(self._call, implementation)

    def _call(self, implementation: Implementation, *arguments: Any) -> Any:
        x = dict(zip(self.shapes(), arguments, strict=True))
        path_BTJ = None if self.parents is None else jnp.asarray(np.stack([paths(self.parents)] * self.rows))
        return self.run(x, Where(x["start"], path_BTJ, x["table"], x["row"], x["base"]), implementation)


@dataclass(frozen=True)
class Sizes(Rows):
    """A shape of the operation.

    Attributes:
      heads, kv_heads, key_width: H, G and C.
      value_width: C' where values are the beginnings of keys, None where they have pages of their own.
      span: most positions that a query sees, None for all; below 0 those from the last multiple of ``-span`` on.
      sinks: whether heads have sinks.
      block: positions that may be read at a time.
    """

    heads: int
    kv_heads: int
    key_width: int
    value_width: int | None = None
    span: int | None = None
    sinks: bool = False
    block: int = 64

    def shapes(self) -> dict[str, Any]:
        """Queries, keys, values, positions, sinks, and where these lie."""
        shape, float32, pages = jax.ShapeDtypeStruct, jnp.dtype(jnp.float32), self.pages(self.kv_heads, self.key_width)
        return {
            "q": shape((self.rows, self.count, self.heads, self.key_width), float32),
            "k": pages,
            "v": pages if self.value_width is None else None,
            "position": shape((self.rows, self.count), jnp.dtype(jnp.int32)),
            "sinks": shape((self.heads,), float32) if self.sinks else None,
        } | self.where_shapes()

    def numbers(self) -> dict[str, Any]:
        """Positions."""
        return {"position": self.position_BT}

    def run(self, x: dict[str, Any], where: Where, implementation: Implementation) -> jax.Array:
        """Attention."""
        return verify_attention(
            x["q"], x["k"], x["v"], x["position"], scale=self.key_width**-0.5, dtype=jnp.dtype(self.compute),
            value_width=self.value_width, sinks_H=x["sinks"], span=self.span, ring=self.span is not None,
            block=self.block, prompt=self.row is not None, implementation=implementation, **vars(where),
        )  # fmt: skip

    def read_bytes(self, *arguments: Any) -> int:
        """Bytes of the cached entries that some query of a row sees, each once."""
        k, v, position_BT = arguments[1], arguments[2], jnp.asarray(arguments[3])
        first_B = 0 if self.span is None else jnp.maximum(first_seen(position_BT.min(axis=1), self.span), 0)
        entry = sum(x.shape[1] * x.shape[3] * x.dtype.itemsize for x in (k, v) if x is not None)
        beside = self.count - 1 - int(self.depth_T.max())  # nodes of a tree that stand beside its longest path
        return int((position_BT.max(axis=1) + 1 - first_B).sum() + beside * self.rows) * entry


def depths(parents: tuple[int, ...]) -> np.ndarray:
    """Distance of each node from the first one, int32 [T]."""
    depth: list[int] = []
    for parent in parents:
        depth.append(depth[parent] + 1 if parent >= 0 else 0)
    return np.asarray(depth, np.int32)


def paths(parents: tuple[int, ...]) -> np.ndarray:
    """Nodes from the first one to each node by depth, int32 [T, J]; 0 after the end of a path."""
    depth_T = depths(parents)
    path_TJ = np.zeros((len(parents), depth_T.max() + 1), np.int32)
    for node, parent in enumerate(parents):
        path_TJ[node] = path_TJ[parent] if parent >= 0 else 0
        path_TJ[node, depth_T[node]] = node
    return path_TJ


def _case(name: str, size: Any, sizes: Sizes) -> Case:
    # Of weights rounded to 8 bits the reference and the kernel round those of a block with another maximum differently.
    tolerance = 1e-5 if sizes.compute == "float32" else 2**-7
    mosaic = sizes.cached == sizes.compute == "bfloat16" and (
        sizes.row is not None or sizes.heads // sizes.kv_heads >= 64
    )
    return Case(name, size, sizes.abstract, sizes.random, sizes.call, tolerance, sizes.read_bytes, mosaic)


def _tiny() -> dict[str, Sizes]:
    plain = Sizes(4, 2, 16, capacity=64, committed=40, block=8, cached="float32", compute="float32")
    ring = replace(plain, span=13, capacity=32)
    latent = replace(plain, heads=6, kv_heads=1, key_width=24, value_width=16)
    tree = {"parents": TREE, "count": len(TREE), "committed": 37}
    bits = {"cached": "uint16", "compute": "bfloat16"}
    prompt = Sizes(4, 2, 64, rows=1, row=0, count=24, capacity=192, committed=100)
    return {
        "chain-of-7-heads": replace(plain, heads=7, kv_heads=1, key_width=24, sinks=True),
        "chain-pool-layers": replace(plain, page=16, rows=3, layers=3, **bits),
        "chain-many-splits": replace(plain, capacity=9216, committed=8900, block=64),
        "ring-sinks": replace(ring, sinks=True, **bits),
        "ring-many-splits": replace(ring, span=600, capacity=640, committed=900, block=64, layers=2),
        "ring-chunks": replace(ring, span=-14),
        "prefill": replace(plain, rows=1, row=1, count=24, committed=8),
        "tree": replace(plain, page=16, **tree),
        "tree-ring": replace(ring, **tree),
        "tree-ring-chunks": replace(ring, span=-13, **tree),
        "latent": replace(latent, page=16),
        "latent-tree": replace(latent, **tree, **bits),
        "prompt-ring": replace(prompt, heads=2, kv_heads=1, row=1, span=70, capacity=128, committed=150, sinks=True),
        "prompt": replace(prompt, page=64, layers=2, sinks=True),
        "prompt-latent": replace(prompt, heads=2, kv_heads=1, key_width=448, value_width=384),
        "step-latent-tree": replace(
            prompt, heads=64, kv_heads=1, key_width=448, value_width=384, row=None, parents=(-1, 0, 0), count=3
        ),
    }


def _real() -> dict[str, Sizes]:
    published = {
        "qwen3-30b-a3b": Sizes(32, 4, 128),
        "gpt-oss-window": Sizes(64, 8, 64, span=128, sinks=True, capacity=256),
        "gpt-oss-full": Sizes(64, 8, 64, sinks=True),
        "mixtral-8x7b": Sizes(32, 8, 128),
        "deepseek-v3-of-8": Sizes(16, 1, 576, 512),
    }
    cases = {}
    for name, sizes in published.items():
        sizes = replace(sizes, rows=8)
        cases[f"{name}-plain"] = replace(sizes, count=1)
        cases[f"{name}-chain"] = sizes
        cases[f"{name}-tree"] = replace(sizes, parents=TREE, count=len(TREE))
    qwen, latent = cases["qwen3-30b-a3b-chain"], cases["deepseek-v3-of-8-chain"]
    prompt = {"rows": 1, "count": 256, "row": 0}
    cases["qwen3-30b-a3b-pool"] = replace(qwen, page=256, layers=2)
    cases["qwen3-30b-a3b-bits"] = replace(qwen, cached="uint16")
    cases["qwen3-30b-a3b-prefill"] = replace(qwen, rows=1, row=7, count=256)
    cases["deepseek-v3-of-8-pool"] = replace(latent, page=256, layers=2)
    cases["qwen3-30b-a3b-prefill-pool"] = replace(qwen, page=256, layers=2, **prompt)
    cases["gpt-oss-window-prefill"] = replace(cases["gpt-oss-window-chain"], capacity=512, **prompt)
    cases["gpt-oss-full-prefill"] = replace(cases["gpt-oss-full-chain"], **prompt)
    cases["deepseek-v3-of-8-prefill"] = replace(latent, rows=1, row=7, count=256)
    cases["deepseek-v3-chain"] = replace(latent, heads=128)
    cases["deepseek-v3-tree"] = replace(cases["deepseek-v3-of-8-tree"], heads=128)
    cases["deepseek-v3-prefill"] = replace(latent, heads=128, **prompt)
    return cases


CASES: tuple[Case, ...] = (
    *(_case(name, "tiny", sizes) for name, sizes in _tiny().items()),
    *(_case(name, "real", sizes) for name, sizes in _real().items()),
)
