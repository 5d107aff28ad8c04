"""Engine totals under the names that vLLM's users know."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxspec.control.decision import Decision, Outcome
from jaxspec.serve.request import CompletionOutput, SpeculationMetrics
from jaxspec.topology import AnyTopology


@dataclass(frozen=True)
class Metric:
    """One counter; ``labels`` tell counters of one name apart."""

    name: str
    value: float
    labels: dict[str, str] = field(default_factory=dict)


@dataclass
class ArmCounts:
    """What dispatches of one arm did.

    Attributes:
      dispatches, probes: how many, and how many of them only to learn.
      steps, tokens, time_s: in all.
      predicted_gain: tokens per second over plain decoding's, as predicted for the last one.
    """

    dispatches: int = 0
    probes: int = 0
    steps: int = 0
    tokens: int = 0
    time_s: float = 0.0
    predicted_gain: float | None = None

    def counters(self) -> list[tuple[str, float]]:
        """Returns names and values."""
        names = ("dispatches", "probes", "steps", "tokens", "time_s")
        counters = [(f"{name}_total", getattr(self, name)) for name in names]
        return counters if self.predicted_gain is None else [*counters, ("predicted_gain", self.predicted_gain)]


class EngineMetrics:
    """Counts since the engine started."""

    def __init__(self, draft_length: int):
        self.speculation = SpeculationMetrics(num_accepted_tokens_per_pos=[0] * draft_length)
        self.prefix_queries = self.prefix_hits = 0
        self.cache_config: dict[str, str] = {}
        self.prompt_tokens = self.generated_tokens = self.requests = 0
        self.prefill_time_s = self.decode_time_s = self.deciding_time_s = 0.0
        self.dispatches = 0
        self.arms: dict[AnyTopology, ArmCounts] = {}
        self.touched: tuple[float, ...] = ()
        self.cut_drafts = 0
        self.draft_prices_s: dict[str, float] = {}

    def add(self, drafted: int, accepted: int, completion: CompletionOutput) -> None:
        """Counts one verification of one row."""
        self.speculation.add(drafted, accepted + 1)
        self.generated_tokens += accepted + 1

    def dispatched(self, decision: Decision, outcome: Outcome) -> None:
        """Counts a dispatch of an arm."""
        arm = self.arms.setdefault(decision.arm, ArmCounts())
        arm.dispatches += 1
        self.dispatches += 1
        arm.probes += decision.probe
        arm.steps += outcome.steps
        arm.time_s += outcome.time_s
        self.decode_time_s += outcome.time_s + outcome.catch_up_s
        arm.tokens += outcome.tokens
        arm.predicted_gain = decision.gain
        self.touched = outcome.touched or self.touched

    def counters(self) -> list[Metric]:
        """Returns every counter."""
        s = self.speculation
        metrics = [
            Metric("vllm:prompt_tokens_total", self.prompt_tokens),
            Metric("vllm:generation_tokens_total", self.generated_tokens),
            Metric("vllm:request_success_total", self.requests),
            Metric("vllm:prefix_cache_queries_total", self.prefix_queries),
            Metric("vllm:prefix_cache_hits_total", self.prefix_hits),
            Metric("vllm:cache_config_info", 1, self.cache_config),
            Metric("vllm:spec_decode_num_drafts_total", s.num_drafts),
            Metric("vllm:spec_decode_num_draft_tokens_total", s.num_draft_tokens),
            Metric("vllm:spec_decode_num_accepted_tokens_total", s.num_accepted_tokens),
        ]
        metrics += [
            Metric("vllm:spec_decode_num_accepted_tokens_per_pos_total", count, {"position": str(position)})
            for position, count in enumerate(s.num_accepted_tokens_per_pos)
        ]
        metrics += [
            Metric("jaxspec:prefill_time_s_total", self.prefill_time_s),
            Metric("jaxspec:decode_time_s_total", self.decode_time_s),
            Metric("jaxspec:deciding_time_s_total", self.deciding_time_s),
            Metric("jaxspec:num_steps_total", s.num_steps),
            Metric("jaxspec:cut_drafts_total", self.cut_drafts),
        ]
        metrics += [Metric("jaxspec:draft_price_s", price, {"of": name}) for name, price in self.draft_prices_s.items()]
        for top, arm in sorted(self.arms.items(), key=lambda item: (item[0].nodes, item[0].name)):
            labels = {"length": str(top.max_depth)} | ({} if top.is_chain else {"tree": top.name})
            metrics += [Metric(f"jaxspec:arm_{name}", value, labels) for name, value in arm.counters()]
        metrics += [
            Metric("jaxspec:predicted_experts", count, {"drafts": str(drafts)})
            for drafts, count in enumerate(self.touched, start=1)
        ]
        return metrics
