"""The step: draft, verify, accept, commit, observe, for every row at once; and several of them in one dispatch."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.cache.kv import Window, in_line, in_rows
from jaxspec.cache.ragged import ragged_of
from jaxspec.decode.confidence import outcomes
from jaxspec.decode.ranks import ranked
from jaxspec.decode.routes import Routes, routes_of
from jaxspec.decode.state import DecodeState, Target, write_rows
from jaxspec.decode.touched import distinct_by_depth, experts_of
from jaxspec.decode.ways import Way, line_lengths, one_of
from jaxspec.models.caches import compact_caches
from jaxspec.models.transformer import features_of, forward, head
from jaxspec.nn.inputs import Inputs
from jaxspec.protocol import Anchor, Commit, Drafter, Proposal, Tree, Verdict
from jaxspec.pytree import pytree, replace
from jaxspec.shapes import Array
from jaxspec.topology import chain
from jaxspec.verify.logits import Context, process
from jaxspec.verify.rules import DRAWN_BY_SCORE, RULES, synthetic
from jaxspec.verify.walk import stop_at, unsound, usable


@dataclass(frozen=True)
class StepPlan:
    """What a compiled step is fixed to.

    Attributes:
      rule: key of ``RULES``.
      steps: most steps in one dispatch.
      logprobs: most log-probabilities per token that a row may ask for.
      survival: rates of synthetic acceptance instead of the rule, empty for none.
      routes: whether a step says which experts were chosen.
    """

    rule: str = "match"
    steps: int = 8
    logprobs: int = 0
    survival: tuple[float, ...] = ()
    routes: bool = False


@pytree
class StepOut:
    """What one step did.

    Attributes:
      token_BT: committed tokens.
      count_B: how many.
      drafted_B: usable drafts that were verified; where a step verified none though some rows had drafts, their
        number below zero.
      stopped_B, full_B: rows that met a stop id, or their length limit.
      broken_B: rows that ended because no token could be sampled, see ``unsound``.
      logprob_BTL: log-probability of each committed token, then of the most likely ones.
      top_BTL: rank of the committed token, then ids of the most likely ones.
      touched_K: experts per layer that the first 1, 2, ... K drafts of all rows were predicted to touch, float32;
        None where the drafter predicts none.
      outcome_HMC: drafts that were tried (H = 0) and accepted (H = 1) by confidence; None where drafts have no prices.
      routes: choices of experts, None unless the plan wants them.
    """

    token_BT: Array
    count_B: Array
    drafted_B: Array
    stopped_B: Array
    full_B: Array
    broken_B: Array
    logprob_BTL: Array
    top_BTL: Array
    touched_K: Array | None
    outcome_HMC: Array | None
    routes: Routes | None


Stepped = tuple[DecodeState, StepOut]
CUT_PARTS, FOUND_PARTS = 4, 2
TAIL = 4  # columns at the end of a report; before the last three stands whether no token could be sampled


def step(target: Target, drafter: Drafter, state: DecodeState, least: Array | int = 1, *, plan: StepPlan) -> Stepped:
    """Drafts, verifies, accepts and commits once for every row.

    Where ``skips`` says so, steps in which fewer than ``least`` rows have a draft run the target on the anchors alone;
    others may leave out the drafts that are not verified.
    """
    proposal, draft = _propose(drafter, state.draft, state.anchor, plan.rule)
    state = replace(state, draft=draft)
    tree = proposal.tree_of(drafter.topology)
    found_B = jnp.sum(usable(proposal, state.sampling, tree) & state.active_B[:, None], axis=1, dtype=jnp.int32)
    verify = partial(_verify, target, drafter, plan=plan)
    lines = _lines(target, drafter, state, proposal, plan)
    needed = jnp.sum(state.active_B, dtype=jnp.int32) + jnp.sum(found_B)
    ways: list[Way] = [partial(verify, proposal=proposal, places=places) for places in (*lines, None)]
    which = jnp.sum(needed > np.asarray(lines, np.int32), dtype=jnp.int32)
    if skips(target, drafter, state, plan):
        nothing = Proposal(proposal.token_BN[:, :0], proposal.valid_BN[:, :0], None, Tree.of(chain(0)))

        def narrow(state: DecodeState) -> Stepped:
            state, out = _widened(verify(state, nothing), tree.max_depth)
            return state, replace(out, drafted_B=-found_B)

        ways, which = [narrow, *ways], jnp.where(jnp.sum(found_B > 0) >= least, which + 1, 0)
    return one_of(ways, which, state)


def _lines(target: Target, drafter: Drafter, state: DecodeState, proposal: Proposal, plan: StepPlan) -> tuple[int, ...]:
    """How many positions may be computed instead of all: of chains of which drafts are cut, or often not found.

    Each is a program more. Not on a mesh, whose devices have rows of their own, and not where routes are watched.
    """
    policy = target.net.policy
    if not drafter.topology.is_chain or plan.routes or policy.compute.mesh is not None:
        return ()
    parts = CUT_PARTS if state.draft_costs is not None else FOUND_PARTS if proposal.sparse else 1
    rows, drafts = proposal.token_BN.shape
    return line_lengths(rows, drafts, parts, policy.compute.kernels == "triton")


def skips(target: Target, drafter: Drafter, state: DecodeState, plan: StepPlan) -> bool:
    """Whether steps in which few rows have a draft verify none: with drafters that often find nothing.

    Not on a mesh, so that all of its steps exchange rows alike, and not where routes are watched.
    """
    if not drafter.topology.drafts or plan.routes or target.net.policy.compute.mesh is not None:
        return False
    proposal, _ = _propose.eval_shape(drafter, state.draft, state.anchor, plan.rule)
    return proposal.sparse


def _widened(done: Stepped, drafts: int) -> Stepped:
    """What a step without drafts did, in the shapes of one with them."""
    state, out = done

    def wide(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, drafts), *[(0, 0)] * (x.ndim - 2)))

    return state, replace(
        out, token_BT=wide(out.token_BT), logprob_BTL=wide(out.logprob_BTL), top_BTL=wide(out.top_BTL)
    )


# Like ``_propose``.
@partial(jax.jit, static_argnames=("places", "plan"), inline=True)
def _verify(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    proposal: Proposal,
    places: int | None = None,
    *,
    plan: StepPlan,
) -> Stepped:
    """The step behind drafting; ``places``: how many positions are computed, None for all."""
    anchor, sampling = state.anchor, state.sampling
    token_BT = jnp.concatenate([anchor.token_B[:, None], proposal.token_BN], axis=1)
    tree = proposal.tree_of(drafter.topology)
    position_BT = anchor.length_B[:, None] + tree.depth_BT
    path_BTJ = None if tree.is_chain else jnp.broadcast_to(tree.path_BTJ, (*token_BT.shape, tree.max_depth + 1))
    active_B1 = state.active_B[:, None]
    live_BT = jnp.concatenate([active_B1, usable(proposal, sampling, tree) & active_B1], axis=1)
    window = Window(anchor.length_B, state.table_BJ, live_BT=live_BT, path_BTJ=path_BTJ, block=target.block)
    window = window if places is None else replace(window, ragged=ragged_of(live_BT, places))
    inputs = Inputs(
        in_line(token_BT, window), in_line(position_BT, window), window, state.layers, reads=drafter.reads,
        routes=plan.routes,
    )  # fmt: skip
    hidden = forward(target.net, target.params, inputs)
    layers = hidden.caches
    logits_BTV = in_rows(head(target.net, target.params, hidden.last_BTD), window)
    context = Context(state.count_BV, state.prompt_BV, token_BT, anchor.length_B, state.history_BS, state.bias_BV)
    score_BTV = process(logits_BTV, sampling, context, tree)
    rule = partial(synthetic, survival=plan.survival) if plan.survival else RULES[plan.rule]
    verdict = rule(proposal, score_BTV, sampling, anchor.length_B, tree)
    unsound_BT = unsound(logits_BTV, score_BTV, verdict, exact=plan.rule in DRAWN_BY_SCORE and not plan.survival)
    verdict, stopped_B, full_B, broken_B = stop_at(verdict, sampling, anchor.length_B, state.active_B, unsound_BT)
    if not tree.is_chain:
        layers = compact_caches(layers, target.net.arch, target.net.policy, window, verdict.path_BT)
    final_BT = jnp.concatenate([anchor.token_B[:, None], verdict.token_BT[:, :-1]], axis=1)
    features = jax.tree.map(lambda x: _along(in_rows(x, window), verdict.path_BT), features_of(hidden))
    commit = Commit(
        final_BT, verdict.token_BT, features, verdict.count_B, anchor.length_B, path_BT=verdict.path_BT, row=None
    )
    draft = drafter.observe(state.draft, commit)
    logprob, ranked = _logprobs(logits_BTV, verdict, sampling.logprobs_B, plan.logprobs)
    drafted_B = jnp.sum(live_BT[:, 1:], axis=1, dtype=jnp.int32)
    touched_K = None
    if proposal.expert_BKYA is not None:
        touched_K = distinct_by_depth(proposal.expert_BKYA, live_BT[:, 1:], experts_of(target.net.arch))
    done_B, outcome_HMC = stopped_B | full_B | broken_B, None
    if state.draft_costs is not None and proposal.confidence_BN is not None:
        tried_BN = live_BT[:, 1:] & ~done_B[:, None]  # an ending cuts verdicts short
        steps, warm_B = state.draft_costs.accept_MC.shape[1], sampling.temperature_B > 0
        outcome_HMC = outcomes(proposal.confidence_BN, tried_BN, verdict.count_B - 1, warm_B, steps)
    routes = routes_of(hidden, proposal, verdict, live_BT, token_BT, position_BT) if plan.routes else None
    out = StepOut(
        verdict.token_BT, verdict.count_B, drafted_B, stopped_B, full_B, broken_B, logprob, ranked, touched_K,
        outcome_HMC, routes,
    )  # fmt: skip
    return _advance(state, layers, draft, verdict, done_B, apart=target.net.policy.compute.splits_rows), out


# Asked for its shapes and then for its values, but traced once.
@partial(jax.jit, static_argnames="rule", inline=True)
def _propose(drafter: Drafter, draft: Any, anchor: Anchor, rule: str) -> tuple[Proposal, Any]:
    return drafter.propose(draft, anchor, rule)


def _along(x: Array, path_BT: Array) -> Array:
    """Entries [B, T, ...] of an array over nodes that a path visits."""
    return jnp.take_along_axis(x, path_BT.reshape(*path_BT.shape, *[1] * (x.ndim - 2)), axis=1)


def _advance(state: DecodeState, layers, draft, verdict: Verdict, done_B: Array, *, apart: bool) -> DecodeState:
    """Commits by length; ``apart`` as of ``write_rows``."""
    count_B, token_BT = verdict.count_B, verdict.token_BT
    last_B = jnp.take_along_axis(token_BT, jnp.maximum(count_B - 1, 0)[:, None], axis=1)[:, 0]
    s = state.sampling
    penalised = jnp.any((s.repetition_B != 1) | (s.presence_B != 0) | (s.frequency_B != 0))

    def tally(count_BV: Array) -> Array:
        counts = jnp.arange(token_BT.shape[1], dtype=jnp.int32)[None] < count_B[:, None]
        rows = jnp.arange(token_BT.shape[0], dtype=jnp.int32)[:, None]
        return count_BV.at[rows, token_BT].add(counts.astype(jnp.int32))

    return replace(
        state,
        layers=layers,
        length_B=state.length_B + count_B,
        anchor_B=jnp.where(count_B > 0, last_B, state.anchor_B),
        history_BS=write_rows(state.history_BS, token_BT, state.length_B + 1, apart=apart),
        count_BV=lax.cond(penalised, tally, lambda x: x, state.count_BV),
        active_B=state.active_B & ~done_B,
        draft=draft,
    )


def _logprobs(logits_BTV: Array, verdict: Verdict, wanted_B: Array, most: int) -> tuple[Array, Array]:
    """Raw log-probabilities along the accepted path, computed only in steps in which some row wants them."""
    rows, depth = verdict.token_BT.shape
    empty = (jnp.zeros((rows, depth, most + 1)), jnp.zeros((rows, depth, most + 1), jnp.int32))
    if most == 0:
        return empty

    def compute() -> tuple[Array, Array]:
        along = jnp.take_along_axis(logits_BTV, verdict.path_BT[..., None], axis=1)
        return ranked(along, verdict.token_BT, most)

    return lax.cond(jnp.any(wanted_B >= 0), compute, lambda: empty)


@pytree
class Report:
    """Outcomes of a dispatch, one small array for the host and others that it reads only on demand.

    Attributes:
      packed_BX: int32 [B, steps * (T + 2) + TAIL]: per step the committed tokens, their count and the usable drafts;
        then whether no token could be sampled, whether a stop id was met, whether the length limit was met, and the
        steps done.
      logprob_BXL, top_BXL: as in ``StepOut``, [B, steps * T, L + 1].
      touched_K, outcome_HMC: sums over the steps of what ``StepOut`` has, None where it has none.
    """

    packed_BX: Array
    logprob_BXL: Array
    top_BXL: Array
    touched_K: Array | None = None
    outcome_HMC: Array | None = None


def dispatch(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    limit: Array,
    eager: Array,
    least: Array | int = 1,
    *,
    plan: StepPlan,
) -> tuple[DecodeState, Report]:
    """Runs up to ``min(limit, plan.steps)`` steps before the host looks.

    Args:
      target: verifies.
      drafter: proposes.
      state: donated.
      limit: int32 scalar, most steps.
      eager: bool scalar; true returns as soon as one row ends, because another request waits for its place.
      least: int32 scalar, rows that must have a draft for a step to verify them, where ``skips`` says so.
      plan: static.
    """
    rows, depth = state.length_B.shape[0], drafter.topology.max_depth + 1
    width = depth + 2
    limit = jnp.minimum(limit, plan.steps)

    def go_on(carry) -> Array:
        i, state, *_, ended_B3 = carry
        return (i < limit) & jnp.any(state.active_B) & ~(eager & jnp.any(ended_B3))

    def one(carry):
        i, state, packed, logprob, top, sums, ended_B3 = carry
        state, out = step(target, drafter, state, least, plan=plan)
        entry = jnp.concatenate([out.token_BT, out.count_B[:, None], out.drafted_B[:, None]], axis=1)
        packed = lax.dynamic_update_slice(packed, entry, (0, i * width))
        if plan.logprobs:
            logprob = lax.dynamic_update_slice(logprob, out.logprob_BTL, (0, i * depth, 0))
            top = lax.dynamic_update_slice(top, out.top_BTL, (0, i * depth, 0))
        sums = jax.tree.map(jnp.add, sums, (out.touched_K, out.outcome_HMC))
        ended_B3 |= jnp.stack([out.broken_B, out.stopped_B, out.full_B], axis=1)
        return i + 1, state, packed, logprob, top, sums, ended_B3

    places = (rows, plan.steps * depth if plan.logprobs else 0, plan.logprobs + 1)
    carry = (
        jnp.int32(0), state, jnp.zeros((rows, plan.steps * width), jnp.int32),
        jnp.zeros(places), jnp.zeros(places, jnp.int32), _no_sums(drafter, state, plan), jnp.zeros((rows, 3), bool),
    )  # fmt: skip
    i, state, packed, logprob, top, sums, ended_B3 = lax.while_loop(go_on, one, carry)
    tail = jnp.concatenate([ended_B3.astype(jnp.int32), jnp.broadcast_to(i, (rows, 1))], axis=1)
    return state, Report(jnp.concatenate([packed, tail], axis=1), logprob, top, *sums)


def _no_sums(drafter: Drafter, state: DecodeState, plan: StepPlan) -> tuple[Array | None, Array | None]:
    """Zeros to add predictions of touched experts and outcomes of confidences to, None where there are none."""
    proposal, _ = _propose.eval_shape(drafter, state.draft, state.anchor, plan.rule)
    touched = None if proposal.expert_BKYA is None else jnp.zeros(proposal.expert_BKYA.shape[1])
    if state.draft_costs is None or proposal.confidence_BN is None:
        return touched, None
    return touched, jnp.zeros((2, *state.draft_costs.accept_MC.shape))
