"""Section "ceilings": what this card's memory and matrix units reach in the simplest programs."""

from functools import cache

import jax
import jax.numpy as jnp

from lab.gpu.report import Section
from lab.gpu.timing import Subject, chained, interleaved

COPY_BYTES = {False: 4 << 30, True: 1 << 20}
MATMUL_SIZE = {False: 8192, True: 64}


@cache
def copy_bytes_per_s(*, tiny: bool) -> float:
    """Bytes read and written per second by a program that adds 1 to a large array."""
    x = jnp.ones(COPY_BYTES[tiny] // 4, jnp.float32)
    launch = chained(lambda x: x + jnp.float32(1), [(x,)])
    timing = interleaved([Subject("copy", launch)], rounds=3 if tiny else 9)["copy"]
    return 2 * x.nbytes / timing.median_s


@cache
def read_bytes_per_s(*, tiny: bool) -> float:
    """Bytes read per second by a program that sums a large array: what a kernel that writes little can reach."""
    x = jnp.ones(COPY_BYTES[tiny] // 4, jnp.float32)
    launch = chained(jnp.sum, [(x,)])
    timing = interleaved([Subject("read", launch)], rounds=3 if tiny else 9)["read"]
    return x.nbytes / timing.median_s


def ceilings(section: Section) -> None:
    """Copy and read bandwidth, and products of square matrices in bfloat16 and fp8 with float32 sums."""
    tiny = section.tiny
    for name, measure in (("copy", copy_bytes_per_s), ("read", read_bytes_per_s)):
        with section.attempt(name) as go:
            if go:
                section.add("bandwidth", name=name, bytes_per_s=measure(tiny=tiny))
    size = MATMUL_SIZE[tiny]
    for kind in (jnp.bfloat16, jnp.float8_e4m3fn):
        name = f"matmul {jnp.dtype(kind).name}"
        with section.attempt(name, needed_s=0 if tiny else 5) as go:
            if not go:
                continue
            left, right = (jax.random.normal(jax.random.key(n), (size, size)).astype(kind) for n in range(2))
            launch = chained(_product, [(left, right)])
            timing = interleaved([Subject(name, launch)], rounds=3 if tiny else 9)[name]
            section.add("matmul", name=name, size=size, flop_per_s=2 * size**3 / timing.median_s)
            wide = jnp.dot(left[:8].astype(jnp.float32), right.astype(jnp.float32), precision="highest")
            error = float(jnp.max(jnp.abs(launch()[0][:8].astype(jnp.float32) - wide)) / jnp.max(jnp.abs(wide)))
            detail = f"largest error {error:.1e} of the largest entry"
            section.check(f"{name} is right", passed=error < 1e-2, detail=detail)


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.dot(left, right, preferred_element_type=jnp.float32).astype(jnp.bfloat16)
