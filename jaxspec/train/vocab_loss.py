"""The loss over the vocabulary, a few positions at a time: logits of all positions never exist together."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.models.apply import apply
from jaxspec.models.block_head import BlockHead
from jaxspec.models.draft_head import DraftHead
from jaxspec.models.medusa import Medusa
from jaxspec.models.transformer import Transformer, head
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
    inner: Any = params["params"]
    reads = task.objective.vocabulary
    trained = {name: leaf for name, leaf in inner.items() if reads and _reads(task.objective.net, name)}
    rest = {name: leaf for name, leaf in inner.items() if name not in trained}
    return _loss(trained, task, lax.stop_gradient(rest), last_SBTD)


def default_positions(rows: int, length: int, vocab_size: int, draft_vocab: int, rounds: int) -> int:
    """Returns how many positions of a row are computed at a time by default."""
    return max(1, min(length, LOGIT_BYTES // (rows * position_bytes(vocab_size, draft_vocab, rounds))))


def position_bytes(vocab_size: int, draft_vocab: int, rounds: int) -> int:
    """Returns the bytes of one position: the target's logits and distribution, and all rounds' with gradients."""
    return 4 * (3 * vocab_size + 4 * rounds * (draft_vocab or vocab_size))


def _reads(net: Net, name: str) -> bool:
    """Whether the vocabulary product reads a parameter of the trained network."""
    if isinstance(net, Medusa):
        return True
    if isinstance(net, BlockHead):
        return name in READS
    if isinstance(net, DraftHead):
        return name == "head_DW"
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
        last_BXD = some(teacher_BTD, axis=1)
        p = target_prediction(o.target_logits(last_BXD), o.knows)
        for j, last_BTD in enumerate(lasts):
            one = partial(_one, task, rest, j, p, some(share_SBT[j], axis=1))
            here = trained, some(last_BTD, axis=1)
            if graded:
                (loss, hit_BX), (own, x) = jax.value_and_grad(one, argnums=(0, 1), has_aux=True)(*here)
                of_params = jax.tree.map(lambda a, b: a + b.astype(a.dtype), of_params, own)
                x = lax.dynamic_update_slice_in_dim(last_BTD, x, at, axis=1)
                lasts = (*lasts[:j], x, *lasts[j + 1 :])
            else:
                loss, hit_BX = one(*here)
            total += loss
            hit_SBT = lax.dynamic_update_slice(hit_SBT, hit_BX[None], (j, 0, at))
        return (total, hit_SBT, of_params, lasts), None

    # Gradients of vectors take their place, one by one.
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), trained) if graded else None
    start = jnp.float32(0), jnp.zeros(share_SBT.shape, bool), zeros, lasts
    (total, hit_SBT, of_params, lasts), _ = lax.scan(visit, start, jnp.arange(count, dtype=jnp.int32) * step)
    if graded:
        of_params = jax.tree.map(lambda x, like: x.astype(like.dtype), of_params, trained)
    return (total, hit_SBT[..., :length]), (of_params, tuple(x[:, :length] for x in lasts))


def _one(task: VocabTask, rest: Params, j: int, p: TargetPrediction, share_BX: Array, trained: Params, last_BXD: Array):
    """Loss of some positions of one round, and where the draft is the target's best token."""
    if isinstance(net := task.objective.net, BlockHead):
        return _of_block(task, {"params": {**rest, **trained}}, net.spec.drafts, p, share_BX, last_BXD)
    logq = jax.nn.log_softmax(_logits(task.objective, {"params": {**rest, **trained}}, j, last_BXD), axis=-1)
    kept = jnp.where(p.knows_BX, share_BX, 0.0) if task.objective.loss.skip_unknown else share_BX
    at_best_BX = jnp.take_along_axis(logq, p.best_BX[..., None], axis=-1)[..., 0]
    hit_BX = (at_best_BX >= jnp.max(logq, axis=-1)) & p.knows_BX  # XLA:CPU finds a maximum much faster than its index
    return jnp.sum(DRAFT_LOSSES[task.objective.loss.kind](p, logq) * kept), hit_BX


def _of_block(task: VocabTask, params: Params, drafts: int, p: TargetPrediction, share_BX: Array, joined_BXY: Array):
    """The same of whole blocks, whose drafts D-PACE (2605.18810) weighs by the tokens that follow from them."""
    loss_BX, best_BX, label_BX = block_losses(task.objective, params, p, joined_BXY)
    alpha = task.objective.loss.block.pace
    if alpha:
        label_BNK = lax.stop_gradient(label_BX).reshape(len(label_BX), -1, drafts)
        counts_BNK = share_BX.reshape(label_BNK.shape) > 0
        through_BNK = jnp.cumprod(jnp.where(counts_BNK, (1 - alpha) * jnp.exp(label_BNK) + alpha, 1.0), axis=2)
        later_BNK = jnp.cumsum(jnp.where(counts_BNK, through_BNK, 0.0)[..., ::-1], axis=2)[..., ::-1]
        share_BX = share_BX * later_BNK.reshape(share_BX.shape)
    kept_BX = jnp.where(p.knows_BX, share_BX, 0.0) if task.objective.loss.skip_unknown else share_BX
    return jnp.sum(loss_BX * kept_BX), (best_BX == p.best_BX) & p.knows_BX


def _logits(objective: HeadObjective, params: Params, j: int, last_BXD: Array) -> Array:
    """The trained network's logits, with the target's product where it has none of its own."""
    net = objective.net
    if isinstance(net, Transformer):
        return head(net, params, last_BXD)
    if isinstance(net, Medusa):
        last_BXD = apply(net, params, j, last_BXD, method="one")
        return last_BXD if net.spec.draft_vocab else objective.target_logits(last_BXD)
    if net.spec.draft_vocab:
        return apply(net, params, last_BXD, method="logits")
    return objective.target_logits(last_BXD)


def _pad(x: Array, *, axis: int, size: int) -> Array:
    extra = size - x.shape[axis]
    return jnp.pad(x, [(0, extra if i == axis else 0) for i in range(x.ndim)]) if extra else x
