"""Tokens drawn with noise: those that XLA draws, in every form of the vocabulary and with every set of instructions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.keys import Purpose
from jaxspec.native.build import compiler, instructions, library
from jaxspec.native.product import kernels
from jaxspec.nn.draw import Noise
from jaxspec.nn.steady import row_argmax

ROWS, NODES = 3, 5
WARM = jnp.asarray([True, False, True])
WIDTHS = (1, 3, 16, 65, 5000)

draw = jax.jit(lambda noise, score, token=None: noise.draw(score, token))
drawn_by_xla = jax.jit(lambda noise, score, token=None: row_argmax(noise.added_to(score, token)))


def noise_of(seed: int, warm_B: Any = WARM) -> Noise:
    key_BX = np.random.default_rng(seed).integers(0, 2**32, (ROWS, 2), dtype=np.int64).astype(np.uint32)
    position_BT = seed + np.arange(ROWS * NODES, dtype=np.int32).reshape(ROWS, NODES)
    return Noise(jnp.asarray(key_BX), jnp.asarray(position_BT), warm_B, Purpose.TARGET)


def scores(width: int, heat: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, heat, (ROWS, NODES, width)).astype(np.float32)


@pytest.fixture(autouse=True)
def in_c():
    if compiler() is None:
        pytest.skip("no C compiler")
    assert kernels().handle is not None, kernels().reason


@pytest.mark.parametrize("heat", [0.0, 1.0, 6.0])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_kernel_draws_what_xla_draws(width: int, heat: float):
    rng, seen = np.random.default_rng(width), set()
    shared = rng.permutation(50_000)[:width].astype(np.int32)
    own = np.stack([rng.permutation(50_000)[: NODES * width].reshape(NODES, width) for _ in range(ROWS)])
    for seed, token in enumerate((None, shared, own.astype(np.int32))):
        given = noise_of(seed), scores(width, heat, seed), token
        wanted = np.asarray(drawn_by_xla(*given))
        np.testing.assert_array_equal(draw(*given), wanted)
        np.testing.assert_array_equal(wanted[1], scores(width, heat, seed)[1].argmax(axis=-1))
        seen |= set(wanted[WARM].ravel().tolist())
    assert width < 65 or heat > 1 or len(seen) > 20


def test_its_draws_have_the_softmax_of_the_scores_for_their_law():
    score = np.asarray([0.0, 2.0, -1.0, 1.0, -np.inf, 0.5], np.float32)
    wide = jnp.broadcast_to(score, (ROWS, NODES, 6))
    found = np.concatenate([np.asarray(draw(noise_of(n, jnp.ones(ROWS, bool)), wide)).ravel() for n in range(800)])
    share, wanted = np.bincount(found, minlength=6) / len(found), np.exp(score) / np.exp(score).sum()
    np.testing.assert_allclose(share, wanted, atol=4 * np.sqrt(0.25 / len(found)))
    assert share[4] == 0


@pytest.mark.parametrize("width", [3, 40, 1000])
def test_what_is_no_finite_number(width: int):
    """The first that is not a number, or else is infinite, is the best; of nothing but -inf the first."""
    score = scores(width, 1.0)
    score[0, 0], score[1, 0] = -np.inf, -np.inf
    score[0, 1, width // 2 :], score[1, 1, -1] = np.inf, np.nan
    score[0, 2, [1, -1]], score[0, 2, 0] = np.nan, np.inf
    score[2, 3, : width - 1] = -np.inf
    given = noise_of(1), score
    np.testing.assert_array_equal(draw(*given), drawn_by_xla(*given))
    np.testing.assert_array_equal(np.asarray(draw(*given))[0, :3], [0, width // 2, 1])


@pytest.mark.parametrize("name", instructions())
def test_every_set_of_instructions_draws_alike(name: str, monkeypatch: pytest.MonkeyPatch):
    handle = library(name).handle
    assert handle is not None
    target = f"jaxspec_draw_{name}"
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handle["jaxspec_draw"]), platform="cpu")
    monkeypatch.setattr("jaxspec.native.draw_call.TARGET", target)
    for width in WIDTHS:
        given = noise_of(width), scores(width, 2.0)
        found = jax.jit(lambda noise, score: noise.draw(score))(*given)
        np.testing.assert_array_equal(found, drawn_by_xla(*given))


@pytest.mark.served
def test_positions_of_a_level_do_not_send_the_compiler_in_circles(capfd: pytest.CaptureFixture[str]):
    """Nodes of one depth have positions that are a row's length and a constant."""

    def of_level(length_B: jax.Array, score: jax.Array) -> jax.Array:
        noise = noise_of(0)
        return Noise(noise.key_BX, length_B[:, None] + jnp.full(8, 2)[None], noise.warm_B, noise.purpose).draw(score)

    jax.jit(of_level).lower(jnp.ones(ROWS, jnp.int32), jnp.zeros((ROWS, 8, 16))).compile()
    assert "circular" not in capfd.readouterr().err
