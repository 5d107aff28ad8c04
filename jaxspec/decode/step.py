"""The step: draft, verify, accept, commit, observe, for every row at once; and several of them in one dispatch."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.kv import Window
from jaxspec.decode.state import DecodeState, Target, write_rows
from jaxspec.models.caches import compact_caches
from jaxspec.models.transformer import forward, head
from jaxspec.protocol import Commit, Drafter, Features, Verdict
from jaxspec.pytree import pytree, replace
from jaxspec.shapes import Array
from jaxspec.verify.logits import Context, process
from jaxspec.verify.rules import RULES, synthetic
from jaxspec.verify.walk import stop_at, usable


@dataclass(frozen=True)
class StepPlan:
    """What a compiled step is fixed to.

    Attributes:
      rule: key of ``RULES``.
      steps: most steps in one dispatch.
      logprobs: most log-probabilities per token that a row may ask for.
      survival: rates of synthetic acceptance instead of the rule, empty for none.
    """

    rule: str = "match"
    steps: int = 8
    logprobs: int = 0
    survival: tuple[float, ...] = ()


@pytree
class StepOut:
    """What one step did.

    Attributes:
      token_BT: committed tokens.
      count_B: how many.
      drafted_B: usable drafts that were verified.
      stopped_B, full_B: rows that met a stop id, or their length limit.
      logprob_BTL: log-probability of each committed token, then of the most likely ones.
      top_BTL: rank of the committed token, then ids of the most likely ones.
    """

    token_BT: Array
    count_B: Array
    drafted_B: Array
    stopped_B: Array
    full_B: Array
    logprob_BTL: Array
    top_BTL: Array


def step(target: Target, drafter: Drafter, state: DecodeState, *, plan: StepPlan) -> tuple[DecodeState, StepOut]:
    """Drafts, verifies, accepts and commits once for every row."""
    top = drafter.topology
    anchor, sampling = state.anchor, state.sampling
    proposal, draft = drafter.propose(state.draft, anchor, plan.rule)
    token_BT = jnp.concatenate([anchor.token_B[:, None], proposal.token_BN], axis=1)
    position_BT = anchor.length_B[:, None] + jnp.asarray(top.depth, jnp.int32)[None]
    see = None if top.is_chain else tuple(tuple(bool(v) for v in row) for row in top.ancestors_TT)
    live_BT = jnp.broadcast_to(state.active_B[:, None], token_BT.shape)
    window = Window(anchor.length_B, state.table_BJ, live_BT=live_BT, ancestors=see, block=target.block)
    hidden, layers = forward(target.net, target.params, token_BT, position_BT, state.layers, window)
    logits_BTV = head(target.net, target.params, hidden.last_BTD)
    context = Context(state.count_BV, state.prompt_BV, token_BT, anchor.length_B)
    score_BTV = process(logits_BTV, sampling, context, top)
    rule = partial(synthetic, survival=plan.survival) if plan.survival else RULES[plan.rule]
    verdict = rule(proposal, score_BTV, sampling, anchor.length_B, top)
    verdict, stopped_B, full_B = stop_at(verdict, sampling, anchor.length_B, state.active_B)
    if not top.is_chain:
        layers = compact_caches(layers, target.net.arch, target.net.policy, window, verdict.path_BT)
    final_BT = jnp.concatenate([anchor.token_B[:, None], verdict.token_BT[:, :-1]], axis=1)
    features = jax.tree.map(partial(_along, path_BT=verdict.path_BT), Features(hidden.last_BTD, hidden.stream))
    commit = Commit(
        final_BT, verdict.token_BT, features, verdict.count_B, anchor.length_B, path_BT=verdict.path_BT, row=None
    )
    draft = drafter.observe(draft, commit)
    logprob, ranked = _logprobs(logits_BTV, verdict, sampling.logprobs_B, plan.logprobs)
    drafted_B = jnp.sum(usable(proposal, sampling, top) & state.active_B[:, None], axis=1, dtype=jnp.int32)
    out = StepOut(verdict.token_BT, verdict.count_B, drafted_B, stopped_B, full_B, logprob, ranked)
    return _advance(state, layers, draft, verdict, stopped_B | full_B), out


def _along(x: Array, path_BT: Array) -> Array:
    """Entries [B, T, ...] of an array over nodes that a path visits."""
    return jnp.take_along_axis(x, path_BT.reshape(*path_BT.shape, *[1] * (x.ndim - 2)), axis=1)


def _advance(state: DecodeState, layers, draft, verdict: Verdict, done_B: Array) -> DecodeState:
    """Commits by length."""
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
        history_BS=write_rows(state.history_BS, token_BT, state.length_B + 1),
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
        logp = jax.nn.log_softmax(along, axis=-1)
        own = jnp.take_along_axis(logp, verdict.token_BT[..., None], axis=-1)
        rank = jnp.sum(logp > own, axis=-1, keepdims=True, dtype=jnp.int32) + 1
        best, ids = lax.top_k(logp, most)
        return jnp.concatenate([own, best], -1), jnp.concatenate([rank, ids.astype(jnp.int32)], -1)

    return lax.cond(jnp.any(wanted_B >= 0), compute, lambda: empty)


@pytree
class Report:
    """Outcomes of a dispatch, one small array for the host and two that it reads only on demand.

    Attributes:
      packed_BX: int32 [B, steps * (T + 2) + 3]: per step the committed tokens, their count and the usable drafts;
        then whether a stop id was met, whether the length limit was met, and the steps done.
      logprob_BXL, top_BXL: as in ``StepOut``, [B, steps * T, L + 1].
    """

    packed_BX: Array
    logprob_BXL: Array
    top_BXL: Array


def dispatch(
    target: Target, drafter: Drafter, state: DecodeState, limit: Array, eager: Array, *, plan: StepPlan
) -> tuple[DecodeState, Report]:
    """Runs up to ``min(limit, plan.steps)`` steps before the host looks.

    Args:
      target: verifies.
      drafter: proposes.
      state: donated.
      limit: int32 scalar, most steps.
      eager: bool scalar; true returns as soon as one row ends, because another request waits for its place.
      plan: static.
    """
    rows, depth = state.length_B.shape[0], drafter.topology.max_depth + 1
    width = depth + 2
    limit = jnp.minimum(limit, plan.steps)

    def go_on(carry) -> Array:
        i, state, _, _, _, ended_B2 = carry
        return (i < limit) & jnp.any(state.active_B) & ~(eager & jnp.any(ended_B2))

    def one(carry):
        i, state, packed, logprob, top, ended_B2 = carry
        state, out = step(target, drafter, state, plan=plan)
        entry = jnp.concatenate([out.token_BT, out.count_B[:, None], out.drafted_B[:, None]], axis=1)
        packed = lax.dynamic_update_slice(packed, entry, (0, i * width))
        if plan.logprobs:
            logprob = lax.dynamic_update_slice(logprob, out.logprob_BTL, (0, i * depth, 0))
            top = lax.dynamic_update_slice(top, out.top_BTL, (0, i * depth, 0))
        return i + 1, state, packed, logprob, top, ended_B2 | jnp.stack([out.stopped_B, out.full_B], axis=1)

    places = (rows, plan.steps * depth if plan.logprobs else 0, plan.logprobs + 1)
    carry = (
        jnp.int32(0), state, jnp.zeros((rows, plan.steps * width), jnp.int32),
        jnp.zeros(places), jnp.zeros(places, jnp.int32), jnp.zeros((rows, 2), bool),
    )  # fmt: skip
    i, state, packed, logprob, top, ended_B2 = lax.while_loop(go_on, one, carry)
    tail = jnp.concatenate([ended_B2.astype(jnp.int32), jnp.broadcast_to(i, (rows, 1))], axis=1)
    return state, Report(jnp.concatenate([packed, tail], axis=1), logprob, top)
