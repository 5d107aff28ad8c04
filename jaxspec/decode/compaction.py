"""Runs verification at the smallest compiled size that holds all live positions."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.cache.packed_tokens import pack_live
from jaxspec.cache.window import Window, pack, unpack
from jaxspec.decode.state import DecodeState, Target
from jaxspec.models.transformer import Caches, chosen_experts, features_of, forward, head
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.policy import Kernels
from jaxspec.protocol import Drafter, Features
from jaxspec.pytree import pytree, replace
from jaxspec.shapes import Array

FULL, SMALLER = "full_verification", "smaller_verification"  # scopes of the only loops that turn once or never
STEP, GPU_STEP = 8, 128  # positions; with fewer a GPU reads weights longer than it computes (a roofline, not measured)
PRUNED_PARTS, SPARSE_PARTS = 4, 2
IDLE_PARTS = 4, 2  # of all positions, for an engine with more rows than requests


@dataclass(frozen=True)
class Sizes:
    """Sizes that a verification is compiled for besides the full one; each is another copy of the target's program.

    Attributes:
      anchors: whether a step in which too few rows have a draft runs the anchors alone.
      packed: numbers of positions that live ones are packed into, ascending.
    """

    anchors: bool
    packed: tuple[int, ...]

    @classmethod
    def of(cls, target: Target, drafter: Drafter, state: DecodeState) -> "Sizes":
        """Returns the sizes for a drafter that often proposes nothing, or whose drafts are pruned, and for idle rows.

        Idle rows are left out where native kernels compute, for there every position takes time. None on a mesh, whose
        devices have rows of their own and must exchange them alike in every step.
        """
        compute, topology = target.net.policy.compute, drafter.topology
        if not topology.drafts or compute.mesh is not None:
            return cls(False, ())
        if not topology.is_chain:
            return cls(drafter.sparse, ())
        parts = PRUNED_PARTS if state.draft_costs is not None else SPARSE_PARTS if drafter.sparse else 1
        return cls(drafter.sparse, packed_sizes(state.length_B.shape[0], topology.drafts, parts, compute.kernels))


def packed_sizes(rows: int, drafts: int, parts: int, kernels: Kernels = "xla") -> tuple[int, ...]:
    """Returns the anchors plus 1/parts, 2/parts, ... of the drafts, and shares for idle rows, in whole steps.

    Args:
      rows: B.
      drafts: of a row.
      parts: equal parts that all drafts are divided into.
      kernels: what computes.
    """
    step, whole = GPU_STEP if kernels == "triton" else STEP, rows * (drafts + 1)
    wanted = [rows + rows * drafts * part / parts for part in range(1, parts)]
    if kernels == "native" and whole >= IDLE_PARTS[0] * step:
        wanted += [whole / part for part in IDLE_PARTS]
    sizes = {math.ceil(size / step) * step for size in wanted}
    # One that saves less than a step is not worth its program.
    return tuple(sorted(size for size in sizes if size + step <= whole))


@pytree
class Verified:
    """What the target computed for the nodes of a step.

    Attributes:
      logits_BTV: raw logits, float32; anything at nodes that are not live.
      features: what drafters may read, likewise.
      layers: caches with the nodes written.
      window: where they are written.
      live_BT: nodes that were verified.
      drafts_B: usable drafts of each row.
      drafts_ran: bool scalar, false where too few rows had drafts, so that only anchors ran.
      expert_BTYA: expert choices in every expert layer, likewise; None unless the inputs ask for them.
    """

    logits_BTV: Array
    features: Features
    layers: Caches
    window: Window
    live_BT: Array
    drafts_B: Array
    drafts_ran: Array
    expert_BTYA: Array | None


def verify(target: Target, inputs: Inputs, min_rows: Array | int, *, sizes: Sizes) -> Verified:
    """Runs the target over the live nodes of all rows.

    Args:
      target: verifies.
      inputs: nodes, anchors first; the window says which are live.
      min_rows: rows that must have a live draft for drafts to be verified, where ``sizes.anchors``.
      sizes: static.
    """
    window, width = inputs.window, inputs.token_BT.shape[1]
    assert isinstance(window, Window), "verification has caches"
    assert window.live_BT is not None, "the step says which nodes are live"
    live_BT, drafts_ran = window.live_BT, jnp.bool_(True)
    drafts_B = jnp.sum(live_BT[:, 1:], axis=1, dtype=jnp.int32)
    if sizes.anchors:
        drafts_ran = jnp.sum(drafts_B > 0) >= min_rows
        live_BT &= drafts_ran | (jnp.arange(width, dtype=jnp.int32) == 0)

    def run(caches: Caches, nodes: int, packed: int | None) -> tuple[Caches, tuple[Array, Features, Array | None]]:
        part = replace(window, live_BT=live_BT[:, :nodes], path_BTJ=window.path_BTJ if nodes > 1 else None)
        part = part if packed is None else replace(part, packing=pack_live(live_BT, packed))
        token_BX, position_BX = (pack(x[:, :nodes], part) for x in (inputs.token_BT, inputs.position_BT))
        own = replace(inputs, token_BT=token_BX, position_BT=position_BX, window=part, memory=caches)
        hidden = forward(target.net, target.params, own)
        logits = head(target.net, target.params, hidden.last_BTD)

        def widen(x: Array) -> Array:
            return jnp.pad(unpack(x, part), ((0, 0), (0, width - nodes), *[(0, 0)] * (x.ndim - 2)))

        expert_BXYA = chosen_experts(target.net, hidden, token_BX) if inputs.routes else None
        return hidden.caches, jax.tree.map(widen, (logits, features_of(hidden), expert_BXYA))

    variants = [partial(run, nodes=width, packed=size) for size in (*sizes.packed, None)]
    which = jnp.sum(jnp.sum(live_BT) > np.asarray(sizes.packed, np.int32), dtype=jnp.int32)
    if sizes.anchors:
        variants, which = [partial(run, nodes=1, packed=None), *variants], jnp.where(drafts_ran, which + 1, 0)
    layers, (logits_BTV, features, expert_BTYA) = switch_in_place(variants, which, inputs.memory)
    return Verified(logits_BTV, features, layers, window, live_BT, drafts_B, drafts_ran, expert_BTYA)


def switch_in_place(variants: Sequence[Callable[[Any], tuple[Any, Any]]], which: Array, state: Any) -> tuple[Any, Any]:
    """Runs one variant, as a conditional would.

    Args:
      variants: take the state and return a new one with an outcome, all in the same shapes; the widest is the last.
      which: int32 scalar, index of the one to run.
      state: updated in place.
    """
    if len(variants) == 1:
        return variants[0](state)
    _, shapes = jax.eval_shape(variants[0], state)
    done = state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    # Loops that turn once or never: XLA copies every cache that goes through a conditional.
    for index, variant in enumerate(variants):

        def turn(carry: tuple[Array, Any, Any], variant: Any = variant) -> tuple[Array, Any, Any]:
            return jnp.bool_(False), *variant(carry[1])

        with jax.named_scope(FULL if variant is variants[-1] else SMALLER):
            _, *done = lax.while_loop(lambda carry: carry[0], turn, (which == index, *done))
    state, outcome = done
    return state, outcome
