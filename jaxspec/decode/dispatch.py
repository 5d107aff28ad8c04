"""Several steps in one program, and the report that the host reads afterwards."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.decode.compaction import Sizes
from jaxspec.decode.state import DecodeState, Target
from jaxspec.decode.step import StepOut, StepPlan, propose, step
from jaxspec.decode.telemetry import Counts, no_experts, zero_counts
from jaxspec.protocol import Drafter
from jaxspec.pytree import pytree, static
from jaxspec.shapes import Array

FLAGS = 3  # columns of a step after its tokens: their count, usable drafts, whether those were verified


@pytree
class Report:
    """What the steps of a dispatch did, on the device; ``unpack`` brings it to the host.

    Attributes:
      packed_BXW: int32 [B, X + 1, T + FLAGS]. Entry x is step x: its tokens and ``FLAGS``. The last entry begins with
        whether the row broke, stopped and filled up (see ``Ends``), and how many steps ran.
      logprob_BXTL, top_BXTL: as in ``StepOut``; without steps where the plan has no log-probabilities.
      counts: sums over the steps.
      expert_BXTYA: as in ``StepOut``; None where the plan has no routes.
      sparse: whether the drafter often proposes nothing, so that a step with too few drafts verifies none.
    """

    packed_BXW: Array
    logprob_BXTL: Array
    top_BXTL: Array
    counts: Counts
    expert_BXTYA: Array | None = None
    sparse: bool = static(default=False)

    def unpack(self) -> "DispatchResult":
        """Waits for the dispatch; reads all but log-probabilities and counts in one transfer."""
        packed_BXW = np.asarray(jax.device_get(self.packed_BXW))
        broken_B, stopped_B, full_B, steps_B = packed_BXW[:, -1, :4].T
        step_BXW = packed_BXW[:, : steps_B[0]]
        count_BX, drafts_BX, verified_BX = np.moveaxis(step_BXW[..., -FLAGS:], 2, 0)
        return DispatchResult(
            step_BXW[..., :-FLAGS],
            count_BX,
            drafts_BX,
            verified_BX[0] > 0,
            broken_B > 0,
            stopped_B > 0,
            full_B > 0,
            self,
        )


@dataclass(frozen=True)
class DispatchResult:
    """A dispatch's report on the host, X steps of B rows.

    Attributes:
      token_BXT: committed tokens, ``count_BX`` of them valid.
      count_BX: tokens that each row committed, 0 for an idle row.
      drafts_BX: usable drafts that each row had.
      verified_X: whether they were verified; a sparse drafter's steps skip them where too few rows have any.
      broken_B, stopped_B, full_B: rows that ended, see ``Ends``.
      report: what this was read from.
    """

    token_BXT: np.ndarray
    count_BX: np.ndarray
    drafts_BX: np.ndarray
    verified_X: np.ndarray
    broken_B: np.ndarray
    stopped_B: np.ndarray
    full_B: np.ndarray
    report: Report

    @property
    def steps(self) -> int:
        """Steps that ran."""
        return len(self.verified_X)

    @property
    def length(self) -> int:
        """K, the deepest draft of the topology."""
        return self.token_BXT.shape[2] - 1

    @property
    def expert_BXTYA(self) -> np.ndarray:
        """Experts that the target chose where it read the anchor and the accepted drafts of each step."""
        return np.asarray(self.report.expert_BXTYA)

    @property
    def ended_B(self) -> np.ndarray:
        """Rows that ended."""
        return self.broken_B | self.stopped_B | self.full_B

    @cached_property
    def verified_BX(self) -> np.ndarray:
        """Drafts that were verified."""
        return self.drafts_BX * self.verified_X


def dispatch(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    limit: Array,
    eager: Array,
    min_rows: Array | int = 1,
    *,
    plan: StepPlan,
) -> tuple[DecodeState, Report]:
    """Runs up to ``min(limit, plan.steps)`` steps before the host looks.

    Args:
      target: verifies.
      drafter: proposes.
      state: donated.
      limit: int32 scalar, most steps.
      eager: bool scalar; true returns as soon as one row ends, because another request waits for its row.
      min_rows: int32 scalar, rows that must have a draft for a step to verify any, where ``Sizes.anchors``.
      plan: static.
    """
    rows, width = state.length_B.shape[0], drafter.topology.max_depth + 1
    limit = jnp.minimum(limit, plan.steps)

    def go_on(carry: Any) -> Array:
        i, state, *_, ended_B3 = carry
        return (i < limit) & jnp.any(state.active_B) & ~(eager & jnp.any(ended_B3))

    def one(carry: Any) -> Any:
        i, state, packed, logprob, top, counts, chosen, ended_B3 = carry
        state, out = step(target, drafter, state, min_rows, plan=plan)
        packed = lax.dynamic_update_slice(packed, entry_of(out)[:, None], (0, i, 0))
        if plan.logprobs:
            logprob = lax.dynamic_update_slice(logprob, out.logprob_BTL[:, None], (0, i, 0, 0))
            top = lax.dynamic_update_slice(top, out.top_BTL[:, None], (0, i, 0, 0))
        counts = jax.tree.map(jnp.add, counts, out.telemetry.counts)
        if out.expert_BTYA is not None:
            chosen = lax.dynamic_update_slice(chosen, out.expert_BTYA[:, None], (0, i, 0, 0, 0))
        ended_B3 |= ended_of(out)
        return i + 1, state, packed, logprob, top, counts, chosen, ended_B3

    proposal, _ = propose.eval_shape(drafter, state.draft, state.anchor, plan.rule.name)
    places = (rows, plan.steps if plan.logprobs else 0, width, plan.logprobs + 1)
    carry = (
        jnp.int32(0), state, jnp.zeros((rows, plan.steps + 1, width + FLAGS), jnp.int32),
        jnp.zeros(places), jnp.zeros(places, jnp.int32), zero_counts(proposal, state),
        no_experts(target.net.arch, (rows, plan.steps, width)) if plan.routes else None, jnp.zeros((rows, 3), bool),
    )  # fmt: skip
    i, state, packed, logprob, top, counts, chosen, ended_B3 = lax.while_loop(go_on, one, carry)
    packed = lax.dynamic_update_slice(packed, tail_of(ended_B3, i)[:, None], (0, plan.steps, 0))
    return state, Report(packed, logprob, top, counts, chosen, Sizes.of(target, drafter, state).anchors)


def entry_of(out: StepOut) -> Array:
    """Returns a step's entry in a report."""
    flags = out.count_B, out.drafts_B, jnp.broadcast_to(out.verified, out.count_B.shape).astype(jnp.int32)
    return jnp.concatenate([out.token_BT, jnp.stack(flags, axis=1)], axis=1)


def ended_of(out: StepOut) -> Array:
    """Returns which rows a step ended and why, bool [B, 3]."""
    return jnp.stack([out.ends.broken_B, out.ends.stopped_B, out.ends.full_B], axis=1)


def tail_of(ended_B3: Array, steps: Array | int) -> Array:
    """Returns what a report's last entry begins with."""
    count_B1 = jnp.full((ended_B3.shape[0], 1), steps, jnp.int32)
    return jnp.concatenate([ended_B3.astype(jnp.int32), count_B1], axis=1)
