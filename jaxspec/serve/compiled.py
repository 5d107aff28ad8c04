"""Ahead-of-time executables of one engine: nothing compiles after warm-up, a changed shape is an error."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.decode.prefill import admit, catch_up, prefill, retire
from jaxspec.decode.scores import Scores, prefill_scored
from jaxspec.decode.scrub import scrub
from jaxspec.decode.state import DecodeState, Target, init_sampling
from jaxspec.decode.step import Report, StepPlan, dispatch, skips
from jaxspec.draft.lazy_observer import CHUNK_SIZE, LazyObserver
from jaxspec.draft.null import NoDrafts
from jaxspec.draft.renew import renew
from jaxspec.protocol import Drafter, Sampling
from jaxspec.shapes import Array, Params
from jaxspec.sharding.placement import mesh_of, settle, shapes_on
from jaxspec.topology import AnyTopology

FEW = 8  # positions of the smallest chunk of kept features


class Programs:
    """Every program that serving needs, compiled for one state's shapes; what few want is compiled when they do.

    Attributes:
      target, drafter: passed to the programs as arguments; weights are never baked in.
      buckets: prefill chunk sizes in tokens, ascending.
      turns: whether a drafter that observes takes turns with plain decoding, so that it must be caught up.
      skipping: arms whose steps verify nothing where few rows have a draft.
    """

    _unbiased_V: Array | None = None

    def __init__(
        self,
        target: Target,
        drafters: Mapping[AnyTopology, Drafter],
        state: DecodeState,
        plan: StepPlan,
        buckets: tuple[int, ...],
        turns: bool = False,
        on_compile: Callable[[int, int], None] | None = None,
    ):
        """Compiles.

        Args:
          target: verifies.
          drafters: by what they draft, plain decoding among them; their state is one and the same.
          state: its shapes have room for each of them.
          plan: static.
          buckets: prefill chunk sizes in tokens, ascending.
          turns: whether rows that speculate also take part in dispatches without drafts, and must be caught up.
          on_compile: called with (programs compiled, programs in all), first with none.
        """
        mesh = mesh_of(state)
        target, drafters = settle(target, mesh), {k: settle(d, mesh) for k, d in drafters.items()}
        drafter = drafters[max(drafters, key=lambda arm: arm.nodes)]  # for prompts any would do that drafts
        self.target, self.drafters, self.drafter, self.buckets, self.plan = target, drafters, drafter, buckets, plan
        scalar, self._unbiased_V = jnp.int32(0), settle(jnp.zeros(state.bias_BV.shape[1]), mesh)
        table = None if state.table_BJ is None else state.table_BJ[0]
        flag = jnp.array(False)
        settings = init_sampling(1, state.sampling.stop_BX.shape[1])
        jobs: dict[str, Callable[[], Any]] = {
            "admit": lambda: _compile(
                admit, (state, scalar, state.history_BS[0], scalar, settings, table, self._unbiased_V), donate=0
            ),
            "retire": lambda: _compile(retire, (state, scalar), donate=0),
        }  # fmt: skip
        for arm, one in drafters.items():
            jobs[f"arm {arm.name}"] = lambda one=one: _compile(
                _dispatch(plan), (target, one, state, scalar, flag, scalar), donate=2, report=True
            )
        for size in buckets:
            chunk = jnp.zeros(size + 1, jnp.int32)
            jobs[f"prefill {size}"] = lambda chunk=chunk: _compile(
                prefill, (target, drafter, state, scalar, chunk, scalar, scalar, table), donate=2
            )
        self.turns = turns and drafter.needs != "none"
        self._shown = shown_at_once(drafter, buckets)
        for size in self._shown if self.turns else ():
            jobs[f"catch up {size}"] = lambda size=size: _compile(
                partial(catch_up, size=size), (drafter, state, scalar, scalar, scalar), donate=1
            )
        self._programs = _compile_all(jobs, on_compile or (lambda done, total: None))
        self.skipping = {arm for arm, one in drafters.items() if skips(target, one, state, plan)}

    def renew(self, params: Params) -> None:
        """Gives every drafter other parameters; the programs stay.

        Raises:
          ConfigError: they do not fit.
        """
        longest = renew(self.drafter, params)
        # Plain decoding has nothing to renew, unless it takes turns with a drafter that observes it.
        plain = {k: d for k, d in self.drafters.items() if d.needs == "none"}
        others = {k: renew(d, params) for k, d in self.drafters.items() if k not in plain}
        self.drafters, self.drafter = plain | others, longest

    def dispatch(
        self, state: DecodeState, steps: int, eager: bool, arm: AnyTopology, least: int = 1
    ) -> tuple[DecodeState, Report]:
        """Up to ``steps`` steps of an arm; one of ``skipping`` verifies where ``least`` rows have a draft."""
        program = self._programs[f"arm {arm.name}"]
        return program(self.target, self.drafters[arm], state, np.int32(steps), np.bool_(eager), np.int32(least))

    def catch_up(self, state: DecodeState, row: int, start: int, count: int) -> DecodeState:
        """Shows the drafter what a row committed without it: ``count`` positions from ``start`` on."""
        while count > 0:
            size = next((b for b in self._shown if b >= count), self._shown[-1])
            done = min(size, count)
            state = self._programs[f"catch up {size}"](
                self.drafter, state, np.int32(row), np.int32(start), np.int32(done)
            )
            start, count = start + done, count - done
        return state

    def prefill(self, state: DecodeState, row: int, prompt: np.ndarray, table_J: np.ndarray | None) -> DecodeState:
        """Runs all of a prompt but its last token, in as few chunks as the buckets allow."""
        for size, chunk, start, count in chunks(prompt, self.buckets):
            state = self._programs[f"prefill {size}"](
                self.target, self.drafter, state, np.int32(row), chunk, start, count, table_J
            )
        return state

    def prefill_scored(
        self,
        state: DecodeState,
        row: int,
        prompt: np.ndarray,
        table_J: np.ndarray | None,
        *,
        most: int,
        drafts: bool = True,
    ) -> tuple[DecodeState, list[tuple[int, Scores]]]:
        """Runs a prompt like ``prefill``; its programs are compiled when they are first wanted.

        Args:
          state: donated.
          row: that gets the prompt.
          prompt: token ids.
          table_J: page ids of the row, None without a page pool.
          most: most likely tokens that are told per position.
          drafts: whether the drafter observes the prompt; nothing may be decoded after it otherwise.

        Returns:
          The state; and of each chunk how many positions count, and their scores.
        """
        drafter, scores = self.drafter if drafts else NoDrafts(), []
        run = partial(prefill_scored, most=most)
        for size, chunk, start, count in chunks(prompt, self.buckets):
            args = (self.target, drafter, state, np.int32(row), chunk, start, count, table_J)
            program = self._later(f"scored {size} {most} {drafts}", run, args, donate=2, report=True)
            state, scored = program(*args)
            scores.append((int(count), scored))
        return state, scores

    def admit(
        self,
        state: DecodeState,
        row: int,
        prompt: np.ndarray,
        sampling: Sampling,
        table_J: np.ndarray | None,
        bias_V: np.ndarray | None = None,
    ) -> DecodeState:
        """Starts a prefilled row."""
        history = np.zeros(state.history_BS.shape[1], np.int32)
        history[: len(prompt)] = prompt
        bias = self._unbiased_V if bias_V is None else bias_V
        return self._programs["admit"](state, np.int32(row), history, np.int32(len(prompt)), sampling, table_J, bias)

    def retire(self, state: DecodeState, row: int) -> DecodeState:
        """Frees a row."""
        return self._programs["retire"](state, np.int32(row))

    def scrub(self, state: DecodeState) -> DecodeState:
        """Takes what is not finite out of the caches; compiled when it is first wanted."""
        return self._later("scrub", scrub, (state,), donate=0)(state)

    def _later(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], **how: Any) -> Any:
        """A program that most engines never want."""
        if name not in self._programs:
            self._programs[name] = _compile(function, args, **how)
        return self._programs[name]


def chunks(prompt: np.ndarray, buckets: tuple[int, ...]) -> Iterator[tuple[int, np.ndarray, np.int32, np.int32]]:
    """The bucket of each chunk of a prompt but its last token, the chunk as prefill takes it, its start and length."""
    start, left = 0, len(prompt) - 1
    while left > 0:
        size = next((b for b in buckets if b >= left), buckets[-1])
        chunk, count = np.zeros(size + 1, np.int32), min(size, left)
        chunk[: count + 1] = prompt[start : start + count + 1]
        yield size, chunk, np.int32(start), np.int32(count)
        start, left = start + count, left - count


def shown_at_once(drafter: Drafter, buckets: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of the chunks in which a drafter is caught up, ascending."""
    return (
        (min(FEW, drafter.ring_size), min(CHUNK_SIZE, drafter.ring_size))
        if isinstance(drafter, LazyObserver)
        else buckets
    )


