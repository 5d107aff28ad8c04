"""Measures how often each expert is chosen: by prompts, and by verifications with all of their drafts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np

from jaxspec.checkpoint.files.fingerprint import digests
from jaxspec.checkpoint.load.model import Model
from jaxspec.decode.state import Target
from jaxspec.decode.step import StepPlan, step
from jaxspec.draft import methods
from jaxspec.errors import ConfigError
from jaxspec.inspect.text_routes import routed_experts
from jaxspec.models.arch import ArchSpec
from jaxspec.models.draft_head import DraftHead
from jaxspec.nn.moe import MoeSpec
from jaxspec.perf.expert_counts import VERSION, ExpertLoad, Kind, Verifications, counted
from jaxspec.perf.moesd import mean_acceptance_length
from jaxspec.protocol import Drafter, VerifyRule
from jaxspec.serve.defaults import end_ids
from jaxspec.serve.loading import load_draft
from jaxspec.sharding.compiler_options import LazyJit
from jaxspec.train.evaluate import AcceptanceEvaluator, EvalSpec
from jaxspec.verify.rules import rule_of

BLOCK = 128
STEP = LazyJit(step, static_argnames="plan", donate_argnums=2)


@dataclass(frozen=True)
class LoadSettings:
    """How much is measured.

    Attributes:
      tokens: generated per prompt, greedily; 0 counts the prompts alone.
      rows: generated together.
      source: the prompts, in words.
    """

    tokens: int
    rows: int
    source: str


@dataclass(frozen=True)
class Predicted:
    """The experts that a head predicted for drafts, and those that the target then chose.

    Attributes:
      layers: indices of the predicted ones among the expert layers.
      by_head, by_target: choices of each expert, by predicted layer.
    """

    layers: tuple[int, ...]
    by_head: tuple[tuple[int, ...], ...]
    by_target: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class MeasuredLoad:
    """A measurement.

    Attributes:
      load: its record.
      seen: verifications, from which batches are drawn; positions of prompts where nothing was generated.
      predicted: None without a head that predicts routing.
      acceptance_length: tokens per target pass, every one of them; 0 where nothing was generated.
    """

    load: ExpertLoad
    seen: Verifications
    predicted: Predicted | None
    acceptance_length: float


def expert_layers(arch: ArchSpec) -> dict[int, MoeSpec]:
    """Returns the layers with routed experts, by number.

    Raises:
      ConfigError: there are none, they choose different numbers of experts, or some experts have no weights.
    """
    layers = {y: layer.ffn for y, layer in enumerate(arch.layers) if isinstance(layer.ffn, MoeSpec)}
    if len({spec.top_k for spec in layers.values()}) != 1:
        raise ConfigError(
            f"balance: layers with the same number of chosen experts are needed, {arch.family} has "
            f"{sorted({spec.top_k for spec in layers.values()}) or 'no routed experts'}"
        )
    if any(spec.identities for spec in layers.values()):
        raise ConfigError(f"balance: {arch.family} has experts without weights, which are on no device")
    return layers


def measure_load(
    model: Model, prompts: Sequence[Sequence[int]], wanted: LoadSettings, config: methods.SpeculativeConfig
) -> MeasuredLoad:
    """Counts what prompts choose, by teacher forcing, and what verifications choose, by the step that serves.

    Args:
      model: on one device.
      prompts: token ids.
      wanted: how much.
      config: of the drafter; method ``none`` decodes plainly.

    Raises:
      ConfigError: the model has no routed experts, or the drafter does not fit it.
    """
    routed = expert_layers(model.net.arch)
    sizes = [spec.experts for spec in routed.values()]
    read = [np.moveaxis(expert_YTA, 0, 1) for expert_YTA in routed_experts(model, prompts)]
    target = (model.net, model.params)
    drafter = methods.build(config, target, BLOCK, load_draft(config, model, "auto"))
    steps = _Steps(model, drafter, wanted, rule_of(config.rule))
    if wanted.tokens:
        steps.run(prompts)
    seen = steps.seen() if wanted.tokens else _alone(read, prompts)
    kept_VT = np.concatenate(steps.kept) if wanted.tokens else np.zeros_like(seen.live_VT)
    rejected_VT = seen.live_VT & ~kept_VT & bool(wanted.tokens)
    chosen: dict[Kind, np.ndarray] = {
        "prompt": np.concatenate(read), "committed": seen.expert_VTYA[kept_VT],
        "rejected": seen.expert_VTYA[rejected_VT],
    }  # fmt: skip
    load = ExpertLoad(
        VERSION, model_name(model), f"{wanted.source}; {wanted.tokens} tokens each, drafts: {_words(config)}",
        tuple(routed), {kind: len(x) for kind, x in chosen.items()},
        {kind: counted(x, sizes) for kind, x in chosen.items()},
    )  # fmt: skip
    passes = len(kept_VT)
    length = mean_acceptance_length(accepted=float(kept_VT.sum()) - passes, passes=passes)
    predicted, net = None, getattr(drafter, "net", None)
    if steps.said and isinstance(net, DraftHead):
        layers = tuple(list(routed).index(y) for y in net.spec.routing)
        predicted = compared(seen, np.concatenate(steps.said), layers, [sizes[y] for y in layers])
    return MeasuredLoad(load, seen, predicted, length)


def model_name(model: Model) -> dict[str, str]:
    """Returns what a record says of a model."""
    return {"name": model.directory.name, **digests(model.config, model.directory)}


def _words(config: methods.SpeculativeConfig) -> str:
    if config.method == "none":
        return "none"
    named = f" {Path(config.model).name}" if config.model else ""
    return f"{config.method}{named}, {config.topology.max_depth} deep"


def _alone(read: Sequence[np.ndarray], prompts: Sequence[Sequence[int]]) -> Verifications:
    """Returns every position of the prompts as a verification of its own."""
    turn = [np.asarray(ids) + np.arange(len(ids)) for ids in prompts]
    text = [np.full(len(ids), number) for number, ids in enumerate(prompts)]
    expert_V1YA = np.concatenate(read)[:, None].astype(np.uint16)
    return Verifications(
        expert_V1YA, np.ones(expert_V1YA.shape[:2], bool), np.concatenate(turn)[:, None], np.concatenate(text)
    )


class _Steps:
    """Runs prompts through the serving step and keeps the routes of every verification."""

    def __init__(self, model: Model, drafter: Drafter, wanted: LoadSettings, rule: VerifyRule):
        self.model, self.drafter, self.wanted = model, drafter, wanted
        self.plan = StepPlan(rule, routes=True)
        self.expert: list[np.ndarray] = []
        self.live: list[np.ndarray] = []
        self.kept: list[np.ndarray] = []
        self.turn: list[np.ndarray] = []
        self.text: list[np.ndarray] = []
        self.said: list[np.ndarray] = []

    def run(self, prompts: Sequence[Sequence[int]]) -> None:
        """Generates for all of them."""
        target = Target(self.model.params, self.model.net, BLOCK)
        stop = tuple(sorted(end_ids(self.model.config, self.model.generation)))
        trial = EvalSpec(tokens=self.wanted.tokens, rows=min(self.wanted.rows, len(prompts)), stop=stop)
        evaluator, go = AcceptanceEvaluator(target, prompts, trial), partial(STEP, target, self.drafter, plan=self.plan)
        for first in range(0, len(prompts), trial.rows):
            state = evaluator.started(self.drafter, first)
            while bool(np.asarray(state.active_B).any()):
                state, out = go(state)
                self._keep(jax.device_get(out.telemetry.routes), first)

    def _keep(self, routes, first: int) -> None:
        busy_B = routes.live_BT.any(axis=1)
        self.expert.append(routes.expert_BTYA[busy_B].astype(np.uint16))
        self.live.append(routes.live_BT[busy_B])
        self.kept.append(routes.kept_BT[busy_B])
        self.turn.append(routes.turn_BT[busy_B])
        self.text.append(first + np.flatnonzero(busy_B))
        if routes.predicted_BKYA is not None:
            self.said.append(routes.predicted_BKYA[busy_B])

    def seen(self) -> Verifications:
        """Returns all of them."""
        return Verifications(*(np.concatenate(x) for x in (self.expert, self.live, self.turn, self.text)))


def compared(seen: Verifications, said_VKYA: np.ndarray, layers: tuple[int, ...], experts: Sequence[int]) -> Predicted:
    """Compares the experts predicted for verified drafts with those that the target chose.

    Args:
      seen: verifications; their first position is the anchor, for which nothing is predicted.
      said_VKYA: predictions, for some of the layers.
      layers: indices of these layers in ``seen``.
      experts: E of each of them.
    """
    live_VK, came_VKYA = seen.live_VT[:, 1:], seen.expert_VTYA[:, 1:][:, :, list(layers)]
    return Predicted(layers, counted(said_VKYA[live_VK], experts), counted(came_VKYA[live_VK], experts))
