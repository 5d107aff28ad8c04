"""What a sweep covers: drafters, speculation lengths, rows, sampling, workloads, arrivals; and the engines for it."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.bench.record import CLOSED
from jaxspec.bench.workload import WORKLOADS
from jaxspec.draft import catalog
from jaxspec.draft.speculation_schedule import AUTO, MAX_LENGTH, SCHEDULE_KEYS, TREES
from jaxspec.draft.synthetic import Synthetic
from jaxspec.errors import ConfigError
from jaxspec.serve.demo_pair import resolve_speculation

NONE = "none"
LEAST_REQUESTS = 4
MORE_ROUNDS = 4  # times as many rounds as are measured in any case, at most, where a precision is wanted
LENGTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, AUTO)
ROWS = (1, 2, 5, 8, 16, 25, 32, 50, 64, 100, 128, 200)
# What two cores finish in some tens of minutes with the demo pair.
CPU_LENGTHS = (0, 2, 4, AUTO)
CPU_ROWS = (1, 2, 5, 8)


@dataclass(frozen=True)
class DrafterChoice:
    """A drafter under the name that tables show.

    Attributes:
      name: of it.
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
        catalog.parse(choice.speculative_config(AUTO if TREES in config else 1, "match", None))
        return choice

    def speculative_config(self, k: int | str, rule: str, synthetic: Synthetic | None) -> dict[str, Any]:
        """The configuration for one speculation length; trees are for ``auto`` to choose among."""
        how = rule if synthetic is None else synthetic
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
        """In words."""
        how = f"{self.drafter.name} K={self.k}" if self.drafter else "plain"
        return f"{how}, {self.rows} rows"


@dataclass(frozen=True)
class Point:
    """What runs on an engine; lengths None are the workload's own, ``rate`` is infinite in a closed loop."""

    workload: str
    input_tokens: int | None
    output_tokens: int
    temperature: float
    rate: float

    @property
    def arrival(self) -> str:
        """As cells name it."""
        return CLOSED if math.isinf(self.rate) else f"poisson {self.rate:g}/s"


