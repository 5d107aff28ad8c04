"""Products with packed weights: what their references compute, the same bits for any rows, threads and instructions."""

import ctypes
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.native import product as module
from jaxspec.native.build import instructions, library
from jaxspec.native.packing import Packed, pack
from jaxspec.native.product import kernels, product
from jaxspec.nn.experts import run_packed
from jaxspec.nn.router import Routing
from pallas_kernels.case import Case
from pallas_kernels.few_rows_dense.cases import CASES as DENSE
from pallas_kernels.quantized import Format, Quantized, abstract_quantized, widen
from pallas_kernels.routed_experts.cases import CASES as EXPERTS
from pallas_kernels.weight_cases import abstract_weight, random_weight

pytestmark = pytest.mark.skipif(kernels().handle is None, reason=kernels().reason)

FORMS = ("bfloat16", "float32", "int8", "fp8", "mxfp4")
DEPTH, COLUMNS = 96, 80


def tiny(cases: tuple[Case, ...]) -> list[Any]:
    return [pytest.param(case, id=case.name) for case in cases if case.size == "tiny"]


def weight_of(
    form: str, lead: tuple[int, ...] = (), shape: tuple[int, ...] = (DEPTH, COLUMNS), block: int = 32
) -> Packed:
    return pack(random_weight(jax.random.key(1), abstract_weight(form, lead, shape, block)), lead=len(lead))


def rows_of(count: int, depth: int = DEPTH) -> jax.Array:
    return jax.random.normal(jax.random.key(2), (count, depth), jnp.float32)


def bits(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view(np.uint32)


def assert_close(got: jax.Array, wanted: jax.Array, tolerance: float) -> None:
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape
    assert np.abs(got - wanted).max() <= tolerance * np.abs(wanted).max()


@pytest.mark.parametrize("case", tiny(DENSE))
def test_dense_products_equal_their_references(case: Case):
    x_MD, weights, *bias, layer = arguments = case.random(jax.random.key(7))
    wanted = jax.jit(case.call("xla"))(*arguments)
    if not isinstance(weights, list):
        weights, wanted = [weights], [wanted]
    for w, each in zip(weights, wanted, strict=True):
        out = product(x_MD, pack(w, lead=0 if layer is None else 1), layer=layer)
        out = out if bias == [] or bias[0] is None else out + bias[0].astype(jnp.float32)
        assert_close(out, each, case.tolerance)


@pytest.mark.parametrize("case", tiny(EXPERTS))
def test_experts_equal_their_references(case: Case):
    x_MD, expert_MA, weight_MA, weights, layer = arguments = case.random(jax.random.key(7))
    lead = 1 if layer is None else 2
    experts = {name: w if "bias" in name else pack(w, lead=lead) for name, w in weights.items()}
    shape, routing = case.abstract.__self__, Routing(expert_MA, weight_MA, x_MD)
    out = run_packed(x_MD, routing, experts, shape.activation, shape.dtype, layer)
    assert_close(out, jax.jit(case.call("xla"))(*arguments), case.tolerance)


@pytest.mark.parametrize(
    ("form", "depth", "block"),
    [*((form, DEPTH, 32) for form in FORMS), ("int8", 1100, 0), ("fp8", 320, 128), ("mxfp8", 160, 64)],
)
def test_a_row_does_not_depend_on_how_many_there_are(form: str, depth: int, block: int):
    w, x_MD = weight_of(form, (), (depth, COLUMNS), block), rows_of(130, depth)
    every = bits(product(x_MD, w))
    for first, count in ((0, 1), (7, 2), (3, 3), (0, 12), (50, 31)):
        np.testing.assert_array_equal(bits(product(x_MD[first : first + count], w)), every[first : first + count])


@pytest.mark.parametrize("form", FORMS)
def test_a_chosen_matrix_gives_the_bits_of_its_own_product(form: str):
    w, x_MD = weight_of(form, (2, 3)), rows_of(9)
    expert_MA = jax.random.randint(jax.random.key(3), (9, 2), -1, 4, jnp.int32)
    out_MAN = bits(product(x_MD, w, expert_MA=expert_MA, layer=jnp.int32(1))).reshape(9, 2, COLUMNS)
    for e in range(3):
        one = jax.tree.map(lambda leaf, e=e: leaf[1, e], w)
        chose = np.asarray(expert_MA) == e
        own = np.broadcast_to(bits(product(x_MD, one))[:, None], out_MAN.shape)
        np.testing.assert_array_equal(out_MAN[chose], own[chose])
    none = (np.asarray(expert_MA) < 0) | (np.asarray(expert_MA) > 2)
    assert none.any()
    assert not out_MAN[none].any()


def test_weighted_neighbors_are_rounded_before_they_are_summed():
    w, x_MD = weight_of("bfloat16", (3,)), rows_of(21)
    expert_MA = jax.random.randint(jax.random.key(3), (21, 3), -1, 3, jnp.int32)
    weight_MA = jax.random.uniform(jax.random.key(4), (21, 3), jnp.float32)
    bias_EN = jax.random.normal(jax.random.key(5), (3, COLUMNS), jnp.float32).astype(jnp.bfloat16)
    each = np.asarray(product(x_MD, w, bias_EN, expert_MA=expert_MA)).reshape(21, 3, COLUMNS)
    parts = each * np.asarray(weight_MA)[..., None]
    found = product(x_MD, w, bias_EN, expert_MA=expert_MA, weight_MA=weight_MA)
    np.testing.assert_array_equal(np.asarray(found), (parts[:, 0] + parts[:, 1]) + parts[:, 2])


@pytest.mark.parametrize("form", ["bfloat16", "int8", "fp8", "mxfp4"])
def test_rows_of_float32_are_not_rounded(form: str):
    w = random_weight(jax.random.key(1), abstract_weight(form, (), (DEPTH, COLUMNS), 32))
    exact = np.asarray(rows_of(21), np.float64) @ np.asarray(widen(w), np.float64)
    out = product(rows_of(21), pack(w), dtype=jnp.float32)
    assert np.abs(np.asarray(out) - exact).max() <= 1e-6 * np.abs(exact).max()
    np.testing.assert_array_equal(bits(product(rows_of(2), pack(w), dtype=jnp.float32)), bits(out)[:2])


def test_no_rows():
    w = weight_of("bfloat16", (3,))
    none = jnp.zeros((0, 2), jnp.int32)
    assert product(rows_of(0), w, expert_MA=none).shape == (0, COLUMNS)
    assert product(rows_of(0), w, expert_MA=none, weight_MA=jnp.zeros((0, 2))).shape == (0, COLUMNS)


def computed_by(handle: ctypes.CDLL, name: str, monkeypatch: pytest.MonkeyPatch, form: str) -> np.ndarray:
    """Bits of products by another library."""
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handle.jaxspec_product), platform="cpu")
    with monkeypatch.context() as patch:
        patch.setattr(module, "TARGET", name)
        dense = bits(product(rows_of(70, 224), weight_of(form, (), (224, 80))))
        expert_MA = jax.random.randint(jax.random.key(3), (33, 2), -1, 4, jnp.int32)
        chosen = bits(product(rows_of(33), weight_of(form, (3,)), expert_MA=expert_MA, weight_MA=jnp.ones((33, 2))))
    return np.concatenate([dense.ravel(), chosen.ravel()])


