"""What a step observes besides its text: touched experts, acceptance by confidence, expert choices."""

import jax
import jax.numpy as jnp

from jaxspec.decode.compaction import Verified
from jaxspec.decode.state import DecodeState, Target
from jaxspec.draft.draft_selection import step_of
from jaxspec.models.arch import ArchSpec, chosen_of, expert_dtype, experts_of
from jaxspec.nn.inputs import Inputs
from jaxspec.protocol import Proposal, Verdict
from jaxspec.pytree import pytree
from jaxspec.shapes import Array
from jaxspec.verify.walk import Ends


@pytree
class Counts:
    """Observations that are summed over the steps of a dispatch.

    Attributes:
      touched_K: experts per layer that the first 1, 2, ... K drafts of all rows were predicted to touch, float32;
        None where the drafter predicts none.
      outcome_HMC: drafts that were tried (H = 0) and accepted (H = 1), by greedy (M = 0) and sampling rows and by
        confidence; None where drafts have no prices or confidences.
    """

    touched_K: Array | None
    outcome_HMC: Array | None


@pytree
class Routes:
    """Expert choices of one step.

    Attributes:
      expert_BTYA: of the anchor and the drafts, in every expert layer.
      live_BT: positions that were computed.
      kept_BT: those of them that became text; the anchor is one always.
      turn_BT: token id plus position, see ``jaxspec.nn.moe.slots_for``.
      predicted_BKYA: what the drafter predicted for the drafts, None where it predicts none.
    """

    expert_BTYA: Array
    live_BT: Array
    kept_BT: Array
    turn_BT: Array
    predicted_BKYA: Array | None


@pytree
class Telemetry:
    """All observations of a step.

    Attributes:
      counts: sums.
      routes: expert choices, None unless the plan asks for them.
    """

    counts: Counts
    routes: Routes | None


def zero_counts(proposal: Proposal, state: DecodeState) -> Counts:
    """Returns what counts are added to, for proposals of such a shape."""
    touched = None if proposal.expert_BKYA is None else jnp.zeros(proposal.expert_BKYA.shape[1])
    if state.draft_costs is None or proposal.confidence_BN is None:
        return Counts(touched, None)
    return Counts(touched, jnp.zeros((2, *state.draft_costs.accept_MC.shape)))


def no_experts(arch: ArchSpec, lead: tuple[int, ...]) -> Array:
    """Returns room for the expert choices of positions [*lead, Y, A]."""
    return jnp.zeros((*lead, len(arch.expert_layers), chosen_of(arch)), expert_dtype(arch))


def measure(
    target: Target,
    state: DecodeState,
    inputs: Inputs,
    proposal: Proposal,
    verified: Verified,
    verdict: Verdict,
    ends: Ends,
) -> Telemetry:
    """Observes one step.

    Args:
      target: its architecture counts.
      state: before the step.
      inputs: nodes of the step.
      proposal: of the drafter.
      verified: what the target made of the nodes.
      verdict: what was accepted.
      ends: rows that ended, whose verdicts were cut short.
    """
    touched_K, outcome_HMC, live_BN = None, None, verified.live_BT[:, 1:]
    if proposal.expert_BKYA is not None:
        touched_K = touched_by_depth(proposal.expert_BKYA, live_BN, experts_of(target.net.arch))
    if state.draft_costs is not None and proposal.confidence_BN is not None:
        steps, sampled_B = state.draft_costs.accept_MC.shape[1], state.sampling.temperature_B > 0
        tried_BN = live_BN & ~ends.any_B[:, None]
        outcome_HMC = outcomes(proposal.confidence_BN, tried_BN, verdict.count_B - 1, sampled_B, steps)
    routes = routes_of(inputs, proposal, verified, verdict) if inputs.routes else None
    return Telemetry(Counts(touched_K, outcome_HMC), routes)


def touched_by_depth(expert_BKYA: Array, live_BK: Array, experts: int) -> Array:
    """Counts distinct experts of the first 1, 2, ... K drafts of all rows, mean over the predicted layers.

    Args:
      expert_BKYA: predicted choices.
      live_BK: drafts that are verified.
      experts: E.

    Returns:
      float32 [K].
    """
    chosen_BKYE = jnp.any(jax.nn.one_hot(expert_BKYA, experts, dtype=bool), axis=3) & live_BK[..., None, None]
    union_KYE = jnp.cumsum(jnp.any(chosen_BKYE, axis=0), axis=0) > 0
    return jnp.mean(jnp.sum(union_KYE, axis=2, dtype=jnp.int32).astype(jnp.float32), axis=1)


def outcomes(confidence_BN: Array, live_BN: Array, accepted_B: Array, sampled_B: Array, steps: int) -> Array:
    """Counts tried and accepted drafts by the kind of row and confidence, float32 [2, M, C].

    A draft of a chain is tried if it is verified and all before it are accepted.

    Args:
      confidence_BN: of each draft, before it was drawn.
      live_BN: drafts that are verified, and whose outcome counts.
      accepted_B: how many were accepted.
      sampled_B: rows that sample.
      steps: C, equal steps of confidence.
    """
    draft_N = jnp.arange(live_BN.shape[1], dtype=jnp.int32)
    tried_BN = live_BN & (draft_N <= accepted_B[:, None])
    hit_BN = tried_BN & (draft_N < accepted_B[:, None])
    kind_BN = sampled_B.astype(jnp.int32)[:, None] * steps + step_of(confidence_BN, steps)
    count_HX = jnp.zeros((2, 2 * steps))
    for which, counted_BN in enumerate((tried_BN, hit_BN)):
        count_HX = count_HX.at[which, kind_BN].add(counted_BN.astype(jnp.float32))
    return count_HX.reshape(2, 2, steps)


def routes_of(inputs: Inputs, proposal: Proposal, verified: Verified, verdict: Verdict) -> Routes:
    """Takes the expert choices of a step apart."""
    assert verified.expert_BTYA is not None, "the inputs ask for them"
    node_T = jnp.arange(inputs.token_BT.shape[1], dtype=jnp.int32)
    counts_BJ = node_T[None, : verdict.path_BT.shape[1]] < verdict.count_B[:, None]
    kept_BT = jnp.any((verdict.path_BT[:, None] == node_T[None, :, None]) & counts_BJ[:, None], axis=2)
    live_BT, turn_BT = verified.live_BT, inputs.token_BT + inputs.position_BT
    return Routes(verified.expert_BTYA, live_BT, kept_BT & live_BT, turn_BT, proposal.expert_BKYA)
