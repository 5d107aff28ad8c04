"""The grid of a sweep: drafters, speculation lengths, rows, sampling, workloads, arrivals; and its engines."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxspec.bench.record import CLOSED
from jaxspec.bench.synthetic import Synthetic
from jaxspec.bench.workload import workload_of
from jaxspec.draft import methods
from jaxspec.draft.speculative_keys import AUTO, MAX_LENGTH, SCHEDULE_KEYS, TREES
from jaxspec.errors import ConfigError
from jaxspec.serve.demo_pair import resolve_speculation

NONE = "none"
LEAST_REQUESTS = 4
LENGTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, AUTO)
ROWS = (1, 2, 5, 8, 16, 25, 32, 50, 64, 100, 128, 200)
# Two cores finish these in some tens of minutes with the demo pair.
CPU_LENGTHS = (0, 2, 4, AUTO)
CPU_ROWS = (1, 2, 5, 8)


@dataclass(frozen=True)
class DrafterChoice:
    """A drafter and its name.

    Attributes:
      name: shown in tables.
      config: ``speculative_config`` without a speculation length; trees that it lists are arms of ``auto``.
    """

    name: str
    config: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> "DrafterChoice":
        """Reads ``ngram``, ``mtp``, ``draft_model=DIR``, or a JSON object with vLLM's keys.

        Raises:
          ConfigError: it is none of them.
        """
        if text.startswith("{"):
            try:
                config = dict(json.loads(text))
            except ValueError as error:
                raise ConfigError(f"bench: --drafters {text!r} is not valid JSON ({error})") from error
            name = config.get("method") or ("draft_model" if config.get("model") else "")
            extra = {k: v for k, v in config.items() if k not in ("method", "model")}
            name += "".join(f" {key}={value}" for key, value in sorted(extra.items()))
        else:
            method, _, directory = text.partition("=")
            config = {"method": method} | ({"model": directory} if directory else {})
            name = method
        for key in (*SCHEDULE_KEYS, "rejection_sample_method"):
            if key in config and key != TREES:
                raise ConfigError(f"bench: leave {key} out of --drafters; the sweep sets it (--k, --rule)")
        choice = cls(name, resolve_speculation(config) or {})
        methods.parse(choice.speculative_config(AUTO if TREES in config else 1, "match", None))
        return choice

    def speculative_config(self, k: int | str, rule: str, synthetic: Synthetic | None) -> dict[str, Any]:
        """Returns the configuration for one speculation length; trees are for ``auto`` to choose among."""
        how = rule if synthetic is None else synthetic.rule
        config = {key: value for key, value in self.config.items() if key != TREES or k == AUTO}
        return {**config, "num_speculative_tokens": k, "rejection_sample_method": how}


@dataclass(frozen=True)
class EnginePoint:
    """One engine of the sweep; ``drafter`` is None for K = 0."""

    rows: int
    drafter: DrafterChoice | None
    k: int | str

    @property
    def name(self) -> str:
        """The engine in words."""
        how = f"{self.drafter.name} K={self.k}" if self.drafter else "plain"
        return f"{how}, {self.rows} rows"


@dataclass(frozen=True)
class Scenario:
    """What runs on an engine; lengths None are the workload's own, ``rate`` is infinite in a closed loop."""

    workload: str
    input_tokens: int | None
    output_tokens: int
    temperature: float
    rate: float

    @property
    def arrival(self) -> str:
        """The arrival of requests, as cells name it."""
        return CLOSED if math.isinf(self.rate) else f"poisson {self.rate:g}/s"


@dataclass(frozen=True)
class Grid:
    """Everything that a sweep is asked for.

    Attributes:
      drafters, lengths, rows: of engines; each pair of drafter and length is an engine at each number of rows, and one
        without a drafter stands for length 0.
      temperatures, workloads, input_tokens, output_tokens, rates: what runs on each engine.
      requests: per run; by default twice the rows and at least four.
      rounds: that are measured, after one that warms up.
      seed: of prompts, arrivals and sampling.
      rule: ``rejection_sample_method``.
      synthetic: acceptance by a coin, None for the real one.
      price_per_hour: of the machine, None for no costs.
      files: where the workloads lie that the user has the files of.
    """

    drafters: tuple[DrafterChoice, ...]
    lengths: tuple[int | str, ...]
    rows: tuple[int, ...]
    temperatures: tuple[float, ...] = (0.0,)
    workloads: tuple[str, ...] = ("held-out",)
    input_tokens: tuple[int | None, ...] = (None,)
    output_tokens: tuple[int | None, ...] = (None,)
    rates: tuple[float, ...] = (math.inf,)
    requests: int | None = None
    rounds: int = 3
    seed: int = 0
    rule: str = "match"
    synthetic: Synthetic | None = None
    price_per_hour: float | None = None
    files: Mapping[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for value, rule, ok in self._checks():
            if not ok:
                raise ConfigError(f"bench: {rule}, got {value!r}")
        for name in self.workloads:
            workload_of(name)
        for k in self.lengths:
            if self.synthetic is not None and isinstance(k, int) and k:
                self.synthetic.check(k)

    def _checks(self) -> Iterator[tuple[Any, str, bool]]:
        """Yields every value with its rule and whether it keeps it."""
        counts = {
            "--concurrency": (self.rows, 1), "--input-tokens": (self.input_tokens, 2),
            "--output-tokens": (self.output_tokens, 2), "--rounds": ((self.rounds,), 1),
            "--requests": ((self.requests,), 1),
        }  # fmt: skip
        for flag, (values, least) in counts.items():
            for n in values:
                yield n, f"{flag} takes whole numbers from {least}", n is None or n >= least
        for k in self.lengths:
            ok = k == AUTO or (isinstance(k, int) and 0 <= k <= MAX_LENGTH)
            yield k, f"--k takes whole numbers from 0 to {MAX_LENGTH}, and auto", ok
        for t in self.temperatures:
            yield t, "--temperature takes numbers from 0", 0 <= t < math.inf
        for rate in self.rates:
            yield rate, "--request-rate takes numbers above 0, and inf for a closed loop", rate > 0
        price = self.price_per_hour
        yield price, "--price-per-hour must be above 0", price is None or 0 < price < math.inf
        yield self.rule, "--rule is match, standard or block", self.rule in ("match", "standard", "block")
        drafts = any(k != 0 for k in self.lengths)
        yield "none", "K above 0 needs a drafter; give --drafters", bool(self.drafters) or not drafts
        yield "nothing", "rows and lengths are needed", bool(self.rows) and bool(self.lengths)

    def engines(self) -> list[EnginePoint]:
        """Returns every engine, by rows."""
        engines = []
        for rows in self.rows:
            engines += [EnginePoint(rows, None, 0)] if 0 in self.lengths else []
            engines += [EnginePoint(rows, d, k) for d in self.drafters for k in self.lengths if k != 0]
        return engines

    def scenarios(self) -> list[Scenario]:
        """Returns what runs on each engine."""
        return [
            Scenario(w, i, o or workload_of(w).output_tokens, t, r)
            for w in self.workloads for i in self.input_tokens for o in self.output_tokens
            for t in self.temperatures for r in self.rates
        ]  # fmt: skip

    def count(self, rows: int) -> int:
        """Returns the requests of a run on an engine."""
        return self.requests or max(2 * rows, LEAST_REQUESTS)


def default_grid(platform: str) -> tuple[Sequence[int | str], Sequence[int]]:
    """Returns speculation lengths and rows where none are named: few on a CPU, all on an accelerator."""
    return (CPU_LENGTHS, CPU_ROWS) if platform == "cpu" else (LENGTHS, ROWS)
