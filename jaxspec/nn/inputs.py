"""The record of a forward pass: what every layer reads besides the stream, and what an attention layer returns."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.cache.window import AnyWindow, Window, take_outputs, unpack
from jaxspec.nn.chosen import Selection
from jaxspec.nn.policy import Compute
from jaxspec.nn.rope import RopeSpec, angles
from jaxspec.protocol import NO_CAPTURE, CaptureSpec
from jaxspec.pytree import pytree, replace, static
from jaxspec.shapes import Array


@pytree
class Inputs:
    """T positions of B rows.

    Attributes:
      token_BT: int32 token ids.
      position_BT: int32 absolute positions (a tree node's is start + depth).
      window: where caches are written and what is seen; without caches, the texts that a row holds.
      memory: one entry per layer, as ``init_caches`` lays them out, or inside a layer its own: a cache, or ``Unrolled``
        for a head in training. None attends within the T positions alone.
      selection: inside a layer, the positions that an earlier layer's indexer kept.
      number: inside a layer, its number in the model, int32 where equal layers run in a loop.
      reads: what is captured of the layers.
      routes: whether the expert choices of every layer are captured.
      rotations, angles, live_M: what ``prepared`` has computed of these positions.
    """

    token_BT: Array
    position_BT: Array
    window: AnyWindow = None
    memory: Any = None
    selection: Selection | None = None
    number: Any = None
    reads: CaptureSpec = static(default=NO_CAPTURE)
    routes: bool = static(default=False)
    rotations: tuple[RopeSpec, ...] = static(default=())
    angles: tuple[tuple[Array, Array], ...] = ()
    live_M: Array | None = None

    def prepared(self, *specs: RopeSpec) -> "Inputs":
        """Returns the inputs with what layers in a loop need not compute again: angles, and ``counted`` positions."""
        turned = replace(self, rotations=specs, angles=tuple(angles(self.position_BT, spec) for spec in specs))
        return replace(turned, live_M=turned.counted)

    @property
    def counted(self) -> Array | None:
        """Whether each position counts, int32 [M] for kernels; None where all do."""
        if self.live_M is not None or self.window is None or self.window.valid is None:
            return self.live_M
        return self.window.valid.reshape(-1).astype(jnp.int32)

    def rotation(self, spec: RopeSpec) -> tuple[Array, Array]:
        """Returns the angles of a rotation by these positions."""
        if spec in self.rotations:
            return self.angles[self.rotations.index(spec)]
        return angles(self.position_BT, spec)

    @property
    def zero_BT1(self) -> Array:
        """Zeros of which a compiler does not know that they are, for ``rounded``."""
        return jnp.minimum(self.position_BT, 0)[..., None]

    @property
    def cache_window(self) -> Window | None:
        """The window where there is a cache to write and to read."""
        return self.window if isinstance(self.window, Window) and isinstance(self.memory, dict) else None

    def written_by(self, compute: Compute) -> "Inputs":
        """Returns the inputs with caches written as ``compute`` wants them."""
        return replace(self, window=written_by(self.window, compute)) if isinstance(self.window, Window) else self

    def unpack(self) -> "Inputs":
        """Returns the inputs with positions as [B, T], which caches are addressed by."""
        return replace(self, position_BT=unpack(self.position_BT, self.window), rotations=(), angles=())

    def of_outputs(self) -> "Inputs":
        """Returns the inputs of the positions whose output is computed, to read with after all T are written."""
        if not isinstance(self.window, Window) or self.window.output_index_B is None:
            return self
        token_BT, position_BT = take_outputs(self.token_BT, self.window), take_outputs(self.position_BT, self.window)
        selection = jax.tree.map(lambda x: take_outputs(x, self.window), self.selection)
        window = self.window.after_write
        own = replace(self, rotations=(), angles=(), live_M=None)
        return replace(own, token_BT=token_BT, position_BT=position_BT, selection=selection, window=window)


def written_by(window: Window, compute: Compute) -> Window:
    """Returns the window with rows written one by one, all at once as a GPU wants it, or where each lies."""
    use_scatter = compute.kernels in ("triton", "interpret")
    return replace(window, use_scatter=use_scatter, rows_sharded=compute.splits_rows)


class Mixed(NamedTuple):
    """What an attention layer returns.

    Attributes:
      out_BTD: its output at the positions asked for; a ``PartialSum`` where that was asked for.
      memory: with the T positions in it.
      selection: what it lets later layers see, None for all.
    """

    out_BTD: Any
    memory: Any
    selection: Selection | None = None
