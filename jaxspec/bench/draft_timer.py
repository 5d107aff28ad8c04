"""Times drafting alone."""

import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.protocol import Anchor, Drafter, DraftState
from jaxspec.pytree import replace
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams
from jaxspec.shapes import Array

PROPOSALS = 16  # drafted per timed call, so that starting the program does not count


def draft_timer(llm: LLM, prompts: Sequence[str], params: SamplingParams) -> Callable[[], float]:
    """Returns a function that times one proposal of all rows, on the state after the prompts."""
    for prompt in prompts:
        llm.submit(prompt, params)
    while llm.engine.reads:
        llm.step(1)
    llm.step(1)  # the drafter is in the middle of a text
    start = jax.tree.map(jnp.copy, (llm.engine.state.draft, llm.engine.state.anchor))
    llm.abort()
    program = jax.jit(propose_often, static_argnums=3).lower(llm.engine.drafter, *start, llm.spec.rule.name).compile()

    def measure() -> float:
        began = time.perf_counter()
        jax.block_until_ready(program(llm.engine.drafter, *start))
        return (time.perf_counter() - began) / PROPOSALS

    measure()
    return measure


def propose_often(drafter: Drafter, draft: DraftState, anchor: Anchor, rule: str) -> Array:
    """Makes ``PROPOSALS`` proposals one after another; to be compiled and timed."""

    def one(_: Array, carry: tuple[DraftState, Array]):
        draft, token_B = carry
        # Each proposal starts from the one before, or XLA would draft once and reuse it.
        moved = replace(anchor, token_B=token_B, length_B=anchor.length_B - (token_B & 1))
        proposal, draft = drafter.propose(draft, moved, rule)
        return draft, jnp.sum(proposal.token_BN, axis=1, dtype=jnp.int32) % 2

    return lax.fori_loop(0, PROPOSALS, one, (draft, anchor.token_B))[1]
