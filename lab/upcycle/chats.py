"""Lets the dense model, or the mixture, answer questions and go on with texts, many at once."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tokenizers import Tokenizer

from lab.upcycle.network import Array, Sizes, Tree, dense_ffn, norm, project, routed_ffn
from lab.upcycle.tokens import END, asked

STOP = 2
Cache = tuple[Array, Array]


def _layer(
    layer: Tree, experts: Tree | None, cache: Cache, x_BTD: Array, at: Array, start_B: Array, sizes: Sizes
) -> tuple[Array, Cache]:
    """One layer over a cache of all positions, of which a row's own begin at ``start_B``."""
    (b, t, _), groups = x_BTD.shape, sizes.heads // sizes.kv_heads
    position_BT = jnp.broadcast_to(at + jnp.arange(t), (b, t))
    q, k, v = project(layer, norm(x_BTD, layer["norm1"], sizes.eps), position_BT, sizes)
    keys, values = (lax.dynamic_update_slice(c, new, (0, at, 0, 0)) for c, new in zip(cache, (k, v), strict=True))
    q = q.reshape(b, t, sizes.kv_heads, groups, sizes.head_dim)
    score = jnp.einsum("btghc,bsgc->bghts", q, keys, preferred_element_type=jnp.float32) * sizes.head_dim**-0.5
    s = jnp.arange(keys.shape[1])
    seen = (s <= position_BT[:, :, None]) & (s >= start_B[:, None, None])
    weight = jax.nn.softmax(jnp.where(seen[:, None, None], score, -1e30)).astype(x_BTD.dtype)
    mixed = jnp.einsum("bghts,bsgc->btghc", weight, values).reshape(b, t, -1)
    x_BTD = x_BTD + mixed @ layer["o"]
    read = norm(x_BTD, layer["norm2"], sizes.eps)
    out = dense_ffn(layer, read)
    return x_BTD + (out if experts is None else routed_ffn(experts, read, sizes.top_k)[0] + out), (keys, values)


def _forward(
    frozen: Tree, experts: Tree | None, caches: tuple[Cache, Cache], token_BT: Array, at: Array, start_B: Array,
    sizes: Sizes,
) -> tuple[Array, tuple[Cache, Cache]]:  # fmt: skip
    """Returns the logits after the last token."""

    def layer(x_BTD: Array, part: tuple[Tree, Tree | None, Cache]) -> tuple[Array, Cache]:
        return _layer(*part, x_BTD, at, start_B, sizes)

    x_BTD, lower = lax.scan(layer, frozen["embed"][token_BT], (frozen["lower"], None, caches[0]))
    x_BTD, upper = lax.scan(layer, x_BTD, (frozen["upper"], experts, caches[1]))
    last_BD = norm(x_BTD[:, -1], frozen["norm"], sizes.eps)
    return jnp.einsum("bd,vd->bv", last_BD, frozen["embed"], preferred_element_type=jnp.float32), (lower, upper)


@partial(jax.jit, static_argnames=("sizes", "steps"))
def sample(
    frozen: Tree, experts: Tree | None, prompt_BT: Array, start_B: Array, key: Array, heat_B: Array, *,
    sizes: Sizes, steps: int,
) -> Array:  # fmt: skip
    """Returns ``steps`` sampled tokens a row; prompts end at the right, and begin at ``start_B``."""
    b, t = prompt_BT.shape

    def empty(layers: int) -> Cache:
        zeros = jnp.zeros((layers, b, t + steps, sizes.kv_heads, sizes.head_dim), frozen["embed"].dtype)
        return zeros, zeros

    caches = empty(sizes.first), empty(sizes.upper)
    logits, caches = _forward(frozen, experts, caches, prompt_BT, jnp.int32(0), start_B, sizes)

    def step(carry: Any, index: Array) -> tuple[Any, Array]:
        logits, caches = carry
        token_B = jax.random.categorical(jax.random.fold_in(key, index), logits / heat_B[:, None])
        return _forward(frozen, experts, caches, token_B[:, None], t + index, start_B, sizes), token_B

    return lax.scan(step, (logits, caches), jnp.arange(steps))[1].T


def write(
    frozen: Tree, experts: Tree | None, prompts: Sequence[Sequence[int]], sizes: Sizes, *,
    count: int = 512, prompt: int = 224, steps: int = 320, heats: Sequence[float] = (0.7,),
) -> list[np.ndarray]:  # fmt: skip
    """Returns prompts and what follows them as tokens; prompts that are too long are left out.

    Args:
      frozen: the dense model.
      experts: those of the mixture, None for the dense model itself.
      prompts: tokens.
      sizes: of the network.
      count: rows at a time.
      prompt: most tokens of a prompt.
      steps: most tokens after it.
      heats: temperatures, in turn.
    """
    ids, texts = [i for i in prompts if len(i) <= prompt], []
    heat = np.resize(np.maximum(heats, 1e-3), count).astype(np.float32)
    for first in range(0, len(ids), count):
        part = ids[first : first + count]
        start = [prompt - len(i) for i in part] + [0] * (count - len(part))
        padded = np.zeros((count, prompt), np.int32)
        for row, i in enumerate(part):
            padded[row, start[row] :] = i
        drawn = sample(
            frozen, experts, jnp.asarray(padded), jnp.asarray(start, jnp.int32), jax.random.key(first),
            jnp.asarray(heat), sizes=sizes, steps=steps,
        )  # fmt: skip
        for i, tokens in zip(part, np.asarray(drawn), strict=False):
            (stops,) = np.nonzero((tokens == STOP) | (tokens == END))
            answer = tokens[: stops[0] + 1] if len(stops) else tokens
            texts.append(np.asarray([*i, *answer], np.uint16))
    return texts


def asking(tokenizer: Tokenizer, questions: Sequence[str]) -> list[list[int]]:
    """Returns the tokens of chats up to where the model answers."""
    return [e.ids for e in tokenizer.encode_batch_fast([asked(q) for q in questions], add_special_tokens=False)]
