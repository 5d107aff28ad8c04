"""Flags of the engine become arguments of LLM."""

import inspect

import pytest

from jaxspec.cli.engine_flags import EngineFlags
from jaxspec.errors import ConfigError
from jaxspec.serve.llm import LLM


def test_every_flag_is_an_argument_with_the_same_default():
    wanted = {name: p.default for name, p in inspect.signature(LLM.__init__).parameters.items()}
    assert {name: wanted[name] for name in EngineFlags().keywords()} == EngineFlags().keywords()


def test_a_mesh_is_axes_and_sizes():
    assert EngineFlags(mesh="expert=4,tensor=2").keywords()["mesh"] == {"expert": 4, "tensor": 2}
    for wrong in ("4x2", "expert=four", "expert"):
        with pytest.raises(ConfigError, match=f"such as expert=4,tensor=2, got '{wrong}'"):
            EngineFlags(mesh=wrong).keywords()
