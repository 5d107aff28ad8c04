"""The step in three programs, between which the host learns the drafts and fills in what grammars allow after them."""

import jax.numpy as jnp

from jaxspec.decode.compaction import Sizes, Verified, verify
from jaxspec.decode.dispatch import Report, ended_of, entry_of, tail_of
from jaxspec.decode.state import DecodeState, Target
from jaxspec.decode.step import StepPlan, conclude, inputs_of, propose
from jaxspec.protocol import Drafter, Proposal
from jaxspec.pytree import pytree, replace
from jaxspec.shapes import Array
from jaxspec.topology import Topology
from jaxspec.verify.walk import usable

NO_TOKEN = -1


@pytree
class Pending:
    """A step whose nodes are verified, and nothing accepted yet.

    Attributes:
      proposal: its drafts, forced ones included.
      verified: what the target made of them; the state has the caches.
    """

    proposal: Proposal
    verified: Verified


def draft_step(
    drafter: Drafter, state: DecodeState, root_BW: Array, *, plan: StepPlan
) -> tuple[DecodeState, tuple[Proposal, Array]]:
    """Drafts; the state is donated.

    Args:
      drafter: proposes.
      state: donated.
      root_BW: what grammars allow after the anchors.
      plan: static.

    Returns:
      The state; the proposal, and what the host reads of it: int32 [B, 2, N], the drafts' tokens, ``NO_TOKEN`` for
      those that nobody will accept, and their parents.
    """
    anchor = replace(state.anchor, mask_BW=root_BW)
    proposal, draft = propose(drafter, state.draft, anchor, plan.rule.name)
    tree = proposal.tree_of(drafter.topology)
    live_BN = usable(proposal, state.sampling, tree) & state.active_B[:, None]
    token_BN = jnp.where(live_BN, proposal.token_BN, NO_TOKEN)
    parent_BN = jnp.broadcast_to(tree.parent_BT[:, 1:], token_BN.shape)
    return replace(state, draft=draft), (proposal, jnp.stack([token_BN, parent_BN], axis=1))


def verify_step(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    proposal: Proposal,
    forced_BN: Array,
    min_rows: Array | int,
    *,
    plan: StepPlan,
) -> tuple[DecodeState, Pending]:
    """Verifies drafts while the host fills masks; the state is donated.

    Args:
      target: verifies.
      drafter: has drafted.
      state: donated.
      proposal: of the drafter.
      forced_BN: tokens that take the places of drafts, because a grammar allows no others; ``NO_TOKEN`` elsewhere.
      min_rows: as of ``step``.
      plan: static.
    """
    proposal = with_forced(proposal, forced_BN)
    inputs = inputs_of(target, drafter, state, proposal, plan)
    verified = verify(target, inputs, min_rows, sizes=Sizes.of(target, drafter, state))
    return replace(state, layers=verified.layers), Pending(proposal, replace(verified, layers=(), window=()))


def conclude_step(
    target: Target, drafter: Drafter, state: DecodeState, pending: Pending, root_BW: Array, mask_BNW: Array,
    *, plan: StepPlan,
) -> tuple[DecodeState, Report]:  # fmt: skip
    """Accepts and commits among what grammars allow; reports one step as ``dispatch`` does.

    Args:
      target: has verified.
      drafter: has drafted, and observes.
      state: donated.
      pending: the step so far.
      root_BW: what grammars allow after the anchors.
      mask_BNW: the same after each draft.
      plan: static.
    """
    proposal, mask_BTW = pending.proposal, jnp.concatenate([root_BW[:, None], mask_BNW], axis=1)
    inputs = inputs_of(target, drafter, state, proposal, plan)
    verified = replace(pending.verified, layers=state.layers, window=inputs.window)
    state, out = conclude(target, drafter, state, proposal, inputs, verified, mask_BTW, plan=plan)
    entry_BW, tail_BW = entry_of(out), tail_of(ended_of(out), 1)
    tail_BW = jnp.pad(tail_BW, ((0, 0), (0, entry_BW.shape[1] - tail_BW.shape[1])))
    steps = slice(None, None if plan.logprobs else 0)
    return state, Report(
        jnp.stack([entry_BW, tail_BW], axis=1), out.logprob_BTL[:, None][:, steps], out.top_BTL[:, None][:, steps],
        out.telemetry.counts, None if out.expert_BTYA is None else out.expert_BTYA[:, None],
        Sizes.of(target, drafter, state).anchors,
    )  # fmt: skip


def takes_forced(drafter: Drafter, state: DecodeState, plan: StepPlan) -> bool:
    """Whether forced tokens may take the places of drafts.

    Not where drafts must have been drawn as the drafter says, grow trees of their own, or have prices that are learned
    from what becomes of them.
    """
    topology = drafter.topology
    return plan.rule.exact and isinstance(topology, Topology) and topology.drafts > 0 and state.draft_costs is None


def with_forced(proposal: Proposal, forced_BN: Array) -> Proposal:
    """Returns a proposal whose drafts are the forced tokens wherever there are any."""
    is_forced_BN = forced_BN != NO_TOKEN
    token_BN = jnp.where(is_forced_BN, forced_BN, proposal.token_BN)
    return replace(proposal, token_BN=token_BN, valid_BN=proposal.valid_BN | is_forced_BN)
