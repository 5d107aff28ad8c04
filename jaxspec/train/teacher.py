"""The frozen target as teacher: runs it over a batch, or takes what it computed earlier."""

import jax
import jax.numpy as jnp

from jaxspec.cache.window import Segments
from jaxspec.models.transformer import Transformer, features_of, forward
from jaxspec.nn.inputs import Inputs
from jaxspec.protocol import CaptureSpec
from jaxspec.shapes import Params
from jaxspec.train.batch import Batch, TeacherOutput


def run_teacher(
    net: Transformer, params: Params, batch: Batch, reads: CaptureSpec, routing: tuple[int, ...] = ()
) -> TeacherOutput:
    """Runs the target over a batch, or takes what it computed earlier; nothing of it is differentiated.

    ``reads`` are the streams that the head reads, ``routing`` the expert layers whose choices it is trained on.
    """
    if batch.cached is not None:
        features = jax.tree.map(lambda x: x.astype(jnp.float32), batch.cached.features)
        experts = tuple(x.astype(jnp.int32) for x in batch.cached.expert_YBTA)
        return jax.lax.stop_gradient(TeacherOutput(features, experts))
    packed = Segments(batch.segment_BT)
    inputs = Inputs(batch.token_BT, batch.position_BT, packed, reads=reads, routes=bool(routing))
    hidden = forward(net, params, inputs)
    chosen = (hidden.routing[net.arch.expert_layers.index(y)].expert_MA for y in routing)
    experts = tuple(x.reshape(*batch.token_BT.shape, -1) for x in chosen)
    return jax.lax.stop_gradient(TeacherOutput(features_of(hidden), experts))
