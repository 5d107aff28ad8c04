"""What every program asks of XLA's GPU compiler reaches it."""

import json

import pytest

from jaxspec.aot import process
from jaxspec.sharding.compiler_options import GPU

pytestmark = pytest.mark.served


def test_no_autotuned_fusions_and_no_softmax_by_triton():
    """XLA would make one Triton kernel of a softmax; see ``compiler_options`` for what is wrong with both."""
    seen = process.run("tests.aot.small_programs:compile_softmax", rows=64, width=1024)
    assert "triton" not in seen["program"].partition("ENTRY")[2]
    for name, value in GPU.items():
        assert f"{name}: {json.dumps(value)}" in seen["options"]
