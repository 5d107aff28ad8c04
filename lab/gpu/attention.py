"""Section "attention": attention of drafted positions to long caches, as a share of the copy bandwidth."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lab.gpu.ceilings import copy_bytes_per_s
from lab.gpu.random_model import random_bits
from lab.gpu.report import Section
from lab.gpu.timing import Subject, chained, interleaved, side_by_side
from pallas_kernels.verify_attention.api import verify_attention

MOST_BYTES = 8 << 30  # of the caches of all calls of a program


@dataclass(frozen=True)
class Shape:
    """Attention of one layer.

    Attributes:
      heads, kv_heads, width: H, G and C.
      value_width: C' where values are the beginnings of keys, 0 where they are cached too.
      sinks: whether heads have sinks.
      block: positions that are read at a time.
    """

    heads: int
    kv_heads: int
    width: int
    value_width: int = 0
    sinks: bool = False
    block: int = 128

    @property
    def entry_bytes(self) -> int:
        """Bytes of one cached position, in bfloat16."""
        return 2 * self.kv_heads * self.width * (1 if self.value_width else 2)


@dataclass(frozen=True)
class Load:
    """Rows, and cached positions of each."""

    rows: int
    context: int


REAL = {
    "qwen3-30b-a3b": Shape(32, 4, 128),
    "gpt-oss, full": Shape(64, 8, 64, sinks=True),
    "mixtral-8x7b": Shape(32, 8, 128),
    "deepseek-v3 on one of 8": Shape(16, 1, 576, 512),
}
TINY = {"latent": Shape(4, 1, 24, 16, sinks=True, block=8)}
POSITIONS = {False: (1, 4, 8), True: (3,)}
LOADS = {False: (Load(1, 4096), Load(8, 4096), Load(1, 32768), Load(8, 32768), Load(64, 4096)), True: (Load(2, 40),)}


def attention(section: Section) -> None:
    """Every shape by rows, context and T; each call of a program reads another layer's cache."""
    shapes = TINY if section.tiny else REAL
    for load in LOADS[section.tiny]:
        for name, shape in shapes.items():
            what = f"{name}: {load.rows} rows of {load.context}"
            with section.attempt(what, needed_s=0 if section.tiny else 4) as go:
                if go:
                    _measure(section, name, what, shape, load)


def _measure(section: Section, model: str, what: str, shape: Shape, load: Load) -> None:
    tiny = section.tiny
    capacity = -(-(load.context + max(POSITIONS[tiny])) // shape.block) * shape.block
    layer_bytes = shape.entry_bytes * capacity * load.rows
    calls = 2 if tiny else max(2, min(8, MOST_BYTES // layer_bytes))
    pages = (calls * load.rows, shape.kv_heads, capacity, shape.width)
    k, v = random_bits(0, pages), None if shape.value_width else random_bits(1, pages)
    jobs = {t: partial(_program, section, shape, load, t, calls, k, v) for t in POSITIONS[tiny]}
    subjects = []
    for t, launch in side_by_side(jobs).items():
        if isinstance(launch, Exception):
            section.check(f"{what}, {t} positions compile", passed=False, detail=str(launch)[:600])
            continue
        out = np.asarray(launch()[0])
        good = bool(np.isfinite(out).all() and np.abs(out).max() > 0)
        section.check(f"{what}, {t} positions give numbers", passed=good, detail=f"largest {np.abs(out).max():.2g}")
        subjects.append(Subject(str(t), launch, calls))
    for t, timing in interleaved(subjects, rounds=2 if tiny else 7, round_s=0.0 if tiny else 0.01).items():
        read = load.rows * (load.context + int(t)) * shape.entry_bytes
        section.add(
            "calls", model=model, rows=load.rows, context=load.context, positions=int(t), time_s=timing.median_s,
            least_s=timing.least_s, most_s=timing.most_s, read_bytes=read, bytes_per_s=read / timing.median_s,
            share_of_copy=read / timing.median_s / copy_bytes_per_s(tiny=tiny),
        )  # fmt: skip


def _program(section: Section, shape: Shape, load: Load, count: int, calls: int, k: Any, v: Any) -> Any:
    """One call per layer; all rows have the same context."""
    run = partial(
        verify_attention, scale=shape.width**-0.5, dtype=jnp.dtype("bfloat16"),
        value_width=shape.value_width or None, block=shape.block,
        implementation="interpret" if section.tiny else "triton",
    )  # fmt: skip
    rng = np.random.default_rng(count)
    place = load.context + np.arange(count)[None]
    position = jnp.asarray(np.broadcast_to(place, (load.rows, count)), jnp.int32)
    sinks = jnp.zeros(shape.heads, jnp.bfloat16) if shape.sinks else None

    def call(q: jax.Array, base: jax.Array, position: Any, k: Any, v: Any, sinks: Any) -> jax.Array:
        return run(q, k, v, position, sinks_H=sinks, base=base)

    def arguments(layer: int) -> tuple[Any, ...]:
        q = rng.standard_normal((load.rows, count, shape.heads, shape.width)).astype(np.float32)
        return jnp.asarray(q), jnp.int32(layer * load.rows), position, k, v, sinks

    return chained(call, [arguments(layer) for layer in range(calls)])
