"""Equal layers behind one another in stacked parameters, walked by a loop: one layer's program for any depth."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.addressing import LayerCache
from jaxspec.cache.window import Window
from jaxspec.models.arch import ArchSpec, Segment
from jaxspec.models.block import Block, init_block
from jaxspec.nn.matrix import Matrix
from jaxspec.nn.moe import ROUTED
from jaxspec.nn.policy import Policy
from jaxspec.nn.quantized import Quantized
from jaxspec.pytree import replace
from jaxspec.shapes import Array


def stack_name(segment: Segment, place: int) -> str:
    """Name of the parameters of one place of a segment's pattern."""
    return f"segment_{segment.first + place}"


def stack_of(layer: int, segments: tuple[Segment, ...]) -> tuple[str, int, int]:
    """Name of the stack that holds a layer, the layer's place in it, and the stack's length."""
    segment = next(s for s in segments if layer < s.stop)
    place = (layer - segment.first) % len(segment.pattern)
    return stack_name(segment, place), (layer - segment.first) // len(segment.pattern), segment.repeats


def init_stack(key: Array, segment: Segment, place: int, arch: ArchSpec, policy: Policy) -> Any:
    """Random parameters of one place of a segment's pattern, every leaf with a leading axis of repeats."""
    keys = jax.random.split(key, segment.repeats)
    return lax.map(lambda k: init_block(k, segment.pattern[place], arch, policy), keys)


@dataclass
class Loop:
    """Runs the layers of one segment.

    Attributes:
      segment: pattern and repeats.
      arch, policy: of the model.
      stacks: parameters of each place of the pattern.
      tokens: ids and positions.
      window: of the forward; None without a cache.
      taps: layers whose input is kept.
      shared_outputs: expert layers of which is kept what their shared experts return, see ``Routing.common_MD``.
      routes: whether expert choices are kept.
    """

    segment: Segment
    arch: ArchSpec
    policy: Policy
    stacks: list[Any]
    tokens: tuple[Array, Array]
    window: Window | None
    taps: tuple[int, ...] = ()
    shared_outputs: tuple[int, ...] = ()
    routes: bool = False
    _blocks: list[Block] = field(init=False)

    def __post_init__(self) -> None:
        repeats = self.segment.repeats
        self._blocks = [Block(s, self.arch, self.policy, repeats, parent=None) for s in self.segment.pattern]

    def run(self, x: Array, caches: tuple[LayerCache | None, ...], shared: Array | None):
        """The stream behind the segment, its caches, what is shared, what is kept by layer, and the kept choices."""
        first = self._repeat(jnp.int32(0), x, caches, shared)
        repeats = self.segment.repeats
        routed = jax.tree.map(lambda r: jnp.broadcast_to(r, (repeats, *r.shape)), first[4])
        carry = (*first[:3], first[3], routed)
        if repeats > 1:
            carry = lax.fori_loop(1, repeats, self._body, carry)
        x, caches, shared, kept, routed = carry
        choices = [jax.tree.map(lambda r, y=y: r[y], place) for y in range(repeats) for place in routed]
        return x, caches, shared, kept, choices

    def _body(self, y: Array, carry):
        x, caches, shared, kept, routed = carry
        x, caches, shared, found, choices = self._repeat(y, x, caches, shared)
        kept = {key: jnp.where(self._place(key[1])[0] == y, found[key], old) for key, old in kept.items()}
        routed = jax.tree.map(lambda all_y, one: lax.dynamic_update_index_in_dim(all_y, one, y, 0), routed, choices)
        return x, caches, shared, kept, routed

    def _place(self, layer: int) -> tuple[int, int]:
        """In which repeat a layer is run, and at which place of the pattern."""
        return divmod(layer - self.segment.first, len(self.segment.pattern))

    def _repeat(self, y: Array, x: Array, caches, shared):
        """One run through the pattern, in its y-th place; kept is what each place has to show, by kind and layer."""
        written, kept, choices = [], {}, []
        for place, block in enumerate(self._blocks):
            kept |= {("tap", b): x for b in self.taps if self._place(b)[1] == place}
            window = self.window
            if isinstance(window, Window) and caches[place] is not None:
                pages = jax.tree.leaves(caches[place])[0].shape[0] // self.segment.repeats
                window = replace(window, base=y * jnp.int32(pages), use_scatter=self.policy.compute.kernels == "triton")
            own = _layer(self.stacks[place], y, self.policy)
            out: Any = block.apply({"params": own}, x, *self.tokens, caches[place], window, shared, y)
            x, cache, shared, routing = out
            written.append(cache)
            kept |= {("common", b): routing.common_MD for b in self.shared_outputs if self._place(b)[1] == place}
            choices += [replace(routing, common_MD=None)] if self.routes and routing is not None else []
        return x, tuple(written), shared, kept, tuple(choices)


def _layer(stack: Any, y: Array, policy: Policy) -> Any:
    """One layer's parameters; routed experts stay whole, for a slice of them would be a copy.

    Where kernels compute, everything stays whole until somebody wants it by itself.
    """

    def pick(path: tuple[Any, ...], leaf: Any) -> Any:
        if any(getattr(part, "key", None) in ROUTED for part in path):
            return leaf
        one = Matrix(leaf, y, policy.compute.whole_kernels)
        return one.own() if policy.compute.whole_kernels == "xla" else one

    return jax.tree_util.tree_map_with_path(pick, stack, is_leaf=lambda leaf: isinstance(leaf, Quantized))
