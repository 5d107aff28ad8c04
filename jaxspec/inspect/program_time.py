"""Predicts the time of a compiled step by groups of operations: their bytes or products, and their launches."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.inspect.model_cost import model_cost
from jaxspec.inspect.shipped import shipped
from jaxspec.perf.cost import Mesh, works
from jaxspec.perf.hardware import SCENARIOS, load_hardware
from jaxspec.perf.pass_time import RATE_OF, smooth_max


@dataclass(frozen=True)
class GroupTime:
    """One group of operations in a step on the slowest device.

    Attributes:
      group: cause of its work, as of ``perf.cost.PassWork``; ``all`` for the whole step.
      launches: kernels that a step starts.
      size_bytes, flops: that must move and be computed at least.
      work_s: the time of these at the shares of the card's peaks that its record calls likely.
      launch_s: from one launch to the next, times the launches.
    """

    group: str
    launches: int
    size_bytes: float
    flops: float
    work_s: float
    launch_s: float

    @property
    def time_s(self) -> float:
        """Predicted: launches wait for each other, so that neither hides the other."""
        return self.work_s + self.launch_s


def group_times(config: Mapping[str, Any], report: Mapping[str, Any], gpu: str, program: str) -> list[GroupTime]:
    """Predicts the groups of one compiled program, and their sum; nothing for a prefill, which is no step.

    Routing is taken to be uniform, and every row to have a cache at its full length.

    Args:
      config: of the model.
      report: what ``report_programs`` returned.
      gpu: record of the card.
      program: its name in the report.
    """
    compiled = report["programs"][program]
    if not compiled["positions"]:
        return []
    card, _ = load_hardware(gpu, shipped("hardware"))
    rates, launch_s = card.rates(), card.assumed.launch_us[SCENARIOS.index("likely")] * 1e-6
    mesh = Mesh(**{axis: size for axis, size in report["mesh"].items() if axis in Mesh.__dataclass_fields__})
    sums = {group: [0.0, 0.0, 0.0] for group in RATE_OF}
    for work in works(
        model_cost(config), rows=report["rows"], positions=compiled["positions"], context=report["capacity"], mesh=mesh
    ):
        byte_s, flop_s = (getattr(rates, name) for name in RATE_OF[work.cause])
        time_s = smooth_max(work.size_bytes * byte_s, work.flops * flop_s, rates.sharpness)
        for i, number in enumerate((work.size_bytes, work.flops, time_s)):
            sums[work.cause][i] += work.count * number
    launches = compiled["launches"]["by_group"]
    times = [
        GroupTime(group, count, size_bytes, flops, work_s, count * launch_s)
        for group, (size_bytes, flops, work_s) in sums.items()
        for count in (launches.get(group, 0),)
    ]
    totals = {n: sum(getattr(t, n) for t in times) for n in ("launches", "size_bytes", "flops", "work_s", "launch_s")}
    return [*times, GroupTime("all", **totals)]
