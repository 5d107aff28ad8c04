"""Routers with a rule of their own against the same rule written down in numpy, expert by expert."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.nn.router import RouterSpec, route


def mixed(logits_E: np.ndarray, jitter: float) -> tuple[list[int], list[float]]:
    """The sparse mixer for one token (Liu 2024), as its authors' inference computes it."""
    experts, weights, left_E = [], [], logits_E.copy()
    for _ in range(2):
        best = int(left_E.argmax())
        far = (left_E[best] - logits_E) / np.maximum(np.abs(logits_E), left_E[best]) > 2 * jitter
        share_E = np.where(far, 0, np.exp(left_E - left_E[best]))
        experts.append(best)
        weights.append(share_E[best] / share_E.sum())
        left_E[best] = -np.inf
    return experts, weights


@pytest.mark.parametrize("shift", [-5.0, 0.0, 5.0])
def test_sparse_mixer(shift: float):
    logits_ME = np.random.default_rng(1).normal(shift, 1, (64, 8)).astype(np.float32)
    for jitter in (0.01, 0.2):
        spec = RouterSpec("sparse_mixer", jitter=jitter)
        routing = jax.jit(lambda x, spec=spec: route(x, 2, spec))(logits_ME)
        wanted = [mixed(row.astype(np.float64), jitter) for row in logits_ME]
        np.testing.assert_array_equal(routing.expert_MA, [experts for experts, _ in wanted])
        np.testing.assert_allclose(routing.weight_MA, [weights for _, weights in wanted], atol=1e-6)


def test_capped_logits():
    logits_ME = np.random.default_rng(2).normal(0, 4, (32, 8)).astype(np.float32)
    spec = RouterSpec("sigmoid", scale=2.5, soft_cap=3.0)
    routing = jax.jit(lambda x: route(x, 3, spec, jnp.linspace(0, 1, 8)))(logits_ME)
    capped_ME = 3 * np.tanh(logits_ME.astype(np.float64) / 3)
    np.testing.assert_allclose(routing.logits_ME, capped_ME, atol=1e-6)
    score_ME = 1 / (1 + np.exp(-capped_ME))
    chosen_MA = np.argsort(-(score_ME + np.linspace(0, 1, 8)), axis=1)[:, :3]
    np.testing.assert_array_equal(routing.expert_MA, chosen_MA)
    weight_MA = np.take_along_axis(score_ME, chosen_MA, 1)
    np.testing.assert_allclose(routing.weight_MA, 2.5 * weight_MA / weight_MA.sum(1, keepdims=True), atol=1e-6)
