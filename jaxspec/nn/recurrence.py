"""Layers that carry a state from position to position: their convolution, what runs them, and rollback over a cache."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.addressing import LayerCache, StreamSpec
from jaxspec.cache.row_state import RowState, load_state, state_streams, store_state
from jaxspec.cache.window import Window, segments_of
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.param import Param
from jaxspec.nn.policy import Compute
from jaxspec.nn.recurrent_chunks import run_chunks
from jaxspec.nn.recurrent_steps import Steps, advance, scan
from jaxspec.nn.steady import added_products, silu
from jaxspec.pytree import replace
from jaxspec.shapes import Array
from pallas_kernels.recurrent_steps.api import OP, Counts, Positions, case_name, obstacles, recurrent_steps
from pallas_kernels.select import Choice, choose

OUT = Param("state_out_HCD", ("heads", "head_dim", "embed"), inputs=2)
STEPS = Compute()
CHAIN_ONLY = "its recurrent layers carry one state from position to position, and the branches of a tree need several"


@dataclass(frozen=True)
class RecurrentSpec:
    """Sizes of a recurrence.

    Attributes:
      heads, key_dim, value_dim: H, N and C of the state S [H, N, C]; no heads for a convolution alone.
      channels: that are convolved.
      taps: positions that the convolution spans, 1 for none.
      gates: further numbers of each position that the state depends on.
    """

    heads: int
    key_dim: int
    value_dim: int
    channels: int
    taps: int
    gates: int

    @property
    def streams(self) -> dict[str, StreamSpec]:
        """Returns what it caches."""
        state = (self.heads, self.key_dim, self.value_dim) if self.heads else None
        return state_streams(state, self.channels, self.taps, self.gates)


class RecurrentMixer(ABC):
    """What the specs of all recurrent mixers have in common."""

    chain_only = CHAIN_ONLY
    one_text_only = False

    @property
    @abstractmethod
    def recurrence(self) -> RecurrentSpec:
        """Returns the sizes of its state."""

    @property
    def streams(self) -> dict[str, StreamSpec]:
        """Returns what it caches, by name."""
        return self.recurrence.streams


@dataclass(frozen=True)
class Recurrence:
    """A recurrent layer's weights at work.

    Attributes:
      spec: sizes.
      steps_of: what convolved channels [B, T, C] and gates [B, T, X] do; the identity of a convolution alone.
      conv_C1K: weights of the convolution, the last tap the present position's; None for none.
      conv_bias_C: its bias.
      activated: whether SiLU follows it.
      compute: what computes, and how.
    """

    spec: RecurrentSpec
    steps_of: Callable[[Array, Array], Any]
    conv_C1K: Array | None = None
    conv_bias_C: Array | None = None
    activated: bool = True
    compute: Compute = STEPS

    def steps(self, *parts: tuple[Array, Array | None], segment_BT: Array | None = None) -> Any:
        """Returns what positions do, those of all parts together.

        Args:
          *parts: channels in front of the convolution and gates [B, T, X], and the channels of the J positions before.
          segment_BT: text of each position of the only part.
        """
        raw_BTX = jnp.concatenate([raw_BTX for raw_BTX, _ in parts], axis=1)
        channels, gates = jnp.split(raw_BTX, [self.spec.channels], axis=-1)
        if self.conv_C1K is None:
            return self.steps_of(channels, gates)
        taps, weight_C1K = self.spec.taps, self.conv_C1K.astype(jnp.float32)
        longs = [self._after_tail(*part) for part in parts]
        pairs = []
        for tap in range(taps):
            x = jnp.concatenate([long[:, tap : long.shape[1] - taps + 1 + tap] for long in longs], axis=1)
            if segment_BT is not None:
                earlier = jnp.pad(segment_BT, ((0, 0), (taps - 1, 0)), constant_values=-1)
                same_BT = earlier[:, tap : tap + segment_BT.shape[1]] == segment_BT
                x = jnp.where(same_BT[..., None], x, 0.0)
            pairs.append((x, weight_C1K[:, 0, tap]))
        out = added_products(pairs)
        out = out if self.conv_bias_C is None else out + self.conv_bias_C.astype(jnp.float32)
        return self.steps_of(silu(out) if self.activated else out, gates)

    def _after_tail(self, raw_BTX: Array, tail_BJC: Array | None) -> Array:
        channels_BTC = raw_BTX[..., : self.spec.channels]
        return channels_BTC if tail_BJC is None else jnp.concatenate([tail_BJC, channels_BTC], axis=1)

    def tail(self, raw_BTX: Array, tail_BJC: Array | None, count_B: Array) -> Array | None:
        """Returns the channels of the last J positions once ``count_B`` more are text."""
        if tail_BJC is None:
            return None
        index_BJ = count_B[:, None] + jnp.arange(tail_BJC.shape[1], dtype=jnp.int32)
        long = self._after_tail(raw_BTX, tail_BJC)
        return jnp.take_along_axis(long, index_BJ[..., None], axis=1, mode="promise_in_bounds")


def run_recurrence(raw_BTX: Array, layer: Recurrence, inputs: Inputs) -> tuple[Array, LayerCache | None]:
    """Runs T positions of each row.

    In steps, every position is computed by itself, after the one before, in products that are rounded each: whatever
    else a forward computes, how ever a text is cut into forwards, the same bits come out. In chunks, whole texts and
    those of prompts are computed some positions at a time from a forward's first one on, whose bits depend on that.

    Args:
      raw_BTX: channels in front of the convolution, then gates, float32.
      layer: what they do.
      inputs: positions in rows. Without a cache, whole texts.

    Returns:
      What the state gives [B, T, H, C], or the convolution [B, T, C], and the cache.
    """
    window = inputs.cache_window
    if window is not None:
        return _cached(raw_BTX, layer, inputs.memory, window)
    rows, spec, segment_BT = raw_BTX.shape[0], layer.spec, segments_of(inputs.window)
    tail = jnp.zeros((rows, spec.taps - 1, spec.channels)) if spec.taps > 1 else None
    steps = layer.steps((raw_BTX, tail), segment_BT=segment_BT)
    if not spec.heads:
        return steps, None
    if segment_BT is not None:
        first_BT = jnp.pad(segment_BT[:, 1:] != segment_BT[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        steps = replace(steps, decay_BTHN=jnp.where(first_BT[..., None, None], 0.0, steps.decay_BTHN))
    state, zero = jnp.zeros((rows, spec.heads, spec.key_dim, spec.value_dim)), hidden_zero(inputs.position_BT[:, 0])
    if layer.compute.recurrence == "chunks":
        return run_chunks(state, steps)[1], None
    choice = _choice(layer, state, steps)
    return scan(state, steps, zero)[1] if choice is None else _whole_text(state, steps, zero, choice), None


def hidden_zero(position_B: Array) -> Array:
    """Returns zeros of which no compiler knows it, int32 [B, 1, 1, 1]."""
    return jnp.minimum(position_B, 0)[:, None, None, None]


def _cached(raw_BTX: Array, layer: Recurrence, cache: LayerCache, window: Window) -> tuple[Array, LayerCache]:
    """Brings the state to the first position, runs all, and keeps it where text ends for certain."""
    assert window.path_BTJ is None, CHAIN_ONLY
    before, live_BT, (rows, count) = load_state(cache, window), window.live_BT, raw_BTX.shape[:2]
    replay_B = jnp.clip(window.start_B - before.at_B, 0, before.draft_BWX.shape[1])
    live_B = jnp.ones(rows, bool) if live_BT is None else live_BT[:, 0]
    if not window.committed:
        text_B = live_B.astype(jnp.int32)
    elif live_BT is None:
        text_B = jnp.full(rows, count, jnp.int32)
    else:
        text_B = jnp.sum(live_BT, axis=1, dtype=jnp.int32)
    # A draft's own forward must be computed though it is not text; a row that is not live may give anything.
    kept_B = text_B if window.written is None else jnp.ones_like(text_B)
    tail_BJC = layer.tail(before.draft_BWX, before.tail_BJC, replay_B)
    if before.state_BHNC is None:
        state, out = None, layer.steps((raw_BTX, tail_BJC))
    else:
        steps = layer.steps((before.draft_BWX, before.tail_BJC), (raw_BTX, tail_BJC))
        counts, certain = Counts(replay_B, kept_B, count), count if window.committed else 1
        chunks = layer.compute.recurrence == "chunks" and window.committed
        choice, zero = None if chunks else _choice(layer, before.state_BHNC, steps), hidden_zero(window.start_B)
        if choice is None:
            state, out = _run(before.state_BHNC, steps, counts, certain, zero, chunks=chunks)
        else:
            state, out = recurrent_steps(before.state_BHNC, _positions(steps), counts, implementation=choice)
    at_B = before.at_B + replay_B + text_B
    done = replace(before, at_B=at_B, tail_BJC=layer.tail(raw_BTX, tail_BJC, text_B), state_BHNC=state)
    if window.committed:
        return out, store_state(cache, window, done)
    return out, store_state(cache, window, _with_drafts(before, done, raw_BTX, window, live_B))


def _with_drafts(before: RowState, done: RowState, raw_BTX: Array, window: Window, live_B: Array) -> RowState:
    """Returns the state to keep with what the drafts add that follow it."""
    count = raw_BTX.shape[1]
    if window.written is None:
        assert count - 1 <= before.draft_BWX.shape[1], "the cache was made for fewer drafts"
        return replace(done, draft_BWX=lax.dynamic_update_slice(before.draft_BWX, raw_BTX[:, 1:], (0, 0, 0)))
    assert count == 1, "a chain is drafted one by one"
    place = jnp.maximum(window.written - 1, 0)
    draft_BWX = lax.dynamic_update_slice(before.draft_BWX, raw_BTX, (0, place, 0))
    is_text_B = live_B & (window.written == 0)
    return jax.tree.map(
        lambda new, old: jnp.where(is_text_B.reshape(-1, *[1] * (new.ndim - 1)), new, old),
        replace(done, draft_BWX=draft_BWX), replace(before, draft_BWX=draft_BWX),
    )  # fmt: skip


def _choice(layer: Recurrence, state_BHNC: Array, steps: Steps) -> Choice | None:
    """Returns the kernel that runs a layer, None where XLA does."""
    kernels = layer.compute.whole_kernels
    if kernels not in ("triton", "interpret"):
        return None
    case = case_name(state_BHNC.shape, _positions(steps))
    choice = choose(OP, case, kernels, "cuda", obstacles(layer.spec.key_dim))
    return None if choice.implementation == "xla" else choice


def _positions(steps: Steps) -> Positions:
    return Positions(steps.q_BTGN, steps.k_BTGN, steps.v_BTHC, steps.decay_BTHN, steps.beta_BTH1, steps.skip_BTHC)


def _run(
    state_BHNC: Array, steps: Steps, counts: Counts, certain: int, zero: Array, *, chunks: bool
) -> tuple[Array, Array]:
    """Runs drafts once more, then the positions of a forward.

    Args:
      state_BHNC: S, without the drafts.
      steps: the drafts, then the T positions.
      counts: how many of the drafts became text, and after how many of the T the state is returned.
      certain: how many of the T these are at most.
      zero: see ``rounded``.
      chunks: whether these run in chunks.

    Returns:
      That state, and what each of the T reads [B, T, H, C].
    """
    drafts = steps.v_BTHC.shape[1] - counts.last
    replays, may_be_text, rest = (
        jax.tree.map(lambda x, first=first, end=end: x[:, first:end], steps)
        for first, end in ((0, drafts), (drafts, drafts + certain), (drafts + certain, None))
    )
    replays = replays.only(jnp.arange(drafts, dtype=jnp.int32) < counts.replay_B[:, None])

    def one(t: Array, state_BHNC: Array) -> Array:
        step = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, t, 1, keepdims=False), replays)
        return advance(state_BHNC, step, zero)[0]

    if drafts:
        state_BHNC = lax.fori_loop(0, jnp.max(counts.replay_B), one, state_BHNC)
    is_text_BT = jnp.arange(certain, dtype=jnp.int32) < counts.kept_B[:, None]
    may_be_text = may_be_text.only(is_text_BT)
    state_BHNC, out = run_chunks(state_BHNC, may_be_text) if chunks else scan(state_BHNC, may_be_text, zero)
    if rest.v_BTHC.shape[1]:
        out = jnp.concatenate([out, scan(state_BHNC, rest, zero)[1]], axis=1)
    return state_BHNC, out


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _whole_text(state_BHNC: Array, steps: Steps, zero: Array, choice: Choice) -> Array:
    """Computes what positions read by a kernel, which has no gradient: it is that of ``scan``."""
    count = steps.v_BTHC.shape[1]
    counts = Counts(zero[:, 0, 0, 0], zero[:, 0, 0, 0] + count, count)
    return recurrent_steps(state_BHNC, _positions(steps), counts, implementation=choice)[1]


def _whole_text_fwd(state_BHNC: Array, steps: Steps, zero: Array, choice: Choice):
    return _whole_text(state_BHNC, steps, zero, choice), (state_BHNC, steps, zero)


def _whole_text_bwd(choice: Choice, saved: tuple[Array, Steps, Array], grad_BTHC: Array):
    state_BHNC, steps, zero = saved
    _, transposed = jax.vjp(lambda state, steps: scan(state, steps, zero)[1], state_BHNC, steps)
    return *transposed(grad_BTHC), None


_whole_text.defvjp(_whole_text_fwd, _whole_text_bwd)
