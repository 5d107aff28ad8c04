"""The loss over the vocabulary, a few positions at a time: logits of all positions never exist together."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax

from jaxspec.models.apply import apply
from jaxspec.models.block_head import BlockHead
from jaxspec.models.draft_head import DraftHead
from jaxspec.models.medusa import Medusa
from jaxspec.models.mtp import Mtp
from jaxspec.models.transformer import Transformer
from jaxspec.pytree import pytree, static
from jaxspec.shapes import Array, Params
from jaxspec.train.block_vocab import READS, block_losses
from jaxspec.train.draft_losses import DRAFT_LOSSES, TargetPrediction, target_prediction
from jaxspec.train.objective import HeadObjective, Net

PRODUCTS = ("embed_VD", "head_DV", "head_bias_V", "project_out_DX", "head_DW", "norm")
LOGIT_BYTES = 1 << 28  # what belongs to the positions that are computed at a time where nothing else is asked


@pytree
class VocabTask:
    """What the loss over the vocabulary compares with; entries stand at the position of the token they predict.

    Attributes:
      objective: networks, the target's parameters, draft vocabulary and kind of loss.
      teacher_BTD: the target's last hidden states.
      share_SBT: weight of each position in the loss, by round.
      positions: how many of a row are computed at a time.
    """

    objective: HeadObjective
    teacher_BTD: Array
    share_SBT: Array
    positions: int = static()


def vocab_loss(params: Params, task: VocabTask, last_SBTD: tuple[Array, ...]) -> tuple[Array, Array]:
    """Computes the weighted loss of all rounds, and where a draft is the target's best token, bool [S, B, T].

    ``last_SBTD`` is what the vocabulary product reads, by round. Gradients are computed together with the loss, in the
    same walk over the positions, so the vocabulary product is not computed twice.
    """
    flat: Any = flatten_dict(params["params"])
    held = () if task.objective.vocabulary else PRODUCTS
    trained = {path: x for path, x in flat.items() if _reads(task.objective.net, path[0]) and path[-1] not in held}
    rest = {path: x for path, x in flat.items() if path not in trained}
    return _loss(trained, task, lax.stop_gradient(rest), last_SBTD)


def default_positions(rows: int, length: int, vocab_size: int, draft_vocab: int, rounds: int) -> int:
    """Returns how many positions of a row are computed at a time by default, about as many each time."""
    most = max(1, LOGIT_BYTES // (rows * position_bytes(vocab_size, draft_vocab, rounds)))
    return -(-length // -(-length // most))


def position_bytes(vocab_size: int, draft_vocab: int, rounds: int) -> int:
    """Returns the bytes of one position: the target's logits and distribution, and all rounds' with gradients."""
    return 4 * (3 * vocab_size + 4 * rounds * (draft_vocab or vocab_size))


def _reads(net: Net, name: str) -> bool:
    """Whether the walk over the vocabulary reads a parameter, or parameters of one name, of the trained network."""
    if isinstance(net, Medusa):
        return True
    if isinstance(net, BlockHead):
        return name in READS
    if isinstance(net, DraftHead):
        return name == "head_DW"
    if isinstance(net, Mtp):
        return False
    return name in PRODUCTS


# The loss is one number, so its gradients are those of this walk times the cotangent: computed on the way forward, they
# need neither logits that are kept nor a second vocabulary product. Hits have no gradient.
@jax.custom_vjp
def _loss(trained: Params, task: VocabTask, rest: Params, last_SBTD: tuple[Array, ...]) -> tuple[Array, Array]:
    return _walk(trained, task, rest, last_SBTD, graded=False)[0]


def _forward(trained: Params, task: VocabTask, rest: Params, last_SBTD: tuple[Array, ...]) -> tuple[Any, Any]:
    return _walk(trained, task, rest, last_SBTD, graded=True)


def _backward(grads: Any, given: tuple[Array, Any]) -> tuple[Any, None, None, Any]:
    trained, last_SBTD = jax.tree.map(lambda x: (given[0] * x).astype(x.dtype), grads)
    return trained, None, None, last_SBTD


_loss.defvjp(_forward, _backward)


def _walk(trained: Params, task: VocabTask, rest: Params, last_SBTD: tuple[Array, ...], *, graded: bool):
    """Loss and hits, and where ``graded`` the gradients of the loss by ``trained`` and ``last_SBTD``."""
    o, length, step = task.objective, task.teacher_BTD.shape[1], task.positions
    count = -(-length // step)
    teacher_BTD, lasts = jax.tree.map(partial(_pad, axis=1, size=count * step), (task.teacher_BTD, last_SBTD))
    share_SBT = _pad(task.share_SBT, axis=2, size=count * step)

    def visit(carry: Any, at: Array) -> tuple[Any, None]:
        total, hit_SBT, of_params, lasts = carry
        some = partial(lax.dynamic_slice_in_dim, start_index=at, slice_size=step)
        p = target_prediction(o.target_logits(some(teacher_BTD, axis=1)), o.knows)
        rounds = partial(_rounds, task, rest, p, some(share_SBT, axis=2))
        here = trained, tuple(some(last_BTD, axis=1) for last_BTD in lasts)
        if graded:
            (loss, hit_SBX), (own, x) = jax.value_and_grad(rounds, argnums=(0, 1), has_aux=True)(*here)
            of_params = jax.tree.map(lambda a, b: a + b.astype(a.dtype), of_params, own)
            lasts = tuple(lax.dynamic_update_slice_in_dim(a, b, at, axis=1) for a, b in zip(lasts, x, strict=True))
        else:
            loss, hit_SBX = rounds(*here)
        hit_SBT = lax.dynamic_update_slice(hit_SBT, hit_SBX, (0, 0, at))
        return (total + loss, hit_SBT, of_params, lasts), None

    # Gradients of vectors take their place, one by one.
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), trained) if graded else None
    start = jnp.float32(0), jnp.zeros(share_SBT.shape, bool), zeros, lasts
    (total, hit_SBT, of_params, lasts), _ = lax.scan(visit, start, jnp.arange(count, dtype=jnp.int32) * step)
    if graded:
        of_params = jax.tree.map(lambda x, like: x.astype(like.dtype), of_params, trained)
    return (total, hit_SBT[..., :length]), (of_params, tuple(x[:, :length] for x in lasts))


def _rounds(
    task: VocabTask, rest: Params, p: TargetPrediction, share_SBX: Array, trained: Params, lasts: tuple[Array, ...]
) -> tuple[Array, Array]:
    """Loss of some positions of all rounds, and where each draft is the target's best token."""
    params: Any = {"params": unflatten_dict({**rest, **trained})}
    net, total = task.objective.net, jnp.float32(0)
    if isinstance(net, BlockHead):
        (last_BXD,) = lasts
        loss, hit_BX = _of_block(task, params, net.spec.drafts, p, share_SBX[0], last_BXD)
        return loss, hit_BX[None]
    logits = _logits(task.objective, params, lasts)
    hits = []
    for share_BX, logits_BXV in zip(share_SBX, logits, strict=True):
        loss, hit_BX = _one(task, p, share_BX, logits_BXV)
        total += loss
        hits.append(hit_BX)
    return total, jnp.stack(hits)


