"""What every folder of pallas_kernels promises: the same five files, cases, and kernels that equal their references."""

import importlib
import math
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.case import Case
from pallas_kernels.select import SlowKernelWarning

HOUSE = Path(pallas_kernels.__file__).parent
OPS = sorted(file.parent.name for file in HOUSE.glob("*/__init__.py"))
FILES = {"__init__.py", "api.py", "reference.py", "kernel.py", "cases.py"}
CASES = {op: importlib.import_module(f"pallas_kernels.{op}.cases").CASES for op in OPS}
TINY = [(op, case) for op in OPS for case in CASES[op] if case.size == "tiny"]
FIRST = [next(pair for pair in TINY if pair[0] == op) for op in OPS]
MOSAIC = [pair for pair in TINY if pair[1].mosaic]
EVERY = [(op, case) for op in OPS for case in CASES[op]]


def name_of(value: object) -> str:
    return value.name if isinstance(value, Case) else str(value)


def test_all_operations_are_found():
    assert set(OPS) >= {"routed_experts", "grouped_matmul", "verify_attention", "few_rows_dense"}


@pytest.mark.parametrize("op", OPS)
def test_a_folder_has_its_files(op: str):
    found = {file.name for file in (HOUSE / op).glob("*.py")}
    assert {name for name in found if not name.startswith("kernel_")} == FILES
    assert (HOUSE / op / "__init__.py").read_text().count("\n") == 1, "a docstring and nothing else"


@pytest.mark.parametrize("op", OPS)
def test_cases_are_named_apart_and_of_both_sizes(op: str):
    names = [case.name for case in CASES[op]]
    assert len(set(names)) == len(names)
    assert {case.size for case in CASES[op]} == {"tiny", "real"}


@pytest.mark.parametrize(("op", "case"), EVERY, ids=name_of)
def test_random_arguments_have_the_abstract_shapes(op: str, case: Case):
    def described(tree: object) -> list[tuple]:
        return [(leaf.shape, jnp.dtype(leaf.dtype)) for leaf in jax.tree.leaves(tree)]

    made = jax.eval_shape(case.random, jax.eval_shape(lambda: jax.random.key(0)))
    assert jax.tree.structure(made) == jax.tree.structure(case.abstract())
    assert described(made) == described(case.abstract())


@pytest.mark.parametrize(("op", "case"), TINY, ids=name_of)
def test_the_kernel_equals_its_reference(op: str, case: Case):
    arguments = case.random(jax.random.key(7))
    wanted = jax.jit(case.call("xla"))(*arguments)
    assert_close(jax.jit(case.call("interpret"))(*arguments), wanted, case.tolerance)
    if case.read_bytes is not None:
        assert 0 < case.read_bytes(*arguments) <= sum(leaf.nbytes for leaf in jax.tree.leaves(arguments))


@pytest.mark.parametrize(("op", "case"), MOSAIC, ids=name_of)
def test_the_mosaic_kernel_equals_the_reference_and_has_no_race(op: str, case: Case, capfd: pytest.CaptureFixture[str]):
    arguments = case.random(jax.random.key(7))
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowKernelWarning)
        got = jax.jit(case.call("mosaic_interpret"))(*arguments)
    assert_close(got, jax.jit(case.call("xla"))(*arguments), case.tolerance)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(("op", "case"), FIRST, ids=name_of)
def test_the_kernel_runs_outside_of_programs(op: str, case: Case):
    arguments = case.random(jax.random.key(8))
    assert_close(case.call("interpret")(*arguments), jax.jit(case.call("xla"))(*arguments), case.tolerance)


def assert_close(got: object, wanted: object, tolerance: float):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    assert 0 < tolerance <= 2**-6, "a wider one would hide a wrong kernel"
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        scale = np.abs(other).max()
        assert 0 < scale < math.inf
        assert np.abs(one - other).max() <= tolerance * scale
