"""The engine: takes requests into rows as places become free, dispatches steps, hands out finished text."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from functools import partial

import jax
import numpy as np

from jaxspec.cache.pages import PageAllocator
from jaxspec.decode.state import DecodeState, Target, init_sampling, init_state
from jaxspec.decode.step import StepPlan
from jaxspec.draft.lazy_observer import RING_SIZE, LazyObserver
from jaxspec.protocol import Drafter
from jaxspec.pytree import replace
from jaxspec.serve.adaptive import Adaptive
from jaxspec.serve.agreed import decider
from jaxspec.serve.arms import arms_of, slack_of
from jaxspec.serve.budget import VerifyBudget
from jaxspec.serve.collect import Collected, Reading, collect, outcome_of
from jaxspec.serve.compiled import Programs
from jaxspec.serve.control import Control, Decision, Fixed, Outcome
from jaxspec.serve.metrics import EngineMetrics
from jaxspec.serve.prompt_logprobs import read_prompt
from jaxspec.serve.request import RequestOutput
from jaxspec.serve.resume import recount
from jaxspec.serve.rows import STOP_PLACES, Sample
from jaxspec.serve.scheduler import Scheduler
from jaxspec.serve.survival import RequestSurvival
from jaxspec.serve.warm_up import warm_up
from jaxspec.sharding import hosts
from jaxspec.sharding.placement import allocate, mesh_of, row_axes, state_rules
from jaxspec.topology import PLAIN, AnyTopology

WARM_ROWS = 8
PAIRS = (0, 0, 1, 0, 2, 0, 3, 1, 1, 2, 1, 3, 2, 2, 3, 3, 0)  # every pair of four tokens: whatever follows has a match
TIMING = "timing speculation lengths"
REMEMBERED = 64.0  # verifications of one request
TRIES = 3  # steps that may fail in a row before a request ends


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is fixed to.

    Attributes:
      rows: batch slots.
      capacity: longest text in tokens, prompt included.
      rule: verification rule.
      steps: most steps before the host looks.
      logprobs: most log-probabilities per token that a request may ask for.
      buckets: prefill chunk sizes, ascending.
      page, pages: page size and count of a shared pool; a size of 0 gives each row one page of its own, a count of 0
        is enough for all rows at full length.
      survival: rates of synthetic acceptance instead of the rule, empty for none.
    """

    rows: int
    capacity: int
    rule: str = "match"
    steps: int = 8
    logprobs: int = 20
    buckets: tuple[int, ...] = (32, 256)
    page: int = 0
    pages: int = 0
    survival: tuple[float, ...] = ()


OnProgress = Callable[[str, int, int], None]


