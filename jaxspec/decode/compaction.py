"""Runs verification at the smallest compiled size that holds all live positions."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.cache.packed_tokens import pack_live
from jaxspec.cache.window import Window, pack, unpack
from jaxspec.decode.state import DecodeState, Target
from jaxspec.models.transformer import Caches, features_of, forward, head
from jaxspec.nn.inputs import Inputs
from jaxspec.protocol import CaptureSpec, Drafter, Features
from jaxspec.pytree import pytree, replace
from jaxspec.shapes import Array

FULL, SMALLER = "full_verification", "smaller_verification"  # scopes of the only loops that turn once or never
STEP, GPU_STEP = 8, 128  # positions; with fewer a GPU reads weights longer than it computes (a roofline, not measured)
PRUNED_PARTS, SPARSE_PARTS = 4, 2


@dataclass(frozen=True)
class Sizes:
    """Sizes that a verification is compiled for besides the full one; each is another copy of the target's program.

    Attributes:
      anchors: whether a step in which too few rows have a draft runs the anchors alone.
      packed: numbers of positions that live ones are packed into, ascending.
      routes: whether expert choices are returned, which leaves the full size alone.
    """

    anchors: bool
    packed: tuple[int, ...]
    routes: bool

    @classmethod
    def of(cls, target: Target, drafter: Drafter, state: DecodeState, *, routes: bool) -> "Sizes":
        """Returns the sizes for a drafter that often proposes nothing, or whose drafts are pruned.

        None on a mesh, whose devices have rows of their own and must exchange them alike in every step.
        """
        compute, topology = target.net.policy.compute, drafter.topology
        if not topology.drafts or routes or compute.mesh is not None:
            return cls(False, (), routes)
        if not topology.is_chain:
            return cls(drafter.sparse, (), routes)
        parts = PRUNED_PARTS if state.draft_costs is not None else SPARSE_PARTS if drafter.sparse else 1
        sizes = packed_sizes(state.length_B.shape[0], topology.drafts, parts, compute.kernels == "triton")
        return cls(drafter.sparse, sizes, routes)


def packed_sizes(rows: int, drafts: int, parts: int, on_gpu: bool = False) -> tuple[int, ...]:
    """Returns the anchors plus 1/parts, 2/parts, ... of the drafts, rounded up to whole steps.

    Args:
      rows: B.
      drafts: of a row.
      parts: equal parts that all drafts are divided into.
      on_gpu: whether steps are a GPU's.
    """
    step = GPU_STEP if on_gpu else STEP
    sizes = {math.ceil((rows + rows * drafts * part / parts) / step) * step for part in range(1, parts)}
    # One that saves less than a step is not worth its program.
    return tuple(sorted(size for size in sizes if size + step <= rows * (drafts + 1)))


@pytree
class Verified:
    """What the target computed for the nodes of a step.

    Attributes:
      logits_BTV: raw logits, float32; anything at nodes that are not live.
      features: what drafters may read, likewise.
      layers: caches with the nodes written.
      live_BT: nodes that were verified.
      drafts: bool scalar, false where too few rows had drafts, so that only anchors ran.
      routing: expert choices of each layer, empty unless ``Sizes.routes``.
    """

    logits_BTV: Array
    features: Features
    layers: Caches
    live_BT: Array
    drafts: Array
    routing: Any


def verify(
    target: Target, layers: Caches, token_BT: Array, position_BT: Array, window: Window, min_rows: Array | int,
    *, sizes: Sizes, reads: CaptureSpec,
) -> Verified:  # fmt: skip
    """Runs the target over the live nodes of all rows.

    Args:
      target: its caches are written.
      layers: caches.
      token_BT: tokens of the nodes, anchors first.
      position_BT: their positions.
      window: where they are written, what they see, and which are live.
      min_rows: rows that must have a live draft for drafts to be verified, where ``sizes.anchors``.
      sizes: static.
      reads: what the drafter reads besides last hidden states.
    """
    live_BT, drafts = window.live_BT, jnp.bool_(True)
    assert live_BT is not None, "the step says which nodes are live"
    if sizes.anchors:
        drafts = jnp.sum(jnp.any(live_BT[:, 1:], axis=1)) >= min_rows
        live_BT &= drafts | (jnp.arange(live_BT.shape[1], dtype=jnp.int32) == 0)
    which = jnp.sum(jnp.sum(live_BT) > np.asarray(sizes.packed, np.int32), dtype=jnp.int32)

    def run(layers: Caches, width: int, packed: int | None) -> tuple[Caches, tuple[Array, Features, Any]]:
        part = replace(window, live_BT=live_BT[:, :width], path_BTJ=window.path_BTJ if width > 1 else None)
        part = part if packed is None else replace(part, packing=pack_live(live_BT, packed))
        token_BX, position_BX = (pack(x[:, :width], part) for x in (token_BT, position_BT))
        inputs = Inputs(token_BX, position_BX, part, layers, reads=reads, routes=sizes.routes)
        hidden = forward(target.net, target.params, inputs)
        logits = head(target.net, target.params, hidden.last_BTD)
        missing = token_BT.shape[1] - width

        def pad(x: Array) -> Array:
            return jnp.pad(unpack(x, part), ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)))

        return hidden.caches, (
            *jax.tree.map(pad, (logits, features_of(hidden))),
            hidden.routing if sizes.routes else (),
        )

    widths: list[tuple[int, int | None]] = [(token_BT.shape[1], size) for size in (*sizes.packed, None)]
    if sizes.anchors:
        widths, which = [(1, None), *widths], jnp.where(drafts, which + 1, 0)
    variants = [lambda layers, size=size: run(layers, *size) for size in widths]
    layers, (logits_BTV, features, routing) = switch_in_place(variants, which, layers)
    return Verified(logits_BTV, features, layers, live_BT, drafts, routing)


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
