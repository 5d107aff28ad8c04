"""Attention for some queries at a time: what scores take of memory grows with the length of a text, not its square."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.shapes import Array

BLOCK = 512  # most queries that are attended for at a time
LEAST = 16
SCORE_BYTES = 1 << 28  # of float32 scores that exist at a time

Attend = Callable[[Any, Any], Array]


def queries_at_once(heads: int, keys: int) -> int:
    """Returns for how many queries, each of so many heads in all rows, scores of so many keys exist at a time."""
    return min(BLOCK, max(LEAST, SCORE_BYTES // (4 * heads * keys)))


def by_blocks(attend: Attend, text: Any, each: Any, size: int, *, one_again: bool = False) -> Array:
    """Attends for ``size`` queries at a time; several blocks are computed again for their gradients.

    Args:
      attend: takes what all queries read and arrays of some queries, and knows no other arrays.
      text: what all queries read.
      each: arrays [B, X, ...] of all queries; B may be 1.
      size: queries of a block.
      one_again: whether a single block is computed again, too.

    Returns:
      What ``attend`` returns of all queries, [B, X, ...].
    """
    count = jax.tree.leaves(each)[0].shape[1]
    if count <= size and not one_again:
        return attend(text, each)
    blocks = -(-count // size)
    size = -(-count // blocks)
    out: Any = _by_blocks(attend, size, text, jax.tree.map(partial(_pad, size=blocks * size), each))
    return out[:, :count]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_blocks(attend: Attend, size: int, text: Any, each: Any) -> Array:
    count = jax.tree.leaves(each)[0].shape[1]
    like = jax.eval_shape(attend, text, _some(each, 0, size))
    # Without the barrier XLA makes the buffers of all layers and rounds at once, and keeps them.
    zeros, each = lax.optimization_barrier((jnp.zeros((like.shape[0], count, *like.shape[2:]), like.dtype), each))

    def visit(n: Array, out: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(out, attend(text, _some(each, n * size, size)), n * size, axis=1)

    return lax.fori_loop(0, count // size, visit, zeros)


def _forward(attend: Attend, size: int, text: Any, each: Any) -> tuple[Array, Any]:
    return _by_blocks(attend, size, text, each), (text, each)


def _backward(attend: Attend, size: int, saved: tuple[Any, Any], grad: Array) -> tuple[Any, Any]:
    text, each = saved
    texts, text_of = _floats(text)
    eaches, _ = _floats(each)

    def visit(n: Array, sums: tuple[list[Array], list[Array]]) -> tuple[list[Array], list[Array]]:
        some, some_of = _floats(_some(each, n * size, size))
        _, pull = jax.vjp(lambda a, b: attend(text_of(a), some_of(b)), texts, some)
        of_text, of_some = pull(_some(grad, n * size, size))
        put = partial(lax.dynamic_update_slice_in_dim, start_index=n * size, axis=1)
        added = [a + b.astype(jnp.float32) for a, b in zip(sums[0], of_text, strict=True)]
        return added, jax.tree.map(put, sums[1], of_some)

    wide = [jnp.zeros(x.shape, jnp.float32) for x in texts]  # sums of as many as there are blocks
    zeros, grad = lax.optimization_barrier(((wide, [jnp.zeros_like(x) for x in eaches]), grad))
    of_texts, of_eaches = lax.fori_loop(0, grad.shape[1] // size, visit, zeros)
    of_texts = [x.astype(like.dtype) for x, like in zip(of_texts, texts, strict=True)]
    return text_of(of_texts, rest=None), _floats(each)[1](of_eaches, rest=None)


_by_blocks.defvjp(_forward, _backward)
_SAME: Any = object()


def _floats(tree: Any) -> tuple[list[Array], Callable[..., Any]]:
    """Returns the float arrays of a tree, and what puts others in their place, beside the rest or ``rest``."""
    leaves, structure = jax.tree.flatten(tree)
    is_float = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]

    def rebuilt(floats: list[Array], rest: Any = _SAME) -> Any:
        given = iter(floats)
        every = [
            next(given) if own else leaf if rest is _SAME else rest for leaf, own in zip(leaves, is_float, strict=True)
        ]
        return jax.tree.unflatten(structure, every)

    return [leaf for leaf, own in zip(leaves, is_float, strict=True) if own], rebuilt


def _some(each: Any, first: Array | int, size: int) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, size, axis=1), each)


def _pad(x_BX: Array, size: int) -> Array:
    extra = size - x_BX.shape[1]
    return jnp.pad(x_BX, [(0, 0), (0, extra), *[(0, 0)] * (x_BX.ndim - 2)]) if extra else x_BX
