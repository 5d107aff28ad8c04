"""Engine totals under the names that vLLM's users know."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxspec.serve.request import CompletionOutput, SpeculationMetrics


@dataclass(frozen=True)
class Metric:
    """One counter; ``labels`` tell counters of one name apart."""

    name: str
    value: float
    labels: dict[str, str] = field(default_factory=dict)


class EngineMetrics:
    """Counts since the engine started."""

    def __init__(self, draft_length: int):
        self.speculation = SpeculationMetrics(num_accepted_tokens_per_pos=[0] * draft_length)
        self.prompt_tokens = self.generated_tokens = self.requests = 0
        self.prefill_time_s = self.decode_time_s = 0.0

    def add(self, drafted: int, accepted: int, completion: CompletionOutput) -> None:
        """Counts one verification of one row."""
        self.speculation.add(drafted, accepted + 1)
        self.generated_tokens += accepted + 1

    def counters(self) -> list[Metric]:
        """Every counter."""
        s = self.speculation
        found = [
            Metric("vllm:prompt_tokens_total", self.prompt_tokens),
            Metric("vllm:generation_tokens_total", self.generated_tokens),
            Metric("vllm:request_success_total", self.requests),
            Metric("vllm:spec_decode_num_drafts_total", s.num_drafts),
            Metric("vllm:spec_decode_num_draft_tokens_total", s.num_draft_tokens),
            Metric("vllm:spec_decode_num_accepted_tokens_total", s.num_accepted_tokens),
        ]
        found += [
            Metric("vllm:spec_decode_num_accepted_tokens_per_pos_total", count, {"position": str(position)})
            for position, count in enumerate(s.num_accepted_tokens_per_pos)
        ]
        found += [
            Metric("jaxspec:prefill_time_s_total", self.prefill_time_s),
            Metric("jaxspec:decode_time_s_total", self.decode_time_s),
            Metric("jaxspec:num_steps_total", s.num_steps),
        ]
        return found
