"""Lets the dense model answer questions, many at once."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tokenizers import Tokenizer

from lab.upcycle.network import Array, Sizes, Tree, dense_ffn, norm, project
from lab.upcycle.tokens import asked

STOP = 2
Cache = tuple[Array, Array]


def _layer(layer: Tree, cache: Cache, x_BTD: Array, at: Array, start_B: Array, sizes: Sizes) -> tuple[Array, Cache]:
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
    return x_BTD + dense_ffn(layer, norm(x_BTD, layer["norm2"], sizes.eps)), (keys, values)


def _forward(
    frozen: Tree, caches: Cache, token_BT: Array, at: Array, start_B: Array, sizes: Sizes
) -> tuple[Array, Cache]:
    """Returns the logits after the last token."""

    def layer(x_BTD: Array, part: tuple[Tree, Cache]) -> tuple[Array, Cache]:
        return _layer(*part, x_BTD, at, start_B, sizes)

    x_BTD, caches = lax.scan(layer, frozen["embed"][token_BT], (frozen["layers"], caches))
    last_BD = norm(x_BTD[:, -1], frozen["norm"], sizes.eps)
    return jnp.einsum("bd,vd->bv", last_BD, frozen["embed"], preferred_element_type=jnp.float32), caches


@partial(jax.jit, static_argnames=("sizes", "steps"))
def sample(
    frozen: Tree, prompt_BT: Array, start_B: Array, key: Array, heat: Array, *, sizes: Sizes, steps: int
) -> Array:
    """Returns ``steps`` sampled tokens a row; prompts end at the right, and begin at ``start_B``."""
    b, t = prompt_BT.shape
    shape = (sizes.layers, b, t + steps, sizes.kv_heads, sizes.head_dim)
    empty = jnp.zeros(shape, frozen["embed"].dtype)
    logits, caches = _forward(frozen, (empty, empty), prompt_BT, jnp.int32(0), start_B, sizes)

    def step(carry: tuple[Array, Cache], index: Array) -> tuple[tuple[Array, Cache], Array]:
        logits, caches = carry
        token_B = jax.random.categorical(jax.random.fold_in(key, index), logits / heat)
        return _forward(frozen, caches, token_B[:, None], t + index, start_B, sizes), token_B

    return lax.scan(step, (logits, caches), jnp.arange(steps))[1].T


def answers(
    frozen: Tree, tokenizer: Tokenizer, questions: Sequence[str], sizes: Sizes, *,
    count: int = 1024, prompt: int = 224, steps: int = 256, heat: float = 0.7,
) -> list[np.ndarray]:  # fmt: skip
    """Returns whole chats as tokens; questions that are too long are left out."""
    whole = {name: jnp.concatenate([frozen["lower"][name], frozen["upper"][name]]) for name in frozen["lower"]}
    weights = {"embed": frozen["embed"], "norm": frozen["norm"], "layers": whole}
    ids = [e.ids for e in tokenizer.encode_batch_fast([asked(q) for q in questions], add_special_tokens=False)]
    ids, chats = [i for i in ids if len(i) <= prompt], []
    for first in range(0, len(ids), count):
        part = ids[first : first + count]
        start = [prompt - len(i) for i in part] + [0] * (count - len(part))
        padded = np.zeros((count, prompt), np.int32)
        for row, i in enumerate(part):
            padded[row, start[row] :] = i
        drawn = sample(
            weights, jnp.asarray(padded), jnp.asarray(start, jnp.int32), jax.random.key(first), jnp.float32(heat),
            sizes=sizes, steps=steps,
        )  # fmt: skip
        for i, tokens in zip(part, np.asarray(drawn), strict=False):
            (stops,) = np.nonzero(tokens == STOP)
            kept = tokens[: stops[0] + 1] if len(stops) else tokens
            chats.append(np.asarray([*i, *kept], np.uint16))
    return chats
