"""From raw logits to the scores that are sampled: bans, biases, penalties, temperature, truncation, in vLLM's order."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.native.threshold_call import find_cut
from jaxspec.nn.steady import softmax
from jaxspec.nn.threshold import find_threshold, has_kernels
from jaxspec.protocol import Sampling, Tree, unpack_mask
from jaxspec.pytree import pytree
from jaxspec.shapes import Array

BANNED = -jnp.inf
UNITS = 1 << 30  # of probability


@pytree
class Context:
    """The text so far, for the next token of every node.

    Attributes:
      count_BV: how often each token was generated.
      prompt_BV: whether the prompt contains it.
      token_BT: tokens of the nodes, the anchor first.
      length_B: position of the anchor.
      history_BS: committed tokens, the anchor included at ``length``; None where no row has bad words.
      bias_BV: added to the logits of rows that are biased; None where none is.
      mask_BTW: the tokens that grammars allow after each node, 32 to an unsigned word, the lowest bit first; all bits
        of a row without a grammar are set. None where no row has one.
    """

    count_BV: Array
    prompt_BV: Array
    token_BT: Array
    length_B: Array
    history_BS: Array | None = None
    bias_BV: Array | None = None
    mask_BTW: Array | None = None


def process(logits_BTV: Array, sampling: Sampling, context: Context, tree: Tree) -> Array:
    """Computes scores whose softmax is the distribution that each node's next token is sampled from.

    In the order of vLLM's sampler: tokens that a grammar forbids, that are not allowed and bad words are banned, the
    bias is added, stop ids are banned before the shortest length; then come penalties, temperature and truncation. A
    draft's path counts as text wherever the text matters. Every feature runs only in steps in which some row uses it,
    and leaves the other rows bitwise as they are.

    Args:
      logits_BTV: raw target logits, float32.
      sampling: row settings.
      context: text so far.
      tree: of the nodes.

    Returns:
      float32 [B, T, V]; greedy rows are neither scaled nor truncated.
    """
    s, x = sampling, logits_BTV
    if context.mask_BTW is not None:
        x = jnp.where(unpack_mask(context.mask_BTW, x.shape[-1]), x, BANNED)
    x = ban(x, s, context, tree)
    x = lax.cond(_penalizes(s), lambda x: penalize(x, s, context, tree), lambda x: x, x)
    warm_B = s.temperature_B > 0
    x = jnp.where(warm_B[:, None, None], x / jnp.where(warm_B, s.temperature_B, 1)[:, None, None], x)
    cut_B = warm_B & ((s.top_k_B > 0) | (s.top_p_B < 1) | (s.min_p_B > 0))
    return lax.cond(jnp.any(cut_B), lambda x: jnp.where(cut_B[:, None, None], truncate(x, s), x), lambda x: x, x)


def leaves_as_is(sampling: Sampling, context: Context, tree: Tree) -> Array:
    """Whether ``process`` would return the raw logits and rules add no noise, for every row is greedy and plain."""
    if context.mask_BTW is not None:
        return jnp.bool_(False)
    is_warm = jnp.any(sampling.temperature_B > 0)
    return ~(is_warm | _penalizes(sampling) | _bans(sampling, context, tree))


def _penalizes(s: Sampling) -> Array:
    return jnp.any((s.repetition_B != 1) | (s.presence_B != 0) | (s.frequency_B != 0))


def _early(s: Sampling, context: Context, tree: Tree) -> Array:
    return context.length_B[:, None] + tree.depth_BT + 2 <= s.min_length_B[:, None]


def _bans(s: Sampling, context: Context, tree: Tree) -> Array:
    is_worded_B = jnp.any(s.bad_words_BWL[..., 0] >= 0, axis=1)
    return jnp.any(_early(s, context, tree)) | jnp.any(s.biased_B | is_worded_B)


def ban(x_BTV: Array, s: Sampling, context: Context, tree: Tree) -> Array:
    """Adds biases, and -inf to tokens that are not allowed, end bad words, or stop a text that is too short."""
    early_BT = _early(s, context, tree)

    def apply(x: Array) -> Array:
        if context.history_BS is not None:
            x = _ban_words(x, s, context, tree)
        if context.bias_BV is not None:
            x = jnp.where(s.biased_B[:, None, None], x + context.bias_BV[:, None], x)
        ids_BX = jnp.where(s.stop_BX < 0, x.shape[-1], s.stop_BX)
        stops_BV = jax.vmap(lambda ids: jnp.zeros(x.shape[-1], bool).at[ids].set(True, mode="drop"))(ids_BX)
        return jnp.where(early_BT[..., None] & stops_BV[:, None], BANNED, x)

    # One condition for all three: on a GPU each costs as much as a kernel.
    return lax.cond(_bans(s, context, tree), apply, lambda x: x, x_BTV)


def _ban_words(x_BTV: Array, s: Sampling, context: Context, tree: Tree) -> Array:
    """Bans the last token of a bad word where the generated text, a draft's path included, ends with the rest."""
    history_BS, most = context.history_BS, s.bad_words_BWL.shape[2]
    assert history_BS is not None, "there is a text to look at"
    rows, count, vocab = x_BTV.shape
    rows_B, nodes_T = (jnp.arange(n, dtype=jnp.int32) for n in (rows, count))
    back_L = jnp.arange(most - 1, dtype=jnp.int32)
    depth_BTL = jnp.broadcast_to(tree.depth_BT[..., None] - back_L, (rows, count, most - 1))
    path_BTJ = jnp.broadcast_to(tree.path_BTJ, (rows, count, tree.max_depth + 1))
    node_BTL = jnp.take_along_axis(path_BTJ, jnp.maximum(depth_BTL, 0), axis=2)
    at_BTL = context.length_B[:, None, None] + depth_BTL
    drafts_BTL = context.token_BT[rows_B[:, None, None], node_BTL]
    before_BTL = history_BS[rows_B[:, None, None], jnp.maximum(at_BTL, 0)]
    token_BTL = jnp.where(depth_BTL > 0, drafts_BTL, before_BTL)
    token_BTL = jnp.where(at_BTL >= s.prompt_length_B[:, None, None], token_BTL, -2)  # no part of any word
    last_BW, rest_BWL = s.bad_words_BWL[..., 0], s.bad_words_BWL[..., 1:]
    fits_BTWL = (rest_BWL[:, None] < 0) | (rest_BWL[:, None] == token_BTL[:, :, None])
    ids_BTW = jnp.where(jnp.all(fits_BTWL, axis=3) & (last_BW >= 0)[:, None], last_BW[:, None], vocab)
    return x_BTV.at[rows_B[:, None, None], nodes_T[None, :, None], ids_BTW].set(BANNED, mode="drop")