class Engine:
    """Continuous batching over compiled steps."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        spec: EngineSpec,
        eos: set[int],
        control: Control | None = None,
        budget: VerifyBudget | None = None,
        on_progress: OnProgress | None = None,
    ):
        """Compiles every program, for the mesh that the target's parameters lie on.

        Args:
          target: verifies.
          drafter: drafts whatever an arm asks for, not only its own topology.
          spec: what the engine is fixed to.
          eos: ids that end a text.
          control: chooses the arm of each dispatch; by default the drafter's own topology, always.
          budget: sets the prices of drafts; None verifies them all.
          on_progress: called with ("compiling", programs done, programs in all), and before arms are timed.

        Raises:
          ConfigError: the mesh does not divide the rows.
        """
        self.control, self.budget = control or Fixed(drafter.topology), budget
        if PLAIN in self.control.arms and drafter.topology.drafts and drafter.needs == "hidden":
            drafter = LazyObserver(drafter, drafter.topology, target.net.arch, max(RING_SIZE, 2 * spec.steps))
        drafters = arms_of(drafter, self.control.arms)
        self.depth, self.slack = max(arm.max_depth for arm in drafters), slack_of(drafters, spec.buckets)
        if spec.page and not spec.pages:
            spec = changed(spec, pages=1 + spec.rows * -(-(spec.capacity + self.slack) // spec.page))
        self.spec, self.eos, self.drafter = spec, eos, drafter
        make = partial(
            init_state, target, drafter, spec.rows, spec.capacity,
            slack=self.slack, stop_ids=STOP_PLACES, pages=spec.pages, page=spec.page,
            draft_costs=budget and budget.prices(0, spec.rows),
        )  # fmt: skip
        self._allocate = partial(_allocate, make, target, spec)
        self._begin()
        plan, turns = StepPlan(spec.rule, spec.steps, spec.logprobs, spec.survival), PLAIN in self.control.arms
        told_of_compiling = on_progress and partial(on_progress, "compiling")
        self.programs = Programs(target, drafters, self.state, plan, spec.buckets, turns, told_of_compiling)
        adaptive = decider(self.control)
        if isinstance(adaptive, Adaptive):
            tell = on_progress or (lambda stage, done, total: None)
            tell(TIMING, 0, 0)
            self._random = np.random.default_rng(0)
            told = warm_up(adaptive.arms, self._warm_up, min(spec.rows, WARM_ROWS), spec.steps)
            times = adaptive.times
            times.prior, times.overhead_s = times.prior or told[0], told[1]
            tell(TIMING, 1, 1)

    def _begin(self) -> None:
        """Nothing runs or waits, and nothing is known of requests."""
        self.state, self._lost = self._allocate(), False
        self._moved: dict[int, RequestOutput] = {}
        pool = PageAllocator(self.spec.pages, self.spec.page) if self.spec.pages else None
        self.scheduler = Scheduler(self.spec.rows, pool, self.slack)
        self.metrics = EngineMetrics(self.depth)
        self.survival = RequestSurvival(self.spec.rows, self.depth, REMEMBERED)

    def beside(self, control: Control) -> Engine:
        """Another engine over the same weights, programs, arms and budget, idle, with a KV cache of its own."""
        other = copy.copy(self)
        other.control = control
        other._begin()
        return other

    def _warm_up(self, arm: AnyTopology, most: int) -> tuple[float, float]:
        """Time of a step of an arm on random tokens in seconds, and the share that was not skipped; nothing stays."""
        rows, repeats = range(min(self.spec.rows, WARM_ROWS)), arm in self.programs.skipping
        sampling = replace(
            init_sampling(1, STOP_PLACES),
            max_length_B=np.full(1, self.spec.capacity, np.int32), draft_limit_B=np.full(1, self.depth, np.int32),
            temperature_B=np.ones(1, np.float32),  # text as it may come, which touches experts as text does
            # Nothing but the prompt's tokens: only what is repeated has a match, and is verified.
            presence_B=np.full(1, -1e4 if repeats else 0.0, np.float32),
        )  # fmt: skip
        table = None if self.state.table_BJ is None else np.zeros(self.state.table_BJ.shape[1], np.int32)
        for row in rows:
            vocab = self.programs.target.net.arch.vocab_size
            drawn_X = self._random.integers(0, vocab, len(PAIRS)).astype(np.int32)
            prompt = drawn_X[list(PAIRS)] if repeats else drawn_X
            self.state = self.programs.prefill(self.state, row, prompt, table)
            self.state = self.programs.admit(self.state, row, prompt, sampling, table)
        jax.block_until_ready(self.state.length_B)
        began = time.monotonic()
        self.state, report = self.programs.dispatch(self.state, most, False, arm)
        reading = Reading.of(report, arm, arm in self.programs.skipping)
        # Process 0's time, for all: the number of rounds, and so of programs that exchange, depends on it.
        step_s = float(hosts.broadcast_arrays(np.float32((time.monotonic() - began) / max(reading.steps, 1))))
        for row in rows:
            self.state = self.programs.retire(self.state, row)
        return step_s, 1.0 - float(np.mean(reading.skipped_X))

    @property
    def busy(self) -> bool:
        """Whether anything waits or runs."""
        return self.scheduler.busy

    @property
    def waiting(self) -> Sequence[Sample]:
        """Samples without a row, the oldest first."""
        return self.scheduler.waiting

    @property
    def rows(self) -> list[Sample | None]:
        """Sample in each row."""
        return self.scheduler.rows

    @property
    def pool(self) -> PageAllocator | None:
        """Pages that all rows share, None where each row has its own."""
        return self.scheduler.pool

    def add(self, samples: list[Sample]) -> None:
        """Queues the samples of one request.

        Raises:
          CapacityError: the page pool could never hold one of them; nothing is queued then.
        """
        self.scheduler.add(samples)

    def abort(self, samples: list[Sample] | None = None) -> None:
        """Ends these samples (None: all), whether they wait or run, as ``abort``; the others go on."""
        samples = [*self.waiting, *filter(None, self.rows)] if samples is None else samples
        for sample in samples:
            sample.abort()
        try:
            for row in self.scheduler.withdraw(samples):
                self._free(row)
        except Exception as error:  # of a device; nothing here is the caller's any more
            self._recover(error)

    def step(self, steps: int | None = None) -> list[RequestOutput]:
        """Admits what fits, runs one dispatch, and returns the requests that it moved forward.

        If it fails, ``take_moved`` has what it had moved by then. What runs goes on with the next step, and its text
        is what it would have been: prompts and texts so far are read again into a new state, for the old one may have
        gone with the program that failed. What fails again and again before another token comes ends with an error.
        """
        try:
            self._step(steps)
        except BaseException as error:
            self._recover(error)
            raise
        return self.take_moved()

    def take_moved(self) -> list[RequestOutput]:
        """Requests that moved and were not returned yet."""
        moved, self._moved = list(self._moved.values()), {}
        return moved

    def _step(self, steps: int | None) -> None:
        read = self._admit()
        running = len(self.scheduler.running)
        if not running:
            return
        asked = time.monotonic()
        decision, began = self._decide(running, steps), time.monotonic()
        self._catch_up(decision.length)
        self._price(decision.length, running)
        ready = time.monotonic()
        self.state, report = self.programs.dispatch(
            self.state, steps or self.spec.steps, bool(self.waiting), decision.arm, decision.least
        )
        self.control.ahead(decision, running, self.survival)
        reading = Reading.of(report, decision.arm, decision.arm in self.programs.skipping)
        done = time.monotonic()
        self.metrics.decode_time_s += done - began
        taken = collect(reading, self.rows, self.eos, self.metrics, self.budget is not None)
        self._moved |= taken.moved
        if reading.broken_B.any():
            self.state = self.programs.scrub(self.state)
        for row, sample in taken.ended:
            self._finish(row, sample)
        self.survival.add(decision.length, taken.by_row)
        outcome = outcome_of(reading, taken, running, time_s=done - ready, lost_s=ready - began, read=read)
        self._record(decision, reading, taken, outcome, began - asked)

    def _recover(self, error: BaseException) -> None:
        """Lets go of the state; what ran is admitted again, with its text so far, once there is a new one."""
        for row, sample in self.scheduler.running:
            self.survival.leave(row)
            if sample.stalls() >= TRIES:
                sample.fail(f"{TRIES} steps failed before another token came ({type(error).__name__}: {error})")
                self._moved[id(sample.output)] = sample.output
            if sample.completion.finish_reason is not None:
                self._settle(sample)
        self.scheduler.requeue()
        if not self._lost:
            self._lost = True
            del self.state  # first of all its memory

    def _record(
        self, decision: Decision, reading: Reading, taken: Collected, outcome: Outcome, deciding_s: float
    ) -> None:
        """Takes note of what came of a decision that took so long."""
        told = time.monotonic()
        self.control.record(decision, outcome)
        self.metrics.deciding_time_s += deciding_s + time.monotonic() - told
        self.metrics.dispatched(decision, outcome)
        if self.budget is not None and reading.report.outcome_HMC is not None:
            self.budget.record(decision.length, outcome, np.asarray(reading.report.outcome_HMC))
            self.metrics.draft_prices_s = self.budget.prices_s

    def _decide(self, rows: int, steps: int | None) -> Decision:
        """Arm of the next dispatch; rows that want no drafts take part in it, too, and gain nothing."""
        if not self.survival.wanted:
            return Decision(PLAIN)
        return self.control.choose(rows, len(self.waiting), self.survival, steps)

    def _price(self, length: int, rows: int) -> None:
        """DraftCosts of the next dispatch's drafts."""
        if self.budget is not None and self.budget.pruning.by_cost and length:
            places = jax.tree.map(lambda x: x.sharding, self.state.draft_costs)
            prices = hosts.broadcast_arrays(self.budget.prices(length, rows))  # clocks of other processes differ
            self.state = replace(self.state, draft_costs=jax.device_put(prices, places))

    def _catch_up(self, length: int) -> None:
        """Shows the drafter what rows committed without it, before it drafts; a head what was kept for it."""
        if self.drafter.needs == "none" or not (self.programs.turns and length):
            return
        room = self.drafter.ring_size if isinstance(self.drafter, LazyObserver) else self.spec.capacity
        shown = False
        for row, sample in enumerate(self.rows):
            if sample is None or sample.params.draft_limit == 0 or sample.observed == sample.length:
                continue
            first = max(sample.observed, sample.length - room)
            self.state = self.programs.catch_up(self.state, row, first, sample.length - first)
            sample.observed, shown = sample.length, True
        if shown:  # or the dispatch would seem to take its time
            jax.block_until_ready(self.state)

    def _admit(self) -> bool:
        """Reads the prompts of requests that have a place, to the end: a dispatch's time is its own then."""
        began, waiting = time.monotonic(), len(self.waiting)
        if self._lost:
            self.state, self._lost = self._allocate(), False
        for row, sample in self.scheduler.place():
            self.survival.enter(row, sample.params.draft_limit, sample.params.kind)
            self._start(row, sample)
        read = len(self.waiting) < waiting
        if read:
            jax.block_until_ready(self.state.length_B)
            self.metrics.prefill_time_s += time.monotonic() - began
        return read

    def _start(self, row: int, sample: Sample) -> None:
        """Reads a sample's prompt, and its text where it goes on after a failure, into its row."""
        width = 0 if self.state.table_BJ is None else self.state.table_BJ.shape[1]
        table, tokens = self.scheduler.table(sample, width), sample.tokens
        stop_ids = sorted(({*()} if sample.params.ignore_eos else self.eos) | set(sample.params.stop_token_ids or []))
        try:
            sampling = sample.sampling(stop_ids, STOP_PLACES, self.depth)
            bias_V = sample.bias(self.state.bias_BV.shape[1])
        except Exception as error:  # its own failure; the others go on
            sample.fail(f"this request could not be started ({type(error).__name__}: {error})")
            self._moved[id(sample.output)] = sample.output
            self._finish(row, sample)
            return
        self.metrics.prompt_tokens += 0 if sample.completion.token_ids else len(sample.prompt)
        self.state = read_prompt(self.programs, self.state, row, sample, table, self.spec.logprobs)
        if sample.reads_only:
            self._moved[id(sample.output)] = sample.output
            self._finish(row, sample)
            return
        self.state = self.programs.admit(self.state, row, tokens, sampling, table, bias_V)
        sample.observed = sample.length
        if sample.completion.token_ids:
            prompt, generated = sample.output.prompt_token_ids, sample.completion.token_ids
            self.state = recount(self.state, row, prompt, generated)

    def _finish(self, row: int, sample: Sample) -> None:
        self._settle(sample)
        self._free(row)

    def _settle(self, sample: Sample) -> None:
        """A sample has ended; its request, too, if it was the last."""
        if sample.settle() and all(c.error is None for c in sample.output.outputs):
            self.metrics.requests += 1

    def _free(self, row: int) -> None:
        self.scheduler.free(row)
        self.survival.leave(row)
        self.state = self.programs.retire(self.state, row)


def _allocate(make: Callable[[], DecodeState], target: Target, spec: EngineSpec) -> DecodeState:
    """A state where the target lies."""
    mesh = mesh_of(target.params)
    if mesh is not None:
        return allocate(make, mesh, places_of(target, spec))
    with jax.default_device(next(iter(jax.tree.leaves(target.params)[0].devices()))):
        return make()


def places_of(target: Target, spec: EngineSpec) -> Mapping[str, tuple[str, ...]]:
    """Mesh axes of the state's arrays by letter: rows over ``data``, and over ``expert`` where they are exchanged."""
    policy = target.net.policy
    if policy.compute.mesh is None:
        return {}
    over = row_axes(policy.compute.mesh, spec.rows, policy.compute.transport != "sum")
    return state_rules(over, own_pages=not spec.pages and policy.layout.depth == "unrolled")
