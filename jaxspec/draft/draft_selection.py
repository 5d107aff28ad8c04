"""Which drafts of a chain are verified, decided for all rows together before each of them is drawn."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.protocol import Anchor, DraftCosts
from jaxspec.pytree import pytree
from jaxspec.shapes import Array


@pytree
class DraftSelection:
    """The drafts that are verified, while they are drafted.

    Attributes:
      going_B: rows whose next draft may be verified.
      survival_B: estimated chance that all drafts so far are accepted.
      certainty_B: product of the drafter's confidences in them.
      tokens: float32 scalar, verified so far in all rows, anchors included.
      chosen_YE: experts that they were predicted to touch; None without a prediction.
      valid_BN: drafts that are verified.
      confidence_BN: the drafter's confidence before each draft was drawn.
    """

    going_B: Array
    survival_B: Array
    certainty_B: Array
    tokens: Array
    chosen_YE: Array | None
    valid_BN: Array
    confidence_BN: Array


def empty_selection(prices: DraftCosts, may_B: Array, drafts: int, layers: int | None) -> DraftSelection:
    """Before the first draft.

    Args:
      prices: what drafts cost.
      may_B: rows that draft at all.
      drafts: N, room for decisions.
      layers: Y, for how many layers experts are predicted; None for no prediction.
    """
    one_B, shape = jnp.ones(may_B.shape), (may_B.shape[0], drafts)
    chosen_YE = None if layers is None else jnp.zeros((layers, prices.experts), bool)
    return DraftSelection(may_B, one_B, one_B, prices.rows, chosen_YE, jnp.zeros(shape, bool), jnp.zeros(shape))


def select_next(
    kept: DraftSelection, anchor: Anchor, k: Array | int, score_BV: Array, expert_BYA: Array | None
) -> DraftSelection:
    """Decides whether draft k + 1 of each row is verified.

    A draft should add ``s`` tokens, the chance that it and all before it are accepted, estimated from the drafter's
    confidences: the largest probability of the distribution that it will be drawn from. It gains these, less what the
    batch commits in the time that the draft adds, that of a token and of the experts that no other token touches
    (Dinkelbach's form, 1967, of making tokens over time large). Rows queue up by what they would gain alone; those are
    verified up to which the gains add up highest, if that pays for drafting the depth. A row whose draft before this
    one is not verified has left the queue.

    Nothing of this looks at draft k + 1 or at later ones, so under every rule of verification the text keeps its law:
    to drop a draft because of what was drawn would leave only the others in the text
    (``tests/unit/draft/test_draft_selection.py`` shows both).

    Args:
      kept: decisions so far.
      anchor: where drafting started; has prices.
      k: drafts before this one.
      score_BV: logits that the draft will be drawn from, at the row's temperature and without noise.
      expert_BYA: experts that it is predicted to touch.
    """
    prices, sampling = anchor.draft_costs, anchor.sampling
    assert prices is not None, "without prices everything is kept"
    confidence_B = jnp.exp(jnp.max(score_BV, axis=-1) - jax.nn.logsumexp(score_BV, axis=-1))
    certainty_B = kept.certainty_B * confidence_B
    survival_B = kept.survival_B * accepted_share(prices, confidence_B, sampling.temperature_B)
    most_B = jnp.minimum(sampling.draft_limit_B, prices.max_drafts.astype(jnp.int32))
    may_B = kept.going_B & (k < most_B) & (certainty_B >= prices.min_confidence)
    miss = 1 - prices.top_k / max(prices.experts, 1)
    worth_B, expert = survival_B - prices.tok_per_s * prices.token_s, prices.tok_per_s * prices.expert_s
    if expert_BYA is None or kept.chosen_YE is None:
        chosen_BYE = None
        turn_B = jnp.argsort(jnp.where(may_B, -worth_B, jnp.inf))
        place_B = jnp.arange(len(turn_B), dtype=jnp.int32).astype(jnp.float32)
        touched_B = prices.top_k * miss ** (kept.tokens + place_B)
    else:
        chosen_BYE = jnp.any(jax.nn.one_hot(expert_BYA, prices.experts, dtype=bool), axis=2) & ~kept.chosen_YE
        untouched = miss**prices.rows
        turn_B = jnp.argsort(jnp.where(may_B, expert * untouched * _mean(chosen_BYE) - worth_B, jnp.inf))
        touched_B = untouched * _mean(_first(chosen_BYE[turn_B]))
    gain_B = jnp.where(may_B[turn_B], worth_B[turn_B] - expert * touched_B, -jnp.inf)
    sum_B = jnp.cumsum(gain_B)
    most = jnp.max(sum_B)
    verified_B = (lax.cummax(sum_B, reverse=True) >= most) & (most >= prices.tok_per_s * prices.depth_s)
    verified_B = verified_B[jnp.argsort(turn_B)] & may_B
    chosen_YE = kept.chosen_YE
    if chosen_BYE is not None and chosen_YE is not None:
        chosen_YE |= jnp.any(chosen_BYE & verified_B[:, None, None], axis=0)
    return DraftSelection(
        verified_B,
        survival_B,
        certainty_B,
        kept.tokens + jnp.sum(verified_B, dtype=jnp.int32).astype(jnp.float32),
        chosen_YE,
        lax.dynamic_update_slice_in_dim(kept.valid_BN, verified_B[:, None], k, axis=1),
        lax.dynamic_update_slice_in_dim(kept.confidence_BN, confidence_B[:, None], k, axis=1),
    )


def accepted_share(prices: DraftCosts, confidence_B: Array, temperature_B: Array) -> Array:
    """Share of tried drafts of this confidence that were accepted, [B]; greedy and sampling rows differ."""
    table_MC = prices.accept_MC
    return table_MC[(temperature_B > 0).astype(jnp.int32), step_of(confidence_B, table_MC.shape[1])]


def step_of(confidence: Array, steps: int) -> Array:
    """Which of equal steps from 0 to 1 a confidence falls into, int32."""
    return jnp.clip((confidence * steps).astype(jnp.int32), 0, steps - 1)


def _first(x_BYE: Array) -> Array:
    """Where no row before has it."""
    return x_BYE & (jnp.cumsum(x_BYE, axis=0, dtype=jnp.int32) == 1)


def _mean(x_BYE: Array) -> Array:
    """How many experts each row has, mean over layers."""
    return jnp.sum(x_BYE, axis=(1, 2), dtype=jnp.int32).astype(jnp.float32) / x_BYE.shape[1]
