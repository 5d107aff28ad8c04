"""The step: propose, verify, accept, commit, observe, once for every row."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.window import Window
from jaxspec.decode.compaction import Sizes, Verified, verify
from jaxspec.decode.state import DecodeState, Target, write_rows
from jaxspec.decode.telemetry import Telemetry, measure
from jaxspec.models.caches import compact_caches
from jaxspec.nn.inputs import Inputs
from jaxspec.protocol import Anchor, Commit, Drafter, Proposal, Verdict, VerifyRule
from jaxspec.pytree import pytree, replace
from jaxspec.shapes import Array
from jaxspec.verify.logits import leaves_as_is, process
from jaxspec.verify.logprobs import along_path
from jaxspec.verify.rules import RULES
from jaxspec.verify.walk import Ends, stop_at, unsound, usable


@dataclass(frozen=True)
class StepPlan:
    """What a compiled step is fixed to.

    Attributes:
      rule: decides which drafts are accepted.
      steps: most steps in one dispatch.
      logprobs: most log-probabilities per token that a row may ask for.
      routes: whether expert choices are reported.
    """

    rule: VerifyRule = RULES["match"]
    steps: int = 8
    logprobs: int = 0
    routes: bool = False


@pytree
class StepOut:
    """What one step did.

    Attributes:
      token_BT: committed tokens.
      count_B: how many.
      drafts_B: usable drafts of each row.
      verified: bool scalar, whether they were verified.
      ends: rows that ended.
      logprob_BTL: log-probability of each committed token, then of the most likely ones.
      top_BTL: rank of the committed token, then ids of the most likely ones.
      expert_BTYA: experts that the target chose where it read the anchor and the accepted drafts, None unless the plan
        asks for them.
      telemetry: observations.
    """

    token_BT: Array
    count_B: Array
    drafts_B: Array
    verified: Array
    ends: Ends
    logprob_BTL: Array
    top_BTL: Array
    expert_BTYA: Array | None
    telemetry: Telemetry


def step(
    target: Target, drafter: Drafter, state: DecodeState, min_rows: Array | int = 1, *, plan: StepPlan
) -> tuple[DecodeState, StepOut]:
    """Drafts, verifies, accepts and commits once for every row.

    Where ``Sizes.anchors`` holds, steps in which fewer than ``min_rows`` rows have a draft verify none.
    """
    proposal, draft = propose(drafter, state.draft, state.anchor, plan.rule.name)
    state = replace(state, draft=draft)
    inputs = inputs_of(target, drafter, state, proposal, plan)
    verified = verify(target, inputs, min_rows, sizes=Sizes.of(target, drafter, state))
    return conclude(target, drafter, state, proposal, inputs, verified, plan=plan)


def conclude(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    proposal: Proposal,
    inputs: Inputs,
    verified: Verified,
    mask_BTW: Array | None = None,
    *,
    plan: StepPlan,
) -> tuple[DecodeState, StepOut]:
    """Accepts and commits what was verified, and shows it to the drafter; ``mask_BTW`` as of ``Context``."""
    tree = proposal.tree_of(drafter.topology)
    context = state.context(inputs.token_BT, mask_BTW)

    def judge(score_BTV: Array, rule: VerifyRule) -> tuple[Verdict, Array]:
        verdict = rule(proposal, score_BTV, verified.live_BT[:, 1:], state.sampling, state.length_B, tree)
        return verdict, unsound(verified.logits_BTV, score_BTV, verdict, exact=rule.exact)

    def judge_scores() -> tuple[Verdict, Array]:
        return judge(process(verified.logits_BTV, state.sampling, context, tree), plan.rule)

    if plan.rule.exact:  # no scores are written where they would be the logits
        plain = leaves_as_is(state.sampling, context, tree)
        verdict, unsound_BT = lax.cond(plain, lambda: judge(verified.logits_BTV, RULES["greedy"]), judge_scores)
    else:
        verdict, unsound_BT = judge_scores()
    verdict, ends = stop_at(verdict, state.sampling, state.length_B, state.active_B, unsound_BT)

    layers, policy = verified.layers, target.net.policy
    if not tree.is_chain:
        layers = compact_caches(layers, target.net.arch, policy, verified.window, verdict.path_BT)
    draft = drafter.observe(state.draft, commit_of(verdict, verified, state))
    logprob_BTL, top_BTL = along_path(verified.logits_BTV, verdict, state.sampling.logprobs_B, plan.logprobs)
    telemetry = measure(target, state, inputs, proposal, verified, verdict, ends)
    state = advance(replace(state, layers=layers, draft=draft), verdict, ends, apart=policy.compute.splits_rows)
    expert_BTYA = jax.tree.map(partial(along, verdict.path_BT), verified.expert_BTYA)
    return state, StepOut(
        verdict.token_BT, verdict.count_B, verified.drafts_B, verified.drafts_ran, ends, logprob_BTL, top_BTL,
        expert_BTYA, telemetry,
    )  # fmt: skip


# Its own jit, so that ``dispatch`` may ask for the proposal's shape without a second trace.
@partial(jax.jit, static_argnames="rule", inline=True)
def propose(drafter: Drafter, draft: Any, anchor: Anchor, rule: str) -> tuple[Proposal, Any]:
    """Drafts every node."""
    return drafter.propose(draft, anchor, rule)


def inputs_of(
    target: Target, drafter: Drafter, state: DecodeState, proposal: Proposal, plan: StepPlan
) -> Inputs:  # fmt: skip
    """Returns the anchors and drafts of all rows as the target's inputs; usable drafts of active rows are live."""
    tree = proposal.tree_of(drafter.topology)
    token_BT = jnp.concatenate([state.anchor_B[:, None], proposal.token_BN], axis=1)
    usable_BN = usable(proposal, state.sampling, tree)
    live_BT = jnp.pad(usable_BN, ((0, 0), (1, 0)), constant_values=True) & state.active_B[:, None]
    path_BTJ = None if tree.is_chain else jnp.broadcast_to(tree.path_BTJ, (*token_BT.shape, tree.max_depth + 1))
    window = Window(state.length_B, state.table_BJ, live_BT=live_BT, path_BTJ=path_BTJ, block=target.block)
    position_BT = state.length_B[:, None] + tree.depth_BT
    return Inputs(token_BT, position_BT, window, state.layers, reads=drafter.reads, routes=plan.routes)


