"""What drafts are chosen by: scores of the tokens that a drafter knows, with the noise that draws among them."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.draft.draft_vocab import Candidates, DraftVocab
from jaxspec.draft.network_drafter import NetworkDrafter
from jaxspec.keys import Purpose, within_step
from jaxspec.nn.draw import Noise
from jaxspec.nn.steady import row_argmax, row_top_k
from jaxspec.protocol import Anchor, unpack_mask
from jaxspec.pytree import pytree
from jaxspec.shapes import Array

NEEDS_DRAFT_PROBS = ("reject", "block")
BANNED_DRAFT = -1e4


@pytree
class DraftScores:
    """Scores of the W tokens that a draft is chosen from.

    Attributes:
      score_BTW: at each row's temperature; log-probabilities where the rule needs distributions.
      known: which tokens they are; None for all of the target's.
      noise: with which the best token is a sample; None for greedy drafts.
    """

    score_BTW: Array
    known: DraftVocab | Candidates | None = None
    noise: Noise | None = None

    def level(self, k: int) -> "DraftScores":
        """Returns those of one depth, where a position is a depth."""
        noise = None if self.noise is None else self.noise.at(k)
        return DraftScores(self.score_BTW[:, k : k + 1], self.known, noise)

    def best(self) -> Array:
        """Returns the token of each node that noise ranks first, [B, T]."""
        if self.noise is None:
            return self._ids(row_argmax(self.score_BTW)[..., None])[..., 0]
        return self._ids(self.noise.draw(self.score_BTW, self._token)[..., None])[..., 0]

    def best_few(self, count: int) -> tuple[Array, Array]:
        """Returns the largest noisy scores of each node, in descending order, and their tokens, [B, T, X] both.

        Beyond the tokens that there are scores are -inf.
        """
        score_BTW, width = self.noisy(), self.score_BTW.shape[-1]
        if count > width:
            score_BTW = jnp.pad(score_BTW, ((0, 0), (0, 0), (0, count - width)), constant_values=-jnp.inf)
        best_BTX, index_BTX = row_top_k(score_BTW, count)
        return best_BTX, self._ids(jnp.minimum(index_BTX, width - 1) if count > width else index_BTX)

    def noisy(self) -> Array:
        """Returns scores with the noise that ranks tokens."""
        return self.score_BTW if self.noise is None else self.noise.added_to(self.score_BTW, self._token)

    def logp(self) -> Array:
        """Returns ``score_BTW`` over the target's vocabulary, -inf for tokens that are not drafted."""
        return self.score_BTW if self.known is None else self.known.expand(self.score_BTW)

    @property
    def _token(self) -> Array | None:
        return None if self.known is None else self.known.token

    def _ids(self, index_BTX: Array) -> Array:
        return index_BTX if self.known is None else self.known.ids(index_BTX)


def score_tokens(drafter: NetworkDrafter, last_BTD: Any, anchor: Anchor, depth_T: Array, rule: str) -> DraftScores:
    """Scores tokens at each row's temperature, with the noise that ranks them.

    Args:
      drafter: has the head.
      last_BTD: what the head reads.
      anchor: says how rows sample.
      depth_T: depth of the drafts that are drawn.
      rule: of verification.
    """
    known = drafter.known(last_BTD)
    logits = _masked(_biased(drafter.logits(last_BTD), anchor, known), anchor, depth_T, known)
    if rule == "greedy":
        return DraftScores(logits, known)
    warm_B = anchor.sampling.temperature_B > 0
    score = logits / jnp.where(warm_B, anchor.sampling.temperature_B, 1.0)[:, None, None]
    # match: the target's own noise, which makes drafts agree; reject and block need draws that no other step sees.
    purpose, position_BT = Purpose.TARGET, anchor.length_B[:, None] + depth_T[None]
    if rule != "match":
        score = jax.nn.log_softmax(score)
        purpose = Purpose.DRAFT
        position_BT = within_step(anchor.length_B, jnp.broadcast_to(depth_T[None], position_BT.shape))
    return DraftScores(score, known, Noise(anchor.sampling.key_BX, position_BT, warm_B, purpose))


def _biased(logits: Array, anchor: Anchor, known: DraftVocab | Candidates | None) -> Array:
    """Adds each row's bias: a banned token would never be accepted."""
    if anchor.bias_BV is None:
        return logits
    # Not -inf: all that a drafter knows may be banned. Not under a condition on whether some row is biased: that would
    # cost a GPU more than the sum.
    bias_B1V = jnp.maximum(anchor.bias_BV, BANNED_DRAFT)[:, None]
    bias = bias_B1V if known is None else known.pick(bias_B1V)
    return jnp.where(anchor.sampling.biased_B[:, None, None], logits + bias, logits)


def _masked(logits: Array, anchor: Anchor, depth_T: Array, known: DraftVocab | Candidates | None) -> Array:
    """Bans what a grammar forbids from the first drafts; what it forbids later nobody knows before they are drawn."""
    if anchor.mask_BW is None:
        return logits
    vocab_size = logits.shape[-1] if known is None else known.vocab_size
    allowed = unpack_mask(anchor.mask_BW[:, None], vocab_size)
    allowed = allowed if known is None else known.pick(allowed)
    return jnp.where(allowed | (depth_T != 1)[None, :, None], logits, logits + BANNED_DRAFT)
