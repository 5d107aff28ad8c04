"""Tokens drawn from scores: the best of each node with Gumbel noise, which is a sample of the scores' softmax."""

import jax.numpy as jnp
from jax import lax

from jaxspec.keys import Purpose, gumbel, words_of
from jaxspec.native.draw_call import draw as native_draw
from jaxspec.nn.steady import row_argmax
from jaxspec.nn.threshold import has_kernels
from jaxspec.pytree import pytree, replace, static
from jaxspec.shapes import Array


@pytree
class Noise:
    """Gumbel noise of nodes; see ``gumbel``.

    Attributes:
      key_BX: both words of each row's key.
      position_BT: of the tokens that are drawn.
      warm_B: rows that have noise.
      purpose: of the draw.
    """

    key_BX: Array
    position_BT: Array
    warm_B: Array
    purpose: Purpose = static()

    def at(self, node: int) -> "Noise":
        """Returns that of one node."""
        return replace(self, position_BT=self.position_BT[:, node : node + 1])

    def added_to(self, score_BTV: Array, token: Array | None = None) -> Array:
        """Returns scores with the noise of their tokens, whose ids are [V] or [B, T, V], or places where it is None."""

        def noisy(score_BTV: Array) -> Array:
            tokens = score_BTV.shape[-1] if token is None else token
            noise = gumbel(self.key_BX, self.position_BT, self.purpose, tokens)
            return jnp.where(self.warm_B[:, None, None], score_BTV + noise, score_BTV)

        return lax.cond(jnp.any(self.warm_B), noisy, lambda x: x, score_BTV)

    def draw(self, score_BTV: Array, token: Array | None = None) -> Array:
        """Returns the place of each node's best score with noise, int32 [B, T]; arguments as of ``added_to``.

        On a CPU by a kernel in C, which computes the noise only of tokens that may be the best: its logarithms may
        round otherwise than XLA's.
        """

        def by_xla(score_BTV: Array, token: Array | None) -> Array:
            return row_argmax(self.added_to(score_BTV, token))

        def by_kernel(score_BTV: Array, token: Array | None) -> Array:
            rows, count, width = score_BTV.shape
            # XLA's simplifier goes in circles where it sees that a row's positions are all its length and a constant.
            position_BT = lax.optimization_barrier(jnp.broadcast_to(self.position_BT, (rows, count)))
            first, second = (x.reshape(-1) for x in words_of(self.key_BX, position_BT, self.purpose))
            own = token if token is None or token.ndim == 1 else token.reshape(-1, width)
            score_NV, warm_N = score_BTV.reshape(-1, width), jnp.repeat(self.warm_B, count)
            return native_draw(score_NV, (first, second), warm_N, own).reshape(rows, count)

        on_cpu = by_kernel if has_kernels() else by_xla
        return lax.platform_dependent(score_BTV, token, cpu=on_cpu, default=by_xla)
