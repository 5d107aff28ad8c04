"""Rounds of drafting over whole texts: from real features first, then from the head's own output."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.models.apply import apply
from jaxspec.models.draft_head import DraftHead
from jaxspec.models.mtp import Mtp
from jaxspec.models.transformer import Transformer, embed
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.router import Routing
from jaxspec.nn.unrolled import Unrolled
from jaxspec.protocol import Features
from jaxspec.pytree import pytree
from jaxspec.shapes import Array, Params
from jaxspec.train.batch import Batch, shift_left


@pytree
class Round:
    """One round of X slots per row; slot i of round j drafts the token of position i + 2 + j.

    Attributes:
      last_BXD: what the vocabulary product reads.
      next_BXD: what the next draft would continue from.
      slot_BX: i, ascending.
      routing: choices of the head's own experts, of each layer that has some.
    """

    last_BXD: Array
    next_BXD: Array
    slot_BX: Array
    routing: tuple[Routing, ...] = ()


def unroll(
    net: DraftHead | Mtp,
    params: Params,
    target: tuple[Transformer, Params],
    features: Features,
    batch: Batch,
    rounds: int,
    *,
    remat: bool = False,
) -> list[Round]:
    """Training-time test (Li 2025, 2503.01840, section 3.2): every slot drafts ``rounds`` tokens ahead.

    Each round reads the text's own tokens and what the round before returned, and sees the real slots and what the
    same slot drafted, as drafting does. ``target`` embeds where the head has no embedding of its own; ``remat``
    computes each round again for its gradient. Of multi-token prediction the first layer runs in every round (FastMTP,
    Cai 2025, 2509.18362), first on what it joins of the target, see ``Mtp.joins``.
    """
    if isinstance(net, Mtp):
        g_BTD = features.taps[0] if net.joins.taps else features.last_BTD
    else:
        g_BTD = apply(net, params, net.spec.feature(features), method="join")
    memory, done = _memory(net, batch), []
    slot_BT, run = _all_slots(batch), _round(net, target[0], remat=remat)
    for j in range(rounds):
        token_BT = shift_left(batch.token_BT, 1 + j)
        last, g_BTD, memory, routing = run(params, target[1], g_BTD, token_BT, batch.position_BT + j, memory)
        done.append(Round(last, g_BTD, slot_BT, routing))
    return done


def unroll_masked(
    net: DraftHead,
    params: Params,
    target: tuple[Transformer, Params],
    features: Features,
    batch: Batch,
    counts: tuple[int, ...],
    key: Array,
    *,
    remat: bool = False,
) -> list[Round]:
    """Rounds of a head that drafts all tokens in one pass, on masks, from fewer and fewer slots.

    Conditional drop-token sampling (Hui 2026, 2602.01469, section 3.3): the slots of a round are drawn from those of
    the round before, texts' trained slots first, so each has all of its own earlier drafts to see. The head has a mask
    token, ``counts`` are the slots of each round after the first, never growing, and ``key`` draws them; the other
    arguments are those of ``unroll``.
    """
    g_BTD = apply(net, params, net.spec.feature(features), method="join")
    memory, slot_BX, run = _memory(net, batch), _all_slots(batch), _round(net, target[0], remat=remat)
    token_BT = shift_left(batch.token_BT, 1)
    last, following, memory, routing = run(params, target[1], g_BTD, token_BT, batch.position_BT, memory)
    done = [Round(last, following, slot_BX, routing)]
    assert net.spec.mask_token is not None, "only such heads draft in one pass"
    mask = apply(net, params, method="mask")
    for d, (count, one) in enumerate(zip(counts, jax.random.split(key, max(len(counts), 1)), strict=False), start=1):
        weight_BX = jnp.take_along_axis(weights(batch, d), slot_BX, axis=1)
        drawn_BX = jax.vmap(lambda own, width=slot_BX.shape[1]: jax.random.uniform(own, (width,)))(batch.keys(one))
        rank_BX = drawn_BX + weight_BX  # draws are below 1: trained slots come first, at random among themselves
        kept_BX = jnp.sort(jax.lax.top_k(rank_BX, count)[1], axis=1).astype(jnp.int32)
        slot_BX = jnp.take_along_axis(slot_BX, kept_BX, axis=1)
        memory = tuple(m.keep(kept_BX, slot_BX) for m in memory)
        token_BX = jnp.full(slot_BX.shape, net.spec.mask_token, jnp.int32)
        position_BX = jnp.take_along_axis(batch.position_BT, slot_BX, axis=1) + d
        g_BXD = jnp.broadcast_to(mask, (*slot_BX.shape, mask.shape[-1]))
        last, following, memory, routing = run(params, target[1], g_BXD, token_BX, position_BX, memory)
        done.append(Round(last, following, slot_BX, routing))
    return done


def weights(batch: Batch, j: int) -> Array:
    """Returns 1 for slots whose draft of round j is a trained token of the slot's own text, float32 [B, T]."""
    wanted = shift_left(batch.loss_BT, 2 + j) & (shift_left(batch.segment_BT, 2 + j) == batch.segment_BT)
    inside = jnp.arange(batch.token_BT.shape[1]) + 2 + j < batch.token_BT.shape[1]
    return (wanted & inside & (batch.segment_BT > 0)).astype(jnp.float32)


def embedding(net: DraftHead, params: Params, target: tuple[Transformer, Params], token_BT: Array) -> Array:
    """Embeds tokens with the head's own table, or the target's."""
    return apply(net, params, token_BT, method="embed") if net.spec.own_embedding else embed(*target, token_BT)


def _round(net: DraftHead | Mtp, base: Transformer, *, remat: bool) -> Callable[..., Any]:
    """One round of a head."""

    def run(params: Params, frozen: Params, g_BXD: Array, token_BX: Array, position_BX: Array, memory: Any) -> Any:
        if isinstance(net, Mtp):
            inputs = Inputs(token_BX, position_BX, memory=memory[0])
            *vectors, own = apply(net, params, 0, embed(base, frozen, token_BX), g_BXD, inputs)
            return *vectors, (own,), ()
        embedded = embedding(net, params, (base, frozen), token_BX)
        return apply(net, params, embedded, g_BXD, Inputs(token_BX, position_BX, memory=memory), method="routed")

    return jax.checkpoint(run) if remat else run


def _memory(net: DraftHead | Mtp, batch: Batch) -> tuple[Any, ...]:
    layers = net.arch.mtp[:1] if isinstance(net, Mtp) else net.spec.arch.layers
    return tuple(Unrolled(batch.segment_BT) for _ in layers)


def _all_slots(batch: Batch) -> Array:
    slots = jnp.arange(batch.token_BT.shape[1], dtype=jnp.int32)
    return jnp.broadcast_to(slots[None], batch.token_BT.shape)