@dataclass(frozen=True)
class Grid:
    """Everything that a sweep is asked for.

    Attributes:
      drafters, lengths, rows: engines; each pair of drafter and length is an engine at each number of rows, and one
        without a drafter stands for length 0.
      temperatures, workloads, input_tokens, output_tokens, rates: what runs on each engine.
      requests: per run; by default twice the rows and at least four.
      rounds, warm_up_rounds: measured ones, and those before them: one of everything, others of engines that choose
        their length alone, which learn from them.
      precision, most_rounds: rounds go on, up to so many, until the ratios' 95 % intervals are no wider; None for no
        more rounds, and for ``MORE_ROUNDS`` times as many.
      turn_requests: requests of a closed loop after which the next way of decoding has its turn; by default one where
        the engine has one row, and all where it has several.
      turn_tokens: tokens after which it has its turn within them; each way has an engine of its own then, over the same
        weights and programs. None is none.
      seed: of prompts, arrivals and sampling.
      rule: ``rejection_sample_method``.
      synthetic: acceptance that is decreed, None for the real thing.
      experts: whether touched experts are counted.
      against_fixed: whether engines that choose their length run every fixed one in the same rounds.
      price_per_hour: of the machine, None for no costs.
      prompts: JSONL of the workload ``file``.
    """

    drafters: tuple[DrafterChoice, ...]
    lengths: tuple[int | str, ...]
    rows: tuple[int, ...]
    temperatures: tuple[float, ...] = (0.0,)
    workloads: tuple[str, ...] = ("code",)
    input_tokens: tuple[int | None, ...] = (None,)
    output_tokens: tuple[int | None, ...] = (None,)
    rates: tuple[float, ...] = (math.inf,)
    requests: int | None = None
    rounds: int = 3
    warm_up_rounds: int = 1
    precision: float | None = None
    most_rounds: int | None = None
    turn_requests: int | None = None
    turn_tokens: int | None = None
    seed: int = 0
    rule: str = "match"
    synthetic: Synthetic | None = None
    experts: bool = True
    against_fixed: bool = False
    price_per_hour: float | None = None
    prompts: Path | None = None

    def __post_init__(self) -> None:
        for value, name, ok in self._values():
            if not ok:
                raise ConfigError(f"bench: {name}, got {value!r}")

    def _values(self) -> Iterator[tuple[Any, str, bool]]:
        whole = [(n, "--concurrency takes whole numbers from 1", n >= 1) for n in self.rows]
        whole += [(n, "--input-tokens takes whole numbers from 2", n >= 2) for n in self.input_tokens if n is not None]
        whole += [
            (n, "--output-tokens takes whole numbers from 2", n >= 2) for n in self.output_tokens if n is not None
        ]
        yield from whole
        rounds = ("--rounds", self.rounds), ("--warm-up-rounds", self.warm_up_rounds)
        turns = ("--turn-requests", self.turn_requests), ("--turn-tokens", self.turn_tokens)
        for name, count in (*rounds, *turns, ("--requests", self.requests)):
            yield count, f"{name} must be at least 1", count is None or count >= 1
        yield self.precision, "--precision must be above 0", self.precision is None or 0 < self.precision < math.inf
        alone = self.most_rounds is not None and self.precision is None
        yield self.most_rounds, "--most-rounds is for rounds that go on until --precision; give that, too", not alone
        more = self.most_rounds is None or self.most_rounds >= self.rounds
        yield self.most_rounds, f"--most-rounds must be at least --rounds ({self.rounds})", more
        for k in self.lengths:
            ok = k == AUTO or (isinstance(k, int) and 0 <= k <= MAX_LENGTH)
            yield k, f"--k takes whole numbers from 0 to {MAX_LENGTH}, and auto", ok
        for t in self.temperatures:
            yield t, "--temperature takes numbers from 0", 0 <= t < math.inf
        for rate in self.rates:
            yield rate, "--request-rate takes numbers above 0, and inf for a closed loop", rate > 0
        for name in self.workloads:
            yield name, f"--workload is one of {list(WORKLOADS)}", name in WORKLOADS
        price = self.price_per_hour
        yield price, "--price-per-hour must be above 0", price is None or 0 < price < math.inf
        yield self.rule, "--rule is match, standard or block", self.rule in ("match", "standard", "block")
        drafts = any(k != 0 for k in self.lengths)
        auto = not self.against_fixed or AUTO in self.lengths
        yield self.lengths, "--against-fixed compares auto; add it to --k", auto
        yield "none", "K above 0 needs a drafter; give --drafters", bool(self.drafters) or not drafts
        yield "nothing", "rows and lengths are needed", bool(self.rows) and bool(self.lengths)

    def engines(self) -> list[EnginePoint]:
        """Every engine, by rows."""
        found = []
        for rows in self.rows:
            found += [EnginePoint(rows, None, 0)] if 0 in self.lengths else []
            found += [EnginePoint(rows, d, k) for d in self.drafters for k in self.lengths if k != 0]
        return found

    def points(self) -> list[Point]:
        """What runs on each engine."""
        return [
            Point(w, i, o or WORKLOADS[w].output_tokens, t, r)
            for w in self.workloads for i in self.input_tokens for o in self.output_tokens
            for t in self.temperatures for r in self.rates
        ]  # fmt: skip

    def turn(self, rows: int) -> int:
        """Requests of a closed loop until the next way of decoding has its turn, on an engine."""
        return self.turn_requests or (1 if rows == 1 else self.count(rows))

    def count(self, rows: int) -> int:
        """Requests of a run on an engine."""
        return self.requests or max(2 * rows, LEAST_REQUESTS)


def default_grid(platform: str) -> tuple[Sequence[int | str], Sequence[int]]:
    """Speculation lengths and rows where none are named: few on a CPU, all on an accelerator."""
    return (CPU_LENGTHS, CPU_ROWS) if platform == "cpu" else (LENGTHS, ROWS)
