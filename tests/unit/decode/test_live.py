"""What of a verification is alive: only drafts that can be accepted touch experts and count."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decode import step as step_module
from jaxspec.decode.state import Target, init_state
from jaxspec.draft.ngram import Ngram
from jaxspec.draft.small_lm import SmallLm
from jaxspec.protocol import Drafter, Prices
from jaxspec.pytree import replace
from jaxspec.topology import chain, tree
from tests.unit.verify.test_rules_texts import MarkovNet

ROWS, NEVER = 4, Prices(*(jnp.float32(x) for x in (0, 1, 0, 0, 0, 0.999)), jnp.ones((2, 4)))
UNSURE = jnp.log(jnp.asarray(np.random.default_rng(9).dirichlet(np.ones(3), 3), jnp.float32))


def live(drafter: Drafter, **changes: Any) -> tuple[list[list[int]], list[int]]:
    """Which nodes a step verifies, and how many drafts it says that it did."""
    target = Target(UNSURE, MarkovNet(3), block=16)
    state = init_state(target, drafter, ROWS, 12, slack=8, stop_ids=1, prices=changes.pop("prices", None))
    least = jnp.int32(changes.pop("least", 1))
    limit_B = jnp.asarray(changes.pop("limit", [99] * ROWS), jnp.int32)
    sampling = replace(state.sampling, draft_limit_B=limit_B, max_length_B=jnp.full(ROWS, 12, jnp.int32))
    state = replace(state, sampling=sampling, active_B=jnp.ones(ROWS, bool))
    state = replace(state, **{name: jnp.asarray(value) for name, value in changes.items()})
    seen, forward = [], step_module.forward

    def watched(net, params, token, position, layers, window, *rest):
        if not isinstance(window.live_BT, jax.core.Tracer):  # asked for shapes alone
            seen.append(window.live_BT)
        return forward(net, params, token, position, layers, window, *rest)

    with pytest.MonkeyPatch.context() as patch, jax.disable_jit():  # only what is computed has values
        patch.setattr(step_module, "forward", watched)
        _, out = step_module.step(target, drafter, state, least, plan=step_module.StepPlan("match"))
    assert out.token_BT.shape == (ROWS, drafter.topology.max_depth + 1)
    (live_BT,) = seen
    return live_BT.astype(int).tolist(), out.drafted_B.tolist()


def test_drafts_beyond_a_limit_and_idle_rows_are_dead():
    drafter = SmallLm(UNSURE, MarkovNet(3), chain(2), block=16)
    found, drafted = live(drafter, limit=[99, 1, 0, 2], active_B=[True, True, True, False])
    assert found == [[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]]
    assert drafted == [2, 1, 0, 0]


def test_nodes_of_a_tree_that_were_not_found_are_dead():
    history_BS = np.zeros((ROWS, 32), np.int32)
    history_BS[:3, :5] = [[1, 2, 1, 0, 1], [1, 2, 0, 0, 1], [2, 2, 0, 0, 1]]  # two continuations of 1, one, none
    drafter = Ngram(tree((2,)), longest=1, shortest=1)
    length, anchor = np.array([4, 4, 4, 0], np.int32), np.array([1, 1, 1, 0], np.int32)
    found, drafted = live(drafter, history_BS=history_BS, length_B=length, anchor_B=anchor)
    assert found == [[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 0, 0]]
    assert drafted == [2, 1, 0, 0]


def test_a_step_without_a_match_verifies_no_draft():
    history_BS = np.zeros((ROWS, 32), np.int32)
    history_BS[:, :4] = [1, 0, 1, 2]
    length, anchor = np.full(ROWS, 3, np.int32), np.full(ROWS, 2, np.int32)
    for topology in (chain(3), tree((2, 2))):
        found, drafted = live(
            Ngram(topology, longest=1, shortest=1), history_BS=history_BS, length_B=length, anchor_B=anchor
        )
        assert found == [[1]] * ROWS
        assert drafted == [0] * ROWS
    history_BS[0, 0] = 2  # found in an idle row, and in one that wants no drafts
    changes = {"history_BS": history_BS, "length_B": length, "anchor_B": anchor}
    drafter = Ngram(chain(3), longest=1, shortest=1)
    found, _ = live(drafter, active_B=[False, True, True, True], **changes)
    assert found == [[0], [1], [1], [1]]
    found, _ = live(drafter, limit=[0, 9, 9, 9], **changes)
    assert found == [[1]] * ROWS
    found, drafted = live(drafter, **changes)
    assert found == [[1, 1, 1, 1], *[[1, 0, 0, 0]] * 3]
    assert drafted == [3, 0, 0, 0]
    found, drafted = live(drafter, least=2, **changes)
    assert found == [[1]] * ROWS, "too few rows have one"
    assert drafted == [-3, 0, 0, 0]
    history_BS[2, 0] = 2
    found, drafted = live(drafter, least=2, **changes)
    assert found == [[1, 1, 1, 1], [1, 0, 0, 0]] * 2
    assert drafted == [3, 0, 3, 0]


def test_cut_drafts_are_dead():
    drafter = SmallLm(UNSURE, MarkovNet(3), chain(2), block=16)
    found, drafted = live(drafter, prices=NEVER)
    assert found == [[1, 0, 0]] * ROWS
    assert drafted == [0] * ROWS
