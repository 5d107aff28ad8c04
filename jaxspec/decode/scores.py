"""Log-probabilities of a prompt's own tokens and of the most likely ones, under the target's raw distribution."""

import jax.numpy as jnp
from jax import lax

from jaxspec.decode.prefill import Chunk, read_chunk
from jaxspec.decode.state import DecodeState, Target
from jaxspec.models.transformer import chosen_experts, head
from jaxspec.protocol import Drafter
from jaxspec.pytree import pytree
from jaxspec.shapes import Array
from jaxspec.verify.logprobs import ranked

BLOCK = 64  # positions whose logits exist at a time


@pytree
class Scores:
    """Log-probabilities of the tokens after each position of a chunk.

    Attributes:
      logprob_TL: log-probability of the text's own next token, then of the most likely ones.
      top_TL: rank of the text's own next token from 1, then ids of the most likely ones.
      expert_TYA: expert choices, None unless asked for.
    """

    logprob_TL: Array
    top_TL: Array
    expert_TYA: Array | None = None


def prefill_scored(
    target: Target, drafter: Drafter, state: DecodeState, chunk: Chunk, *, most: int, routes: bool = False
) -> tuple[DecodeState, Scores]:
    """Prefills a chunk and scores its tokens; logits exist for ``BLOCK`` positions at a time.

    Args:
      target: its caches are filled.
      drafter: observes the chunk.
      state: donated.
      chunk: of one prompt.
      most: number of most likely tokens per position.
      routes: whether expert choices are wanted, too.
    """
    state, hidden = read_chunk(target, drafter, state, chunk, routes=routes)
    last_TD, next_T = hidden.last_BTD[0], chunk.token_RX[0, 1:]
    size = min(BLOCK, len(next_T))
    blocks = -(-len(next_T) // size)
    padding = blocks * size - len(next_T)
    last_XTD = jnp.pad(last_TD, ((0, padding), (0, 0))).reshape(blocks, 1, size, -1)
    next_XT = jnp.pad(next_T, (0, padding)).reshape(blocks, 1, size)

    def one(block: tuple[Array, Array]) -> tuple[Array, Array]:
        return ranked(head(target.net, target.params, block[0]), block[1], most)

    logprob, top = lax.map(one, (last_XTD, next_XT))
    logprob, top = (x.reshape(-1, most + 1)[: len(next_T)] for x in (logprob, top))
    expert_TYA = chosen_experts(target.net, hidden, chunk.token_RX[:, :-1])[0] if routes else None
    return state, Scores(logprob, top, expert_TYA)
