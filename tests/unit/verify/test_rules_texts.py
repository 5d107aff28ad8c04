"""Verification rules over whole texts: their law after many steps with rejections and bonuses."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from jaxspec.decode.dispatch import dispatch
from jaxspec.decode.state import Target, init_state
from jaxspec.decode.step import StepPlan
from jaxspec.draft.small_lm import SmallLm
from jaxspec.models.arch import LayerSpec
from jaxspec.nn.attention import AttentionSpec
from jaxspec.nn.policy import make_policy
from jaxspec.nn.rope import RopeSpec
from jaxspec.protocol import DraftCosts, NoDrafts
from jaxspec.pytree import replace
from jaxspec.topology import Topology, chain, tree
from jaxspec.verify.rules import RULES


@dataclass(frozen=True)
class MarkovNet:
    """Stands in for a network: the next token's logits depend on the last token alone."""

    vocab: int

    @property
    def arch(self):
        spec = AttentionSpec(heads=1, kv_heads=1, head_dim=1, rope=RopeSpec(10000.0, 2))
        return SimpleNamespace(vocab_size=self.vocab, layers=(LayerSpec(spec, None),))

    @property
    def policy(self):
        return make_policy("float32")

    def apply(self, params, inputs, *, method=None):
        if method == "logits":
            return inputs
        last = params[inputs.token_BT]
        return SimpleNamespace(last_BTD=last, stream=last, caches=inputs.memory, taps=(), shared_outputs=())


def markov_texts(
    rule: str, drafter_of: Callable, rows: int, new: int, prices: DraftCosts | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Texts [rows, new] behind a prompt of one token, over as many steps as they take.

    Returns them, and the share of verifications that had 0, 1, ... drafts.
    """
    net = MarkovNet(3)
    p, q = (np.random.default_rng(seed).dirichlet(np.ones(3), 3) for seed in (8, 9))
    target = Target(jnp.log(jnp.asarray(p, jnp.float32)), net, block=16)
    drafter = drafter_of(jnp.log(jnp.asarray(q, jnp.float32)), net)
    state = init_state(target, drafter, rows, new + 1, slack=drafter.topology.nodes, stop_ids=1, draft_costs=prices)
    sampling = replace(
        state.sampling,
        temperature_B=jnp.ones(rows),
        draft_limit_B=jnp.full(rows, 99, jnp.int32),
        max_length_B=jnp.full(rows, new + 1, jnp.int32),
        key_BX=jnp.stack([jnp.zeros(rows, jnp.uint32), jnp.arange(rows, dtype=jnp.uint32)], axis=1),
    )
    state = replace(state, sampling=sampling, active_B=jnp.ones(rows, bool))
    plan = StepPlan(RULES[rule], steps=new)
    run = jax.jit(partial(dispatch, plan=plan))
    state, report = run(target, drafter, state, jnp.int32(new), jnp.asarray(False))
    assert not np.any(state.active_B)
    depth = drafter.topology.max_depth
    result = report.unpack()
    ran = result.count_BX > 0
    lengths = np.bincount(result.verified_BX[ran], minlength=depth + 1) / np.sum(ran)
    return np.asarray(state.history_BS[:, 1 : new + 1]), lengths


def chi_square(texts: np.ndarray) -> float:
    """Probability of counts at least as far from the target's law as these."""
    rows, new = texts.shape
    p = np.random.default_rng(8).dirichlet(np.ones(3), 3)
    law = np.ones(())
    for place in range(new):
        law = law[..., None] * (p[0] if place == 0 else p)
    law = law.reshape(-1)
    seen = np.bincount(np.ravel_multi_index(tuple(texts.T), (3,) * new), minlength=law.size)
    return float(chi2.sf(np.sum((seen - rows * law) ** 2 / (rows * law)), law.size - 1))


@pytest.mark.parametrize(
    ("rule", "topology"),
    [
        ("match", chain(2)),
        ("reject", chain(2)),
        ("reject", tree((2, 2))),
        ("block", chain(2)),
    ],
    ids=["match-chain", "reject-chain", "reject-tree", "block-chain"],
)
def test_texts_of_many_steps_have_the_targets_law(rule: str, topology: Topology):
    rows, new = 8000, 4
    texts, _ = markov_texts(rule, lambda params, net: SmallLm(params, net, topology, block=16), rows, new)
    assert chi_square(texts) > 1e-3
    if rule == "match":
        plain, _ = markov_texts("match", lambda params, net: NoDrafts(), rows, new)
        np.testing.assert_array_equal(texts, plain)
