"""The file that a benchmark leaves: its schema, and reading and writing it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from scipy.stats import binom

from jaxspec.bench.measure import Trace
from jaxspec.errors import ConfigError
from jaxspec.serve.request import SpeculationMetrics
from jaxspec.whole_file import write_whole

SCHEMA = "jaxspec.bench/2"
PERCENTILES = (50, 95, 99)
CLOSED = "closed"


class Struct(msgspec.Struct, frozen=True):
    """A part of the file; times are in seconds, rates per second. Fields of older files that are gone are ignored."""


class Spread(Struct, frozen=True):
    """A figure over the measured rounds.

    Attributes:
      median, least, most: of one value per round.
      low, high: a 95 % interval of the median, the order statistics that chance passes at most once in forty times on
        either side (binomial; Conover, Practical Nonparametric Statistics); None for fewer than six rounds.
    """

    median: float
    least: float
    most: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Computes it from one value per round."""
        inner, ordered = int(binom.ppf(0.025, len(values), 0.5)), sorted(map(float, values))
        interval = (ordered[inner - 1], ordered[-inner]) if inner else (None, None)
        return cls(float(np.median(values)), ordered[0], ordered[-1], *interval)


class Waits(Struct, frozen=True):
    """A waiting time over all requests of all measured rounds; percentiles by linear interpolation, as vLLM's bench."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Waits | None":
        """Computes it from one value per request or gap; None if there is none."""
        if not values:
            return None
        return cls(float(np.mean(values)), *(float(np.percentile(values, p)) for p in PERCENTILES))


class Figures(Struct, frozen=True):
    """One way of decoding in one cell.

    Attributes:
      tokens_per_s: of whole runs, prompts read and rows running empty included.
      decode_tokens_per_s: while every row decodes and no prompt is read, None if that never was.
      ttft_s: from when a request is sent to its first token.
      itl_s: between arrivals of one request after the first; tokens of one dispatch arrive together.
      tpot_s: of each request, time per token after the first arrival.
      latency_s: from when a request is sent to its last token.
      requests, tokens: of one round.
      usd_per_million_tokens: at the price per hour that was given, by the median of ``tokens_per_s``.
    """

    tokens_per_s: Spread
    decode_tokens_per_s: Spread | None
    ttft_s: Waits | None
    itl_s: Waits | None
    tpot_s: Waits | None
    latency_s: Waits | None
    requests: int
    tokens: int
    usd_per_million_tokens: float | None = None


class AcceptanceFigures(Struct, frozen=True):
    """What became of the drafts of one round.

    Attributes:
      num_drafts: verifications of a row that had drafts.
      num_draft_tokens, num_accepted_tokens: the target's own token after them is not counted.
      num_steps: verifications of a row, those without drafts included.
      rate: accepted over drafted tokens.
      length: tokens committed per verification of a row, whether it had drafts or not.
      drafted_length: 1 + accepted / num_drafts, vLLM's mean acceptance length.
      per_pos: share of ``num_drafts`` whose accepted prefix covers each position; not conditional on the one before.
      mean_drafted: draft tokens per verification.
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_steps: int
    rate: float
    length: float
    drafted_length: float
    per_pos: list[float]
    mean_drafted: float

    @classmethod
    def of(cls, m: SpeculationMetrics) -> "AcceptanceFigures":
        """Computes it for all requests of a round together."""
        return cls(
            m.num_drafts, m.num_draft_tokens, m.num_accepted_tokens, m.num_steps,
            m.draft_acceptance_rate, m.mean_acceptance_length, m.drafted_acceptance_length, m.acceptance_per_pos,
            m.num_draft_tokens / max(m.num_steps, 1),
        )  # fmt: skip


class Experts(Struct, frozen=True):
    """Distinct experts per layer and step, means over layers and steps; see ``bench.touched_experts``.

    Attributes:
      plain, speculative: counted, with one position per row and with all verified ones.
      plain_independent, speculative_independent: expected if every token chose its experts independently and evenly.
      layers: with experts.
      experts, experts_per_token: of a layer.
      texts: that were counted on.
    """

    plain: float
    speculative: float
    plain_independent: float
    speculative_independent: float
    layers: int
    experts: int
    experts_per_token: int
    texts: int


class PeerFigures(Struct, frozen=True):
    """Another engine in the same rounds, on the same files and prompts.

    Attributes:
      peer, mode, version: which one, and how it decoded.
      tokens_per_s, decode_tokens_per_s: as in ``Figures``.
      ours: jaxspec's decode rate over the peer's of the same round, plain against plain and speculation against it.
      tokens_per_step: committed per pass of its target, None where it does not tell.
      same_texts: prompts whose tokens are those of jaxspec's plain decoding.
      first_differences: place of the first other token of each prompt, None where there is none.
    """

    peer: str
    mode: str
    version: str
    tokens_per_s: Spread
    decode_tokens_per_s: Spread | None
    ours: Spread | None
    tokens_per_step: float | None
    same_texts: int
    first_differences: list[int | None]


