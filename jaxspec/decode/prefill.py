"""Reads prompts into the caches chunk by chunk, and admits and retires rows."""

from dataclasses import fields

import jax.numpy as jnp

from jaxspec.cache.window import Window
from jaxspec.decode.state import DecodeState, Target
from jaxspec.models.transformer import Hidden, chosen_experts, features_of, forward
from jaxspec.nn.inputs import Inputs
from jaxspec.protocol import Commit, Drafter, Sampling
from jaxspec.pytree import pytree, replace
from jaxspec.shapes import Array


@pytree
class Chunk:
    """A piece of the prompts of R different rows, up to X tokens of each.

    Attributes:
      row_R: int32, the rows.
      token_RX: their tokens and the one after them, then padding up to X + 1; what padding writes lands after the
        prompt and is overwritten later.
      start_R: positions of the first tokens.
      count_R: their numbers; at least one token follows.
      table_RJ: page ids of the rows, None without a page pool.
    """

    row_R: Array
    token_RX: Array
    start_R: Array
    count_R: Array
    table_RJ: Array | None = None


def prefill(target: Target, drafter: Drafter, state: DecodeState, chunk: Chunk) -> DecodeState:
    """Writes a chunk into the target's and the drafter's caches; the state is donated."""
    return read_chunk(target, drafter, state, chunk)[0]


def prefill_routed(target: Target, drafter: Drafter, state: DecodeState, chunk: Chunk) -> tuple[DecodeState, Array]:
    """Does what ``prefill`` does, and returns the experts that the target chose [R, X, Y, A]."""
    state, hidden = read_chunk(target, drafter, state, chunk, routes=True)
    return state, chosen_experts(target.net, hidden, chunk.token_RX[:, :-1])


def read_chunk(
    target: Target, drafter: Drafter, state: DecodeState, chunk: Chunk, *, routes: bool = False
) -> tuple[DecodeState, Hidden]:
    """Does what ``prefill`` does, and returns the hidden states of the chunk's positions, with routes if asked for."""
    token_RX, next_RX, start_R, count_R = chunk.token_RX[:, :-1], chunk.token_RX[:, 1:], chunk.start_R, chunk.count_R
    index_RX = jnp.arange(token_RX.shape[1], dtype=jnp.int32)[None]
    live_RX = index_RX < count_R[:, None]
    window = Window(start_R, chunk.table_RJ, chunk.row_R, live_BT=live_RX, block=target.block, committed=True)
    inputs = Inputs(token_RX, start_R[:, None] + index_RX, window, state.layers, reads=drafter.reads, routes=routes)
    hidden = forward(target.net, target.params, inputs)
    features = features_of(hidden)
    commit = Commit(token_RX, next_RX, features, count_R, start_R, path_BT=None, row_B=chunk.row_R)
    draft = drafter.observe(state.draft, commit)
    # Rows that decode meanwhile write ahead in all rows: in this one from here on, where the next chunk overwrites it.
    length_B = state.length_B.at[chunk.row_R].set(start_R + count_R)
    return replace(state, layers=hidden.caches, draft=draft, length_B=length_B), hidden


def catch_up(drafter: Drafter, state: DecodeState, row: Array, start: Array, count: Array, *, size: int) -> DecodeState:
    """Shows a drafter what a row committed without it: tokens, and features where it kept some.

    Args:
      drafter: observes.
      state: donated.
      row: int32 scalar.
      start: first position that it has not seen.
      count: how many of them are shown.
      size: static, at least ``count``.
    """
    place_X = start + jnp.arange(size + 1, dtype=jnp.int32)
    token_X = jnp.take(state.history_BS[row], place_X, mode="clip")
    features = drafter.replay_features(state.draft, row, place_X[:-1])
    token_BT, next_BT, row_B = token_X[None, :-1], token_X[None, 1:], row[None]
    commit = Commit(token_BT, next_BT, features, count[None], start[None], path_BT=None, row_B=row_B)
    return replace(state, draft=drafter.observe(state.draft, commit))


def remember(drafter: Drafter, state: DecodeState, text_S: Array, count: Array) -> DecodeState:
    """Gives a drafter the text of a request that ended, its first ``count`` tokens; the state is donated."""
    return replace(state, draft=drafter.remember(state.draft, text_S, count))


def admit(
    state: DecodeState,
    row: Array,
    text_S: Array,
    length: Array,
    sampling: Sampling,
    table_J: Array | None,
    bias_V: Array | None = None,
) -> DecodeState:
    """Starts a request in a row whose cache holds all of its text but the last token.

    Args:
      state: donated.
      row: int32 scalar.
      text_S: prompt, and what was generated before a failure, padded to the history's width.
      length: tokens of it, at least 1.
      sampling: settings, arrays of one row.
      table_J: page ids of the row, None without a page pool.
      bias_V: of its logits where its settings say that it is biased.
    """
    place_S, vocab = jnp.arange(text_S.shape[0], dtype=jnp.int32), state.count_BV.shape[1]
    is_prompt_S = place_S < jnp.minimum(length, sampling.prompt_length_B[0])
    prompt_V = jnp.zeros(vocab, bool).at[jnp.where(is_prompt_S, text_S, vocab)].set(True, mode="drop")
    generated_S = jnp.where(~is_prompt_S & (place_S < length), text_S, vocab)
    count_V = jnp.zeros(vocab, jnp.int32).at[generated_S].add(1, mode="drop")
    merged = {
        f.name: getattr(state.sampling, f.name).at[row].set(getattr(sampling, f.name)[0])
        for f in fields(Sampling)  # pyright: ignore[reportArgumentType]
    }
    return replace(
        state,
        table_BJ=state.table_BJ if table_J is None or state.table_BJ is None else state.table_BJ.at[row].set(table_J),
        length_B=state.length_B.at[row].set(length - 1),
        anchor_B=state.anchor_B.at[row].set(text_S[length - 1]),
        history_BS=state.history_BS.at[row].set(text_S),
        count_BV=state.count_BV.at[row].set(count_V),
        prompt_BV=state.prompt_BV.at[row].set(prompt_V),
        bias_BV=state.bias_BV if bias_V is None else state.bias_BV.at[row].set(bias_V),
        sampling=Sampling(**merged),
        active_B=state.active_B.at[row].set(True),
    )


def retire(state: DecodeState, row: Array) -> DecodeState:
    """Frees a row; its settings become neutral, so that it switches no feature on for the others."""
    s = state.sampling
    neutral = {"temperature_B": 0.0, "top_p_B": 1.0, "min_p_B": 0.0, "top_k_B": 0, "repetition_B": 1.0}
    neutral |= {"presence_B": 0.0, "frequency_B": 0.0, "min_length_B": 0, "draft_limit_B": 0, "logprobs_B": -1}
    neutral |= {"biased_B": False, "bad_words_BWL": -1}
    changes = {name: getattr(s, name).at[row].set(value) for name, value in neutral.items()}
    return replace(
        state,
        table_BJ=None if state.table_BJ is None else state.table_BJ.at[row].set(0),
        sampling=replace(s, **changes),
        active_B=state.active_B.at[row].set(False),
        length_B=state.length_B.at[row].set(0),
        anchor_B=state.anchor_B.at[row].set(0),
    )
