"""The engine: takes requests into rows as places become free, dispatches steps, hands out finished text."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from functools import partial

import jax
import numpy as np

from jaxspec.cache.pages import PageAllocator
from jaxspec.decode.state import Target, init_sampling, init_state
from jaxspec.decode.step import Report, StepPlan
from jaxspec.draft.deferred import KEPT, Deferred
from jaxspec.draft.null import NoDrafts
from jaxspec.protocol import Drafter
from jaxspec.pytree import replace
from jaxspec.serve.adaptive import Adaptive
from jaxspec.serve.agreed import decider
from jaxspec.serve.budget import VerifyBudget
from jaxspec.serve.compiled import Programs
from jaxspec.serve.control import Control, Decision, Fixed, Outcome
from jaxspec.serve.metrics import EngineMetrics
from jaxspec.serve.request import Logprob, RequestOutput
from jaxspec.serve.rows import Sample
from jaxspec.serve.survival import RequestSurvival
from jaxspec.serve.warm_up import warm_up
from jaxspec.sharding import hosts
from jaxspec.sharding.placement import allocate, mesh_of, row_axes, state_rules
from jaxspec.topology import PLAIN, AnyTopology

STOP_PLACES = 16
WARM_ROWS = 8
PAIRS = (0, 0, 1, 0, 2, 0, 3, 1, 1, 2, 1, 3, 2, 2, 3, 3, 0)  # every pair of four tokens: whatever follows has a match
REMEMBERED = 64.0  # verifications of one request


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
    ):
        """Compiles every program, for the mesh that the target's parameters lie on.

        Args:
          target: verifies.
          drafter: drafts whatever an arm asks for, not only its own topology.
          spec: what the engine is fixed to.
          eos: ids that end a text.
          control: chooses the arm of each dispatch; by default the drafter's own topology, always.
          budget: sets the prices of drafts; None verifies them all.

        Raises:
          ConfigError: the mesh does not divide the rows.
        """
        self.control, self.budget = control or Fixed(drafter.topology), budget
        if PLAIN in self.control.arms and drafter.topology.drafts and drafter.follows == "features":
            drafter = Deferred(drafter, drafter.topology, target.net.arch, max(KEPT, 2 * spec.steps))
        drafters = arms(drafter, self.control.arms)
        self.depth, self.slack = max(arm.max_depth for arm in drafters), slack_of(drafters, spec.buckets)
        if spec.page and not spec.pages:
            spec = changed(spec, pages=1 + spec.rows * -(-(spec.capacity + self.slack) // spec.page))
        self.spec, self.eos, self.drafter = spec, eos, drafter
        make = partial(
            init_state, target, drafter, spec.rows, spec.capacity,
            slack=self.slack, stop_ids=STOP_PLACES, pages=spec.pages, page=spec.page,
            prices=budget and budget.prices(0, spec.rows),
        )  # fmt: skip
        self._allocate = partial(allocate, make, mesh_of(target.params), places_of(target, spec))
        self._begin()
        plan, turns = StepPlan(spec.rule, spec.steps, spec.logprobs, spec.survival), PLAIN in self.control.arms
        self.programs = Programs(target, drafters, self.state, plan, spec.buckets, turns)
        adaptive = decider(self.control)
        if isinstance(adaptive, Adaptive):
            self._random = np.random.default_rng(0)
            told = warm_up(adaptive.arms, self._warm_up, min(spec.rows, WARM_ROWS), spec.steps)
            times = adaptive.times
            times.prior, times.overhead_s = times.prior or told[0], told[1]

    def _begin(self) -> None:
        """Nothing runs or waits, and nothing is known of requests."""
        self.state = self._allocate()
        self.pool = PageAllocator(self.spec.pages, self.spec.page) if self.spec.pages else None
        self.metrics = EngineMetrics(self.depth)
        self.waiting: deque[Sample] = deque()
        self.rows: list[Sample | None] = [None] * self.spec.rows
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
        table = None if self.pool is None else np.zeros(self.state.table_BJ.shape[1], np.int32)  # pyright: ignore[reportOptionalMemberAccess]
        for row in rows:
            vocab = self.programs.target.net.arch.vocab_size
            drawn_X = self._random.integers(0, vocab, len(PAIRS)).astype(np.int32)
            prompt = drawn_X[list(PAIRS)] if repeats else drawn_X
            self.state = self.programs.prefill(self.state, row, prompt, table)
            self.state = self.programs.admit(self.state, row, prompt, sampling, table)
        jax.block_until_ready(self.state.length_B)
        began = time.monotonic()
        self.state, report = self.programs.dispatch(self.state, most, False, arm)
        packed_BX = np.asarray(report.packed_BX)
        # Process 0's time, for all: the number of rounds, and so of programs that exchange, depends on it.
        step_s = float(hosts.agreed(np.float32((time.monotonic() - began) / max(packed_BX[0, -1], 1))))
        skipped_X, _ = self._skipped(packed_BX, arm)
        for row in rows:
            self.state = self.programs.retire(self.state, row)
        return step_s, 1.0 - float(np.mean(skipped_X))

    def _skipped(self, packed_BX: np.ndarray, arm: AnyTopology) -> tuple[np.ndarray, np.ndarray]:
        """Which steps of a dispatch verified nothing for want of drafts, and how many drafts each row had in each.

        Drafts that were not verified are below zero.
        """
        steps, width = packed_BX[0, -1], arm.max_depth + 3
        drafted_BX = packed_BX[:, width - 1 : -3 : width][:, :steps]
        return (drafted_BX.max(axis=0) <= 0) & (arm in self.programs.skipping), drafted_BX

    @property
    def busy(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting) or any(self.rows)

    def add(self, samples: list[Sample]) -> None:
        """Queues the samples of one request.

        Raises:
          CapacityError: the page pool could never hold one of them; nothing is queued then.
        """
        if self.pool is not None:
            for sample in samples:
                self.pool.check(sample.max_length + self.slack)
        self.waiting.extend(samples)

    def abort(self, samples: list[Sample] | None = None) -> None:
        """Forgets these samples (None: all), whether they wait or run; the others go on."""
        if samples is None:
            samples = [*self.waiting, *filter(None, self.rows)]
        gone = {id(sample) for sample in samples}
        self.waiting = deque(sample for sample in self.waiting if id(sample) not in gone)
        for row, sample in enumerate(self.rows):
            if sample is not None and id(sample) in gone:
                self._free(row, sample)

    def step(self, steps: int | None = None) -> list[RequestOutput]:
        """Admits what fits, runs one dispatch, and returns the requests that it moved forward."""
        read = self._admit()
        running = [sample for sample in self.rows if sample is not None]
        if not running:
            return []
        asked = time.monotonic()
        decision, began = self._decide(len(running), steps), time.monotonic()
        self._catch_up(decision.length)
        self._price(decision.length, len(running))
        ready = time.monotonic()
        self.state, report = self.programs.dispatch(
            self.state, steps or self.spec.steps, bool(self.waiting), decision.arm, decision.least
        )
        self.control.ahead(decision, len(running), self.survival)
        packed = np.asarray(jax.device_get(report.packed_BX))
        done = time.monotonic()
        self.metrics.decode_time_s += done - began
        steps_done, skipped_tokens = int(packed[0, -1]), 0
        skipped_X, drafted_BX = self._skipped(packed, decision.arm)
        counts_BX = packed[:, decision.length + 1 : -3 : decision.length + 3][:, :steps_done]
        often_none = decision.arm in self.programs.skipping
        moved: dict[int, RequestOutput] = {}
        accepted: dict[int, list[int]] = {}
        by_row: dict[int, list[int]] = {}
        for row, sample in enumerate(self.rows):
            if sample is not None:
                moved[id(sample.output)] = sample.output
                tried = sample.tried(decision.length)
                took = self._take(row, sample, packed[row], report, decision.length, tried)
                had = zip(took, drafted_BX[row] > 0, strict=False)
                by_row[row] = [count for count, some in had if some] if often_none else took
                skipped_tokens += len(took) - len(by_row[row])
                accepted.setdefault(tried, []).extend(by_row[row])
                if sample.completion.finish_reason is not None:
                    self._finish(row, sample)
        self.survival.add(decision.length, by_row)
        touched = () if report.touched_K is None else tuple(np.asarray(report.touched_K) / max(steps_done, 1))
        outcome = Outcome(
            len(running), steps_done, done - ready, accepted, ready - began, touched,
            drafted=float(drafted_BX.clip(0).sum() / max(steps_done, 1)),
            deepest=float(drafted_BX.clip(0).max(axis=0).sum() / max(steps_done, 1)),
            skipped=int(skipped_X.sum()), skipped_tokens=skipped_tokens,
            found=tuple((drafted_BX != 0).sum(axis=0).tolist()) if often_none else (),
            active=float((counts_BX > 0).sum() / max(steps_done, 1)), read=read,
        )  # fmt: skip
        told = time.monotonic()
        self.control.record(decision, outcome)
        self.metrics.deciding_time_s += began - asked + time.monotonic() - told
        self.metrics.dispatched(decision, outcome)
        if self.budget is not None and report.outcome_HMC is not None:
            self.budget.record(decision.length, outcome, np.asarray(report.outcome_HMC))
            self.metrics.draft_prices_s = self.budget.prices_s
        return list(moved.values())

    def _decide(self, rows: int, steps: int | None) -> Decision:
        """Arm of the next dispatch; rows that want no drafts take part in it, too, and gain nothing."""
        if not self.survival.wanted:
            return Decision(PLAIN)
        return self.control.choose(rows, len(self.waiting), self.survival, steps)

    def _price(self, length: int, rows: int) -> None:
        """Prices of the next dispatch's drafts."""
        if self.budget is not None and self.budget.cuts.priced and length:
            places = jax.tree.map(lambda x: x.sharding, self.state.prices)
            prices = hosts.agreed(self.budget.prices(length, rows))  # clocks of other processes differ
            self.state = replace(self.state, prices=jax.device_put(prices, places))

    def _catch_up(self, length: int) -> None:
        """Shows the drafter what rows committed without it, before it drafts; a head what was kept for it."""
        if self.drafter.follows == "nothing" or not (self.programs.turns and length):
            return
        room = self.drafter.room if isinstance(self.drafter, Deferred) else self.spec.capacity
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
        self._admit_what_fits()
        read = len(self.waiting) < waiting
        if read:
            jax.block_until_ready(self.state.length_B)
            self.metrics.prefill_time_s += time.monotonic() - began
        return read

    def _admit_what_fits(self) -> None:
        for row, held in enumerate(self.rows):
            if held is not None or not self.waiting:
                continue
            sample = self.waiting[0]
            table = None
            if self.pool is not None:
                pages = self.pool.allocate(sample.max_length + self.slack)
                if pages is None:
                    return  # the oldest request goes first; the others wait behind it
                sample.pages = pages
                table = np.zeros(self.state.table_BJ.shape[1], np.int32)  # pyright: ignore[reportOptionalMemberAccess]
                table[: len(pages)] = pages
            self.waiting.popleft()
            stop_ids = sorted(
                ({*()} if sample.params.ignore_eos else self.eos) | set(sample.params.stop_token_ids or [])
            )
            sampling = sample.sampling(stop_ids, STOP_PLACES, self.depth)
            state = self.programs.prefill(self.state, row, sample.prompt, table)
            self.state = self.programs.admit(state, row, sample.prompt, sampling, table)
            self.rows[row] = sample
            sample.observed = sample.length
            self.survival.enter(row, sample.params.draft_limit, sample.params.kind)
            self.metrics.prompt_tokens += len(sample.output.prompt_token_ids)

    def _take(self, row: int, sample: Sample, packed: np.ndarray, report: Report, length: int, tried: int) -> list[int]:
        """Hands the tokens of a dispatch to a sample, step by step.

        Returns:
          What each verification accepted of the drafts that were tried, but for a last one that was cut short.
        """
        depth = length + 1
        width, counts = depth + 2, []
        for index in range(int(packed[-1])):
            entry = packed[index * width : (index + 1) * width]
            count, drafted = int(entry[depth]), max(int(entry[depth + 1]), 0)
            if count == 0:
                break
            logprobs = None
            if sample.params.logprobs is not None:
                logprobs = _logprobs(report, row, index * depth, entry[:count], sample.params.logprobs)
            self.metrics.cut_drafts += tried - drafted if self.budget else 0
            before = sample.output.metrics.num_accepted_tokens
            ended = sample.take(entry[:count], drafted, logprobs, self.eos)
            self.metrics.add(drafted, sample.output.metrics.num_accepted_tokens - before, sample.completion)
            if ended:
                break
            counts.append(count - 1)
        if length:
            sample.observed = sample.length
        return counts

    def _finish(self, row: int, sample: Sample) -> None:
        self._free(row, sample)
        if all(c.finish_reason for c in sample.output.outputs):
            sample.output.finished = True
            sample.output.time_s["total"] = time.monotonic() - sample.arrived
            self.metrics.requests += 1

    def _free(self, row: int, sample: Sample) -> None:
        self.rows[row] = None
        self.survival.leave(row)
        self.state = self.programs.retire(self.state, row)
        if self.pool is not None:
            self.pool.release(sample.pages)


