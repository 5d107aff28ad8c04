"""Recurrent layers: the same bits however a text is cut, and exact rollback."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.addressing import CacheSize, init_layer
from jaxspec.cache.window import Segments, Window
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.policy import Compute
from jaxspec.nn.recurrence import Recurrence, RecurrentSpec, run_recurrence
from jaxspec.nn.recurrent_steps import Steps
from jaxspec.nn.steady import exp, sigmoid

pytestmark = pytest.mark.served
ROWS, LENGTH, HEADS, GROUPS, KEYS, VALUES, TAPS = 3, 24, 4, 2, 5, 7, 4
FLOAT = jnp.dtype("float32")
SPEC = RecurrentSpec(HEADS, KEYS, VALUES, 2 * GROUPS * KEYS + HEADS * VALUES, TAPS, 2 * HEADS)
DRAFTS = 5


def steps_of(channels_BTX, gates_BTX, *, delta: bool):
    lead, keys = channels_BTX.shape[:2], GROUPS * KEYS
    q, k, v = jnp.split(channels_BTX, [keys, 2 * keys], axis=-1)
    decay, strength = jnp.split(gates_BTX, 2, axis=-1)
    return Steps(
        q.reshape(*lead, GROUPS, KEYS), k.reshape(*lead, GROUPS, KEYS), v.reshape(*lead, HEADS, VALUES),
        exp(-sigmoid(decay))[..., None], sigmoid(strength)[..., None] if delta else None,
    )  # fmt: skip


BY_KERNEL = [pytest.param(f"{rule} by kernel", marks=pytest.mark.slow) for rule in ("delta", "plain")]


@pytest.fixture(scope="module", params=["delta", "plain", "convolution", *BY_KERNEL])
def layer(request: pytest.FixtureRequest) -> Recurrence:
    rng = np.random.default_rng(1)
    conv = jnp.asarray(rng.normal(size=(SPEC.channels, 1, TAPS)), FLOAT)
    if request.param == "convolution":
        spec = RecurrentSpec(0, 0, 0, SPEC.channels, TAPS, SPEC.gates)
        return Recurrence(spec, lambda channels, gates: channels, conv, activated=False)
    rule, _, kernel = request.param.partition(" by ")
    compute = Compute(kernels="interpret" if kernel else "xla")
    return Recurrence(SPEC, partial(steps_of, delta=rule == "delta"), conv, compute=compute)


RAW = np.random.default_rng(0).normal(size=(ROWS, LENGTH, SPEC.channels + SPEC.gates)).astype(np.float32)


class Text:
    """Rows over a cache."""

    def __init__(self, layer: Recurrence, rows: int = ROWS):
        self.layer, self.cache = (
            layer,
            init_layer(layer.spec.streams, CacheSize(rows, 64, LENGTH, drafts=DRAFTS), FLOAT),
        )
        self.run = jax.jit(lambda raw, inputs: run_recurrence(raw, layer, inputs))

    def forward(self, raw, start, **window):
        start_B = jnp.asarray(start, jnp.int32)
        position_BT = start_B[:, None] + jnp.arange(raw.shape[1], dtype=jnp.int32)
        out, self.cache = self.run(raw, Inputs(position_BT, position_BT, Window(start_B, **window), self.cache))
        return np.asarray(out)


@pytest.fixture(scope="module")
def one_by_one(layer: Recurrence) -> np.ndarray:
    text = Text(layer)
    return np.concatenate([text.forward(RAW[:, t : t + 1], [t] * ROWS) for t in range(LENGTH)], axis=1)


def test_a_whole_text_without_a_cache(layer: Recurrence, one_by_one: np.ndarray):
    position_BT = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), (ROWS, LENGTH))
    whole = jax.jit(lambda raw, position_BT: run_recurrence(raw, layer, Inputs(position_BT, position_BT))[0])
    np.testing.assert_array_equal(whole(RAW, position_BT), one_by_one)


@pytest.mark.parametrize("layer", BY_KERNEL, indirect=True)
def test_a_kernel_has_the_gradient_of_the_scan(layer: Recurrence):
    position_BT = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), (ROWS, LENGTH))

    def slope(raw, layer):
        out = run_recurrence(raw, layer, Inputs(position_BT, position_BT))[0]
        return jnp.sum(out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))

    got, wanted = (
        jax.jit(jax.grad(partial(slope, layer=of)))(RAW) for of in (layer, replace(layer, compute=Compute()))
    )
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_a_convolution_of_one_position_is_a_product():
    spec = RecurrentSpec(0, 0, 0, SPEC.channels, 1, SPEC.gates)
    weight = jnp.asarray(np.random.default_rng(3).normal(size=(SPEC.channels, 1, 1)), FLOAT)
    layer = Recurrence(spec, lambda channels, gates: channels, weight, activated=False)
    whole = Text(layer).forward(RAW, [0] * ROWS, committed=True)
    np.testing.assert_allclose(whole, RAW[..., : SPEC.channels] * np.asarray(weight)[:, 0, 0], rtol=1e-6, atol=1e-6)


def test_texts_side_by_side(layer: Recurrence, one_by_one: np.ndarray):
    """Each begins with nothing of the one before it."""
    packed = jnp.concatenate([RAW[:1, :9], RAW[1:2, :6], RAW[2:, :4]], axis=1)
    segment_BT = jnp.asarray([[1] * 9 + [2] * 6 + [3] * 4])
    position_BT = jnp.asarray([[*range(9), *range(6), *range(4)]])
    out, _ = run_recurrence(packed, layer, Inputs(position_BT, position_BT, Segments(segment_BT)))
    wanted = np.concatenate([one_by_one[:1, :9], one_by_one[1:2, :6], one_by_one[2:, :4]], axis=1)
    np.testing.assert_allclose(out, wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize("cuts", [(24,), (7, 1, 16), (5, 5, 5, 5, 4)])
def test_prompts_in_chunks(layer: Recurrence, one_by_one: np.ndarray, cuts: tuple[int, ...]):
    text, out, start = Text(layer), [], 0
    for count in cuts:
        out.append(text.forward(RAW[:, start : start + count], [start] * ROWS, committed=True))
        start += count
    np.testing.assert_array_equal(np.concatenate(out, axis=1), one_by_one)


def test_rejected_drafts_leave_no_trace(layer: Recurrence, one_by_one: np.ndarray):
    """Every row accepts another number of drafts in each step, and those after them are wrong; some steps have none."""
    rng, text, length_B = np.random.default_rng(2), Text(layer), np.zeros(ROWS, np.int32)
    for step in range(40):
        drafts = (DRAFTS, 0, 2)[step % 3]
        right_B = np.minimum(rng.integers(0, drafts + 1, ROWS), LENGTH - 1 - length_B)
        index_BT = np.minimum(length_B[:, None] + np.arange(drafts + 1), LENGTH - 1)
        raw = RAW[np.arange(ROWS)[:, None], index_BT]
        is_wrong = np.arange(drafts + 1) > right_B[:, None]
        raw = np.where(is_wrong[..., None], rng.normal(size=raw.shape), raw).astype(np.float32)
        out = text.forward(raw, length_B, live_BT=jnp.ones(raw.shape[:2], bool))
        for row, (start, right) in enumerate(zip(length_B, right_B, strict=True)):
            np.testing.assert_array_equal(out[row, : right + 1], one_by_one[row, start : start + right + 1])
        length_B = np.minimum(length_B + right_B + 1, LENGTH - 1).astype(np.int32)
        if (length_B == LENGTH - 1).any():
            break
    assert (length_B > DRAFTS).all()


def test_a_chain_that_is_drafted_one_by_one(layer: Recurrence, one_by_one: np.ndarray):
    text, length = Text(layer), 0
    while length + DRAFTS < LENGTH:
        right = length % 3
        for k in range(DRAFTS):
            raw = RAW[:, length + k : length + k + 1] if k <= right else np.full_like(RAW[:, :1], 3.0)
            out = text.forward(raw, [length + k] * ROWS, written=jnp.int32(k))
            if k <= right:
                np.testing.assert_array_equal(out[:, 0], one_by_one[:, length + k])
        length += right + 1


def test_rows_come_and_go(layer: Recurrence, one_by_one: np.ndarray):
    """A row that nothing runs in keeps its state, one that begins again has none, and a stack of layers is apart."""
    text = Text(layer)
    text.forward(RAW[:, :6], [0] * ROWS, committed=True)
    live_BT = jnp.asarray([[True], [False], [True]])
    text.forward(RAW[:, 6:7], [6] * ROWS, live_BT=live_BT)
    again = text.forward(RAW[1:2, 6:9], [6], row_B=jnp.asarray([1]), committed=True)
    np.testing.assert_array_equal(again[0], one_by_one[1, 6:9])
    new = text.forward(
        RAW[1:2, :4], [0], row_B=jnp.asarray([2]), live_BT=jnp.asarray([[True] * 3 + [False]]), committed=True
    )
    np.testing.assert_array_equal(new[0, :3], one_by_one[1, :3])
    last = text.forward(np.stack([RAW[0, 7:8], RAW[1, 9:10], RAW[1, 3:4]]), [7, 9, 3])
    np.testing.assert_array_equal(last[:, 0], [one_by_one[0, 7], one_by_one[1, 9], one_by_one[1, 3]])


def test_layers_of_a_stack_are_apart(layer: Recurrence, one_by_one: np.ndarray):
    layers = 2
    size = CacheSize(ROWS, 64, LENGTH, drafts=DRAFTS)
    cache = init_layer(layer.spec.streams, size, FLOAT, layers=layers)
    run = jax.jit(lambda raw, inputs: run_recurrence(raw, layer, inputs))
    for start in (0, 6):
        for base in (ROWS, 0):
            start_B = jnp.full(ROWS, start, jnp.int32)
            window = Window(start_B, layer=jnp.int32(base))
            position_BT = start_B[:, None] + jnp.arange(6, dtype=jnp.int32)
            raw = RAW[:, start : start + 6] if base else -RAW[:, start : start + 6]
            out, cache = run(raw, Inputs(position_BT, position_BT, window, cache))
            if base:
                np.testing.assert_array_equal(out, one_by_one[:, start : start + 6])
