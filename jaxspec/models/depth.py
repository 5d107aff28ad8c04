"""Runs the layers of a model: one after another, or equal ones from stacked parameters in a loop."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.window import Window
from jaxspec.models.arch import ArchSpec, Segment
from jaxspec.models.block import Block, LayerOutput, init_block
from jaxspec.native.packing import Packed
from jaxspec.nn.chosen import Selection
from jaxspec.nn.expert_shards import ROUTED
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.param import LAYERS, as_matrix, declared
from jaxspec.nn.policy import Policy
from jaxspec.nn.router import Routing
from jaxspec.pytree import pytree, replace
from jaxspec.shapes import Array
from pallas_kernels.quantized import Quantized


@pytree
class ForwardState:
    """What a forward has computed up to some layer.

    Attributes:
      x: the stream.
      caches: of the layers so far.
      selection: which positions later layers may reuse.
      taps: the stream entering each tapped layer, by number.
      shared_MD: what the shared experts of each asked layer return, by number.
      routing: choices of the expert layers, if asked for.
    """

    x: Array
    caches: tuple[Any, ...] = ()
    selection: Selection | None = None
    taps: dict[int, Array] = field(default_factory=dict)
    shared_MD: dict[int, Array] = field(default_factory=dict)
    routing: tuple[Routing, ...] = ()

    def then(self, later: "ForwardState") -> "ForwardState":
        """Returns what was computed up to the end of the layers that started from here."""
        return ForwardState(
            later.x,
            self.caches + later.caches,
            later.selection,
            self.taps | later.taps,
            self.shared_MD | later.shared_MD,
            self.routing + later.routing,
        )


def state_after(
    index: Mapping[int, int], entered: list[Array], outs: list[LayerOutput], inputs: Inputs
) -> ForwardState:
    """Collects the outputs of consecutive layers.

    Args:
      index: of each layer, by number, in the lists.
      entered: the stream entering each.
      outs: what each returned.
      inputs: say what is captured.
    """
    routing: list[Any] = [out.routing for out in outs]
    return ForwardState(
        outs[-1].x,
        tuple(out.memory for out in outs),
        outs[-1].selection,
        {layer: entered[index[layer]] for layer in inputs.reads.taps if layer in index},
        {layer: routing[index[layer]].shared_MD for layer in inputs.reads.shared_outputs if layer in index},
        tuple(replace(r, shared_MD=None) for r in routing if r is not None) if inputs.routes else (),
    )


def run_block(block: Block, layer: int, before: ForwardState, inputs: Inputs) -> ForwardState:
    """Runs one layer, whose number is ``layer``."""
    memory = None if inputs.memory is None else inputs.memory[layer]
    out = block(before.x, replace(inputs, memory=memory, selection=before.selection, number=jnp.int32(layer)))
    return state_after({layer: 0}, [before.x], [out], inputs)


def stack_name(segment: Segment, position: int) -> str:
    """Returns the name of the parameters of one position of a segment's pattern."""
    return f"segment_{segment.first + position}"


def stack_of(layer: int, segments: tuple[Segment, ...]) -> tuple[str, int, int]:
    """Returns the name of the stack that holds a layer, the layer's index in it, and the stack's length."""
    segment = next(s for s in segments if layer < s.stop)
    position = (layer - segment.first) % len(segment.pattern)
    return stack_name(segment, position), (layer - segment.first) // len(segment.pattern), segment.repeats


def init_stack(key: Array, segment: Segment, position: int, arch: ArchSpec, policy: Policy) -> Any:
    """Returns random parameters of one position of a segment's pattern, every leaf with a leading axis of repeats."""
    keys = jax.random.split(key, segment.repeats)
    made = lax.map(lambda k: init_block(k, segment.pattern[position], arch, policy), keys)
    return nn.meta.add_axis(made, 0, {nn.PARTITION_NAME: LAYERS})