def _one(task: VocabTask, p: TargetPrediction, share_BX: Array, logits_BXV: Array) -> tuple[Array, Array]:
    """The same of one round, from its logits."""
    logq = jax.nn.log_softmax(logits_BXV, axis=-1)
    kept = jnp.where(p.knows_BX, share_BX, 0.0) if task.objective.loss.skip_unknown else share_BX
    at_best_BX = jnp.take_along_axis(logq, p.best_BX[..., None], axis=-1)[..., 0]
    hit_BX = (at_best_BX >= jnp.max(logq, axis=-1)) & p.knows_BX  # XLA:CPU finds a maximum much faster than its index
    return jnp.sum(DRAFT_LOSSES[task.objective.loss.kind](p, logq) * kept), hit_BX


def _of_block(task: VocabTask, params: Params, drafts: int, p: TargetPrediction, share_BX: Array, joined_BXY: Array):
    """The same of whole blocks, whose drafts D-PACE (2605.18810) weighs by the tokens that follow from them."""
    loss_BX, hit_BX, label_BX = block_losses(task.objective, params, p, joined_BXY)
    alpha = task.objective.loss.block.pace
    if alpha:
        label_BNK = lax.stop_gradient(label_BX).reshape(len(label_BX), -1, drafts)
        counts_BNK = share_BX.reshape(label_BNK.shape) > 0
        through_BNK = jnp.cumprod(jnp.where(counts_BNK, (1 - alpha) * jnp.exp(label_BNK) + alpha, 1.0), axis=2)
        later_BNK = jnp.cumsum(jnp.where(counts_BNK, through_BNK, 0.0)[..., ::-1], axis=2)[..., ::-1]
        share_BX = share_BX * later_BNK.reshape(share_BX.shape)
    kept_BX = jnp.where(p.knows_BX, share_BX, 0.0) if task.objective.loss.skip_unknown else share_BX
    return jnp.sum(loss_BX * kept_BX), hit_BX


def _logits(objective: HeadObjective, params: Params, lasts: tuple[Array, ...]) -> Iterable[Array]:
    """Returns the trained network's logits by round, with the target's product where it has none of its own.

    Rounds share one product of their own, so its weights are read once, and its gradient is one array.
    """
    net = objective.net
    if isinstance(net, Transformer):
        return objective.model_logits(params, jnp.stack(lasts))
    if isinstance(net, Mtp):
        return [objective.target_logits(x) for x in lasts]
    if isinstance(net, Medusa):
        lasts = tuple(apply(net, params, j, x, method="one") for j, x in enumerate(lasts))
    elif net.spec.draft_vocab:
        return apply(net, params, jnp.stack(lasts), method="logits")
    return lasts if net.spec.draft_vocab else [objective.target_logits(x) for x in lasts]


def _pad(x: Array, *, axis: int, size: int) -> Array:
    extra = size - x.shape[axis]
    return jnp.pad(x, [(0, extra if i == axis else 0) for i in range(x.ndim)]) if extra else x
