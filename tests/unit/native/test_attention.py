"""Attention in C: what the reference gives, the bits of XLA's attention, and no copy of a cache."""

import ctypes
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.addressing import StreamSpec, write
from jaxspec.cache.window import Window
from jaxspec.native import attention_call as native
from jaxspec.native.build import NEEDED, instructions, library
from jaxspec.native.product import kernels
from jaxspec.nn.cached_attention import attend_cached
from jaxspec.nn.dense import has_tiles
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.policy import make_policy
from pallas_kernels.case import Case
from pallas_kernels.verify_attention import cases
from pallas_kernels.verify_attention.cases import CASES, TREE, depths, paths

pytestmark = pytest.mark.skipif(kernels().handle is None, reason=kernels().reason)
TINY = [pytest.param(case, id=case.name) for case in CASES if case.size == "tiny"]
HEADS, GROUPS, LENGTH = 6, 2, 300


def as_promised(
    q, k, v, position, *, scale, dtype, block, implementation, value_width=None, sinks_H=None, span=None, ring=False,
    start_B=None, path_BTJ=None, table_BJ=None, row_B=None, base=None, base_pages=1, prompt=False,
):  # fmt: skip
    """The native kernel, prompts' and steps' alike, with the signature of ``pallas_kernels.verify_attention``."""
    assert (implementation, base_pages) == ("native", 1)
    assert native.obstacles(k, dtype=dtype, block=block) == []
    page_BJ = table_BJ
    if page_BJ is None:
        page_BJ = (jnp.arange(q.shape[0], dtype=jnp.int32) if row_B is None else row_B)[:, None]
    where = native.Where(page_BJ, block, base, span, ring, None, start_B, path_BTJ)
    wide = k.shape[3] if value_width is None else value_width
    return native.attention(q, k, v, position, where, scale=scale, value_width=wide, sinks_H=sinks_H)


@pytest.mark.parametrize("case", TINY)
def test_it_equals_the_reference(case: Case, monkeypatch: pytest.MonkeyPatch):
    arguments = case.random(jax.random.key(7))
    wanted = np.asarray(jax.jit(case.call("xla"))(*arguments))
    monkeypatch.setattr(cases, "verify_attention", as_promised)
    found = np.asarray(jax.jit(case.call("native"))(*arguments))
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= case.tolerance * np.abs(wanted).max()


class Step:
    """T positions of two rows over a cache of blocks of 128, as a layer computes them.

    Attributes:
      arguments: queries, keys, values or None, committed lengths.
    """

    def __init__(self, *, width=64, value_width=0, count=5, span=0, sinks=False, is_tree=False, dtype="bfloat16",
                 block=128, keeps=1.0):  # fmt: skip
        rng = np.random.default_rng(4)
        self.span, self.value_width, self.dtype = span or None, value_width or width, dtype
        self.block, self.count = block, len(TREE) if is_tree else count
        depth_T = depths(TREE) if is_tree else np.arange(self.count, dtype=np.int32)
        start_B = np.array([LENGTH, LENGTH - 190], np.int32)
        self.position_BT = jnp.asarray(start_B[:, None] + depth_T)
        self.path_BTJ = jnp.asarray(paths(TREE))[None] if is_tree else None
        self.heads, self.groups = (HEADS, 1) if value_width else (HEADS, GROUPS)
        shape = (2 * self.count, 1) if is_tree else (2, self.count)
        self.kept_XTS = jnp.asarray(rng.random((*shape, 384)) < keeps) if keeps < 1 else None
        self.stream = StreamSpec(self.groups, width, span - 1 if span else None)
        self.sinks_H = jnp.asarray(rng.normal(size=self.heads), jnp.float32) if sinks else None
        pages = (2, self.groups, 256 if span else 384, width)
        k, v = (self.stored(rng.normal(size=pages)) for _ in range(2))
        q = jnp.asarray(rng.normal(size=(2, self.count, self.heads, width)), jnp.float32)
        self.arguments = q, k, None if value_width else v, jnp.asarray(start_B)

    def stored(self, x: np.ndarray) -> jax.Array:
        narrow = jnp.asarray(x).astype(self.dtype)
        return jax.lax.bitcast_convert_type(narrow, jnp.uint16) if self.dtype == "bfloat16" else narrow

    def program(self, how: str):
        policy = make_policy(self.dtype, kernels=how)

        def compute(q, k, v, start_B):
            window = Window(start_B, path_BTJ=self.path_BTJ, block=self.block)
            inputs = Inputs(self.position_BT, self.position_BT, window, {"k": k}, self.kept_XTS)
            return attend_cached(
                q, (k, v), inputs, self.stream, policy, scale=0.125, span=self.span, value_width=self.value_width,
                sinks=self.sinks_H,
            )  # fmt: skip

        return jax.jit(compute)

    def run(self, how: str) -> np.ndarray:
        return np.asarray(self.program(how)(*self.arguments))