@dataclass
class Loop:
    """Runs the layers of one segment.

    Attributes:
      segment: pattern and repeats.
      arch, policy: of the model.
      stacks: parameters of each position of the pattern.
      inputs: of the forward, with the caches of this segment: one per position, for all repeats.
    """

    segment: Segment
    arch: ArchSpec
    policy: Policy
    stacks: list[Any]
    inputs: Inputs
    _blocks: list[Block] = field(init=False)
    _traced: Any = field(init=False)

    def __post_init__(self) -> None:
        repeats = self.segment.repeats
        self._blocks = [Block(s, self.arch, self.policy, repeats, parent=None) for s in self.segment.pattern]

    def run(self, before: ForwardState) -> ForwardState:
        """Runs all repeats from the stream and the selection before them."""
        repeats = self.segment.repeats
        caches = (None,) * len(self._blocks) if self.inputs.memory is None else self.inputs.memory
        before = replace(before, caches=caches)
        ropes = (getattr(spec.attention, "rope", None) for spec in self.segment.pattern)
        self.inputs = self.inputs.prepared(*dict.fromkeys(rope for rope in ropes if rope is not None))
        # Traced once for its shapes and for the loop; every operation goes into the program that runs it.
        self._traced = jax.jit(self._repeat, inline=True)
        after: Any = jax.eval_shape(self._traced, jnp.int32(0), _carried(before))
        # Where it gives a selection that there is not before it, the first repeat runs by itself.
        first = int(repeats == 1 or jax.tree.structure(before.selection) != jax.tree.structure(after.selection))
        if first:
            carry = self._traced(jnp.int32(0), _carried(before))
        else:
            zeros = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), after)
            carry = replace(zeros, x=before.x, caches=caches, selection=before.selection)
        routing = jax.tree.map(lambda r: jnp.broadcast_to(r, (repeats, *r.shape)), carry.routing)
        carry = replace(carry, routing=routing)
        if first < repeats:
            carry = lax.fori_loop(first, repeats, self._body, carry)
        each = [jax.tree.map(lambda r, y=y: r[y], routing) for y in range(repeats) for routing in carry.routing]
        return replace(carry, routing=tuple(each))

    def _body(self, y: Array, carry: ForwardState) -> ForwardState:
        new = self._traced(y, _carried(carry))

        def captured(old: dict[int, Array], own: dict[int, Array]) -> dict[int, Array]:
            return {layer: jnp.where(self._index(layer)[0] == y, own[layer], x) for layer, x in old.items()}

        routing = jax.tree.map(
            lambda all_y, one: lax.dynamic_update_index_in_dim(all_y, one, y, 0), carry.routing, new.routing
        )
        taps, shared_MD = captured(carry.taps, new.taps), captured(carry.shared_MD, new.shared_MD)
        return replace(new, taps=taps, shared_MD=shared_MD, routing=routing)

    def _index(self, layer: int) -> tuple[int, int]:
        """Returns the repeat in which a layer runs, and its position in the pattern."""
        return divmod(layer - self.segment.first, len(self.segment.pattern))

    def _repeat(self, y: Array, before: ForwardState) -> ForwardState:
        """Runs the pattern for the y-th time; captures are those of this repeat, whichever layers were asked for."""
        x, selection, entered, outs = before.x, before.selection, [], []
        for place, (stack, block, cache) in enumerate(zip(self.stacks, self._blocks, before.caches, strict=True)):
            window = self.inputs.window
            if isinstance(window, Window) and cache:
                pages = jax.tree.leaves(cache)[0].shape[0] // self.segment.repeats
                window = replace(window, layer=y, layer_pages=pages)
            number = jnp.int32(self.segment.first + place) + y * jnp.int32(len(self._blocks))
            inputs = replace(self.inputs, window=window, memory=cache, selection=selection, number=number)
            out: Any = block.apply({"params": _layer(stack, y, self.policy)}, x, inputs, y)
            entered.append(x)
            outs.append(out)
            x, selection = out.x, out.selection
        layers = range(self.segment.first, self.segment.stop)
        return state_after({layer: self._index(layer)[1] for layer in layers}, entered, outs, self.inputs)


def _carried(state: ForwardState) -> ForwardState:
    """Returns what the next layer reads of a state."""
    return ForwardState(state.x, state.caches, state.selection)


def _layer(stack: Any, y: Array, policy: Policy) -> Any:
    """Returns one layer's parameters; routed experts stay stacked, for a slice of them would be a copy.

    Where kernels compute, every weight stays stacked; ``Matrix.own`` slices one on demand.
    """

    def pick(path: tuple[Any, ...], leaf: Any) -> Any:
        if any(getattr(part, "key", None) in ROUTED for part in path):
            return leaf
        one = as_matrix(leaf, declared(path), policy, y)
        return one.own() if one.kernels == "xla" else one

    return jax.tree_util.tree_map_with_path(pick, stack, is_leaf=lambda leaf: isinstance(leaf, Quantized | Packed))
