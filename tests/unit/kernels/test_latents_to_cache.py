"""The kernel from low-rank products to the cache: a row's numbers are its own, and a layer computes what XLA does."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.addressing import CacheSize, init_layer
from jaxspec.cache.packed_tokens import pack_live
from jaxspec.cache.window import Window, unpack
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.latent_attention import LatentAttention, LatentSpec
from jaxspec.nn.policy import make_policy
from jaxspec.nn.rope import RopeSpec
from jaxspec.nn.temperature import Temperature
from pallas_kernels.latents_to_cache.api import Latents, latents_to_cache, obstacles
from pallas_kernels.select import UnsupportedKernel, recording

R, C, Q, Z = 24, 8, 20, 8
LATENTS = Latents(R, C)
RNG = np.random.default_rng(0)
PARAMS = {name: jnp.asarray(RNG.normal(size=size), jnp.bfloat16) for name, size in (("norm", R), ("q_norm", Q))}


def noise(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


@jax.jit
def run(part_SMX: jax.Array, query_SMR: jax.Array, pages: jax.Array, where: Any):
    how: Any = {"params": PARAMS, "query_SMR": query_SMR, "implementation": "interpret"}
    return latents_to_cache(part_SMX, pages, LATENTS, where=where, **how)


def angles(rows: int) -> dict[str, jax.Array]:
    angle = noise(rows, C // 2)
    return {"cos": jnp.cos(angle), "sin": jnp.sin(angle)}


@pytest.mark.served
def test_a_row_does_not_see_its_neighbors():
    part, query, turn, pages = noise(2, 5, R + C), noise(3, 5, Q), angles(5), jnp.zeros((5, 1, Z, R + C))
    first = jnp.asarray([3, 0, 7, 2, 5], jnp.int32)
    together = run(part, query, pages, {"first": first, **turn})
    own = {"first": first[2:3], **{name: x[2:3] for name, x in turn.items()}}
    alone = run(part[:, 2:3], query[:, 2:3], pages[:1], own)
    for one, all_rows in zip(alone, together, strict=True):
        assert np.ptp(one) > 0
        assert np.asarray(one).tobytes() == np.asarray(all_rows)[2:3].tobytes()


def test_an_entry_without_a_place_is_left_out():
    """After a page's end, before its beginning, and on a page that there is not; the last row has a place."""
    old = noise(4, 1, Z, R + C)
    where = {"first": jnp.asarray([Z, -1, 0, 2], jnp.int32), "row": jnp.asarray([0, 1, 4, 3], jnp.int32), **angles(4)}
    low, new = run(noise(2, 4, R + C), noise(1, 4, Q), old, where)
    assert np.isfinite(low).all()
    changed = np.argwhere((np.asarray(new) != np.asarray(old)).any(axis=(1, 3)))
    np.testing.assert_array_equal(changed, [[3, 2]])


def test_what_does_not_fit_is_refused():
    part, pages, where = noise(2, 2, R + C), jnp.zeros((2, 1, Z, R + C)), {"first": jnp.zeros(2, jnp.int32)}
    call = partial(latents_to_cache, part, pages, LATENTS, where=where)
    with pytest.raises(UnsupportedKernel, match="norm and first needed"):
        call(params={})
    with pytest.raises(UnsupportedKernel, match="norm, q_norm and first needed"):
        call(params={"norm": PARAMS["norm"]}, query_SMR=noise(1, 2, Q))
    with pytest.raises(UnsupportedKernel, match=r"pages \[P, 1, Z, 32\]"):
        latents_to_cache(part, pages[..., 1:], LATENTS, params=PARAMS, where=where)
    assert "a cache of int8 is not written" in obstacles(LATENTS, pages.astype(jnp.int8), None)[0]
    assert "more than 8192" in obstacles(LATENTS, pages, noise(1, 2, 8193))[0]


PLAIN = LatentSpec(heads=4, plain_dim=16, value_dim=12, rank=24, rope=RopeSpec(1e4, 8), scale=0.2, query_rank=32)
LAYERS = {
    "pairs": replace(PLAIN, rope=RopeSpec(1e4, 8, interleaved=True)),
    "biases": replace(PLAIN, bias=True, latent_scale=1.7),
    "direct": replace(PLAIN, query_rank=None, rotates=False, gated=True),
    "warmer": replace(PLAIN, temperature=Temperature(0.1, 4, 64)),
}


@pytest.mark.parametrize("is_packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_with_the_kernels_what_it_computes_with_xla(name: str, *, is_packed: bool):
    spec, rows, count = LAYERS[name], 3, 4
    start_B, live_BT = np.array([30, 9, 0], np.int32), np.arange(count) < np.array([[3], [1], [4]])
    packing = pack_live(jnp.asarray(live_BT), 9) if is_packed else None
    pages = {"latent": noise(rows, 1, 48, R + C)}
    assert init_layer(spec.streams, CacheSize(rows, 48, count, 8), jnp.dtype("float32"))["latent"].shape == (
        3,
        1,
        48,
        32,
    )
    window = Window(start_B, packing=packing, block=8)
    position_BT = jnp.asarray(start_B[:, None] + np.arange(count, dtype=np.int32))
    x_BTD = noise(rows, count, 64)
    own_BT, own_BTD = (packing.pack(position_BT), packing.pack(x_BTD)) if packing else (position_BT, x_BTD)
    plain = LatentAttention(spec, 64, 1e-5, make_policy("float32"))
    shapes = jax.eval_shape(partial(plain.init, jax.random.key(0)), x_BTD, Inputs(position_BT, position_BT))
    params = jax.tree.map(lambda p: noise(*p.shape) / 4, shapes)

    def attend(kernels: str) -> tuple[np.ndarray, np.ndarray]:
        module = LatentAttention(spec, 64, 1e-5, make_policy("float32", kernels=kernels))
        out, memory, _ = jax.jit(module.apply)(params, own_BTD, Inputs(own_BT, own_BT, window, pages))
        return np.asarray(unpack(out, window))[live_BT], np.asarray(memory["latent"])

    with recording() as made:
        got, new = attend("interpret")
    assert {choice.op: choice.implementation for choice in made} == dict.fromkeys(
        ("few_rows_dense", "heads_dense", "latents_to_cache", "verify_attention"), "interpret"
    )
    wanted, old = attend("xla")
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    for row, length in enumerate(live_BT.sum(axis=1)):
        part = (row, 0, slice(start_B[row], start_B[row] + length))
        assert (new[part] != np.asarray(pages["latent"])[part]).all()
        np.testing.assert_allclose(new[part], old[part], rtol=0, atol=3e-7 * np.abs(old).max())
        before = (row, 0, slice(0, start_B[row]))
        np.testing.assert_array_equal(new[before], np.asarray(pages["latent"])[before])
