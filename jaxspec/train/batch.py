"""Texts packed into rows of T tokens, and what the target computed for them."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspec.protocol import Features
from jaxspec.pytree import pytree
from jaxspec.shapes import Array
from jaxspec.sharding.placement import row_axes
from jaxspec.train.settings import TrainSettings


@pytree
class TeacherOutput:
    """What the frozen target computed for a batch: what heads read, and its expert choices in each asked layer.

    Its logits follow from the last hidden states, see ``vocab_loss``.
    """

    features: Features
    expert_YBTA: tuple[Array, ...]


@pytree
class Batch:
    """Texts packed into rows of T tokens.

    Attributes:
      token_BT: int32 ids.
      segment_BT: number of the text that each token belongs to, 0 for padding.
      position_BT: position in its own text.
      loss_BT: whether the token is trained on.
      cached: what the target computed for them earlier, None where it has yet to run.
      row_B: number of each row in its update, None for 0, 1, 2, ...
    """

    token_BT: Array
    segment_BT: Array
    position_BT: Array
    loss_BT: Array
    cached: TeacherOutput | None = None
    row_B: Array | None = None

    def keys(self, key: Array) -> Array:
        """Returns a key for each row [B], whichever other rows are computed with it."""
        row_B = jnp.arange(len(self.token_BT), dtype=jnp.int32) if self.row_B is None else self.row_B
        return jax.vmap(jax.random.fold_in, (None, 0))(key, row_B)


def shift_left(x_BT: Array, by: int) -> Array:
    """Moves entries [B, T, ...] ``by`` positions to the left; the last one repeats at the end."""
    index = jnp.minimum(jnp.arange(x_BT.shape[1], dtype=jnp.int32) + by, x_BT.shape[1] - 1)
    return jnp.take(x_BT, index, axis=1)


def rows_over(mesh: Mesh | None, settings: TrainSettings) -> tuple[str, ...]:
    """Returns the axes of a mesh that rows computed together are split over: ``expert``, too, where it divides them."""
    return () if mesh is None else row_axes(mesh, settings.micro_rows or settings.rows, spread=True)
