"""Steps with grammars: compiled when a request first brings one, and run with masks that the host fills meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.decode.dispatch import Report
from jaxspec.decode.masked_step import NO_TOKEN, conclude_step, draft_step, takes_forced, verify_step
from jaxspec.decode.state import DecodeState, Target
from jaxspec.decode.step import StepPlan
from jaxspec.protocol import Drafter
from jaxspec.serve.background import CompiledPrograms
from jaxspec.serve.compiled import Programs, compile_program
from jaxspec.serve.constraint import Constraint
from jaxspec.serve.engine_spec import EngineSpec
from jaxspec.sharding.placement import mesh_of, settle, shapes_on
from jaxspec.topology import AnyTopology, Topology

WORD = 32
ALL = np.uint32(0xFFFFFFFF)
STEPS: dict[str, Callable[..., Any]] = {"draft": draft_step, "verify": verify_step, "conclude": conclude_step}


class MaskedPrograms:
    """The three programs of a step with grammars, by topology; see ``jaxspec.decode.masked_step``."""

    def __init__(self, programs: Programs, state: DecodeState, spec: EngineSpec, first: AnyTopology):
        """Begins to compile for what ``programs`` compile for, the first topology before the others."""
        self._programs, self._plan = programs, StepPlan(spec.rule, 1, spec.logprobs, routes=spec.routes)
        self._words = words_of(state.bias_BV.shape[1])
        arms = dict.fromkeys([first, *programs.drafters])
        target, drafters = programs.target, programs.drafters
        self._forces = {arm: takes_forced(drafters[arm], state, self._plan) for arm in arms}
        self._mesh = mesh_of(state)
        target, state = shapes_on(target, self._mesh), shapes_on(state, self._mesh)
        shapes = {
            arm: StepShapes(target, shapes_on(drafters[arm], self._mesh), state, self._plan, self._mesh) for arm in arms
        }
        self.compiled = CompiledPrograms(
            {(name, arm): partial(StepShapes.compile, shapes[arm], name) for arm in arms for name in STEPS}
        )

    def ready(self, arm: AnyTopology) -> bool:
        """Whether a step of a topology would wait for no compilation."""
        return all(self.compiled.ready((name, arm)) for name in STEPS) and self._programs.ready(arm)

    def dispatch(
        self, state: DecodeState, arm: AnyTopology, constraints: Sequence[Constraint | None], min_rows: int = 1
    ) -> tuple[DecodeState, Report]:
        """Runs one step; the state is donated.

        The host looks forced drafts up while the device drafts, and fills masks while it verifies.

        Args:
          state: of all rows.
          arm: what is drafted.
          constraints: of each row, up to its text so far; None for rows without a grammar.
          min_rows: as of ``jaxspec.decode.dispatch``.
        """
        draft, verify, conclude = (self.compiled[name, arm] for name in STEPS)
        target, drafter = self._programs.target, self._programs.drafters[arm]
        root_BW = self._roots(constraints)
        root_on_device = settle(root_BW, self._mesh) if self._mesh else jax.device_put(root_BW, state.length_B.sharding)
        state, (proposal, node_B2N) = draft(drafter, state, root_on_device)
        forced_BN = self._forced(arm, constraints)
        state, pending = verify(target, drafter, state, proposal, forced_BN, np.int32(min_rows))
        token_BN, parent_BN = np.moveaxis(np.asarray(node_B2N), 1, 0)
        token_BN = np.where(forced_BN == NO_TOKEN, token_BN, forced_BN)
        mask_BNW = np.full((*token_BN.shape, self._words), ALL)
        for row, constraint in enumerate(constraints):
            if constraint is not None:
                constraint.fill(root_BW[row], mask_BNW[row], token_BN[row].tolist(), parent_BN[row].tolist())
        return conclude(target, drafter, state, pending, root_on_device, mask_BNW)

    def _roots(self, constraints: Sequence[Constraint | None]) -> np.ndarray:
        """Returns what may follow each row's text."""
        root_BW = np.full((len(constraints), self._words), ALL)
        for row, constraint in enumerate(constraints):
            if constraint is not None:
                constraint.fill_root(root_BW[row])
        return root_BW

    def _forced(self, arm: AnyTopology, constraints: Sequence[Constraint | None]) -> np.ndarray:
        """Returns the tokens that grammars force, along the first path of the topology."""
        forced_BN = np.full((len(constraints), arm.nodes - 1), NO_TOKEN, np.int32)
        if isinstance(arm, Topology) and self._forces[arm]:
            path = first_path(arm)
            for row, constraint in enumerate(constraints):
                tokens = [] if constraint is None else constraint.forced(len(path))
                forced_BN[row, path[: len(tokens)]] = tokens
        return forced_BN


def first_path(topology: Topology) -> list[int]:
    """Returns the drafts, counted from 0, that the first child of each node leads to."""
    path, node = [], 0
    while topology.children[node]:
        node = topology.children[node][0]
        path.append(node - 1)
    return path


@dataclass(frozen=True)
class StepShapes:
    """Shapes that a step is compiled for, where they lie; on a mesh all but the state lies whole on each device."""

    target: Target
    drafter: Drafter
    state: DecodeState
    plan: StepPlan
    mesh: Mesh | None

    def compile(self, name: str) -> Callable[..., Any]:
        """Compiles one of its programs."""
        rows, vocab = self.state.bias_BV.shape
        scalar, root_BW = _shape(), _shape(rows, words_of(vocab), dtype=jnp.uint32)
        if name == "draft":
            return self._program(name, self.drafter, self.state, root_BW)
        _, (proposal, node_B2N) = jax.eval_shape(self._step("draft"), self.drafter, self.state, root_BW)
        drafts, models = node_B2N.shape[2], (self.target, self.drafter, self.state)
        args = *models, proposal, _shape(rows, drafts), scalar
        if name == "verify":
            return self._program(name, *args)
        _, pending = jax.eval_shape(self._step("verify"), *args)
        mask_BNW = _shape(rows, drafts, words_of(vocab), dtype=jnp.uint32)
        return self._program(name, *models, pending, root_BW, mask_BNW)

    def _step(self, name: str) -> Callable[..., Any]:
        return partial(STEPS[name], plan=self.plan)

    def _program(self, name: str, *shapes: Any) -> Callable[..., Any]:
        shapes = shapes_on(shapes, self.mesh)
        return compile_program(
            self._step(name), shapes, mesh=self.mesh, donate=1 if name == "draft" else 2, report=True
        )


def _shape(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def words_of(vocab: int) -> int:
    """Returns how many words hold a bit for each token."""
    return -(-vocab // WORD)
