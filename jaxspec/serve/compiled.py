"""Ahead-of-time executables of one engine: a changed shape is an error, and only rare programs compile when called."""

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.decode.chunks import UnreadPrompt, cut, next_size
from jaxspec.decode.compaction import Sizes
from jaxspec.decode.dispatch import dispatch
from jaxspec.decode.prefill import Chunk, admit, catch_up, prefill, prefill_routed, remember, retire
from jaxspec.decode.prefix import PrefixPlan, Store, load_blocks, save_blocks
from jaxspec.decode.runner import Runner
from jaxspec.decode.scores import Scores, prefill_scored
from jaxspec.decode.scrub import scrub
from jaxspec.decode.state import DecodeState, Target, init_sampling
from jaxspec.decode.step import StepPlan
from jaxspec.nn.policy import Compute
from jaxspec.protocol import Drafter, NoDrafts
from jaxspec.pytree import replace
from jaxspec.serve.background import THREADS, CompiledPrograms
from jaxspec.serve.engine_spec import EngineSpec
from jaxspec.shapes import Params
from jaxspec.sharding import hosts
from jaxspec.sharding.compiler_options import compiler_options
from jaxspec.sharding.placement import mesh_of, settle, shapes_on
from jaxspec.topology import AnyTopology

_TRACING = Lock()  # two traces in turns take as long as one after the other, and XLA idles meanwhile


