"""Acceptance of a head on held-out prompts, measured by the step that serves."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.decode.prefill import admit, prefill
from jaxspec.decode.state import DecodeState, Target, init_sampling, init_state
from jaxspec.decode.step import TAIL, StepPlan, dispatch
from jaxspec.protocol import Drafter
from jaxspec.pytree import replace
from jaxspec.shapes import Array
from jaxspec.sharding.placement import allocate, mesh_of, settle, state_rules, state_shardings

BUCKET, STEPS = 64, 8
RULES = state_rules(("data",), own_pages=True)


def _prefill(mesh: Mesh | None, target: Target, drafter: Drafter, state: DecodeState, *rest: Any) -> DecodeState:
    return _stay(prefill(target, drafter, state, *rest), mesh)


def _admit(mesh: Mesh | None, state: DecodeState, *rest: Any) -> DecodeState:
    return _stay(admit(state, *rest), mesh)


def _dispatch(
    mesh: Mesh | None, plan: StepPlan, target: Target, drafter: Drafter, state: DecodeState
) -> tuple[DecodeState, Array]:
    state, report = dispatch(target, drafter, state, jnp.int32(plan.steps), jnp.array(False), plan=plan)
    packed_BX = report.packed_BX
    if mesh is not None:  # the host of every process reads it
        packed_BX = jax.lax.with_sharding_constraint(packed_BX, NamedSharding(mesh, PartitionSpec()))
    return _stay(state, mesh), packed_BX


def _stay(state: DecodeState, mesh: Mesh | None) -> DecodeState:
    """A state where it was allocated; left to the compiler, it would move."""
    return state if mesh is None else jax.lax.with_sharding_constraint(state, state_shardings(state, mesh, RULES))


# Of the module, so that trials of all temperatures and updates share them.
PREFILL = jax.jit(_prefill, static_argnums=0, donate_argnums=3)
ADMIT = jax.jit(_admit, static_argnums=0, donate_argnums=1)
DISPATCH = jax.jit(_dispatch, static_argnums=(0, 1), donate_argnums=4)


@dataclass(frozen=True)
class EvalSpec:
    """What is generated to measure acceptance.

    Attributes:
      tokens: generated per prompt.
      temperature: 0 is greedy.
      rows: prompts at a time.
      rule: of verification.
      seed: of the sampling.
      stop: token ids that end a text.
    """

    tokens: int = 96
    temperature: float = 0.0
    rows: int = 8
    rule: str = "match"
    seed: int = 0
    stop: tuple[int, ...] = ()


@dataclass(frozen=True)
class Acceptance:
    """What verification accepted.

    Attributes:
      length: tokens committed per verification, bonus token included.
      survival: share of verifications whose first 1, 2, ... K drafts were all accepted.
      verifications: how many there were; those that met the end of a text are left out.
      counts: accepted drafts of each verification, by prompt.
    """

    length: float
    survival: tuple[float, ...]
    verifications: int
    counts: tuple[tuple[int, ...], ...]


class AcceptanceEvaluator:
    """Runs prompts through the compiled step; other parameters of a drafter and temperatures recompile nothing."""

    def __init__(self, target: Target, prompts: Sequence[Sequence[int]], spec: EvalSpec):
        """Keeps what is generated from.

        Args:
          target: verifies.
          prompts: token ids.
          spec: how.
        """
        self.mesh = mesh_of(target.params)
        self.target, self.prompts = settle(target, self.mesh), [np.asarray(p, np.int32) for p in prompts]
        over = 1 if self.mesh is None else self.mesh.shape["data"]
        self.spec = replace(spec, rows=-(-spec.rows // over) * over)

    def measure(self, drafter: Drafter) -> Acceptance:
        """Acceptance over all prompts."""
        drafter = settle(drafter, self.mesh)
        counts: list[tuple[int, ...]] = []
        for first in range(0, len(self.prompts), self.spec.rows):
            counts += self._group(drafter, first)
        flat = np.array([n for row in counts for n in row], np.int64)
        depth = np.arange(1, drafter.topology.max_depth + 1)
        if not len(flat):
            return Acceptance(float("nan"), (float("nan"),) * len(depth), 0, tuple(counts))
        survival = tuple(float(np.mean(flat >= k)) for k in depth)
        return Acceptance(float(np.mean(flat)) + 1, survival, len(flat), tuple(counts))

    def _group(self, drafter: Drafter, first: int) -> list[tuple[int, ...]]:
        """Accepted drafts of each verification of some prompts."""
        state = self.started(drafter, first)
        found: list[list[int]] = [[] for _ in self.prompts[first : first + self.spec.rows]]
        depth, plan, left = drafter.topology.max_depth + 1, StepPlan(self.spec.rule, STEPS), len(found)
        while left:
            state, packed_BX = DISPATCH(self.mesh, plan, self.target, drafter, state)
            packed = np.asarray(packed_BX)
            for row, counts in enumerate(found):
                took = packed[row, : int(packed[row, -1]) * (depth + 2)].reshape(-1, depth + 2)[:, depth]
                took = took[took > 0]
                ended = bool(packed[row, -TAIL:-1].any())
                counts += (took[: -1 if ended else None] - 1).tolist()
                left -= ended
        return [tuple(counts) for counts in found]

    def started(self, drafter: Drafter, first: int) -> DecodeState:
        """Rows with as many prompts as there is room for, from number ``first`` on."""
        t, longest = self.spec, max(len(p) for p in self.prompts)
        slack = max(drafter.topology.nodes, drafter.slack, BUCKET)
        places = max(8, len(t.stop))
        make = partial(init_state, self.target, drafter, t.rows, longest + t.tokens, slack=slack, stop_ids=places)
        state = allocate(make, self.mesh, RULES)
        for row, prompt in enumerate(self.prompts[first : first + t.rows]):
            state = self._start(drafter, state, row, prompt, first + row)
        return state

    def _start(self, drafter: Drafter, state: DecodeState, row: int, prompt: np.ndarray, number: int) -> DecodeState:
        """Prefills and admits one prompt."""
        t, at, places = self.spec, 0, state.sampling.stop_BX.shape[1]
        while at < len(prompt) - 1:
            count = min(BUCKET, len(prompt) - 1 - at)
            chunk = np.zeros(BUCKET + 1, np.int32)
            chunk[: count + 1] = prompt[at : at + count + 1]
            numbers = np.int32(row), chunk, np.int32(at), np.int32(count)
            state = PREFILL(self.mesh, self.target, drafter, state, *numbers)
            at += count
        sampling = replace(
            jax.tree.map(np.asarray, init_sampling(1, places)),
            stop_BX=np.array([[*t.stop, *[-1] * (places - len(t.stop))]], np.int32),
            temperature_B=np.full(1, t.temperature, np.float32),
            max_length_B=np.full(1, len(prompt) + t.tokens, np.int32),
            draft_limit_B=np.full(1, drafter.topology.max_depth, np.int32),
            key_BX=np.array([[t.seed, number]], np.uint32),
        )
        history = np.zeros(state.history_BS.shape[1], np.int32)
        history[: len(prompt)] = prompt
        return ADMIT(self.mesh, state, np.int32(row), history, np.int32(len(prompt)), sampling, None)


def acceptance_figures(name: str, acceptance: Acceptance) -> dict[str, float]:
    """Acceptance as metrics: ``NAME/acceptance_length`` and ``NAME/accepted_at_K``."""
    rates = {f"{name}/accepted_at_{k}": rate for k, rate in enumerate(acceptance.survival, start=1)}
    return {f"{name}/acceptance_length": acceptance.length} | rates