class SweepCell(Struct, frozen=True):
    """One point of the sweep: first what it is, then what was measured.

    Attributes:
      drafter: its name, ``none`` for an engine without one.
      k: drafts per step, 0 without a drafter; ``auto`` where the engine chooses.
      concurrency: rows of the engine.
      temperature: of sampling, 0 is greedy.
      workload: name.
      input_tokens: of each prompt, None for as long as it is.
      output_tokens: generated per prompt, end-of-text ids ignored.
      arrival: ``closed``, or the rate of a Poisson process as ``poisson 4/s``.
      plain, speculative: figures of either; speculative is None for k = 0.
      speedup: paired ratios of one round each, while every row decodes (whole runs if that never was).
      total_speedup: the same of whole runs. Plain runs of an engine with a draft model read prompts with it, too.
      lengths: steps by chain length or tree that they took, where the engine chooses (``k`` is ``auto``).
      decision_s: seconds that a choice took on the host, mean over a round's dispatches; likewise.
      same_text: whether all runs of a prompt gave the same tokens; None where the rule does not promise that, or
        acceptance is synthetic.
      rounds: that were measured; 0 in older files.
    """

    drafter: str
    k: int | str
    concurrency: int
    temperature: float
    workload: str
    input_tokens: int | None
    output_tokens: int
    arrival: str
    plain: Figures
    speculative: Figures | None = None
    speedup: Spread | None = None
    total_speedup: Spread | None = None
    acceptance: AcceptanceFigures | None = None
    experts: Experts | None = None
    lengths: dict[str, int] | None = None
    decision_s: Spread | None = None
    same_text: bool | None = None
    peers: list[PeerFigures] = []
    rounds: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        """The cell's identity, to find it in another file."""
        return (
            self.drafter, self.k, self.concurrency, self.temperature, self.workload, self.input_tokens,
            self.output_tokens, self.arrival,
        )  # fmt: skip

    @property
    def name(self) -> str:
        """The cell in words."""
        size = f"{self.input_tokens or 'natural'}+{self.output_tokens}"
        how = "" if self.arrival == CLOSED else f", {self.arrival}"
        drafts = "plain" if self.k == 0 else f"{self.drafter} K={self.k}"
        return f"{drafts}, {self.concurrency} rows, {self.workload} {size}, T={self.temperature:g}{how}"


class Skipped(Struct, frozen=True):
    """A cell or engine that could not be measured, and why."""

    what: str
    reason: str


class BenchReport(Struct, frozen=True):
    """A whole benchmark.

    Attributes:
      schema: name and version of this layout.
      complete: whether the sweep came to its end; a file that a stopped sweep left is not.
      synthetic: settings of synthetic acceptance, None for the real thing. The texts of such a sweep are no model's,
        and its speeds hold at that acceptance only.
      command: arguments of the command line.
      date: of the start, ISO 8601 in UTC.
      seed: of prompts, arrivals and sampling.
      machine, versions, model, settings: what it ran on, with and how.
      cells, skipped: what was measured and what was not.
    """

    schema: str
    complete: bool
    synthetic: dict[str, Any] | None
    command: list[str]
    date: str
    seed: int
    machine: dict[str, Any]
    versions: dict[str, str]
    model: dict[str, Any]
    settings: dict[str, Any]
    cells: list[SweepCell]
    skipped: list[Skipped]


def figures(
    traces: Sequence[Sequence[Trace]],
    tokens_per_s: Sequence[float],
    decode: Sequence[float | None],
    price_per_hour: float | None,
) -> Figures:
    """Computes the figures of one way of decoding from its measured rounds, each with the traces of its requests."""
    every = [trace for round_ in traces for trace in round_]
    rate = Spread.of(tokens_per_s)
    decoding = [rate for rate in decode if rate is not None]
    return Figures(
        tokens_per_s=rate,
        decode_tokens_per_s=Spread.of(decoding) if len(decoding) == len(decode) else None,
        ttft_s=Waits.of([t.ttft_s for t in every]),
        itl_s=Waits.of([gap for t in every for gap in t.gaps_s]),
        tpot_s=Waits.of([t.tpot_s for t in every if t.tpot_s is not None]),
        latency_s=Waits.of([t.latency_s for t in every]),
        requests=len(traces[0]),
        tokens=sum(t.tokens for t in traces[0]),
        usd_per_million_tokens=None if price_per_hour is None else usd_per_million(price_per_hour, rate.median),
    )


def usd_per_million(price_per_hour: float, tokens_per_s: float) -> float:
    """Returns what a million tokens cost on a machine of this price at this rate."""
    return price_per_hour / 3600 / tokens_per_s * 1e6


def save(report: BenchReport, file: Path) -> None:
    """Writes a report; a reader never sees half of one."""
    write_whole(file, msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def load(file: Path) -> BenchReport:
    """Reads a report.

    Raises:
      ConfigError: the file is missing or is none.
    """
    try:
        data = file.read_bytes()
        named = msgspec.json.decode(data)
        schema = named.get("schema") if isinstance(named, dict) else None
        if schema != SCHEMA:
            raise ConfigError(f"{file}: a file of the schema {SCHEMA!r} is needed, this one has {schema!r}")
        return msgspec.json.decode(data, type=BenchReport)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{file}: no report of jaxspec bench ({error})") from error
