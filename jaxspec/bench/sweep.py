"""Runs a sweep: one engine after another over the same weights, plain and speculative decoding in turns on each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
from msgspec import structs

from jaxspec.bench.grid import NONE, EnginePoint, Grid, Scenario
from jaxspec.bench.measure import Run, poisson_arrivals, run_requests
from jaxspec.bench.peers.sessions import PeerSession, peer_figures
from jaxspec.bench.prompt_source import PromptSource
from jaxspec.bench.record import CLOSED, AcceptanceFigures, Experts, PeerFigures, Skipped, Spread, SweepCell, figures
from jaxspec.bench.rounds import PLAIN, SPECULATIVE, Subject, held_at, run_rounds, total
from jaxspec.bench.touched_experts import touched_experts
from jaxspec.bench.workload import settings, workload_of
from jaxspec.checkpoint.load.model import Model, read_config
from jaxspec.checkpoint.text.codec import Text
from jaxspec.errors import JaxspecError
from jaxspec.models.arch import ArchSpec
from jaxspec.models.catalog import arch_of
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams
from jaxspec.topology import PLAIN as PLAIN_ARM

Peers = Callable[[EnginePoint, int], tuple[list[PeerSession], list[Skipped]]]


@dataclass(frozen=True)
class SweepCallbacks:
    """Callbacks of a sweep.

    Attributes:
      opening: called before an engine is built.
      cell, skipped: called with what came of a point.
      progress: called while an engine loads and compiles, see ``LLM``.
    """

    opening: Callable[[EnginePoint], None] = lambda point: None
    cell: Callable[[SweepCell], None] = lambda cell: None
    skipped: Callable[[Skipped], None] = lambda skipped: None
    progress: Callable[[str, int, int], None] | None = None


@dataclass
class Sweep:
    """A grid on one model.

    Attributes:
      directory: of the model.
      grid: what it covers.
      engine: keyword arguments of every ``LLM``.
      peers: opens the other engines that take part in a closed greedy point, for (engine, capacity).
      callbacks: called back.
      model: target, None until the first engine has loaded it.
      capacity: longest text in tokens.
    """

    directory: Path
    grid: Grid
    engine: Mapping[str, Any] = field(default_factory=dict)
    peers: Peers | None = None
    callbacks: SweepCallbacks = field(default_factory=SweepCallbacks)

    def __post_init__(self) -> None:
        self.arch: ArchSpec = arch_of(read_config(self.directory))
        self.source = PromptSource(Text.load(self.directory), self.arch.vocab_size, self.grid.files)
        self.capacity = self._longest()
        self.model: Model | None = None

    def prompts(self, engine: EnginePoint, scenario: Scenario) -> list[list[int]]:
        """Returns the token ids of a run's prompts, the same for every engine with as many rows."""
        count = self.grid.count(engine.rows)
        return self.source.prompts(scenario.workload, count, self.grid.seed, scenario.input_tokens)

    def _longest(self) -> int:
        """Returns the longest text of the whole sweep, in tokens."""
        widest = EnginePoint(max(self.grid.rows), None, 0)
        return max(max(map(len, self.prompts(widest, s))) + s.output_tokens for s in self.grid.scenarios())

    def run(self) -> None:
        """Measures every point; what cannot be measured is reported as skipped, and the rest goes on."""
        for point in self.grid.engines():
            self.callbacks.opening(point)
            try:
                self._on_engine(point)
            except (JaxspecError, jax.errors.JaxRuntimeError) as error:
                self.callbacks.skipped(Skipped(point.name, _line(error)))

    def _on_engine(self, engine: EnginePoint) -> None:
        llm = self.open(engine)
        sessions: list[PeerSession] = []
        if self.peers is not None:
            sessions, missing = self.peers(engine, self.capacity)
            for skipped in missing:
                self.callbacks.skipped(skipped)
        try:
            for scenario in self.grid.scenarios():
                try:
                    self.callbacks.cell(self.measure(llm, engine, scenario, sessions))
                except JaxspecError as error:
                    self.callbacks.skipped(Skipped(f"{engine.name}, {scenario.workload}", _line(error)))
        finally:
            for session in sessions:
                session.stop()

    def open(self, engine: EnginePoint) -> LLM:
        """Builds an engine; the weights of the target are loaded once."""
        settings = dict(self.engine)
        settings.setdefault("enable_prefix_caching", False)  # rounds repeat prompts, and peers read them again, too
        config = None
        if engine.drafter is not None:
            config = engine.drafter.speculative_config(engine.k, self.grid.rule, self.grid.synthetic)
        llm = LLM(
            self.model or self.directory,
            speculative_config=config,
            max_model_len=self.capacity,
            max_num_seqs=engine.rows,
            max_logprobs=0,
            on_progress=self.callbacks.progress,
            **settings,
        )
        self.model = llm.model
        llm.finish_compiling()
        return llm

    def measure(
        self, llm: LLM, engine: EnginePoint, scenario: Scenario, sessions: Sequence[PeerSession] = ()
    ) -> SweepCell:
        """Returns one cell: rounds in which every way of decoding runs once, in turns."""
        prompts = self.prompts(engine, scenario)
        subjects = self.subjects(llm, engine, scenario)
        peers = {session.name: session for session in sessions} if self._suits_peers(scenario, len(prompts)) else {}
        for name, peer in peers.items():
            subjects[name] = lambda part, peer=peer: peer.run(prompts[part], scenario.output_tokens)
        rounds = [total(runs) for runs in run_rounds(subjects, self.parts(engine, scenario), self.grid.rounds)]
        cell = self._cell(engine, scenario, rounds)
        figures_of_peers = [_peer_figures(peer, name, rounds) for name, peer in peers.items()]
        return structs.replace(cell, peers=figures_of_peers, experts=self._experts(llm, engine, prompts, rounds))

    def subjects(self, llm: LLM, engine: EnginePoint, scenario: Scenario) -> dict[str, Subject]:
        """Returns our ways of decoding: plainly, and with the engine's drafter if it has one."""
        prompts = self.prompts(engine, scenario)
        closed = scenario.arrival == CLOSED
        arrivals = None if closed else poisson_arrivals(len(prompts), scenario.rate, self.grid.seed)
        plain, drafted = (self.params(scenario, len(prompts), mode) for mode in (PLAIN, SPECULATIVE))

        def run_plainly(part: slice) -> Run:
            with held_at(llm, PLAIN_ARM):
                return run_requests(llm, prompts[part], plain[part], arrivals)

        def run_drafted(part: slice) -> Run:
            return run_requests(llm, prompts[part], drafted[part], arrivals)

        return {PLAIN: run_plainly} | ({SPECULATIVE: run_drafted} if engine.drafter else {})

    def parts(self, engine: EnginePoint, scenario: Scenario) -> list[slice]:
        """Returns the parts of the prompts between which ways of decoding take turns: one by one on a single row."""
        count = self.grid.count(engine.rows)
        size = 1 if engine.rows == 1 and scenario.arrival == CLOSED else count
        return [slice(start, start + size) for start in range(0, count, size)]

    def _suits_peers(self, scenario: Scenario, count: int) -> bool:
        """Whether other engines can run it: greedily, in a closed loop, without penalties."""
        params = [settings(scenario.workload, i, scenario.temperature) for i in range(count)]
        return scenario.arrival == CLOSED and all(one == {"temperature": 0.0} for one in params)

    def params(self, scenario: Scenario, count: int, mode: str) -> list[SamplingParams]:
        """Returns the settings of each request, the same whichever way decodes it but for ``speculative``."""
        # Other engines take no ends of texts; where they take part, nobody does.
        goes_on = self.peers is not None or not workload_of(scenario.workload).ends
        one = SamplingParams(
            max_tokens=scenario.output_tokens, ignore_eos=goes_on, speculative=False if mode == PLAIN else None
        )
        return [
            replace(one, seed=self.grid.seed * count + i, **settings(scenario.workload, i, scenario.temperature))
            for i in range(count)
        ]

    def _cell(self, engine: EnginePoint, scenario: Scenario, rounds: Sequence[Mapping[str, Any]]) -> SweepCell:
        """Computes the figures of our own runs."""
        runs = {mode: [round_[mode] for round_ in rounds] for mode in (PLAIN, SPECULATIVE) if mode in rounds[0]}
        measured = {
            mode: figures(
                [run.traces for run in some],
                [run.tokens_per_s for run in some],
                [run.decode_tokens_per_s for run in some],
                self.grid.price_per_hour,
            )
            for mode, some in runs.items()
        }
        point = {
            "drafter": engine.drafter.name if engine.drafter else NONE,
            "k": engine.k,
            "concurrency": engine.rows,
            "temperature": scenario.temperature,
            "workload": scenario.workload,
            "input_tokens": scenario.input_tokens or workload_of(scenario.workload).input_tokens,
            "output_tokens": scenario.output_tokens,
            "arrival": scenario.arrival,
            "rounds": len(rounds),
        }
        if not engine.drafter:
            return SweepCell(**point, plain=measured[PLAIN], same_text=_same(runs[PLAIN]))
        pairs = list(zip(runs[SPECULATIVE], runs[PLAIN], strict=True))
        total_ratios = [spec.tokens_per_s / plain.tokens_per_s for spec, plain in pairs]
        lossless = self.grid.rule == "match" and self.grid.synthetic is None
        last = runs[SPECULATIVE][-1]
        return SweepCell(
            **point,
            plain=measured[PLAIN],
            speculative=measured[SPECULATIVE],
            speedup=Spread.of(_decode_ratios(pairs) or total_ratios),
            total_speedup=Spread.of(total_ratios),
            acceptance=AcceptanceFigures.of(last.speculation),
            lengths=last.lengths if isinstance(engine.k, str) else None,
            decision_s=Spread.of([run.decision_s for run in runs[SPECULATIVE]]) if isinstance(engine.k, str) else None,
            same_text=_same([run for round_ in rounds for run in round_.values() if isinstance(run, Run)])
            if lossless
            else None,
        )

    def _experts(
        self, llm: LLM, engine: EnginePoint, prompts: Sequence[Sequence[int]], rounds: Sequence[Mapping[str, Any]]
    ) -> Experts | None:
        """Counts the experts touched, outside the timed runs; not where steps differ in length."""
        if not engine.drafter or isinstance(engine.k, str):
            return None
        drafts = llm.engine.depth
        return touched_experts(llm.model, prompts, rounds[-1][SPECULATIVE], rows=engine.rows, drafts=drafts)


def _peer_figures(peer: PeerSession, name: str, rounds: Sequence[Mapping[str, Any]]) -> PeerFigures:
    """Compares a peer's plain decoding with ours, its speculation with ours."""
    mode = PLAIN if peer.mode == PLAIN else SPECULATIVE
    return peer_figures(peer, [r[name] for r in rounds], [r[mode] for r in rounds], rounds[0][PLAIN])


def _decode_ratios(pairs: Sequence[tuple[Run, Run]]) -> list[float]:
    """Returns paired ratios of decode rates, empty if some run has none."""
    rates = [(a.decode_tokens_per_s, b.decode_tokens_per_s) for a, b in pairs]
    ratios = [a / b for a, b in rates if a is not None and b is not None]
    return ratios if len(ratios) == len(rates) else []


def _same(runs: Sequence[Run]) -> bool:
    """Whether all runs gave the same tokens."""
    return all(a.token_ids == b.token_ids for a, b in pairwise(runs))


def _line(error: Exception) -> str:
    """Returns an error as one short line."""
    return " ".join(str(error).split())[:300]