def penalize(x: Array, s: Sampling, context: Context, tree: Tree) -> Array:
    """Applies repetition (Keskar 2019), frequency and presence penalties; a draft's path counts as generated."""
    count_BTV = context.count_BV[:, None].astype(jnp.float32)
    if tree.nodes > 1:
        draft_N = jnp.arange(1, tree.nodes, dtype=jnp.int32)
        on_path_BTN = jnp.any(tree.path_BTJ[..., None] == draft_N, axis=2).astype(jnp.float32)
        on_path_BTN = jnp.broadcast_to(on_path_BTN, (x.shape[0], *on_path_BTN.shape[1:]))
        drafts_BNV = jax.nn.one_hot(context.token_BT[:, 1:], x.shape[-1], dtype=jnp.float32)
        count_BTV += jnp.einsum("btn,bnv->btv", on_path_BTN, drafts_BNV)
    made = count_BTV > 0
    known = made | context.prompt_BV[:, None]
    factor = jnp.where(known, s.repetition_B[:, None, None], 1.0)
    x = jnp.where(x > 0, x / factor, x * factor)
    return x - s.frequency_B[:, None, None] * count_BTV - s.presence_B[:, None, None] * made.astype(jnp.float32)


def truncate(x: Array, s: Sampling) -> Array:
    """Bans what min-p, then top-k, then top-p (Holtzman 2020) leave out; the best token always stays.

    Top-k keeps scores from the k-th largest on, top-p those than which better ones have less than ``top_p`` of the
    probability; equal scores stay or go together. Probabilities are rounded to units of 2^-30, so that a sum is the
    same in any order; it is off by half a unit per token at most, 7e-5 for 150,000 tokens, and by 1e-7 as a rule.
    """
    on_cpu = truncate_by_kernel if has_kernels() else truncate_by_search
    return lax.platform_dependent(x, s, cpu=on_cpu, default=truncate_by_search)


def truncate_by_kernel(x: Array, s: Sampling) -> Array:
    """As ``truncate``, for CPUs with the kernels in C: one pass over each node's scores finds what goes."""
    rows, count, vocab = x.shape
    of_node = (jnp.repeat(own_B, count) for own_B in (_floor(s), s.top_k_B, jnp.where(s.top_p_B < 1, _units(s), 0)))
    cut_BT1 = find_cut(x.reshape(-1, vocab), *of_node).reshape(rows, count, 1)
    return jnp.where(x < cut_BT1, BANNED, x)


def truncate_by_search(x: Array, s: Sampling) -> Array:
    """As ``truncate``, by XLA."""
    best = jnp.max(x, axis=-1, keepdims=True)
    x = jnp.where(x < best + _floor(s)[:, None, None], BANNED, x)
    x = lax.cond(jnp.any(s.top_k_B > 0), lambda x: _keep_top_k(x, s.top_k_B), lambda x: x, x)
    return lax.cond(jnp.any(s.top_p_B < 1), lambda x: _keep_top_p(x, s), lambda x: x, x)


def _floor(s: Sampling) -> Array:
    return jnp.where(s.min_p_B > 0, jnp.log(jnp.maximum(s.min_p_B, np.finfo(np.float32).tiny)), -jnp.inf)


def _units(s: Sampling) -> Array:
    return jnp.ceil(s.top_p_B * UNITS).astype(jnp.int32)


def _keep_top_k(x: Array, top_k_B: Array) -> Array:
    least_BT = jnp.broadcast_to(jnp.where(top_k_B > 0, top_k_B, x.shape[-1])[:, None], x.shape[:-1])
    return jnp.where(x < find_threshold(x, jnp.ones_like(x, jnp.int32), least_BT)[..., None], BANNED, x)


def _keep_top_p(x: Array, s: Sampling) -> Array:
    share = jnp.round(softmax(x) * UNITS).astype(jnp.int32)
    least_BT = jnp.broadcast_to(_units(s)[:, None], x.shape[:-1])
    is_out = x < find_threshold(x, share, least_BT)[..., None]
    return jnp.where(is_out & (s.top_p_B < 1)[:, None, None], BANNED, x)