class Programs(Runner):
    """Compiles the programs that serving needs for one state's shapes, in the background and the first needed first.

    Attributes:
      programs: by name, see ``Runner``.
      turns: whether a drafter that observes takes turns with plain decoding, so that it must be caught up.
      routes: whether the experts that the target chooses are reported.
      skipping: topologies whose steps verify nothing where few rows have a draft.
    """

    programs: CompiledPrograms
    routes: bool = False

    def __init__(
        self, target: Target, drafters: Mapping[AnyTopology, Drafter], state: DecodeState, spec: EngineSpec,
        *, turns: bool = False, first: AnyTopology | None = None, prefix: tuple[PrefixPlan, Store] | None = None,
    ):  # fmt: skip
        """Begins to compile.

        Args:
          target: verifies; weights are never baked into programs.
          drafters: by what they draft, plain decoding among them; their state is one and the same.
          state: its shapes have room for each of them.
          spec: of the engine.
          turns: whether rows that speculate also take part in dispatches without drafts, and must be caught up.
          first: what the first request drafts, by default the first of ``drafters``.
          prefix: how prefixes are taken over, and a store of them for its shapes; None where none are.
        """
        mesh, plan = mesh_of(state), StepPlan(spec.rule, spec.steps, spec.logprobs, routes=spec.routes)
        drafters = {k: settle(drafter, mesh) for k, drafter in drafters.items()}
        super().__init__(settle(target, mesh), drafters, spec.buckets, {})
        self.unbiased_V = settle(jnp.zeros(state.bias_BV.shape[1]), mesh)
        self.turns, self.routes = turns and self.drafter.needs != "none", spec.routes
        self.any_cut = reads_alike(target.net.policy.compute)
        self._joint = (spec.joint, spec.buckets[0]) if spec.joint > 1 and mesh is None and self.any_cut else None
        first = next(iter(drafters)) if first is None else first
        self._urgent = ("dispatch", first), ("prefill", self.buckets[len(self.buckets) // 2]), "admit", "retire"
        jobs = self._jobs(state, plan)
        # A GPU computes while all cores of its host compile; a CPU does both itself.
        cores = {} if jax.default_backend() == "cpu" else {"threads": os.cpu_count() or THREADS}
        self.programs = CompiledPrograms({name: jobs[name] for name in (*self._urgent, *jobs)}, **cores)
        self._blocks = max(spec.capacity // prefix[0].size, 1) if prefix else 0  # of the longest text
        self._copies = {} if prefix is None else self._copy_jobs(state, *prefix)
        self.skipping = {k for k, one in drafters.items() if Sizes.of(target, one, state).anchors}

    def _jobs(self, state: DecodeState, plan: StepPlan) -> dict[Hashable, Callable[[], Any]]:
        """Returns what compiles each program; they hold shapes, for states come and go."""
        target, drafter, table, mesh = self.target, self.drafter, state.table_BJ, mesh_of(state)
        scalar, flag, settings = jnp.int32(0), jnp.array(False), init_sampling(1, state.sampling.stop_BX.shape[1])
        table_J = None if table is None else table[0]

        def job(function: Callable[..., Any], *args: Any, donate: int, report: bool = False) -> Callable[[], Any]:
            return partial(compile_program, function, shapes_on(args, mesh), mesh=mesh, donate=donate, report=report)

        def reads(rows: int, size: int) -> Callable[[], Any]:
            number_R, table_RJ = jnp.zeros(rows, jnp.int32), None if table is None else table[:rows]
            chunk = Chunk(number_R, jnp.zeros((rows, size + 1), jnp.int32), number_R, number_R, table_RJ)
            reads = prefill_routed if plan.routes else prefill
            return job(reads, target, drafter, state, chunk, donate=2, report=plan.routes)

        text_S = state.history_BS[0]
        jobs: dict[Hashable, Callable[[], Any]] = {
            ("dispatch", k): job(
                partial(dispatch, plan=plan), target, one, state, scalar, flag, scalar, donate=2, report=True
            )
            for k, one in self.drafters.items()
        }
        jobs |= {("prefill", size): reads(1, size) for size in self.buckets}
        jobs["admit"] = job(admit, state, scalar, text_S, scalar, settings, table_J, self.unbiased_V, donate=0)
        jobs["retire"] = job(retire, state, scalar, donate=0)
        if drafter.remembers:
            jobs["remember"] = job(remember, drafter, state, text_S, scalar, donate=1)
        if self._joint is not None:
            jobs["prefill jointly", self._joint[1]] = reads(*self._joint)
        for size in drafter.replay_sizes(self.buckets) if self.turns else ():
            jobs["catch up", size] = job(partial(catch_up, size=size), drafter, state, scalar, scalar, scalar, donate=1)
        return jobs

    def _copy_jobs(self, state: DecodeState, plan: PrefixPlan, store: Store) -> dict[Hashable, Callable[[], Any]]:
        """Returns what compiles the programs that take over prefixes."""
        table_J, mesh, number = None if state.table_BJ is None else state.table_BJ[0], mesh_of(state), jnp.int32(0)
        args = store, state, number, table_J, number, jnp.zeros(self._blocks, jnp.int32), number
        copies = {"save prefix": (save_blocks, 0), "load prefix": (load_blocks, 1)}
        return {
            name: partial(
                compile_program, partial(function, plan=plan), shapes_on(args, mesh), mesh=mesh, donate=donate
            )
            for name, (function, donate) in copies.items()
        }

    @property
    def copies_prefixes(self) -> bool:
        """Whether prefixes can be taken over now; where they could be, what compiles the programs begins."""
        self._compile_copies()
        return all(name in self.programs and self.programs.ready(name) for name in ("save prefix", "load prefix"))

    def _compile_copies(self) -> None:
        jobs, self._copies = self._copies, {}
        self.programs.compile(jobs)

    def save_prefix(self, store: Store, state: DecodeState, prompt: UnreadPrompt, first: int, ids: list[int]) -> Store:
        """Copies blocks of a row from number ``first`` on into the store, which is donated, as its blocks ``ids``."""
        return self.programs["save prefix"](*self._copying(store, state, prompt, first, ids))

    def load_prefix(
        self, store: Store, state: DecodeState, prompt: UnreadPrompt, first: int, ids: list[int]
    ) -> DecodeState:
        """Copies blocks ``ids`` of the store into a row, from its block ``first`` on; the state is donated."""
        return self.programs["load prefix"](*self._copying(store, state, prompt, first, ids))

    def _copying(
        self, store: Store, state: DecodeState, prompt: UnreadPrompt, first: int, ids: list[int]
    ) -> tuple[Any, ...]:
        id_J = np.zeros(self._blocks, np.int32)
        id_J[: len(ids)] = ids
        return store, state, np.int32(prompt.row), prompt.table_J, np.int32(first), id_J, np.int32(len(ids))

    @property
    def complete(self) -> bool:
        """Whether nothing is left to compile but what is rare."""
        return self.programs.complete

    @property
    def sizes(self) -> tuple[int, ...]:
        """The chunk sizes that may be used now: those that are compiled, where all read alike."""
        if not self.any_cut:
            return self.buckets
        ready = tuple(size for size in self.buckets if self.programs.ready(("prefill", size)))
        return ready or self.buckets

    @property
    def joint(self) -> tuple[int, int] | None:
        """The chunk of several prompts, once it is compiled."""
        ready = self._joint is not None and self.programs.ready(("prefill jointly", self._joint[1]))
        return self._joint if ready else None

    def ready(self, topology: AnyTopology) -> bool:
        """Whether a dispatch of a topology would wait for no compilation."""
        shown = self.drafter.replay_sizes(self.buckets) if self.turns else ()
        names = [("dispatch", topology), *(("catch up", size) for size in shown)]
        return all(map(self.programs.ready, names))

    def can_read(self, prompts: Sequence[UnreadPrompt]) -> bool:
        """Whether ``read`` would wait for no compilation."""
        return self.programs.ready(self.next_chunk(prompts)[0])

    def wait(self, show: Callable[[int, int], None], *, everything: bool) -> None:
        """Waits for what a first request needs, or for everything; ``show`` as of ``CompiledPrograms.wait``.

        Several processes, which must agree on what is there, wait for everything.
        """
        everything |= hosts.is_multiprocess()
        if everything:
            self._compile_copies()
        self.programs.wait(self.programs if everything else self._urgent, show)

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

    def update_target(self, params: Params) -> None:
        """Gives the target other parameters, which lie and are packed like those in use; the programs stay."""
        self.target = replace(self.target, params=params)
        self.drafters = {k: drafter.update_target(params) for k, drafter in self.drafters.items()}

    def read(self, state: DecodeState, prompts: Sequence[UnreadPrompt]) -> DecodeState:
        """Reads one chunk of prompts with tokens left; those of a prompt that has routes get them."""
        if not self.routes:
            return super().read(state, prompts)
        name, chosen = self.next_chunk(prompts)
        starts = [prompt.start for prompt in chosen]
        state, expert_RXYA = self.programs[name](self.target, self.drafter, state, cut(chosen, name[1]))
        for prompt, start, expert_XYA in zip(chosen, starts, np.asarray(expert_RXYA), strict=True):
            prompt.route(start, expert_XYA[: prompt.start - start])
        return state

    def read_scored(
        self, state: DecodeState, prompt: UnreadPrompt, *, most: int, drafts: bool = True
    ) -> tuple[DecodeState, tuple[int, Scores]]:
        """Reads one chunk like ``read``, with scores; its programs, of few sizes, compile when first wanted.

        Args:
          state: donated.
          prompt: with tokens left.
          most: number of most likely tokens per position.
          drafts: whether the drafter observes the prompt; nothing may be decoded after it otherwise.

        Returns:
          The state; how many positions of the chunk count, and their scores.
        """
        size = next_size(prompt.left, tuple(sorted({self.buckets[0], self.buckets[-1]})))
        start = prompt.start
        args = (self.target, self.drafter if drafts else NoDrafts(), state, chunk := cut([prompt], size))
        run = partial(prefill_scored, most=most, routes=self.routes)
        state, scores = self._later(("scored", size, most, drafts), run, args, donate=2, report=True)(*args)
        count = int(chunk.count_R[0])
        if scores.expert_TYA is not None:
            prompt.route(start, np.asarray(scores.expert_TYA)[:count])
        return state, (count, scores)

    def scrub(self, state: DecodeState) -> DecodeState:
        """Takes what is not finite out of the caches; compiled when it is first wanted."""
        return self._later("scrub", scrub, (state,), donate=0)(state)

    def _later(self, name: Hashable, function: Callable[..., Any], args: tuple[Any, ...], **how: Any) -> Any:
        """Returns a rare program, compiled by the first call."""
        if name not in self.programs:
            mesh = mesh_of(args[how["donate"]])
            self.programs[name] = compile_program(function, shapes_on(args, mesh), mesh=mesh, **how)
        return self.programs[name]


def reads_alike(compute: Compute) -> bool:
    """Whether a position's numbers have the same bits in chunks of any size.

    XLA:CPU's products of bfloat16 have them, and all of the kernels in C; those of float32 round 64 rows and more in
    another order than fewer, and recurrences in chunks begin them where a chunk of the prompt does. Where sizes differ,
    the chunks of a prompt may depend on nothing but its length.
    """
    if compute.recurrence == "chunks":
        return False
    on_cpu = jax.default_backend() == "cpu" and compute.mesh is None
    return on_cpu and (compute.kernels == "native" or (compute.kernels == "xla" and compute.dtype == jnp.bfloat16))


def compile_program(
    function: Callable[..., Any], shapes: tuple[Any, ...], *, mesh: Mesh | None, donate: int, report: bool = False
) -> Any:
    """Compiles for where the arguments lie; the state stays where it was, a report is replicated."""
    placed: dict[str, Any] = {}
    if mesh is not None:
        state = jax.tree.map(lambda x: x.sharding, shapes[donate])
        placed["out_shardings"] = (state, NamedSharding(mesh, PartitionSpec())) if report else state
    with _TRACING:
        lowered = jax.jit(function, donate_argnums=donate, **placed).lower(*shapes)
    return lowered.compile(compiler_options())