def orders(form: str) -> list[str]:
    """Sets of instructions that add in one order: the matrix unit has its own."""
    return [name for name in instructions() if name != "amx" or form == "float32"]


@pytest.mark.parametrize(("form", "name"), [(form, name) for form in FORMS for name in orders(form)[1:]])
def test_every_set_of_instructions_gives_the_same_bits(name: str, form: str, monkeypatch: pytest.MonkeyPatch):
    if form == "float32" and name == "plain":
        pytest.skip("without fused additions each float32 product is rounded by itself")
    made, first = library(name), library(orders(form)[0])
    assert made.handle is not None, made.reason
    found = computed_by(made.handle, f"jaxspec_{name}_{form}", monkeypatch, form)
    best = computed_by(first.handle, f"jaxspec_best_{name}_{form}", monkeypatch, form)
    np.testing.assert_array_equal(found, best)


def by_blocks_of_32(x_MK: np.ndarray, w_KN: np.ndarray) -> np.ndarray:
    """Computes products as the matrix unit does: even and odd depths apart, 32 at a time."""
    products_KMN = x_MK.T[:, :, None] * w_KN[:, None]  # exact
    total = np.zeros(products_KMN.shape[1:], np.float32)
    for block in range(0, len(w_KN), 32):
        some = products_KMN[block : block + 32]
        parts = np.zeros((2, *total.shape), np.float32)
        for k, product_MN in enumerate(some):
            parts[k % 2] += product_MN
        total += parts[0] + parts[1]
    return total


@pytest.mark.parametrize("depth", [8, 32, 96, 110])
def test_the_matrix_unit_adds_even_and_odd_depths_of_32_apart(depth: int):
    if kernels().instructions != "amx":
        pytest.skip("this CPU has no matrix unit")
    w = jax.random.normal(jax.random.key(1), (depth, COLUMNS), jnp.bfloat16)
    x_MD = np.asarray(rows_of(19, depth).astype(jnp.bfloat16), np.float32)
    np.testing.assert_array_equal(np.asarray(product(x_MD, pack(w))), by_blocks_of_32(x_MD, np.asarray(w, np.float32)))


