"""Named cases of chosen_attention: small ones of every feature, and the shapes of published models."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backend import Implementation
from pallas_kernels.case import Case
from pallas_kernels.chosen_attention.api import Recent, chosen_attention
from pallas_kernels.verify_attention.cases import TREE, Rows
from pallas_kernels.where import Where


@dataclass(frozen=True)
class Entries(Rows):
    """A shape of the operation.

    Attributes:
      heads, width, value_width: H, C and C'.
      chosen: entries that a query attends to at most, None for all.
      span: latest positions that a query sees as well, 0 for none; in rings of ``ring`` positions.
      sinks: whether heads have sinks.
    """

    heads: int
    width: int
    value_width: int
    chosen: int | None
    span: int = 0
    ring: int = 0
    sinks: bool = False

    def shapes(self) -> dict[str, Any]:
        """Queries, entries, how many and which are chosen, latest positions, sinks, and where these lie."""
        shape, float32, int32 = jax.ShapeDtypeStruct, jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)
        each, recent = (self.rows, self.count), replace(self, page=None, capacity=self.ring).pages(1, self.width)
        return {
            "q": shape((*each, self.heads, self.width), float32),
            "k": self.pages(1, self.width),
            "count": shape(each, int32),
            "place": shape((*each, self.chosen), int32) if self.chosen else None,
            "recent": recent if self.span else None,
            "position": shape(each, int32),
            "sinks": shape((self.heads,), float32) if self.sinks else None,
        } | self.where_shapes()

    def numbers(self) -> dict[str, Any]:
        """Positions, and places at random."""
        given = {"position": self.position_BT, "count": np.minimum(self.seen_BT, self.chosen or self.capacity)}
        return given | ({"place": _places(self.seen_BT, self.chosen)} if self.chosen else {})

    def run(self, x: dict[str, Any], where: Where, implementation: Implementation) -> jax.Array:
        """Attention."""
        recent = Recent(x["recent"], x["position"], self.span) if self.span else None
        return chosen_attention(
            x["q"], x["k"], x["count"], x["place"], scale=self.width**-0.5, dtype=jnp.dtype(self.compute),
            value_width=self.value_width, recent=recent, sinks_H=x["sinks"], where=where, implementation=implementation,
        )  # fmt: skip

    def read_bytes(self, *arguments: Any) -> int:
        """Bytes of the entries that a row's last query attends to, and of the latest positions that some query sees."""
        k, count_BT, position_BT = arguments[1], np.asarray(arguments[2]), np.asarray(arguments[5])
        near_B = np.minimum(position_BT.max(axis=1) + 1, self.span + self.count - 1) * bool(self.span)
        return int(count_BT.max(axis=1).sum() + near_B.sum()) * k.shape[3] * k.dtype.itemsize


def _places(seen_BT: np.ndarray, most: int) -> np.ndarray:
    """Random places of what each query sees, ascending, and 0 after the last."""
    rng = np.random.default_rng(1)
    place_BTK = np.zeros((*seen_BT.shape, most), np.int32)
    for b, t in np.ndindex(seen_BT.shape):
        own = rng.permutation(seen_BT[b, t])[:most]
        place_BTK[b, t, : own.size] = np.sort(own)
    return place_BTK


def _case(name: str, size: Any, sizes: Entries) -> Case:
    # Of weights rounded to 8 bits the reference and the kernel round those of a block with another maximum differently.
    tolerance = 1e-5 if sizes.compute == "float32" else 2**-7
    return Case(name, size, sizes.abstract, sizes.random, sizes.call, tolerance, sizes.read_bytes)


def _tiny() -> dict[str, Entries]:
    exact: dict[str, Any] = {"capacity": 64, "committed": 40, "cached": "float32", "compute": "float32"}
    bits = {"cached": "uint16", "compute": "bfloat16"}
    latent = Entries(6, 24, 16, 12, **exact)
    compressed = Entries(5, 16, 16, 7, stride=4, span=13, ring=32, sinks=True, **exact)
    return {
        "latent": latent,
        "latent-pool-layers": replace(latent, page=16, rows=3, layers=3, **bits),
        "latent-many-splits": replace(latent, chosen=600, capacity=1024, committed=900),
        "latent-tree": replace(latent, page=16, parents=TREE, count=len(TREE), committed=37),
        "latent-prefill": replace(latent, rows=1, row=1, count=24, committed=0),
        "compressed": compressed,
        "compressed-layers": replace(compressed, layers=2, **bits),
        "compressed-all": replace(compressed, chosen=None, stride=8, capacity=16, **bits),
        "compressed-short": replace(compressed, committed=2, row=1),
    }


def _real() -> dict[str, Entries]:
    published = {
        "deepseek-v3.2": Entries(128, 576, 512, 2048, committed=6000),
        "deepseek-v3.2-of-8": Entries(16, 576, 512, 2048, committed=6000),
        "glm-5": Entries(64, 576, 512, 2048, committed=6000),
        "deepseek-v4-flash": Entries(64, 512, 512, 512, stride=4, span=128, ring=256, sinks=True, committed=32000),
        "deepseek-v4-pro": Entries(128, 512, 512, 1024, stride=4, span=128, ring=256, sinks=True, committed=32000),
    }
    cases = {}
    for name, sizes in published.items():
        sizes = replace(sizes, rows=8)
        cases[f"{name}-plain"] = replace(sizes, count=1)
        cases[f"{name}-chain"] = sizes
    latent, compressed = cases["deepseek-v3.2-chain"], cases["deepseek-v4-flash-chain"]
    cases["deepseek-v3.2-tree"] = replace(latent, parents=TREE, count=len(TREE))
    cases["deepseek-v3.2-pool"] = replace(latent, page=256, layers=2)
    cases["deepseek-v3.2-prefill"] = replace(latent, rows=1, row=7, count=256)
    cases["deepseek-v4-flash-prefill"] = replace(compressed, rows=1, row=7, count=256, layers=2)
    cases["deepseek-v4-flash-all"] = replace(compressed, chosen=None, stride=128, capacity=1024)
    return cases


CASES: tuple[Case, ...] = (
    *(_case(name, "tiny", sizes) for name, sizes in _tiny().items()),
    *(_case(name, "real", sizes) for name, sizes in _real().items()),
)
