"""Measures steps of a model on this machine, through the programs that serve it, and fits the model of step time."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.draft_timer import PROPOSALS, propose_often
from jaxspec.checkpoint.files.fingerprint import digests
from jaxspec.checkpoint.load.model import read_config
from jaxspec.decode.state import DecodeState, init_sampling
from jaxspec.draft.speculative_keys import SCHEDULE_KEYS
from jaxspec.errors import ConfigError
from jaxspec.inspect.describe import describe_machine, describe_versions
from jaxspec.inspect.model_cost import model_cost, routed_order
from jaxspec.inspect.text_routes import routed_experts
from jaxspec.models.arch import ArchSpec
from jaxspec.nn.moe import MoeSpec
from jaxspec.perf.calibration import VERSION, Calibration, MeasuredCell, fit_points, record_of
from jaxspec.perf.cost import ModelCost
from jaxspec.perf.overlap import MeasuredOverlap, measure_overlap
from jaxspec.pytree import replace as with_leaves
from jaxspec.serve.compiled import Programs
from jaxspec.serve.engine import STOP_PLACES, Engine
from jaxspec.serve.llm import LLM
from jaxspec.sharding.compiler_options import compiler_options
from jaxspec.topology import chain

BUCKET, OVERLAP_TEXT = 64, 96
Show = Callable[[int, int], None]
Cell = tuple[int, int, int]


@dataclass(frozen=True)
class CalibrationGrid:
    """The cells that are measured, and how.

    Attributes:
      rows, lengths: every pair of these is measured at the first context.
      contexts: cached positions per row; after the first one only the fewest and the most rows are measured, and
        those of a number of rows in the middle, each with the least and a middle length.
      rounds: of all cells in turn, after one that only warms up.
      steps: per timed dispatch.
      held_out_rows, held_out_lengths: further ones, measured in the same rounds and left out of the fit, to see how
        well it predicts them.
    """

    rows: tuple[int, ...] = (1, 2, 4, 8)
    lengths: tuple[int, ...] = (0, 1, 3, 7)
    contexts: tuple[int, ...] = (128, 1024)
    rounds: int = 9
    steps: int = 8
    held_out_rows: tuple[int, ...] = ()
    held_out_lengths: tuple[int, ...] = ()

    @property
    def all_rows(self) -> tuple[int, ...]:
        """Rows that are measured, held out or not."""
        return tuple(sorted({*self.rows, *self.held_out_rows}))

    @property
    def all_lengths(self) -> tuple[int, ...]:
        """Lengths that are measured, held out or not."""
        return tuple(sorted({*self.lengths, *self.held_out_lengths}))

    def __post_init__(self) -> None:
        lists = {"rows": (self.rows, 1), "lengths": (self.lengths, 0), "contexts": (self.contexts, 1)}
        for name, (values, least) in lists.items():
            if not values or list(values) != sorted(set(values)) or values[0] < least:
                raise ConfigError(f"calibrate: {name} must ascend from at least {least}, got {values}")
        if self.lengths[0] != 0 or len(self.lengths) < 2 or self.all_lengths[-1] > 16 or self.all_lengths[0] < 0:
            raise ConfigError(
                f"calibrate: lengths must be 0 and up to 16, plain decoding among them, got {self.lengths}"
            )
        if self.rounds < 2 or self.steps < 1:
            raise ConfigError(f"calibrate: needs 2 rounds and 1 step at least, got {self.rounds} and {self.steps}")
        twice = sorted({*self.rows} & {*self.held_out_rows}), sorted({*self.lengths} & {*self.held_out_lengths})
        if any(twice) or self.all_rows[0] < 1:
            raise ConfigError(
                "calibrate: what is held out must be rows from 1 and lengths that are not fitted, got "
                f"{self.held_out_rows} and {self.held_out_lengths}, of which rows and lengths {twice} are fitted"
            )

    def cells(self) -> list[Cell]:
        """Returns rows, K and context of each cell to fit."""
        near = [(b, k, self.contexts[0]) for b in self.rows for k in self.lengths]
        some = sorted({self.rows[0], self.rows[len(self.rows) // 2], self.rows[-1]})
        middle = self.lengths[len(self.lengths) // 2]
        return near + [(b, k, c) for c in self.contexts[1:] for b in some for k in (0, middle)]

    def held_out(self) -> list[Cell]:
        """Returns the cells that nothing is fitted to, at the first context."""
        return [
            (b, k, self.contexts[0])
            for b in self.all_rows
            for k in self.all_lengths
            if b in self.held_out_rows or k in self.held_out_lengths
        ]


@dataclass
class Bench:
    """One cell ready to be measured again and again.

    Attributes:
      cell: rows, K, context.
      programs: of the engine, one for each length.
      state: of the rows, donated to each dispatch.
      start: lengths, anchors, texts and activity that every dispatch starts from.
      propose: compiled drafting alone, None for K = 0.
      grown: positions per row and dispatch that were committed.
    """

    cell: Cell
    programs: Programs
    state: DecodeState
    start: Mapping[str, np.ndarray]
    propose: Any
    grown: float = 0.0

    def step_s(self, steps: int) -> float:
        """Times a step, over one dispatch that the host waits for, in seconds."""
        state = with_leaves(self.state, **{name: jnp.asarray(x) for name, x in self.start.items()})
        jax.block_until_ready(state.length_B)
        began = time.perf_counter()
        self.state, report = self.programs.dispatch(state, chain(self.cell[1]), steps)
        result = report.unpack()
        elapsed = time.perf_counter() - began
        assert result.steps == steps, "a row ended while it was measured"
        self.grown = float(np.mean(np.asarray(self.state.length_B) - self.start["length_B"]))
        return elapsed / steps

    def draft_s(self) -> float:
        """Times one proposal, in seconds."""
        if self.propose is None:
            return 0.0
        began = time.perf_counter()
        drafter = self.programs.drafters[chain(self.cell[1])]
        jax.block_until_ready(self.propose(drafter, self.state.draft, self.state.anchor))
        return (time.perf_counter() - began) / PROPOSALS


def calibrate(
    directory: Path,
    texts: Sequence[str],
    *,
    speculative: Mapping[str, Any],
    grid: CalibrationGrid,
    load: Callable[..., LLM] = LLM,
    show: Show | None = None,
    **settings: Any,
) -> Calibration:
    """Measures all cells in interleaved rounds, counts real routed ids, and fits.

    Args:
      directory: of the model, with a tokenizer.
      texts: real text that rows continue; random tokens route differently.
      speculative: ``speculative_config`` without a length.
      grid: which cells.
      load: makes the ``LLM`` of a directory or of a loaded model.
      show: called with (measurements done, in all).
      **settings: further keyword arguments of ``LLM``: dtype, quantization, kernels.

    Raises:
      ConfigError: the model has no tokenizer, or the grid does not fit it.
    """
    room = grid.contexts[-1] + grid.steps * (grid.all_lengths[-1] + 1) + 2
    given = sorted(set(SCHEDULE_KEYS) & set(speculative))
    if given:
        raise ConfigError(f"calibrate: the grid gives the lengths; leave {', '.join(given)} out")
    # A table by batch size makes an engine compile every length that it names.
    table = [[n, n, length] for n, length in enumerate(grid.all_lengths, start=1)]
    llm = load(
        directory, speculative_config={**speculative, "num_speculative_tokens_per_batch_size": table},
        max_num_seqs=grid.all_rows[-1], max_model_len=room, max_logprobs=0, prefill_buckets=(BUCKET,),
        steps_per_dispatch=grid.steps, **settings,
    )  # fmt: skip
    if llm.text is None:
        raise ConfigError(
            f"calibrate: {directory} has no tokenizer; real text is needed, random tokens route differently"
        )
    ids = [token for text in texts for token in llm.text.encode(text)]
    engines = {grid.all_rows[-1]: llm.engine}
    for rows in grid.all_rows[:-1]:
        spec = replace(llm.spec, rows=rows)
        engines[rows] = Engine(llm.engine.programs.target, llm.engine.drafter, spec, set(), llm.engine.control)
    for engine in engines.values():
        engine.start(everything=True)
    benches = [bench for rows in grid.all_rows for bench in _benches(engines[rows], grid, rows, ids)]
    measured, noise = _measure(benches, grid, show)
    points, held_out = ([measured[cell] for cell in cells] for cells in (grid.cells(), grid.held_out()))
    arch = llm.model.net.arch
    overlap = _overlap(llm, arch, ids, grid)
    how = {"dtype": str(llm.model.net.policy.storage.param), "quantization": settings.get("quantization") or "auto"}
    cost = model_cost(llm.model.config, name=directory.name, **how)
    full, blind = fit_points(cost, points, overlap, noise / math.sqrt(grid.rounds))
    return Calibration(
        version=VERSION,
        model={"name": directory.name, "family": arch.family, **digests(llm.model.config, directory)},
        machine=describe_machine(),
        versions=describe_versions(),
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        settings={
            "drafter": str(speculative.get("method") or "draft_model"), "rounds": grid.rounds, "steps": grid.steps,
            **how,
        },
        noise_floor=noise,
        points=tuple(points),
        held_out=tuple(held_out),
        overlap=overlap,
        fit=record_of(full),
        token_count_fit=record_of(blind),
    )  # fmt: skip


def cost_of(calibration: Calibration, directory: Path) -> ModelCost:
    """Returns the cost of the calibrated model, as it was measured."""
    how = {name: str(calibration.settings[name]) for name in ("dtype", "quantization")}
    return model_cost(read_config(directory), name=directory.name, **how)


def _benches(engine: Engine, grid: CalibrationGrid, rows: int, ids: Sequence[int]) -> list[Bench]:
    """Prepares every cell of an engine; cells of one length share programs, and each has rows of its own."""
    drafting: dict[int, Any] = {0: None}
    benches = []
    for cell in (cell for cell in grid.cells() + grid.held_out() if cell[0] == rows):
        _, length, context = cell
        state = _filled(engine, rows, context, ids)
        if length not in drafting:
            args = engine.programs.drafters[chain(length)], state.draft, state.anchor, engine.spec.rule.name
            drafting[length] = jax.jit(propose_often, static_argnums=3).lower(*args).compile(compiler_options())
        names = ("length_B", "anchor_B", "history_BS", "active_B")
        start = {name: np.asarray(getattr(state, name)) for name in names}
        benches.append(Bench(cell, engine.programs, state, start, drafting[length]))
    return benches


def _filled(engine: Engine, rows: int, context: int, ids: Sequence[int]) -> DecodeState:
    """Fills rows with different stretches of the text, greedy and without an end."""
    state, programs = jax.tree.map(jnp.copy, engine.state), engine.programs
    stretch = np.resize(np.asarray(ids, np.int32), context + 1 + rows * 97)
    neutral = init_sampling(1, STOP_PLACES)
    length = np.asarray([engine.depth], np.int32)
    sampling = with_leaves(neutral, max_length_B=np.asarray([engine.spec.capacity], np.int32), draft_limit_B=length)
    for row in range(rows):
        prompt = stretch[row * 97 : row * 97 + context + 1]
        state = programs.prefill(state, row, prompt)
        state = programs.admit(state, row, prompt, sampling)
    return state


def _measure(
    benches: Sequence[Bench], grid: CalibrationGrid, show: Show | None
) -> tuple[dict[Cell, MeasuredCell], float]:
    """Returns medians over rounds that measure all cells in turn, and the median of their relative spreads."""
    steps: dict[Cell, list[float]] = {bench.cell: [] for bench in benches}
    drafts: dict[Cell, list[float]] = {bench.cell: [] for bench in benches}
    for turn in range(grid.rounds + 1):
        for number, bench in enumerate(benches if turn % 2 else reversed(benches)):
            step_s, draft_s = bench.step_s(grid.steps), bench.draft_s()
            if turn:  # the first round only warms up
                steps[bench.cell].append(step_s)
                drafts[bench.cell].append(draft_s)
            if show:
                show(turn * len(benches) + number + 1, (grid.rounds + 1) * len(benches))
    points = {}
    for bench in benches:
        rows, length, context = bench.cell
        taken, step_s = sorted(steps[bench.cell]), statistics.median(steps[bench.cell])
        quarter = len(taken) // 4
        spread = (taken[-1 - quarter] - taken[quarter]) / step_s
        # Drafting is timed apart from its step; a noisy step must still leave time for verifying.
        draft_s = min(statistics.median(drafts[bench.cell]), 0.9 * step_s)
        points[bench.cell] = MeasuredCell(rows, length, context + round(bench.grown / 2), step_s, spread, draft_s)
    return points, max(statistics.median(p.spread for p in points.values()), 1e-4)


def _overlap(llm: LLM, arch: ArchSpec, ids: Sequence[int], grid: CalibrationGrid) -> MeasuredOverlap | None:
    """Measures shares of the independent count, on the routes of real text."""
    routed = [layer.ffn for layer in arch.layers if isinstance(layer.ffn, MoeSpec)]
    if not routed or len({spec.top_k for spec in routed}) != 1 or any(spec.identities for spec in routed):
        return None
    size = min(OVERLAP_TEXT, llm.capacity)
    count = max(grid.all_rows[-1], 4)
    stretches = np.resize(np.asarray(ids, np.int32), count * size).reshape(count, size)
    texts = np.stack(routed_experts(llm.model, stretches.tolist()), axis=1)
    order = routed_order(arch)
    positions = sorted({length + 1 for length in grid.lengths})
    return measure_overlap([texts[i] for i in order], [routed[i].experts for i in order], grid.rows, positions)