GROUPS = {
    "one scale for each column": (Format("int8", (1100, 1)), 1100),
    "int8, 128 depths": (Format("int8", (128, 1)), 416),
    "fp8, blocks of 128": (Format("fp8", (128, 128)), 160),
    "fp8, powers of two": (Format("fp8", (64, 64), exponent_scales=True), 160),
    "fp4, powers of two": (Format("fp4", (32, 1), True, -2), 1056),
}


@pytest.mark.parametrize("name", GROUPS)
def test_the_matrix_unit_multiplies_quantized_numbers(name: str):
    if kernels().instructions != "amx":
        pytest.skip("this CPU has no matrix unit")
    how, depth = GROUPS[name]
    w = random_weight(jax.random.key(1), abstract_quantized((depth, COLUMNS), how))
    assert isinstance(w, Quantized)
    packed, x_MD = pack(w), np.asarray(rows_of(19, depth).astype(jnp.bfloat16), np.float32)
    total = np.zeros((19, COLUMNS), np.float32)
    if how.exponent_scales:  # a part of the numbers
        total = by_blocks_of_32(x_MD, np.asarray(w.widen(jnp.float32)))
    else:
        numbers = np.asarray(replace(w, scale=jnp.ones_like(w.scale)).widen(jnp.float32))
        scale_GN = np.moveaxis(np.asarray(packed.scale), 0, 1).reshape(-1, packed.data.shape[0] * 32)[:, :COLUMNS]
        assert len(scale_GN) == -(-depth // how.blocks[0])
        for group, scale_N in enumerate(scale_GN):
            own = slice(group * packed.group, (group + 1) * packed.group)
            total = by_blocks_of_32(x_MD[:, own], numbers[own]) * scale_N + total
    for rows in (1, 2, 3, 19):  # the first two without the unit
        np.testing.assert_array_equal(np.asarray(product(x_MD[:rows], packed)), total[:rows])


def seconds(compute: Callable[..., Any], *arguments: Any) -> float:
    began = time.perf_counter()
    jax.block_until_ready(compute(*arguments))
    return time.perf_counter() - began


@pytest.mark.parametrize("name", [name for name in instructions() if name != "plain"])
def test_products_take_a_few_times_as_long_as_blas(name: str, monkeypatch: pytest.MonkeyPatch):
    """A compiler that does not make vectors of these kernels makes them 20 times as slow and more."""
    made, target = library(name), f"jaxspec_timed_{name}"
    assert made.handle is not None, made.reason
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(made.handle.jaxspec_product), platform="cpu")
    monkeypatch.setattr(module, "TARGET", target)
    rows, dense = np.asarray(rows_of(48, 512)), np.asarray(rows_of(512, 1024))
    for dtype in (jnp.float32, jnp.bfloat16):
        compute, w = jax.jit(lambda x_MD, w: product(x_MD, w)), pack(jnp.asarray(dense, dtype))
        seconds(compute, rows, w)
        times = [(seconds(compute, rows, w), seconds(np.matmul, rows, dense)) for _ in range(20)]
        mine, blas = (min(some) for some in zip(*times, strict=True))
        assert mine < 8 * blas, f"{mine * 1e3:.2f} ms, {blas * 1e3:.2f} by BLAS"


@pytest.mark.parametrize("form", ["bfloat16", "mxfp4"])
def test_one_thread_gives_the_bits_of_two(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    copy = tmp_path / "alone.so"  # a library of its own, which nobody told to make threads
    shutil.copy(kernels().handle._name, copy)
    alone, two = ctypes.CDLL(str(copy)), kernels().handle
    two.jaxspec_threads(2)
    one = computed_by(alone, f"jaxspec_alone_{form}", monkeypatch, form)
    np.testing.assert_array_equal(computed_by(two, f"jaxspec_two_{form}", monkeypatch, form), one)


def test_a_bfloat16_product_has_the_bits_of_xla():
    if "avx512_bf16" not in instructions():
        pytest.skip("XLA computes such products otherwise on this CPU")
    w = random_weight(jax.random.key(1), abstract_weight("bfloat16", (), (DEPTH, COLUMNS)))
    assert not isinstance(w, Quantized)
    dot = jax.jit(lambda x, w: jnp.dot(x.astype(jnp.bfloat16), w, preferred_element_type=jnp.float32))
    np.testing.assert_array_equal(bits(product(rows_of(9), pack(w))), bits(dot(rows_of(9), w)))
