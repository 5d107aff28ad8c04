"""The engine: each dispatch admits, decides, drafts and verifies, hands out text, and learns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace as changed
from functools import partial

import jax
import numpy as np

from jaxspec.cache.pages import PageAllocator
from jaxspec.control.decision import Control, Decision, Fixed, Outcome, Request
from jaxspec.control.draft_cost import VerifyBudget
from jaxspec.decode.dispatch import DispatchResult
from jaxspec.decode.prefix import plan_prefix
from jaxspec.decode.state import DecodeState, Target, init_state
from jaxspec.draft.lazy_observer import RING_SIZE, LazyObserver
from jaxspec.protocol import DraftCosts, Drafter
from jaxspec.pytree import replace
from jaxspec.serve.acceptance_alarm import AcceptanceAlarm
from jaxspec.serve.allocation import allocate_on
from jaxspec.serve.collect import Collected, collect, outcome_of
from jaxspec.serve.compiled import Programs
from jaxspec.serve.engine_spec import EngineSpec
from jaxspec.serve.masked_programs import MaskedPrograms
from jaxspec.serve.metrics import EngineMetrics
from jaxspec.serve.prefix_cache import PrefixCache, blocks_of
from jaxspec.serve.rank0 import adaptive_of
from jaxspec.serve.request import RequestOutput
from jaxspec.serve.sample import STOP_PLACES, Sample
from jaxspec.serve.scheduler import Scheduler
from jaxspec.serve.stopwatch import Stopwatch
from jaxspec.serve.warm_up import DispatchTimer, WarmUp
from jaxspec.shapes import Params
from jaxspec.sharding import hosts
from jaxspec.topology import PLAIN

TIMING = "timing speculation lengths"
BETWEEN_CHUNKS = 2  # steps between two chunks of a prompt: rows that decode go on, and the prompt does not wait long

OnProgress = Callable[[str, int, int], None]


class Engine:
    """Continuous batching over compiled steps.

    Attributes:
      spec: what it is fixed to.
      eos: ids that end a text.
      drafter: drafts any topology of the control's.
      depth: deepest draft of any topology.
      control: chooses the topology of each dispatch.
      untimed: whether it measures and decides nothing yet, before its arms were timed.
      budget: sets the prices of drafts; None verifies them all.
      programs: compiled.
      scheduler: what waits and runs, and the state on the device.
      metrics: totals.
      prefix: what is kept of texts for others that begin alike, None for nothing.
      closed: whether samples that come are held back until it opens.
      held_back: those samples.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        spec: EngineSpec,
        eos: set[int],
        control: Control | None = None,
        budget: VerifyBudget | None = None,
        alarm: AcceptanceAlarm | None = None,
    ):
        """Begins to compile every program, for the mesh that the target's parameters lie on; see ``start``.

        Args:
          target: verifies.
          drafter: drafts any topology of the control's, not only its own.
          spec: what the engine is fixed to.
          eos: ids that end a text.
          control: chooses the topology of each dispatch; by default the drafter's own, always.
          budget: sets the prices of drafts; None verifies them all.
          alarm: warns where far too few drafts are accepted.

        Raises:
          ConfigError: the mesh does not divide the rows.
        """
        self.control, self.budget, self._alarm = control or Fixed(drafter.topology), budget, alarm
        turns = PLAIN in self.control.arms
        if turns and drafter.topology.drafts and drafter.needs == "hidden":
            drafter = LazyObserver(drafter, target.net.arch, max(RING_SIZE, 2 * spec.steps))
        drafters = {PLAIN: drafter.plain()}  # which all share their weights and one state
        drafters |= {k: drafter.with_topology(k) for k in self.control.arms if k.drafts}
        self.depth = max(k.max_depth for k in drafters)
        # Positions beyond a text that one forward, or a chunk of a prompt, may write.
        self._slack = max(*spec.buckets, *(k.nodes for k in drafters), *(d.slack for d in drafters.values()))
        if spec.page and not spec.pages:
            spec = changed(spec, pages=1 + spec.rows * -(-(spec.capacity + self._slack) // spec.page))
        self.spec, self.eos, self.drafter = spec, eos, drafter
        widest = max((drafter, *(d for k, d in drafters.items() if k.drafts)), key=lambda d: d.topology.nodes)
        self._widest = widest.topology
        self._make = partial(
            init_state, rows=spec.rows, capacity=spec.capacity, slack=self._slack, stop_ids=STOP_PLACES,
            pool=(spec.pages, spec.page) if spec.pages else None,
            draft_costs=budget and DraftCosts(**budget.prices(0, spec.rows)),
        )  # fmt: skip
        self._allocate = partial(allocate_on, partial(self._make, target, widest), target, spec)
        state = self._allocate()
        plan = plan_prefix(target, drafter, spec.buckets)
        blocks, self._cache_config = blocks_of(plan, spec)
        self._make_store = partial(plan.init_store, jax.eval_shape(self._make, target, widest), blocks)
        make_store = partial(allocate_on, self._make_store, target, spec)
        copies = (plan, make_store()) if blocks else None
        self.programs = Programs(target, drafters, state, spec, turns=turns, first=self.control.arms[0], prefix=copies)
        self.prefix = None if copies is None else PrefixCache(plan, blocks, make_store, self.programs, copies[1])
        self._masked: MaskedPrograms | None = None  # compiled with the first grammar
        # An adaptive control decides nothing before its arms were timed.
        self._adaptive, self._warm_up = adaptive_of(self.control), None
        self.untimed = self._adaptive is not None
        self.held_back: list[Sample] = []
        self.closed = False
        self.reset(state)

    def start(self, on_progress: OnProgress | None = None, *, everything: bool = False) -> None:
        """Waits for what a first request needs; what else was to compile does so while requests run.

        Args:
          on_progress: called with ("compiling", programs done, programs in all), and before arms are timed.
          everything: waits for all programs, and times the arms of a control that measures.

        Raises:
          Exception: what went wrong with one of them.
        """
        show = on_progress or (lambda stage, done, total: None)
        self.programs.wait(partial(show, "compiling"), everything=everything)
        if self.timing_due and not self.busy:
            show(TIMING, 0, 0)
            for _ in self.time_arms():
                pass
            show(TIMING, 1, 1)

    @property
    def timing_due(self) -> bool:
        """Whether the arms of a control that measures are all compiled, and not timed yet."""
        return self.untimed and self.programs.complete

    def time_arms(self, *, idle: bool = True) -> Iterator[None]:
        """Times arms round by round, as long as nothing waits or runs if ``idle``; rows must be free.

        After an error the control goes on without; an arm that does not run says so where a request needs it.
        """
        adaptive = self._adaptive
        while adaptive is not None and self.timing_due and not (idle and self.busy):
            if self._warm_up is None:
                timer = DispatchTimer(self.scheduler, self.programs, self.spec, self.depth)
                self._warm_up = WarmUp(adaptive.arms, timer, timer.rows, self.spec.steps)
            try:
                self._warm_up.round()
            except BaseException as error:
                self.untimed = False
                self.scheduler.recover(error)
                raise
            if self._warm_up.done:
                adaptive.times.warm_up(*self._warm_up.result())
                self.untimed = False
            yield

    def reset(self, state: DecodeState | None = None) -> None:
        """Forgets all requests: nothing runs or waits, in a state that is given or allocated anew."""
        self.metrics = EngineMetrics(self.depth)
        self.metrics.cache_config = self._cache_config
        if self.prefix is not None:
            self.prefix.reset()
        self.scheduler = Scheduler(
            self.programs, self.spec, self.eos, self.metrics,
            allocate=self._allocate, slack=self._slack, draft_length=self.depth, prefix=self.prefix,
        )  # fmt: skip
        if state is not None:
            self.scheduler.state = state

    def reset_prefix_cache(self) -> None:
        """Forgets every prefix, because of other weights say; what is being read or runs now is not kept later."""
        if self.prefix is not None:
            self.prefix.reset()

    @property
    def busy(self) -> bool:
        """Whether anything waits or runs."""
        return self.scheduler.busy

    @property
    def reads(self) -> bool:
        """Whether the next step reads prompts, if there are pages for them."""
        return bool(self.scheduler.reading) or (bool(self.waiting) and not all(self.rows))

    @property
    def waiting(self) -> Sequence[Sample]:
        """Samples without a row, the next to go first."""
        return self.scheduler.waiting

    @property
    def rows(self) -> list[Sample | None]:
        """Sample in each row."""
        return self.scheduler.rows

    @property
    def pool(self) -> PageAllocator | None:
        """Pages that all rows share, None where each row has its own."""
        return self.scheduler.pool

    @property
    def state(self) -> DecodeState:
        """State of all rows on the device."""
        return self.scheduler.state

    @property
    def samples(self) -> list[Sample]:
        """All that wait, run, or came after a pause began."""
        return [*self.waiting, *filter(None, self.rows), *self.held_back]

    def add(self, samples: list[Sample]) -> None:
        """Queues the samples of one request; those that come while it is closed wait until it opens.

        Raises:
          CapacityError: the page pool could never hold one of them; nothing is queued then.
        """
        self.scheduler.check(samples)
        if self.closed:
            self.held_back.extend(samples)
        else:
            self.scheduler.waiting.extend(samples)

    def open(self) -> None:
        """Queues what came while it was closed, and what comes from now on."""
        self.closed = False
        self.scheduler.waiting.extend(self.held_back)
        self.held_back.clear()

    def abort(self, samples: list[Sample] | None = None, reason: str = "abort") -> None:
        """Ends these samples (None: all), wherever they are, for a reason; the others go on."""
        samples = self.samples if samples is None else samples
        gone = {id(sample) for sample in samples}
        for sample in samples:
            sample.abort(reason)
        self.held_back = [sample for sample in self.held_back if id(sample) not in gone]
        try:
            self.scheduler.abort(samples)
        except Exception as error:  # of a device; nothing here is the caller's any more
            self.scheduler.recover(error)

    def end_late(self) -> None:
        """Ends samples whose time is over."""
        if gone := late(self.samples):
            self.abort(gone, "timeout")
            self.scheduler.moved |= {id(sample.output): sample.output for sample in gone}

    def update_target(self, params: Params) -> None:
        """Gives the target other parameters; what runs is read again with its text so far, and goes on with them."""
        self.scheduler.read_again()
        self.programs.update_target(params)
        self._hold_new()

    def update_draft(self, params: Params) -> None:
        """Gives what drafts other parameters."""
        self.programs.update_params(params)
        self._hold_new()

    def _hold_new(self) -> None:
        """Lets go of parameters that are not in use any more, and of prefixes that they have read."""
        self.reset_prefix_cache()
        self.drafter = self.programs.drafter
        target = self.programs.target
        same = self.drafter.topology == self._widest
        widest = self.drafter if same else self.drafter.with_topology(self._widest)
        self._allocate = partial(allocate_on, partial(self._make, target, widest), target, self.spec)
        self.scheduler.allocate = self._allocate
        if self.prefix is not None:
            self.prefix.allocate = partial(allocate_on, self._make_store, target, self.spec)

    def step(self, steps: int | None = None) -> list[RequestOutput]:
        """Admits what fits, runs one dispatch, and returns the requests that it moved forward.

        If it fails, ``take_moved`` has what it had moved by then. What runs goes on with the next step, and its text
        is what it would have been: prompts and texts so far are read again into a new state, for the old one may have
        gone with the program that failed. What fails again and again before another token comes ends with an error.
        """
        try:
            self._step(steps)
        except BaseException as error:
            self.scheduler.recover(error)
            raise
        return self.take_moved()

    def take_moved(self) -> list[RequestOutput]:
        """Returns requests that moved and were not returned yet."""
        moved = list(self.scheduler.moved.values())
        self.scheduler.moved.clear()
        return moved

    def _step(self, steps: int | None) -> None:
        self.end_late()
        # With long queues arms are timed as soon as rows have ended their texts, else when nothing is left to do.
        timing = self.timing_due and len(self.waiting) > self.spec.rows
        if timing and not any(self.rows):
            timing = any(self.time_arms(idle=False))
        read, rows = self.scheduler.admit(to_rows=not timing), len(self.scheduler.running)
        if not rows:
            return
        if self.scheduler.reading:
            steps = min(steps or self.spec.steps, BETWEEN_CHUNKS)
        watch = Stopwatch()
        decision = self._choose(rows, steps)
        deciding_s = watch.lap()
        self._prepare(decision, rows)
        catch_up_s = watch.lap()
        result = self._dispatch(decision, steps)
        time_s = watch.lap()
        taken = self._hand_out(result)
        outcome = outcome_of(result, taken, rows, time_s=time_s, catch_up_s=catch_up_s, after_prompt=read)
        watch.lap()
        if not self.untimed:
            self.control.record(decision, outcome)
        self.metrics.deciding_time_s += deciding_s + watch.lap()
        self.metrics.dispatched(decision, outcome)
        if self._alarm is not None:
            self._alarm.look(self.metrics.speculation)
        self._record_prices(decision, outcome, result)

    def _choose(self, rows: int, steps: int | None) -> Decision:
        """Decides about the next dispatch; rows that want no drafts take part in it, too, and gain nothing."""
        samples = [sample for _, sample in self.scheduler.running]
        requests = [Request(sample.params.kind, sample.params.draft_limit) for sample in samples]
        if all(request.limit == 0 for request in requests) or self.untimed:
            decision = Decision(PLAIN)
        else:
            decision = self.control.choose(rows, len(self.waiting), requests, steps)
        ready = self.programs.ready
        if any(sample.constraint is not None for sample in samples):
            if self._masked is None:
                self._masked = MaskedPrograms(self.programs, self.state, self.spec, decision.arm)
            ready = self._masked.ready
        started = any(sample.completion.token_ids for sample in samples)
        if not started or ready(decision.arm):  # a text that has begun waits for no compilation
            return decision
        return next((Decision(arm) for arm in self.programs.drafters if ready(arm)), decision)

    def _prepare(self, decision: Decision, rows: int) -> None:
        """Brings the drafter up to date, and the prices of its drafts."""
        if not decision.length:
            return
        self.scheduler.catch_up()
        if self.budget is not None and self.budget.by_cost:
            places = jax.tree.map(lambda x: x.sharding, self.state.draft_costs)
            # Process 0's, for clocks differ.
            prices = hosts.broadcast_arrays(DraftCosts(**self.budget.prices(decision.length, rows)))
            self.scheduler.state = replace(self.state, draft_costs=jax.device_put(prices, places))

    def _dispatch(self, decision: Decision, steps: int | None) -> DispatchResult:
        """Runs one dispatch, of one step where a row has a grammar."""
        constraints = [sample and sample.constraint for sample in self.scheduler.decoding]
        if self._masked is not None and any(constraints):
            for _, sample in self.scheduler.running:
                if sample.constraint is not None:
                    sample.constraint.follow(sample.completion.token_ids)
            self.scheduler.state, report = self._masked.dispatch(
                self.state, decision.arm, constraints, decision.min_rows
            )
            return report.unpack()
        self.scheduler.state, report = self.programs.dispatch(
            self.state, decision.arm, steps or self.spec.steps, eager=bool(self.waiting), min_rows=decision.min_rows
        )
        return report.unpack()

    def _hand_out(self, result: DispatchResult) -> Collected:
        """Gives every row's tokens to its sample, and retires those that ended."""
        taken = collect(result, self.scheduler.decoding, self.eos, self.metrics, prunes=self.budget is not None)
        self.scheduler.moved |= taken.moved
        if result.broken_B.any():
            self.scheduler.state = self.programs.scrub(self.state)
            self.reset_prefix_cache()
        for row, sample in taken.ended:
            self.scheduler.retire(row, sample)
        return taken

    def _record_prices(self, decision: Decision, outcome: Outcome, result: DispatchResult) -> None:
        outcome_HMC = result.report.counts.outcome_HMC
        if self.budget is not None and outcome_HMC is not None:
            self.budget.record(decision.length, outcome, np.asarray(outcome_HMC))
            self.metrics.draft_prices_s = self.budget.prices_s


def late(samples: Sequence[Sample]) -> list[Sample]:
    """Returns the samples whose time is over, by process 0's clock."""
    timed = [sample for sample in samples if sample.params.timeout_s is not None]
    if not timed:
        return []
    now = time.monotonic()
    over = hosts.broadcast_arrays(np.array([sample.is_late(now) for sample in timed]))
    return [sample for sample, ended in zip(timed, np.asarray(over).tolist(), strict=True) if ended]