def commit_of(verdict: Verdict, verified: Verified, state: DecodeState) -> Commit:
    """Returns what became text, with the features of its nodes along the accepted path."""
    path_BT, token_BT = verdict.path_BT, verdict.token_BT
    final_BT = jnp.concatenate([state.anchor_B[:, None], token_BT[:, :-1]], axis=1)
    features = jax.tree.map(partial(along, path_BT), verified.features)
    return Commit(final_BT, token_BT, features, verdict.count_B, state.length_B, path_BT=path_BT, row_B=None)


def along(path_BT: Array, x: Array) -> Array:
    """Returns the entries [B, T, ...] of the nodes of a path."""
    return jnp.take_along_axis(x, path_BT.reshape(*path_BT.shape, *[1] * (x.ndim - 2)), axis=1)


def advance(state: DecodeState, verdict: Verdict, ends: Ends, *, apart: bool) -> DecodeState:
    """Commits a verdict by length; ``apart`` as in ``write_rows``."""
    count_B, token_BT = verdict.count_B, verdict.token_BT
    last_B = jnp.take_along_axis(token_BT, jnp.maximum(count_B - 1, 0)[:, None], axis=1)[:, 0]
    s = state.sampling
    penalized = jnp.any((s.repetition_B != 1) | (s.presence_B != 0) | (s.frequency_B != 0))

    def tally(count_BV: Array) -> Array:
        counts = jnp.arange(token_BT.shape[1], dtype=jnp.int32)[None] < count_B[:, None]
        rows = jnp.arange(token_BT.shape[0], dtype=jnp.int32)[:, None]
        return count_BV.at[rows, token_BT].add(counts.astype(jnp.int32))

    return replace(
        state,
        length_B=state.length_B + count_B,
        anchor_B=jnp.where(count_B > 0, last_B, state.anchor_B),
        history_BS=write_rows(state.history_BS, token_BT, state.length_B + 1, apart=apart),
        count_BV=lax.cond(penalized, tally, lambda x: x, state.count_BV),
        active_B=state.active_B & ~ends.any_B,
    )
