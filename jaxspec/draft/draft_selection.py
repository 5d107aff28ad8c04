"""Which drafts of a chain are verified, decided for all rows together before each of them is drawn."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.protocol import Anchor, DraftCosts
from jaxspec.pytree import pytree
from jaxspec.shapes import Array


@pytree
class DraftSelection:
    """The drafts to verify, while they are drafted.

    Attributes:
      going_B: rows whose next draft may be verified.
      survival_B: estimated chance that all drafts so far are accepted.
      certainty_B: product of the drafter's confidences in them.
      tokens: float32 scalar, positions to verify so far in all rows, anchors included.
      chosen_YE: experts that they are predicted to touch; None without a prediction.
      valid_BN: drafts to verify.
      confidence_BN: the drafter's confidence before each draft was drawn.
    """

    going_B: Array
    survival_B: Array
    certainty_B: Array
    tokens: Array
    chosen_YE: Array | None
    valid_BN: Array
    confidence_BN: Array


def empty_selection(costs: DraftCosts, eligible_B: Array, drafts: int, layers: int | None) -> DraftSelection:
    """Returns the selection before the first draft.

    Args:
      costs: of drafts.
      eligible_B: rows that draft at all.
      drafts: N, how many decisions there will be.
      layers: Y, for how many layers experts are predicted; None for no prediction.
    """
    one_B, shape = jnp.ones(eligible_B.shape), (eligible_B.shape[0], drafts)
    chosen_YE = None if layers is None else jnp.zeros((layers, costs.experts), bool)
    return DraftSelection(eligible_B, one_B, one_B, costs.rows, chosen_YE, jnp.zeros(shape, bool), jnp.zeros(shape))


def select_next(
    selection: DraftSelection,
    anchor: Anchor,
    k: Array | int,
    score_BV: Array,
    expert_BYA: Array | None,
    confidence_B: Array | None = None,
) -> DraftSelection:
    """Decides whether draft k + 1 of each row is verified.

    A draft adds ``s`` tokens, the chance that it and all before it are accepted, estimated from the drafter's
    confidences: the largest probability of the distribution that it will be drawn from. Its gain is ``s`` less what the
    batch commits in the time that the draft adds, for a token and for the experts that no other token touches
    (Dinkelbach 1967: this maximizes the ratio of tokens to time). Rows are ordered by what each would gain alone, and
    the prefix with the largest total gain is verified, if that pays for drafting one position deeper. A row whose last
    draft is not verified takes no further part.

    No decision looks at draft k + 1 or at later ones, so the distribution of the text stays the same under every rule
    of verification: dropping a draft for what was drawn would leave only the others in the text
    (``tests/unit/draft/test_draft_selection.py`` shows both).

    Args:
      selection: decisions so far.
      anchor: where drafting started; has costs.
      k: drafts before this one.
      score_BV: logits that the draft will be drawn from, at the row's temperature and without noise.
      expert_BYA: experts that it is predicted to touch.
      confidence_B: a prediction of its acceptance that does not look at it; None takes the largest probability.
    """
    costs, sampling = anchor.draft_costs, anchor.sampling
    assert costs is not None, "without costs every draft is verified"
    if confidence_B is None:
        confidence_B = jnp.exp(jnp.max(score_BV, axis=-1) - jax.nn.logsumexp(score_BV, axis=-1))
    certainty_B = selection.certainty_B * confidence_B
    survival_B = selection.survival_B * accepted_share(costs, confidence_B, sampling.temperature_B)
    limit_B = jnp.minimum(sampling.draft_limit_B, costs.max_drafts.astype(jnp.int32))
    eligible_B = selection.going_B & (k < limit_B) & (certainty_B >= costs.min_confidence)
    new_BYE = None
    if expert_BYA is not None and selection.chosen_YE is not None:
        new_BYE = jnp.any(jax.nn.one_hot(expert_BYA, costs.experts, dtype=bool), axis=2) & ~selection.chosen_YE
    worth_B = survival_B - costs.tok_per_s * costs.token_s
    order_B, touched_B = _order(costs, eligible_B, worth_B, selection.tokens, new_BYE)
    gain_B = worth_B[order_B] - costs.tok_per_s * costs.expert_s * touched_B
    sum_B = jnp.cumsum(jnp.where(eligible_B[order_B], gain_B, -jnp.inf))
    most = jnp.max(sum_B)
    # A row belongs to the best prefix if the best sum is still to come, or is its own.
    chosen_B = (lax.cummax(sum_B, reverse=True) >= most) & (most >= costs.tok_per_s * costs.depth_s)
    chosen_B = chosen_B[jnp.argsort(order_B)] & eligible_B
    chosen_YE = selection.chosen_YE
    if new_BYE is not None and chosen_YE is not None:
        chosen_YE |= jnp.any(new_BYE & chosen_B[:, None, None], axis=0)
    return DraftSelection(
        chosen_B,
        survival_B,
        certainty_B,
        selection.tokens + jnp.sum(chosen_B, dtype=jnp.int32).astype(jnp.float32),
        chosen_YE,
        lax.dynamic_update_slice_in_dim(selection.valid_BN, chosen_B[:, None], k, axis=1),
        lax.dynamic_update_slice_in_dim(selection.confidence_BN, confidence_B[:, None], k, axis=1),
    )


def _order(
    costs: DraftCosts, eligible_B: Array, worth_B: Array, tokens: Array, new_BYE: Array | None
) -> tuple[Array, Array]:
    """Returns rows by what their draft would gain alone, and how many more experts each touches than those before it.

    Without predictions a token leaves an expert untouched with the same chance ``1 - A / E`` as every other token.
    """
    untouched = 1 - costs.top_k / max(costs.experts, 1)
    if new_BYE is None:
        order_B = jnp.argsort(jnp.where(eligible_B, -worth_B, jnp.inf))
        rank_B = jnp.arange(len(order_B), dtype=jnp.int32).astype(jnp.float32)
        return order_B, costs.top_k * untouched ** (tokens + rank_B)
    by_anchors = untouched**costs.rows  # experts that no anchor touches, whose own are not predicted
    alone_B = worth_B - costs.tok_per_s * costs.expert_s * by_anchors * _per_layer(new_BYE)
    order_B = jnp.argsort(jnp.where(eligible_B, -alone_B, jnp.inf))
    sorted_BYE = new_BYE[order_B]
    first_BYE = sorted_BYE & (jnp.cumsum(sorted_BYE, axis=0, dtype=jnp.int32) == 1)
    return order_B, by_anchors * _per_layer(first_BYE)


def _per_layer(x_BYE: Array) -> Array:
    """Returns how many experts each row has, mean over layers."""
    return jnp.sum(x_BYE, axis=(1, 2), dtype=jnp.int32).astype(jnp.float32) / x_BYE.shape[1]


def accepted_share(costs: DraftCosts, confidence_B: Array, temperature_B: Array) -> Array:
    """Returns the share of tried drafts of this confidence that were accepted, [B]; greedy and sampled rows differ."""
    table_MC = costs.accept_MC
    return table_MC[(temperature_B > 0).astype(jnp.int32), step_of(confidence_B, table_MC.shape[1])]


def step_of(confidence: Array, steps: int) -> Array:
    """Returns which of equal steps from 0 to 1 a confidence falls into, int32."""
    return jnp.clip((confidence * steps).astype(jnp.int32), 0, steps - 1)
