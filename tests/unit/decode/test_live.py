"""What of a verification is alive: only drafts that can be accepted touch experts and count."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.window import Window
from jaxspec.decode import compaction
from jaxspec.decode.state import Target, init_state
from jaxspec.decode.step import StepOut, StepPlan, step
from jaxspec.draft.ngram import Ngram
from jaxspec.draft.small_lm import SmallLm
from jaxspec.protocol import DraftCosts, Drafter
from jaxspec.pytree import replace
from jaxspec.topology import chain, tree
from tests.unit.verify.test_rules_texts import MarkovNet

ROWS, NEVER = 4, DraftCosts(*(jnp.float32(x) for x in (0, 1, 0, 0, 0, 0.999, 99)), jnp.ones((2, 4)))
UNSURE = jnp.log(jnp.asarray(np.random.default_rng(9).dirichlet(np.ones(3), 3), jnp.float32))


def stepped(drafter: Drafter, **changes: Any) -> tuple[jax.Array, Window, StepOut]:
    """The tokens that a step verifies, the window that it verifies them in, and what it says that it did."""
    target = Target(UNSURE, MarkovNet(3), block=16)
    state = init_state(target, drafter, ROWS, 12, slack=8, stop_ids=1, draft_costs=changes.pop("draft_costs", None))
    least = jnp.int32(changes.pop("least", 1))
    limit_B = jnp.asarray(changes.pop("limit", [99] * ROWS), jnp.int32)
    sampling = replace(state.sampling, draft_limit_B=limit_B, max_length_B=jnp.full(ROWS, 12, jnp.int32))
    state = replace(state, sampling=sampling, active_B=jnp.ones(ROWS, bool))
    state = replace(state, **{name: jnp.asarray(value) for name, value in changes.items()})
    seen, forward = [], compaction.forward

    def watched(net, params, inputs):
        if not isinstance(inputs.window.live_BT, jax.core.Tracer):  # asked for shapes alone
            seen.append((inputs.token_BT, inputs.window))
        return forward(net, params, inputs)

    with pytest.MonkeyPatch.context() as patch, jax.disable_jit():  # only what is computed has values
        patch.setattr(compaction, "forward", watched)
        _, out = step(target, drafter, state, least, plan=StepPlan())
    assert out.token_BT.shape == (ROWS, drafter.topology.max_depth + 1)
    ((token, window),) = seen
    return token, window, out


def live(drafter: Drafter, **changes: Any) -> tuple[list[list[int]], list[int]]:
    """Which nodes a step verifies, and how many drafts it says that there were."""
    _, window, out = stepped(drafter, **changes)
    nodes_BT = window.live_BT.astype(int).tolist()
    assert bool(out.verified) == (len(nodes_BT[0]) > 1)
    return nodes_BT, out.drafts_B.tolist()


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
    assert drafted == [3, 0, 0, 0]
    history_BS[2, 0] = 2
    found, drafted = live(drafter, least=2, **changes)
    assert found == [[1, 1, 1, 1], [1, 0, 0, 0]] * 2
    assert drafted == [3, 0, 3, 0]


def test_cut_drafts_are_dead():
    drafter = SmallLm(UNSURE, MarkovNet(3), chain(2), block=16)
    found, drafted = live(drafter, draft_costs=NEVER)
    assert found == [[1, 0, 0]] * ROWS
    assert drafted == [0] * ROWS


def found_by(rows: list[bool]) -> dict[str, Any]:
    """A state in which lookup finds 0, 1, 2 behind the anchor of some rows, and nothing in the others."""
    history_BS = np.zeros((ROWS, 32), np.int32)
    history_BS[:, :5] = [[2 if found else 1, 0, 1, 2, 2] for found in rows]
    history_BS[:, 3] = [1 if found else 0 for found in rows]
    return {"history_BS": history_BS, "length_B": np.full(ROWS, 4, np.int32), "anchor_B": np.full(ROWS, 2, np.int32)}


@pytest.mark.parametrize(
    ("rows", "computed"), [([True, False, False, True], 10), ([True, True, True, False], None), ([False] * 4, None)]
)
def test_only_what_is_verified_is_computed_where_that_is_little(
    monkeypatch: pytest.MonkeyPatch, rows: list[bool], computed: int | None
):
    monkeypatch.setattr(compaction, "STEP", 1)
    token, window, out = stepped(Ngram(chain(3), longest=1, shortest=1), **found_by(rows))
    drafted = [3 if found else 0 for found in rows]
    assert out.drafts_B.tolist() == drafted
    if computed is None:
        assert window.packing is None
        assert token.shape == (ROWS, 4 if any(rows) else 1)
        return
    assert token.shape == (1, computed)
    assert token[0, : ROWS + sum(drafted)].tolist() == [2, 0, 1, 1, 2, 2, 2, 0, 1, 1]
    assert window.valid.astype(int).tolist() == [[1] * (ROWS + sum(drafted))]


def test_one_live_position_too_many_takes_the_full_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compaction, "STEP", 1)
    drafter = Ngram(chain(3), longest=1, shortest=1)
    for limit, packed in (([3, 3, 0, 0], True), ([3, 3, 1, 0], False)):
        _, window, out = stepped(drafter, limit=limit, **found_by([True] * ROWS))
        assert out.drafts_B.tolist() == limit
        assert (window.packing is not None) is packed


def test_a_line_pays_for_its_program():
    assert compaction.packed_sizes(8, 5, 4) == (24, 32, 40)
    assert compaction.packed_sizes(8, 4, 2) == (24,)
    assert compaction.packed_sizes(8, 1, 2) == (), "16 are not worth less than 16"
    assert compaction.packed_sizes(4, 4, 2) == (), "16 are not worth a program beside 20"
    assert compaction.packed_sizes(1, 8, 4) == ()
    assert compaction.packed_sizes(8, 5, 1) == ()
    assert compaction.packed_sizes(8, 0, 4) == ()
    assert compaction.packed_sizes(32, 5, 4, "triton") == ()
    assert compaction.packed_sizes(128, 5, 4, "triton") == (384, 512, 640)


def test_native_kernels_have_sizes_for_idle_rows():
    assert compaction.packed_sizes(8, 3, 1, "native") == (8, 16)
    assert compaction.packed_sizes(8, 1, 1, "native") == (), "8 positions cost little less than 16"
    assert compaction.packed_sizes(4, 3, 1, "native") == ()
    assert compaction.packed_sizes(32, 3, 1, "native") == (32, 64)
    assert compaction.packed_sizes(8, 4, 2, "native") == (16, 24)
    assert compaction.packed_sizes(1, 7, 1, "native") == ()


def test_one_way_is_taken():
    def way(add: int):
        return lambda state: (state + add, jnp.full(2, add))

    variants = [way(1), way(10), way(100)]
    for which in range(3):
        state, out = jax.jit(lambda n: compaction.switch_in_place(variants, n, jnp.float32(5)))(which)
        assert (float(state), out.tolist()) == (5 + 10**which, [10**which] * 2)
