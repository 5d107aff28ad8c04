"""Acceptance of a head on held-out prompts, measured by the step that serves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.checkpoint.load.model import Model
from jaxspec.decode.dispatch import Report, dispatch
from jaxspec.decode.prefill import Chunk, admit, prefill
from jaxspec.decode.runner import Runner
from jaxspec.decode.state import DecodeState, Target, init_sampling, init_state
from jaxspec.decode.step import StepPlan
from jaxspec.draft.draft_vocab import DraftVocab
from jaxspec.draft.head_drafter import head_drafter
from jaxspec.draft.small_lm import SmallLm
from jaxspec.errors import ConfigError
from jaxspec.models.block_head import BlockHead
from jaxspec.models.medusa import Medusa
from jaxspec.models.trained_head import Head
from jaxspec.models.transformer import Transformer
from jaxspec.perf.moesd import mean_acceptance_length
from jaxspec.protocol import Drafter
from jaxspec.pytree import replace
from jaxspec.shapes import Params
from jaxspec.sharding.compiler_options import LazyJit
from jaxspec.sharding.placement import allocate, mesh_of, settle, state_rules, state_shardings
from jaxspec.topology import chain
from jaxspec.train.data import Corpus, prompts
from jaxspec.train.head_nets import token_map_of
from jaxspec.train.head_start import InitialHead
from jaxspec.train.settings import EvaluationSettings, RunSettings
from jaxspec.verify.rules import RULES

BUCKET, STEPS, ROWS, BLOCK = 64, 8, 8, 128
ROW_AXES = state_rules(("data",), own_pages=True)


def _prefill(mesh: Mesh | None, target: Target, drafter: Drafter, state: DecodeState, chunk: Chunk) -> DecodeState:
    return _stay(prefill(target, drafter, state, chunk), mesh)


def _admit(mesh: Mesh | None, state: DecodeState, *rest: Any) -> DecodeState:
    return _stay(admit(state, *rest), mesh)


def _dispatch(
    mesh: Mesh | None, plan: StepPlan, target: Target, drafter: Drafter, state: DecodeState, *rest: Any
) -> tuple[DecodeState, Report]:
    state, report = dispatch(target, drafter, state, *rest, plan=plan)
    if mesh is not None:  # the host of every process reads it
        report = jax.lax.with_sharding_constraint(report, NamedSharding(mesh, PartitionSpec()))
    return _stay(state, mesh), report


def _stay(state: DecodeState, mesh: Mesh | None) -> DecodeState:
    """A state where it was allocated; left to the compiler, it would move."""
    return state if mesh is None else jax.lax.with_sharding_constraint(state, state_shardings(state, mesh, ROW_AXES))


# Of the module: evaluators of all temperatures share these programs, at every update.
PREFILL = LazyJit(_prefill, static_argnums=0, donate_argnums=3)
ADMIT = LazyJit(_admit, static_argnums=0, donate_argnums=1)
DISPATCH = LazyJit(_dispatch, static_argnums=(0, 1), donate_argnums=4)


@dataclass(frozen=True)
class EvalSpec:
    """What is generated to measure acceptance: ``tokens`` a prompt, ``rows`` prompts at a time."""

    tokens: int = 96
    temperature: float = 0.0
    rows: int = 8
    rule: str = "match"
    seed: int = 0
    stop: tuple[int, ...] = ()


@dataclass(frozen=True)
class MeasuredAcceptance:
    """What verification accepted.

    Attributes:
      length: tokens committed per verification, bonus token included; all of them count.
      survival: share of verifications whose first 1, 2, ... K drafts were all accepted; those that met the end of a
        text, which cut them short, are left out.
      verifications: how many there were.
      counts: accepted drafts of each verification, by prompt, those that met the end of a text left out.
    """

    length: float
    survival: tuple[float, ...]
    verifications: int
    counts: tuple[tuple[int, ...], ...]


class AcceptanceEvaluator:
    """Runs prompts through the compiled step; other parameters of a drafter and temperatures recompile nothing."""

    def __init__(self, target: Target, prompts: Sequence[Sequence[int]], spec: EvalSpec):
        self.mesh = mesh_of(target.params)
        self.target, self.prompts = settle(target, self.mesh), [np.asarray(p, np.int32) for p in prompts]
        over = 1 if self.mesh is None else self.mesh.shape["data"]
        self.spec = replace(spec, rows=-(-spec.rows // over) * over)

    def measure(self, drafter: Drafter) -> MeasuredAcceptance:
        """Measures acceptance over all prompts."""
        drafter = settle(drafter, self.mesh)
        groups = [self._group(drafter, first) for first in range(0, len(self.prompts), self.spec.rows)]
        every = np.array([n for group in groups for row in group for n in row], np.int64)
        # The verification that met the end was cut short.
        counts = tuple(row[:-1] for group in groups for row in group)
        flat = np.array([n for row in counts for n in row], np.int64)
        depth = np.arange(1, drafter.topology.max_depth + 1)
        if not len(flat):
            return MeasuredAcceptance(float("nan"), (float("nan"),) * len(depth), 0, counts)
        survival = tuple(float(np.mean(flat >= k)) for k in depth)
        length = mean_acceptance_length(accepted=float(every.sum()), passes=len(every))
        return MeasuredAcceptance(length, survival, len(every), counts)

    def _group(self, drafter: Drafter, first: int) -> list[tuple[int, ...]]:
        """Counts the accepted drafts of each verification of some prompts, to the end of their texts."""
        runner, state = self._runner(drafter), self.started(drafter, first)
        accepted: list[list[int]] = [[] for _ in self.prompts[first : first + self.spec.rows]]
        left = len(accepted)
        while left:
            state, report = runner.dispatch(state, drafter.topology, STEPS)
            result = report.unpack()
            for row, counts in enumerate(accepted):
                count_X, ended = result.count_BX[row], bool(result.ended_B[row])
                counts += (count_X[count_X > 0] - 1).tolist()
                left -= ended
        return [tuple(counts) for counts in accepted]

    def _runner(self, drafter: Drafter) -> Runner:
        plan = StepPlan(RULES[self.spec.rule], STEPS)
        programs: dict[Any, Any] = {
            ("prefill", BUCKET): partial(PREFILL, self.mesh), "admit": partial(ADMIT, self.mesh),
            ("dispatch", drafter.topology): partial(DISPATCH, self.mesh, plan),
        }  # fmt: skip
        return Runner(self.target, {drafter.topology: drafter}, (BUCKET,), programs)

    def started(self, drafter: Drafter, first: int) -> DecodeState:
        """Returns rows with as many prompts as there is room for, from number ``first`` on."""
        t, longest = self.spec, max(len(p) for p in self.prompts)
        slack = max(drafter.topology.nodes, drafter.slack, BUCKET)
        places = max(8, len(t.stop))
        make = partial(init_state, self.target, drafter, t.rows, longest + t.tokens, slack=slack, stop_ids=places)
        runner, state = self._runner(drafter), allocate(make, self.mesh, ROW_AXES)
        for row, prompt in enumerate(self.prompts[first : first + t.rows]):
            sampling = replace(
                jax.tree.map(np.asarray, init_sampling(1, places)),
                stop_BX=np.array([[*t.stop, *[-1] * (places - len(t.stop))]], np.int32),
                temperature_B=np.full(1, t.temperature, np.float32),
                max_length_B=np.full(1, len(prompt) + t.tokens, np.int32),
                draft_limit_B=np.full(1, drafter.topology.max_depth, np.int32),
                key_BX=np.array([[t.seed, first + row]], np.uint32),
            )
            state = runner.prefill(state, row, prompt)
            state = runner.admit(state, row, prompt, sampling)
        return state


def acceptance_figures(name: str, acceptance: MeasuredAcceptance) -> dict[str, float]:
    """Returns acceptance as metrics: ``NAME/acceptance_length`` and ``NAME/accepted_at_K``."""
    rates = {f"{name}/accepted_at_{k}": rate for k, rate in enumerate(acceptance.survival, start=1)}
    return {f"{name}/acceptance_length": acceptance.length} | rates


def best_metric(settings: EvaluationSettings) -> str:
    """Returns the figure that the best head is kept by."""
    return settings.metric or f"{_name(settings.lengths[0], settings.temperatures[0])}/acceptance_length"


def _name(length: int, temperature: float) -> str:
    return f"k{length}/t{temperature:g}"


def make_evaluation(
    settings: RunSettings, head: InitialHead, target: Model, corpus: Corpus, mesh: Mesh | None
) -> Callable[[Params], dict[str, float]] | None:
    """Returns a function that measures a head's parameters, chains of every length at every temperature.

    None without held-out documents. Raises ConfigError if lengths and prompts exceed what head and target can do.
    """
    e, net = settings.evaluation, head.net
    if not corpus.held_out:
        return None
    if isinstance(net, Medusa) and max(e.lengths) > net.spec.heads:
        raise ConfigError(
            f"evaluation: lengths {list(e.lengths)}, but {net.spec.heads} Medusa heads draft at most as many tokens; "
            "lower evaluation.lengths or raise head.heads"
        )
    if isinstance(net, BlockHead) and max(e.lengths) > net.spec.drafts:
        raise ConfigError(
            f"evaluation: lengths {list(e.lengths)}, but a block has {net.spec.drafts} drafts; lower "
            "evaluation.lengths or raise head.block.size"
        )
    map_W = token_map_of(settings.loss, net, target.net.arch.vocab_size)
    asked = prompts(corpus.held_out, count=e.prompts, length=e.prompt_tokens)
    longest = max(len(p) for p in asked) + e.new_tokens
    if longest > target.net.arch.max_position:
        raise ConfigError(f"evaluation: {longest} tokens are more than the target's {target.net.arch.max_position}")
    specs = [EvalSpec(e.new_tokens, t, min(ROWS, len(asked)), seed=settings.seed) for t in e.temperatures]
    served, tokens = Target(target.params, target.net, BLOCK), [p.tolist() for p in asked]
    evaluators = [AcceptanceEvaluator(served, tokens, spec) for spec in specs]

    def evaluate(params: Params) -> dict[str, float]:
        figures: dict[str, float] = {}
        for evaluator in evaluators:
            for length in e.lengths:
                drafter = _drafter(head, params, target, length, map_W)
                name = _name(length, evaluator.spec.temperature)
                figures |= acceptance_figures(name, evaluator.measure(drafter))
        return figures

    return evaluate


def _drafter(head: InitialHead, params: Params, model: Model, length: int, map_W: np.ndarray | None) -> Drafter:
    if isinstance(head.net, Transformer):
        drafter: Any = SmallLm(params, head.net, chain(length), BLOCK)
    else:
        drafter = head_drafter(Head(head.net, params, head.ids_W), (model.net, model.params), chain(length), BLOCK)
    return drafter if map_W is None else drafter.with_vocab(DraftVocab.of(map_W, model.net.arch.vocab_size))
