"""Options of XLA's GPU compiler: asked for on GPUs alone, and looked up when a program is first called."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec.sharding import compiler_options as options
from jaxspec.sharding.compiler_options import GPU, LazyJit, compiler_options


def test_only_gpus_have_options():
    assert compiler_options("gpu") == compiler_options("cuda") == GPU
    assert compiler_options("cpu") is None
    assert compiler_options() is None, "tests run on a CPU"


def test_they_are_looked_up_by_the_first_call(monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    monkeypatch.setattr(options, "compiler_options", lambda: asked.append(1))
    add = LazyJit(lambda x, y: x + y, static_argnums=1)
    assert asked == []
    assert [int(add(jnp.int32(2), 3)), int(add(jnp.int32(5), 3))] == [5, 8]
    assert asked == [1]
    assert add.program._cache_size() == 1


def test_jax_takes_options_by_program():
    """As a dictionary, on every platform that knows their names."""
    lowered = jax.jit(lambda x: x + 1).lower(jnp.float32(1))
    assert float(lowered.compile({"xla_disable_hlo_passes": "algsimp"})(jnp.float32(1))) == 2
