"""Random draws: one for each seed, position and purpose, whatever else is drawn with it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.keys import Purpose, gumbel, uniform, within_step

SEEDS = jnp.asarray([[0, 1], [0, 2]], jnp.uint32)
POSITIONS = jnp.asarray([[3, 4, 5], [3, 4, 5]], jnp.int32)


def test_every_seed_position_and_purpose_draws_its_own():
    coins = np.concatenate([np.asarray(uniform(SEEDS, POSITIONS, purpose)).ravel() for purpose in Purpose])
    assert len(set(coins.tolist())) == coins.size
    noise = np.concatenate([np.asarray(gumbel(SEEDS, POSITIONS, purpose, 7)).ravel() for purpose in Purpose])
    assert len(set(noise.tolist())) > 0.99 * noise.size  # floats near each other may coincide


def test_a_draw_depends_on_nothing_else():
    whole = np.asarray(gumbel(SEEDS, POSITIONS, Purpose.TARGET, 5))
    for row, place in itertools.product(range(2), range(3)):
        alone = gumbel(SEEDS[row : row + 1], POSITIONS[row : row + 1, place : place + 1], Purpose.TARGET, 5)
        np.testing.assert_array_equal(np.asarray(alone)[0, 0], whole[row, place])


def test_draws_are_those_of_jax():
    seeds = jnp.asarray([[0, 1], [0xFFFFFFFF, 0x80000000]], jnp.uint32)
    for purpose, width in itertools.product(Purpose, (1, 7, 1000)):
        noise, coins = gumbel(seeds, POSITIONS, purpose, width), uniform(seeds, POSITIONS, purpose)
        for row, place in itertools.product(range(2), range(3)):
            key = jax.random.wrap_key_data(seeds[row], impl="threefry2x32")
            key = jax.random.fold_in(jax.random.fold_in(key, POSITIONS[row, place]), int(purpose))
            np.testing.assert_array_equal(noise[row, place], jax.random.gumbel(key, (width,), jnp.float32))
            np.testing.assert_array_equal(coins[row, place], jax.random.uniform(key, (), jnp.float32))


def test_noise_of_some_tokens_is_what_they_have_among_all():
    some = jnp.asarray([49151, 0, 77], jnp.int32)
    every = gumbel(SEEDS, POSITIONS, Purpose.TARGET, 49152)
    np.testing.assert_array_equal(gumbel(SEEDS, POSITIONS, Purpose.TARGET, some), every[..., some])


def test_nodes_of_a_step_toss_coins_that_no_other_step_tosses():
    anchors, ranks = jnp.arange(0, 131072, 8191), jnp.arange(64)[None].repeat(17, 0)
    assert anchors.size == len(ranks)
    keys = np.asarray(within_step(anchors, ranks.astype(jnp.int32)))
    assert len(set(keys.ravel().tolist())) == keys.size
    coins = np.asarray(uniform(SEEDS[:1], jnp.asarray(keys[:1, :8]), Purpose.ACCEPT)).ravel()
    assert len(set(coins.tolist())) == 8
