"""The frozen target as teacher: what a draft head reads of it, and what it should have predicted."""

import jax
import jax.numpy as jnp

from jaxspec.cache.kv import Packed
from jaxspec.models.arch import ArchSpec
from jaxspec.models.transformer import Transformer, features_of, forward
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.moe import MoeSpec
from jaxspec.protocol import CaptureSpec, Features
from jaxspec.pytree import pytree
from jaxspec.shapes import Array, Params


@pytree
class Taught:
    """What the target computed for a batch, but for its logits, which its last hidden states give again.

    Attributes:
      last_BTD: stream behind the final norm.
      taps, shared_outputs: what ``CaptureSpec`` asked for, one [B, T, D] each.
      expert_YBTA: expert choices in each asked layer.
    """

    last_BTD: Array
    taps: tuple[Array, ...] = ()
    shared_outputs: tuple[Array, ...] = ()
    expert_YBTA: tuple[Array, ...] = ()


@pytree
class Batch:
    """Texts packed into rows of T tokens.

    Attributes:
      token_BT: int32 ids.
      segment_BT: number of the text that each token belongs to, 0 for padding.
      position_BT: place in its own text.
      loss_BT: whether the token is one to learn from.
      taught: what the target computed for them earlier, None where it has yet to run.
      row_B: number of each row in its update, None for 0, 1, 2, ...
    """

    token_BT: Array
    segment_BT: Array
    position_BT: Array
    loss_BT: Array
    taught: Taught | None = None
    row_B: Array | None = None

    def keys(self, key: Array) -> Array:
        """A key for each row [B], whichever other rows are computed with it."""
        row_B = jnp.arange(len(self.token_BT), dtype=jnp.int32) if self.row_B is None else self.row_B
        return jax.vmap(jax.random.fold_in, (None, 0))(key, row_B)


@pytree
class Lesson:
    """What the target computed for a batch; its logits follow from the last hidden states, see ``vocab_loss``.

    Attributes:
      features: what heads read.
      expert_YBTA: its expert choices in each asked layer.
    """

    features: Features
    expert_YBTA: tuple[Array, ...]


def teach(net: Transformer, params: Params, batch: Batch, reads: CaptureSpec, routing: tuple[int, ...] = ()) -> Lesson:
    """Runs the target over a batch, or takes what it computed earlier; nothing of it is differentiated.

    Args:
      net: the target's network.
      params: its parameters.
      batch: packed texts.
      reads: what the head reads.
      routing: expert layers whose choices are wanted.
    """
    if (taught := batch.taught) is None:
        features, chosen = _run(net, params, batch, reads, routing)
    else:
        last, taps, shared_outputs = jax.tree.map(
            lambda x: x.astype(jnp.float32), (taught.last_BTD, taught.taps, taught.shared_outputs)
        )
        # No head reads the stream before the norm, so that none is kept.
        features = Features(last, last[..., :0], taps, shared_outputs)
        chosen = tuple(x.astype(jnp.int32) for x in taught.expert_YBTA)
    return jax.lax.stop_gradient(Lesson(features, chosen))


def compute(
    net: Transformer, params: Params, batch: Batch, reads: CaptureSpec, routing: tuple[int, ...] = ()
) -> Taught:
    """What ``teach`` would compute for a batch, to be kept; arguments as there."""
    features, chosen = _run(net, params, batch, reads, routing)
    return Taught(features.last_BTD, features.taps, features.shared_outputs, chosen)


def _run(
    net: Transformer, params: Params, batch: Batch, reads: CaptureSpec, routing: tuple[int, ...]
) -> tuple[Features, tuple[Array, ...]]:
    """Features, and the expert choices of each asked layer [B, T, A]."""
    packed = Packed(batch.segment_BT)
    inputs = Inputs(batch.token_BT, batch.position_BT, packed, reads=reads, routes=bool(routing))
    hidden = forward(net, params, inputs)
    experts = expert_layers(net.arch)
    chosen = (hidden.routing[experts.index(y)].expert_MA for y in routing)
    return features_of(hidden), tuple(x.reshape(*batch.token_BT.shape, -1) for x in chosen)


def expert_layers(arch: ArchSpec) -> tuple[int, ...]:
    """Numbers of the layers with routed experts."""
    return tuple(y for y, layer in enumerate(arch.layers) if isinstance(layer.ffn, MoeSpec))


def ahead(x_BT: Array, by: int) -> Array:
    """Entries [B, T, ...] that stand ``by`` positions later; the last ones repeat the end."""
    place = jnp.minimum(jnp.arange(x_BT.shape[1], dtype=jnp.int32) + by, x_BT.shape[1] - 1)
    return jnp.take(x_BT, place, axis=1)
