"""Makes the control and the verify budget that a ``speculative_config`` asks for."""

import math
from pathlib import Path
from typing import Any

import jax

from jaxspec.checkpoint.files.fingerprint import digests
from jaxspec.checkpoint.load.model import Model
from jaxspec.checkpoint.load.places import abstract_params, flatten
from jaxspec.control.adaptive import Adaptive
from jaxspec.control.decision import ByBatchSize, Control, Fixed
from jaxspec.control.draft_cost import VerifyBudget
from jaxspec.draft import methods
from jaxspec.draft.draft_pruning import PruningConfig
from jaxspec.draft.speculation_schedule import SpeculationSchedule
from jaxspec.errors import ConfigError
from jaxspec.models.arch import ArchSpec, chosen_of, experts_of
from jaxspec.models.transformer import Transformer
from jaxspec.nn.moe import MoeSpec
from jaxspec.nn.param import declared
from jaxspec.perf.calibration import load_calibration
from jaxspec.perf.cost import ModelCost
from jaxspec.perf.step_ratios import StepRatios, prior_ratios, step_ratios
from jaxspec.serve.transport import rates_of
from jaxspec.topology import chain


def control_of(schedule: SpeculationSchedule, prior: StepRatios | None = None) -> Control:
    """Returns the control for what may be drafted; an adaptive one starts from ``prior``."""
    if schedule.adaptive:
        chains = [chain(length) for length in range(schedule.topology.max_depth + 1)]
        return Adaptive((*chains, *schedule.trees), prior=prior)
    if schedule.ranges is None:
        return Fixed(schedule.topology)
    return ByBatchSize(schedule.ranges, schedule.otherwise)


def budget_of(pruning: PruningConfig, arch: ArchSpec) -> VerifyBudget | None:
    """Returns the budget for a target, None where no draft is pruned."""
    if not pruning.enabled:
        return None
    return VerifyBudget(
        experts_of(arch), chosen_of(arch), by_cost=pruning.by_cost, min_confidence=pruning.min_confidence
    )


def prior_of(config: methods.SpeculativeConfig, target: Model, quantization: str, rows: int) -> StepRatios | None:
    """Returns what is known of step times beforehand: by a calibration, else by the cost model.

    Args:
      config: names the calibration, if any.
      target: the loaded model.
      quantization: as asked for.
      rows: most that decode together.

    Raises:
      ConfigError: the calibration is of another model, drafter or dtype.
    """
    schedule = config.schedule
    if not schedule.adaptive:
        return None
    if schedule.calibration is not None:
        return _calibrated(schedule.calibration, config.method, target, quantization)
    sizes = tuple(2**n for n in range(math.ceil(math.log2(rows)) + 1))
    lengths = range(1, schedule.topology.max_depth + 1)
    return prior_ratios(_cost_of(target), rates_of(jax.devices()[0]), rows=sizes, lengths=lengths)


def _calibrated(path: str, method: str, target: Model, quantization: str) -> StepRatios:
    calibration = load_calibration(Path(path))
    have = {
        "model": digests(target.config)["config_digest"], "drafter": method,
        "dtype": str(target.net.policy.storage.param), "quantization": quantization,
    }  # fmt: skip
    measured = {**calibration.settings, "model": calibration.model.get("config_digest")}
    wrong = [f"{name} {measured.get(name)!r}, not {have[name]!r}" for name in have if measured.get(name) != have[name]]
    if wrong:
        raise ConfigError(
            f"speculative_config: {path} was measured with {'; '.join(wrong)}; run jaxspec calibrate with this model "
            "and drafter"
        )
    return step_ratios(calibration)


def _cost_of(target: Model) -> ModelCost:
    """Returns the target as the cost model knows it, from the sizes of its parameters as if none were quantized."""
    net = target.net
    plain: Any = Transformer(net.arch, net.policy.update(formats=(), depth="stacked", mesh=None))
    values: dict[str, float] = {"dense": 0.0, "routed experts": 0.0, "embedding": 0.0}
    for path, leaf in flatten(abstract_params(plain)).items():
        part = declared(path).part
        values[part if part in values else "dense"] += math.prod(leaf.shape)
    width = net.policy.storage.param.itemsize
    moe = [layer.ffn for layer in net.arch.layers if isinstance(layer.ffn, MoeSpec)]
    return ModelCost.from_totals(
        layers=len(net.arch.layers), dense_bytes=values["dense"] * width, weight_bytes=width,
        routed_layers=len(moe), experts=experts_of(net.arch), top_k=chosen_of(net.arch),
        expert_bytes=values["routed experts"] * width / sum(ffn.experts for ffn in moe) if moe else 0.0,
    )  # fmt: skip
