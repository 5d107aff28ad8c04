"""Ahead-of-time executables of one engine: nothing compiles after warm-up, a changed shape is an error."""

from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.decode.compaction import Sizes
from jaxspec.decode.dispatch import dispatch
from jaxspec.decode.prefill import Chunk, admit, catch_up, prefill, retire
from jaxspec.decode.runner import Runner, chunks
from jaxspec.decode.scores import Scores, prefill_scored
from jaxspec.decode.scrub import scrub
from jaxspec.decode.state import DecodeState, Target, init_sampling
from jaxspec.decode.step import StepPlan
from jaxspec.protocol import Drafter, NoDrafts
from jaxspec.shapes import Params
from jaxspec.sharding.placement import mesh_of, settle, shapes_on
from jaxspec.topology import AnyTopology


class Programs(Runner):
    """Compiles every program that serving needs for one state's shapes; rare ones when they are first called.

    Attributes:
      turns: whether a drafter that observes takes turns with plain decoding, so that it must be caught up.
      skipping: topologies whose steps verify nothing where few rows have a draft.
    """

    def __init__(
        self,
        target: Target,
        drafters: Mapping[AnyTopology, Drafter],
        state: DecodeState,
        plan: StepPlan,
        buckets: tuple[int, ...],
        *,
        turns: bool = False,
        on_compile: Callable[[int, int], None] | None = None,
    ):
        """Compiles.

        Args:
          target: verifies; weights are never baked into programs.
          drafters: by what they draft, plain decoding among them; their state is one and the same.
          state: its shapes have room for each of them.
          plan: static.
          buckets: prefill chunk sizes in tokens, ascending.
          turns: whether rows that speculate also take part in dispatches without drafts, and must be caught up.
          on_compile: called with (programs compiled, programs in all), first with none.
        """
        mesh = mesh_of(state)
        super().__init__(settle(target, mesh), {k: settle(d, mesh) for k, d in drafters.items()}, buckets, {})
        target, drafter = self.target, self.drafter
        scalar, self.unbiased_V = jnp.int32(0), settle(jnp.zeros(state.bias_BV.shape[1]), mesh)
        table = None if state.table_BJ is None else state.table_BJ[0]
        flag, settings = jnp.array(False), init_sampling(1, state.sampling.stop_BX.shape[1])
        jobs: dict[Hashable, Callable[[], Any]] = {
            "admit": lambda: _compile(
                admit, (state, scalar, state.history_BS[0], scalar, settings, table, self.unbiased_V), donate=0
            ),
            "retire": lambda: _compile(retire, (state, scalar), donate=0),
        }  # fmt: skip
        for topology, one in self.drafters.items():
            jobs["dispatch", topology] = lambda one=one: _compile(
                partial(dispatch, plan=plan), (target, one, state, scalar, flag, scalar), donate=2, report=True
            )
        for size in buckets:
            chunk = Chunk(scalar, jnp.zeros(size + 1, jnp.int32), scalar, scalar, table)
            jobs["prefill", size] = lambda chunk=chunk: _compile(prefill, (target, drafter, state, chunk), donate=2)
        self.turns = turns and drafter.needs != "none"
        for size in drafter.replay_sizes(buckets) if self.turns else ():
            jobs["catch up", size] = lambda size=size: _compile(
                partial(catch_up, size=size), (drafter, state, scalar, scalar, scalar), donate=1
            )
        self.programs = _compile_all(jobs, on_compile or (lambda done, total: None))
        self.skipping = {
            k for k, one in self.drafters.items() if Sizes.of(target, one, state, routes=plan.routes).anchors
        }

    def update_params(self, params: Params) -> None:
        """Gives every drafter other parameters; the programs stay.

        Raises:
          ConfigError: they do not fit.
        """
        largest = self.drafter
        # Plain decoding has no parameters, unless it takes turns with a drafter that observes it.
        self.drafters = {
            k: d if d.needs == "none" and d is not largest else d.update_params(params)
            for k, d in self.drafters.items()
        }

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
          most: number of most likely tokens per position.
          drafts: whether the drafter observes the prompt; nothing may be decoded after it otherwise.

        Returns:
          The state; and of each chunk how many positions count, and their scores.
        """
        drafter, scores = self.drafter if drafts else NoDrafts(), []
        run = partial(prefill_scored, most=most)
        for size, chunk in chunks(prompt, self.buckets, row, table_J):
            args = (self.target, drafter, state, chunk)
            program = self._later(("scored", size, most, drafts), run, args, donate=2, report=True)
            state, scored = program(*args)
            scores.append((int(chunk.count), scored))
        return state, scores

    def scrub(self, state: DecodeState) -> DecodeState:
        """Takes what is not finite out of the caches; compiled when it is first wanted."""
        return self._later("scrub", scrub, (state,), donate=0)(state)

    def _later(self, name: Hashable, function: Callable[..., Any], args: tuple[Any, ...], **how: Any) -> Any:
        """Returns a rare program, compiled by the first call."""
        if name not in self.programs:
            self.programs[name] = _compile(function, args, **how)
        return self.programs[name]


def _compile_all(
    jobs: Mapping[Hashable, Callable[[], Any]], on_compile: Callable[[int, int], None]
) -> dict[Hashable, Any]:
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


def _compile(function: Callable[..., Any], args: tuple[Any, ...], *, donate: int, report: bool = False) -> Any:
    """Compiles for where the arguments lie; the state stays where it was, a report is replicated."""
    mesh = mesh_of(args[donate])
    shapes = shapes_on(args, mesh)
    placed: dict[str, Any] = {}
    if mesh is not None:
        state = jax.tree.map(lambda x: x.sharding, shapes[donate])
        placed["out_shardings"] = (state, NamedSharding(mesh, PartitionSpec())) if report else state
    return jax.jit(function, donate_argnums=donate, **placed).lower(*shapes).compile()
