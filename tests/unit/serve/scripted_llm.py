"""An LLM that says what its prompts ask for, for tests of jobs that need no model."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jaxspec.errors import RequestError
from jaxspec.serve.request import CompletionOutput, Logprob, RequestOutput, SamplingParams, SpeculationMetrics

FAILS: dict[str, Callable[[], Exception]] = {
    "refused": lambda: RequestError("prompt: refused"), "broken": lambda: ZeroDivisionError("a bug"),
}  # fmt: skip


class ScriptedLLM:
    """Finishes one request per step; what a prompt says decides how.

    ``refused`` and ``broken`` fail when they are submitted, ``poison`` makes every step fail while it is in flight,
    ``error`` and ``nan`` end in an error and in a log-probability that is none, ``-inf`` in an infinite one.

    Attributes:
      cured: whether nothing fails any more.
      submitted: prompts in the order in which they came.
      most: in flight at a time.
    """

    def __init__(self, directory: Path):
        self.model, self.spec, self.text = SimpleNamespace(directory=directory), SimpleNamespace(rows=2), None
        metrics = SimpleNamespace(generated_tokens=0, speculation=SpeculationMetrics())
        self.engine = SimpleNamespace(metrics=metrics, abort=self.abort)
        self.default_sampling_params = SamplingParams()
        self.cured, self.submitted, self.most = False, [], 0
        self._flying: list[RequestOutput] = []

    def submit(self, prompt: Any, params: SamplingParams, *, request_id: str, number: int) -> RequestOutput:
        said = str(prompt.get("prompt", ""))
        self.submitted.append(said)
        if said in FAILS and not self.cured:
            raise FAILS[said]()
        chance = {"nan": float("nan"), "-inf": float("-inf")}.get(said, -0.5)
        samples = [
            CompletionOutput(i, f"{said}!{number}.{i}", [7], [False], chance, [{7: Logprob(chance, 1)}], "stop")
            for i in range(params.n)
        ]
        if said == "error" and not self.cured:
            samples[-1].finish_reason, samples[-1].error = "error", "the logits are not finite"
        self._flying.append(RequestOutput(request_id, said, [5], samples))
        self.most = max(self.most, len(self._flying))
        return self._flying[-1]

    def step(self) -> list[RequestOutput]:
        if not self.cured and any(output.prompt == "poison" for output in self._flying):
            raise RuntimeError("INTERNAL: a step failed")
        output = self._flying.pop()
        output.finished = True
        self.engine.metrics.generated_tokens += 1
        return [output]

    def abort(self) -> None:
        self._flying.clear()
