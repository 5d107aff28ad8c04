"""Runs a sweep: one engine after the other over the same weights, plain and speculative decoding in turns on each."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
from msgspec import structs

from jaxspec.bench.grid import MORE_ROUNDS, NONE, EnginePoint, Grid, Point
from jaxspec.bench.measure import Run, poisson_arrivals, running
from jaxspec.bench.peers.contest import Contender, peer_figures
from jaxspec.bench.record import CLOSED, Acceptance, Cell, Experts, PeerFigures, Skipped, Spread, figures
from jaxspec.bench.rounds import AGAIN, FIXED, PLAIN, SPECULATIVE, Rounds, Subject, regret, run_rounds
from jaxspec.bench.touched import touched_experts
from jaxspec.bench.turns import Going, at_once
from jaxspec.bench.workload import WORKLOADS, Source, settings
from jaxspec.checkpoint.load.model import Model, read_config
from jaxspec.checkpoint.text.codec import Text
from jaxspec.control.decision import Fixed
from jaxspec.errors import JaxspecError
from jaxspec.models.arch import ArchSpec
from jaxspec.models.catalog import arch_of
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams
from jaxspec.topology import PLAIN as PLAIN_ARM
from jaxspec.topology import AnyTopology

LEAST_BUCKET, MOST_BUCKET = 32, 1024
Peers = Callable[[EnginePoint, int], tuple[list[Contender], list[Skipped]]]


@dataclass(frozen=True)
class Watcher:
    """Who is told how far a sweep is.

    Attributes:
      opening: called before an engine is built.
      cell, skipped: called with what came of a point.
      progress: called while an engine loads and compiles, see ``LLM``.
    """

    opening: Callable[[EnginePoint], None] = lambda point: None
    cell: Callable[[Cell], None] = lambda cell: None
    skipped: Callable[[Skipped], None] = lambda skipped: None
    progress: Callable[[str, int, int], None] | None = None


@dataclass
class Sweep:
    """A grid on one model.

    Attributes:
      directory: of the model.
      grid: what is wanted.
      engine: keyword arguments of every ``LLM``.
      peers: opens the other engines that take part in a closed greedy point, for (engine, capacity).
      watcher: is told.
      model: target, None until the first engine has loaded it.
      longest: longest prompt in tokens.
      capacity: longest text in tokens.
    """

    directory: Path
    grid: Grid
    engine: Mapping[str, Any] = field(default_factory=dict)
    peers: Peers | None = None
    watcher: Watcher = field(default_factory=Watcher)

    def __post_init__(self) -> None:
        self.arch: ArchSpec = arch_of(read_config(self.directory))
        self.source = Source(Text.load(self.directory), self.arch.vocab_size, self.grid.prompts)
        self.longest, self.capacity = self._lengths()
        self.model: Model | None = None

    def prompts(self, engine: EnginePoint, point: Point) -> list[list[int]]:
        """Token ids of a run's prompts, the same for every engine with as many rows."""
        return self.source.prompts(point.workload, self.grid.count(engine.rows), self.grid.seed, point.input_tokens)

    def _lengths(self) -> tuple[int, int]:
        """Longest prompt and longest text of the whole sweep, in tokens."""
        widest = EnginePoint(max(self.grid.rows), None, 0)
        longest = [(max(map(len, self.prompts(widest, p))), p.output_tokens) for p in self.grid.points()]
        return max(prompt for prompt, _ in longest), max(prompt + output for prompt, output in longest)

    @property
    def chunk(self) -> int:
        """Prompt tokens that are read at a time unless ``engine`` says so: all of the longest prompt but its last."""
        wanted = min(max(self.longest - 1, LEAST_BUCKET), MOST_BUCKET)
        return 1 << (wanted - 1).bit_length()

    def run(self) -> None:
        """Measures every point; what cannot be measured is told as skipped and the rest goes on."""
        for point in self.grid.engines():
            self.watcher.opening(point)
            try:
                self._on_engine(point)
            except (JaxspecError, jax.errors.JaxRuntimeError) as error:
                self.watcher.skipped(Skipped(point.name, _line(error)))

    def _on_engine(self, engine: EnginePoint) -> None:
        llm = self.open(engine)
        contenders: list[Contender] = []
        if self.peers is not None:
            contenders, missing = self.peers(engine, self.capacity)
            for skipped in missing:
                self.watcher.skipped(skipped)
        try:
            for point in self.grid.points():
                try:
                    self.watcher.cell(self.measure(llm, engine, point, contenders))
                except JaxspecError as error:
                    self.watcher.skipped(Skipped(f"{engine.name}, {point.workload}", _line(error)))
        finally:
            for contender in contenders:
                contender.stop()

    def open(self, engine: EnginePoint) -> LLM:
        """Builds an engine; the weights of the target are loaded once."""
        settings = dict(self.engine)
        settings.setdefault("prefill_buckets", (self.chunk,))
        config = None
        if engine.drafter is not None:
            config = engine.drafter.speculative_config(engine.k, self.grid.rule, self.grid.synthetic)
        llm = LLM(
            self.model or self.directory,
            speculative_config=config,
            max_model_len=self.capacity,
            max_num_seqs=engine.rows,
            max_logprobs=0,
            on_progress=self.watcher.progress,
            **settings,
        )
        self.model = llm.model
        return llm

    def measure(self, llm: LLM, engine: EnginePoint, point: Point, contenders: Sequence[Contender] = ()) -> Cell:
        """One cell: rounds in which every way of decoding runs once, in turns, behind those that warm up."""
        grid, prompts = self.grid, self.prompts(engine, point)
        arrivals = None if point.arrival == CLOSED else poisson_arrivals(len(prompts), point.rate, grid.seed)
        greedy = {"temperature": 0.0}
        simple = all(settings(point.workload, place, point.temperature) == greedy for place in range(len(prompts)))
        comparable = simple and arrivals is None
        rivals = {c.name: c for c in contenders} if comparable else {}
        plain, drafted = (self._params(point, len(prompts), mode) for mode in (PLAIN, SPECULATIVE))

        def ours(own: LLM, params: list[SamplingParams], part: slice) -> Going[Run]:
            return running(own, prompts[part], params[part], arrivals)

        def held(arm: AnyTopology, params: list[SamplingParams]) -> Subject:
            if grid.turn_tokens is None:
                return lambda part: _held(llm, arm, ours(llm, params, part))
            return partial(ours, llm.beside(Fixed(arm)), params)

        subjects: dict[str, Subject] = {PLAIN: held(PLAIN_ARM, plain)}
        if engine.drafter:
            subjects[SPECULATIVE] = partial(ours, llm, drafted)
        for name, rival in rivals.items():
            subjects[name] = lambda part, rival=rival: at_once(partial(rival.run, prompts[part], point.output_tokens))
        if grid.against_fixed and isinstance(engine.k, str):
            subjects[AGAIN] = held(PLAIN_ARM, plain)
            subjects |= {FIXED + arm.name: held(arm, drafted) for arm in llm.engine.control.arms if arm.drafts}
        size = len(prompts) if arrivals else grid.turn(engine.rows)
        parts = [slice(start, start + size) for start in range(0, len(prompts), size)]
        learns = grid.warm_up_rounds - 1 if isinstance(engine.k, str) else 0
        wanted = Rounds(grid.rounds, learns, grid.precision or 0.0, grid.most_rounds or MORE_ROUNDS * grid.rounds)
        rounds = run_rounds(subjects, parts, wanted, grid.turn_tokens or math.inf)
        cell = self._cell(engine, point, rounds)
        found = [_beside(rival, name, rounds) for name, rival in rivals.items()]
        return structs.replace(cell, peers=found, experts=self._experts(llm, engine, prompts, rounds))

    def _params(self, point: Point, count: int, mode: str) -> list[SamplingParams]:
        one = SamplingParams(
            max_tokens=point.output_tokens, ignore_eos=True, speculative=False if mode == PLAIN else None
        )
        return [
            replace(one, seed=self.grid.seed * count + place, **settings(point.workload, place, point.temperature))
            for place in range(count)
        ]

    def _cell(self, engine: EnginePoint, point: Point, rounds: Sequence[Mapping[str, Any]]) -> Cell:
        """The figures of our own runs."""
        runs = {mode: [round_[mode] for round_ in rounds] for mode in (PLAIN, SPECULATIVE) if mode in rounds[0]}
        found = {
            mode: figures(
                [run.traces for run in some],
                [run.tokens_per_s for run in some],
                [run.decode_tokens_per_s for run in some],
                self.grid.price_per_hour,
            )
            for mode, some in runs.items()
        }
        one = {
            "drafter": engine.drafter.name if engine.drafter else NONE,
            "k": engine.k,
            "concurrency": engine.rows,
            "temperature": point.temperature,
            "workload": point.workload,
            "input_tokens": point.input_tokens or WORKLOADS[point.workload].input_tokens,
            "output_tokens": point.output_tokens,
            "arrival": point.arrival,
            "rounds": len(rounds),
        }
        if not engine.drafter:
            return Cell(**one, plain=found[PLAIN], same_text=_same(runs[PLAIN]))
        pairs = list(zip(runs[SPECULATIVE], runs[PLAIN], strict=True))
        whole = [spec.tokens_per_s / plain.tokens_per_s for spec, plain in pairs]
        lossless = self.grid.rule == "match" and self.grid.synthetic is None
        last = runs[SPECULATIVE][-1]
        return Cell(
            **one,
            plain=found[PLAIN],
            speculative=found[SPECULATIVE],
            speedup=Spread.of(_decode_ratios(pairs) or whole),
            total_speedup=Spread.of(whole),
            acceptance=Acceptance.of(last.speculation, last.tokens),
            lengths=last.lengths if isinstance(engine.k, str) else None,
            decision_s=Spread.of([run.decision_s for run in runs[SPECULATIVE]]) if isinstance(engine.k, str) else None,
            regret=regret(rounds),
            same_text=_same([run for round_ in rounds for run in round_.values() if isinstance(run, Run)])
            if lossless
            else None,
        )

    def _experts(
        self, llm: LLM, engine: EnginePoint, prompts: Sequence[Sequence[int]], rounds: Sequence[Mapping[str, Any]]
    ) -> Experts | None:
        """Experts touched, counted outside the timed runs; not where steps differ in length."""
        if not self.grid.experts or not engine.drafter or isinstance(engine.k, str):
            return None
        drafts = llm.engine.depth
        return touched_experts(llm.model, prompts, rounds[-1][SPECULATIVE], rows=engine.rows, drafts=drafts)


