"""Compile time does not grow with depth: the biggest models' decode steps trace and lower in a minute, unallocated."""

import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec.checkpoint.load.places import abstract_params
from jaxspec.decode.dispatch import dispatch
from jaxspec.decode.state import Target, init_state
from jaxspec.decode.step import StepPlan
from jaxspec.draft.ngram import Ngram
from jaxspec.models.catalog import arch_of
from jaxspec.models.transformer import Transformer
from jaxspec.nn.policy import make_policy
from jaxspec.protocol import Drafter, NoDrafts
from jaxspec.topology import chain

POLICY = make_policy(depth="stacked")
MOST_S = 60
ROWS, CAPACITY = 8, 8192  # longer than any indexer keeps, so that all of them are in the program
DRAFTERS = {"plain": NoDrafts(), "chain of 4": Ngram(chain(4))}


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    return json.loads(Path(f"configs/models/{name}.json").read_text()) | changes


def lowered(config: dict[str, Any], drafter: Drafter) -> tuple[str, float]:
    """Text of the lowered decode step of a config's model, and the seconds that tracing and lowering took."""
    net = Transformer(arch_of(config), POLICY)
    began = time.monotonic()
    target = Target({"params": abstract_params(net)}, net)
    state = jax.eval_shape(lambda: init_state(target, drafter, ROWS, CAPACITY, slack=256))
    limit, eager = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), bool)
    step = jax.jit(dispatch, static_argnames="plan", donate_argnums=2)
    text = step.lower(target, drafter, state, limit, eager, plan=StepPlan()).as_text()
    return text, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v4-pro", "glm-5.2"])
def test_the_biggest_steps_lower_in_a_minute(name: str, drafter: str):
    text, time_s = lowered(config_of(name), DRAFTERS[drafter])
    assert "stablehlo.while" in text
    assert time_s < MOST_S


@pytest.mark.parametrize("drafter", [pytest.param("plain", marks=pytest.mark.slow), "chain of 4"])
def test_programs_do_not_grow_with_depth(drafter: str):
    shallow, _ = lowered(config_of("deepseek-v3", num_hidden_layers=8), DRAFTERS[drafter])
    deep, _ = lowered(config_of("deepseek-v3"), DRAFTERS[drafter])
    assert len(deep) == pytest.approx(len(shallow), rel=0.01)


@pytest.mark.slow
def test_alternating_layers_do_not_grow_with_depth():
    ratios = config_of("deepseek-v4-flash")["compress_ratios"]
    few = config_of("deepseek-v4-flash", num_hidden_layers=9, compress_ratios=ratios[:9])
    shallow, _ = lowered(few, DRAFTERS["plain"])
    deep, _ = lowered(config_of("deepseek-v4-flash"), DRAFTERS["plain"])
    assert len(deep) == pytest.approx(len(shallow), rel=0.01)