def arms(drafter: Drafter, wanted: Sequence[AnyTopology]) -> dict[AnyTopology, Drafter]:
    """A drafter of each topology, plain decoding always among them; they share their weights and their state.

    Plain decoding drafts and observes nothing; only where it takes turns with a drafter that reads what the target
    computed, that is kept for it.
    """
    found: dict[AnyTopology, Drafter] = {PLAIN: NoDrafts()}
    if isinstance(drafter, Deferred):
        found[PLAIN] = replace(drafter, topology=PLAIN)
    return found | {arm: replace(drafter, topology=arm) for arm in wanted if arm.drafts}


def slack_of(drafters: Mapping[AnyTopology, Drafter], buckets: Sequence[int]) -> int:
    """Positions beyond a text that one forward of some arm, or a chunk of a prompt, may write."""
    return max(*buckets, *(arm.nodes for arm in drafters), *(drafter.slack for drafter in drafters.values()))


def places_of(target: Target, spec: EngineSpec) -> Mapping[str, tuple[str, ...]]:
    """Mesh axes of the state's arrays by letter: rows over ``data``, and over ``expert`` where they are exchanged."""
    policy = target.net.policy
    if policy.mesh is None:
        return {}
    over = row_axes(policy.mesh, spec.rows, policy.transport != "sum")
    return state_rules(over, own_pages=not spec.pages and policy.depth == "unrolled")


def _logprobs(report: Report, row: int, first: int, tokens: np.ndarray, most: int) -> list[dict[int, Logprob]]:
    """Log-probabilities of one verification's tokens: the sampled one and the ``most`` best."""
    # Sliced on the host: a slice on the device would compile a program for each length.
    values = np.asarray(report.logprob_BXL)[row, first : first + len(tokens)]
    ids = np.asarray(report.top_BXL)[row, first : first + len(tokens)]
    found = []
    for token, value, top in zip(tokens.tolist(), values, ids, strict=True):
        entry = {
            int(i): Logprob(float(v), r + 1)
            for r, (i, v) in enumerate(zip(top[1:], value[1:], strict=True))
            if r < most
        }
        entry.setdefault(token, Logprob(float(value[0]), int(top[0])))
        found.append(entry)
    return found