def _beside(rival: Contender, name: str, rounds: Sequence[Mapping[str, Any]]) -> PeerFigures:
    """A peer's plain decoding beside ours, its speculation beside ours."""
    mode = PLAIN if rival.mode == PLAIN else SPECULATIVE
    return peer_figures(rival, [r[name] for r in rounds], [r[mode] for r in rounds], rounds[0][PLAIN])


def _held(llm: LLM, arm: AnyTopology, run: Going[Run]) -> Going[Run]:
    """A run of an engine that may choose, held at one arm: it learns nothing from it."""
    engine = llm.engine
    chooses, engine.control = engine.control, Fixed(arm)
    try:
        return (yield from run)
    finally:
        engine.control = chooses


def _decode_ratios(pairs: Sequence[tuple[Run, Run]]) -> list[float]:
    """Paired ratios of decode rates, empty if some run has none."""
    rates = [(a.decode_tokens_per_s, b.decode_tokens_per_s) for a, b in pairs]
    found = [a / b for a, b in rates if a is not None and b is not None]
    return found if len(found) == len(rates) else []


def _same(runs: Sequence[Run]) -> bool:
    """Whether all runs gave the same tokens."""
    return all(a.token_ids == b.token_ids for a, b in pairwise(runs))


def _line(error: Exception) -> str:
    """An error as one short line."""
    return " ".join(str(error).split())[:300]