STEPS = {
    "chain": {},
    "one": {"count": 1},
    "prompt": {"count": 70},
    "tree": {"is_tree": True},
    "window-sinks": {"span": 140, "sinks": True, "is_tree": True},
    "latent": {"width": 72, "value_width": 56, "is_tree": True},
    "latent-indexed": {"width": 72, "value_width": 56, "is_tree": True, "keeps": 0.2},
}


@pytest.mark.served
@pytest.mark.parametrize("name", STEPS)
def test_bfloat16_has_the_bits_of_xla(name: str):
    step = Step(**STEPS[name])
    ours, xla = step.run("native"), step.run("xla")
    if has_tiles():  # XLA multiplies by AMX, which adds in another order
        np.testing.assert_allclose(ours.astype(np.float32), xla.astype(np.float32), rtol=2e-2, atol=2e-2)
    else:
        np.testing.assert_array_equal(ours, xla)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_instruction_set_gives_the_same_bits(dtype: str, monkeypatch: pytest.MonkeyPatch):
    step = Step(span=140, sinks=True, is_tree=True, dtype=dtype)
    wanted = step.run("native")
    for name in instructions():
        if name != "plain" or dtype == "bfloat16":  # plain products of float32 round before they add
            take_library(name, monkeypatch)
            np.testing.assert_array_equal(step.run("native"), wanted, err_msg=name)


@pytest.mark.parametrize("name", ["one", "tree", "window-sinks", "latent"])
def test_parts_put_together_have_the_bits_of_a_whole(name: str, monkeypatch: pytest.MonkeyPatch):
    step = Step(**STEPS[name], block=32)
    wanted = step.run("native")
    handle = take_library("plain", monkeypatch)
    handle.jaxspec_threads(9)  # more than there are rows and heads to compute
    np.testing.assert_array_equal(step.run("native"), wanted)


def take_library(name: str, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """Has attention computed by the kernels compiled for an instruction set, which have threads of their own."""
    made, target = library(name), f"jaxspec_attention_{name}"
    assert made.handle is not None, f"{NEEDED[name]}: {made.reason}"
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(made.handle["jaxspec_attention"]), platform="cpu")
    monkeypatch.setattr(native, "TARGET", target)
    return made.handle


def test_a_loop_over_layers_copies_no_cache():
    rows, layers, stream = 2, 3, StreamSpec(GROUPS, 64)
    policy = make_policy("bfloat16", kernels="native")

    @partial(jax.jit, donate_argnums=(0, 1))
    def forward(k, v, x, start_B):
        position_BT = start_B[:, None] + jnp.arange(2, dtype=jnp.int32)

        def layer(y, carry):
            x, k, v = carry
            window = Window(start_B, layer=y * rows)
            k, v = (write(pages, stream, window, x[:, :, :GROUPS]) for pages in (k, v))
            inputs = Inputs(position_BT, position_BT, window, {"k": k})
            return attend_cached(x, (k, v), inputs, stream, policy, scale=0.125), k, v

        return jax.lax.fori_loop(0, layers, layer, (x, k, v))

    pages = jax.ShapeDtypeStruct((layers * rows, GROUPS, 256, 64), jnp.uint16)
    x, start_B = jax.ShapeDtypeStruct((rows, 2, HEADS, 64), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32)
    text = forward.lower(pages, pages, x, start_B).compile().as_text()
    assert native.TARGET in text
    assert re.findall(r"u16\[6,2,256,64\][^ ]* copy\(", text) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cached": "float32"}, "float32 is not read for products of bfloat16"),
        ({"page": 40}, "whole blocks of 64"),
        ({"width": 63}, "two by two"),
    ],
)
def test_obstacles_say_what_stands_in_the_way(changes: dict, words: str):
    def found(width=64, cached="uint16", page=512, **more) -> list[str]:
        pages = jax.ShapeDtypeStruct((1, 1, page, width), jnp.dtype(cached))
        return native.obstacles(pages, dtype=jnp.dtype("bfloat16"), block=64, **more)

    assert found() == []
    (sentence,) = found(**changes)
    assert words in sentence
