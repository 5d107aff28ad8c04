"""Named cases of choose_places: small ones of every feature, and the indexers of published models."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backend import Implementation
from pallas_kernels.case import Case
from pallas_kernels.choose_places.api import choose_places
from pallas_kernels.verify_attention.cases import TREE, Rows
from pallas_kernels.where import Where


@dataclass(frozen=True)
class Index(Rows):
    """A shape of the operation.

    Attributes:
      heads, width: H and C.
      top_k: places that a query keeps.
    """

    heads: int
    width: int
    top_k: int

    def shapes(self) -> dict[str, Any]:
        """Queries, weights of their heads, keys, how many are seen, and where they lie."""
        shape, float32, each = jax.ShapeDtypeStruct, jnp.dtype(jnp.float32), (self.rows, self.count)
        return {
            "q": shape((*each, self.heads, self.width), float32), "weight": shape((*each, self.heads), float32),
            "k": self.pages(1, self.width), "seen": shape(each, jnp.dtype(jnp.int32)),
        } | self.where_shapes()  # fmt: skip

    def numbers(self) -> dict[str, Any]:
        """The number of keys that each query sees."""
        return {"seen": self.seen_BT}

    def draw(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Draws whole numbers, whose sums are exact in any order, so that places can be compared; many are equal."""
        return jax.random.randint(key, shape, -2, 3).astype(jnp.float32)

    def run(self, x: dict[str, Any], where: Where, implementation: Implementation) -> Any:
        """Places and their counts."""
        return choose_places(
            x["q"], x["weight"], x["k"], x["seen"], top_k=self.top_k, dtype=jnp.dtype(self.compute), where=where,
            implementation=implementation,
        )  # fmt: skip

    def read_bytes(self, *arguments: Any) -> int:
        """Bytes of the keys that some query of a row sees, where it does not see all that it may keep."""
        k, seen_B = arguments[2], np.asarray(arguments[3]).max(axis=1)
        return int(np.where(seen_B > self.top_k, seen_B, 0).sum()) * k.shape[3] * k.dtype.itemsize


# Places are whole numbers, of which a wrong one differs by more than this share of the largest.
def _case(name: str, size: Any, sizes: Index) -> Case:
    return Case(name, size, sizes.abstract, sizes.random, sizes.call, 1e-6, sizes.read_bytes)


def _tiny() -> dict[str, Index]:
    plain = Index(3, 12, 6, capacity=64, committed=40, cached="float32", compute="float32")
    return {
        "chain": plain,
        "chain-pool-layers": replace(plain, page=16, rows=3, layers=3, cached="uint16", compute="bfloat16"),
        "entries": replace(plain, stride=4, committed=60),
        "keeps-all": replace(plain, top_k=22, rows=3),
        "prefill": replace(plain, rows=1, row=1, count=24, committed=0),
        "tree": replace(plain, page=16, parents=TREE, count=len(TREE), committed=37),
    }


def _real() -> dict[str, Index]:
    published = {
        "deepseek-v3.2": Index(64, 128, 2048, committed=6000),
        "glm-5": Index(32, 128, 2048, capacity=65536, committed=60000),
        "deepseek-v4-flash": Index(64, 128, 512, stride=4, committed=32000),
        "deepseek-v4-pro": Index(64, 128, 1024, stride=4, committed=32000),
    }
    cases = {}
    for name, sizes in published.items():
        sizes = replace(sizes, rows=8)
        cases[f"{name}-plain"] = replace(sizes, count=1)
        cases[f"{name}-chain"] = sizes
    deepseek = cases["deepseek-v3.2-chain"]
    cases["deepseek-v3.2-pool"] = replace(deepseek, page=256, layers=2)
    cases["deepseek-v3.2-tree"] = replace(deepseek, parents=TREE, count=len(TREE))
    cases["deepseek-v3.2-prefill"] = replace(deepseek, rows=1, row=7, count=256)
    return cases


CASES: tuple[Case, ...] = (
    *(_case(name, "tiny", sizes) for name, sizes in _tiny().items()),
    *(_case(name, "real", sizes) for name, sizes in _real().items()),
)