def _dispatch(plan: StepPlan) -> Callable[..., tuple[DecodeState, Report]]:
    def run(target: Target, drafter: Drafter, state: DecodeState, limit: Array, eager: Array, least: Array):
        return dispatch(target, drafter, state, limit, eager, least, plan=plan)

    return run


def _compile_all(jobs: Mapping[str, Callable[[], Any]], on_compile: Callable[[int, int], None]) -> dict[str, Any]:
    """Compiles by name; an exception, such as an interrupt, does not wait for what has not begun."""
    # XLA compiles outside the interpreter lock, so two threads halve the wait on two cores.
    pool = ThreadPoolExecutor(2)
    try:
        futures = {name: pool.submit(job) for name, job in jobs.items()}
        on_compile(0, len(jobs))
        for done, future in enumerate(as_completed(futures.values()), 1):
            future.result()
            on_compile(done, len(jobs))
        return {name: future.result() for name, future in futures.items()}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _compile(function: Callable[..., Any], args: tuple[Any, ...], donate: int, report: bool = False) -> Any:
    """Compiles for where the arguments lie; the state comes back where it was, and a report beside it whole."""
    mesh = mesh_of(args[donate])
    shapes = shapes_on(args, mesh)
    placed: dict[str, Any] = {}
    if mesh is not None:
        state = jax.tree.map(lambda x: x.sharding, shapes[donate])
        placed["out_shardings"] = (state, NamedSharding(mesh, PartitionSpec())) if report else state
    return jax.jit(function, donate_argnums=donate, **placed).lower(*shapes).compile()
