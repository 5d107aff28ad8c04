"""``jaxspec bench``: speed and acceptance over rows, speculation lengths, drafters and workloads, as files."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from jaxspec.cli.stages import Stages
from jaxspec.errors import ConfigError
from jaxspec.serve.demo_pair import DEMO, demo_model_dir, resolve_model
from jaxspec.whole_file import write_whole

if TYPE_CHECKING:
    from jaxspec.bench.grid import EnginePoint, Grid
    from jaxspec.bench.peers.contest import PeerChoice
    from jaxspec.bench.record import Cell, Report, Skipped
    from jaxspec.bench.sweep import Sweep

NAME = "bench"


@dataclass(frozen=True)
class BenchArgs:
    """Measures plain against speculative decoding over a grid; ``jaxspec bench compare A B`` compares two reports.

    On a CPU the default grid is 1, 2, 5 and 8 rows, K 0, 2, 4 and auto, temperatures 0 and 1 on the held-out code:
    some tens of minutes on two cores with the demo pair. On an accelerator it is 1 to 200 rows, and K 0 to 8
    and auto.

    Attributes:
      model: Model directory in Hugging Face layout, a hub id, or demo, the packaged model.
      drafters: ngram, mtp, draft_model=DIR, or JSON with vLLM's keys; by default the demo's draft model, its head and
        ngram for the demo model, ngram for any other.
      k: Numbers of speculative tokens, 0 to 16, and auto; by default 0, 2, 4 and auto on a CPU, 0 to 8 and auto else.
      concurrency: Requests decoded together (in a closed loop, requests that are out); by default 1, 2, 5 and 8 on a
        CPU, 1 to 200 else.
      temperature: 0 is greedy.
      workload: code, prefill, shuffled, mixed, random, and file for --prompts; by default code, or file with --prompts.
      prompts: JSONL of prompts for the workload file, as for jaxspec generate; settings in it are not used.
      input_tokens: Length of prompts; by default the workload's.
      output_tokens: Generated per prompt; by default the workload's.
      request_rate: Poisson arrivals per second; inf is a closed loop.
      requests: Per run; by default twice the rows and at least four.
      rounds: Measured rounds.
      precision: Go on after them until the 95 % intervals of speculation over plain decoding, and of auto over the
        best fixed K, are no wider: 0.02 is from 0.99 to 1.01.
      most_rounds: Measured rounds at most, with a precision; by default four times as many.
      warm_up_rounds: Rounds before them; those after the first are of engines that choose K alone, which learn from
        them.
      turn_requests: Requests of a closed loop after which the next way of decoding has its turn; by default one where
        there is one row, else all of a run. The fewer, the less of a machine's moods is left in the ratios; but with
        no more than rows, rates of decoding count texts only until the first of them ends, each K other parts of them.
      turn_tokens: Tokens after which the next way of decoding has its turn within those requests: the fewer, the less
        of a noisy machine is left in the ratios. Each way then holds a KV cache of its own.
      seed: Of prompts, arrivals and sampling.
      rule: Verification: match keeps the text of plain decoding, standard and block its distribution.
      synthetic_rates: Accept drafts by a coin, with these shares for draft 1, 2, ...; for studies of hardware, every
        output says so.
      synthetic_length: The same with a mean number of tokens per verification.
      experts: Count the distinct experts that verifications touch, outside the timed runs.
      against_fixed: Where K is auto, run every fixed K in the same rounds and say how auto compares with the best.
      price_per_hour: Of the machine in dollars, for the cost of a million tokens.
      dtype: Of weights and activations; auto takes the checkpoint's.
      quantization: As for jaxspec generate.
      steps_per_dispatch: Most verification steps before the host looks; tokens of one dispatch arrive together.
      prefill_buckets: Prompt chunk sizes in tokens; by default one that fits the longest prompt, at most 1024.
      kv_page_size: Tokens per page of a KV pool that all rows share; 0 gives each row its whole capacity.
      peers: Other engines in the same rounds: transformers, vllm, llamacpp. They join greedy closed-loop points of
        workloads without penalties.
      peer_python: Python that has the peers installed, or NAME=PATH for each.
      llama_server: Program llama-server.
      gguf: The model in llama.cpp's format, made with its converter.
      draft_gguf: The draft model in that format.
      core: Pin this program and its peers to one core; with peers by default the first one.
      plots: Draw pictures where matplotlib is installed.
      output: Directory for bench.json, bench.csv, bench.md and pictures.
    """

    GROUPS: ClassVar = {
        "grid": ("drafters", "k", "concurrency", "temperature", "rule", "synthetic_rates", "synthetic_length"),
        "workload": ("workload", "prompts", "input_tokens", "output_tokens", "request_rate", "requests", "seed"),
        "measurement": (
            "rounds", "precision", "most_rounds", "warm_up_rounds", "turn_requests", "turn_tokens", "experts",
            "against_fixed", "core",
        ),
        "engine": ("dtype", "quantization", "steps_per_dispatch", "prefill_buckets", "kv_page_size"),
        "other engine": ("peers", "peer_python", "llama_server", "gguf", "draft_gguf"),
        "output": ("output", "plots", "price_per_hour"),
    }  # fmt: skip

    model: tyro.conf.Positional[str | Path] = DEMO
    drafters: tuple[str, ...] = ()
    k: tuple[str, ...] = ()
    concurrency: tuple[int, ...] = ()
    temperature: tuple[float, ...] = (0.0, 1.0)
    workload: tuple[str, ...] = ()
    prompts: Path | None = None
    input_tokens: tuple[int, ...] = ()
    output_tokens: tuple[int, ...] = ()
    request_rate: tuple[float, ...] = (float("inf"),)
    requests: int | None = None
    rounds: int = 3
    precision: float | None = None
    most_rounds: int | None = None
    warm_up_rounds: int = 1
    turn_requests: int | None = None
    turn_tokens: int | None = None
    seed: int = 0
    rule: Literal["match", "standard", "block"] = "match"
    synthetic_rates: tuple[float, ...] = ()
    synthetic_length: float | None = None
    experts: bool = True
    against_fixed: bool = False
    price_per_hour: float | None = None
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    quantization: Literal["auto", "none", "fp8", "int8"] = "auto"
    steps_per_dispatch: int = 8
    prefill_buckets: tuple[int, ...] = ()
    kv_page_size: int = 0
    peers: tuple[str, ...] = ()
    peer_python: tuple[str, ...] = ()
    llama_server: Path | None = None
    gguf: Path | None = None
    draft_gguf: Path | None = None
    core: int | None = None
    plots: bool = True
    output: Annotated[Path, tyro.conf.arg(metavar="DIR", aliases=["-o"])] = Path("bench-report")


def run(args: BenchArgs) -> int:
    """Runs the sweep and writes its files; returns the exit status, 1 if some text differed that may not."""
    report_file = args.output / "bench.json"
    if report_file.exists():
        raise ConfigError(f"bench: {report_file} exists; name another directory with --output")
    core = pin(args.core, bool(args.peers))
    from jaxspec.bench import plot
    from jaxspec.bench.record import save
    from jaxspec.serve.compile_cache import use_compile_cache

    use_compile_cache()
    sweep = sweep_of(args)
    draws = args.plots and plot.missing() is None
    if args.plots and not draws:
        sys.stderr.write(f"jaxspec: no pictures: {plot.missing()}\n")
    args.output.mkdir(parents=True, exist_ok=True)
    notes = Notes(args, sweep, core, report_file)
    with Stages() as stages:
        sweep.watcher = notes.watcher(stages)
        sweep.run()
    report = notes.report(complete=True)
    save(report, report_file)
    conclude(report, args.output, draws)
    return 1 if any(cell.same_text is False for cell in report.cells) else 0


def pin(core: int | None, with_peers: bool) -> int | None:
    """Pins this process to a core, before anything asks how many there are; returns which.

    Raises:
      ConfigError: the core is not one that this process may use, or this system cannot pin.
    """
    if core is None and not with_peers:
        return None
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("bench: this system cannot pin a process to a core; leave --core and --peers out")
    usable = sorted(os.sched_getaffinity(0))
    chosen = usable[0] if core is None else core
    if chosen not in usable:
        raise ConfigError(f"bench: --core {chosen} is not one of the usable cores {usable}")
    os.sched_setaffinity(0, {chosen})
    return chosen


def sweep_of(args: BenchArgs) -> Sweep:
    """The sweep that the arguments ask for.

    Raises:
      ConfigError: they are not usable.
    """
    from functools import partial

    from jaxspec.bench.peers.contest import open_contenders
    from jaxspec.bench.sweep import Sweep
    from jaxspec.checkpoint.load.model import read_config

    directory = resolve_model(args.model)
    config = read_config(directory)
    engine: dict[str, Any] = {
        "dtype": args.dtype, "quantization": args.quantization, "steps_per_dispatch": args.steps_per_dispatch,
        "kv_page_size": args.kv_page_size, "seed": args.seed,
    }  # fmt: skip
    if args.prefill_buckets:
        engine["prefill_buckets"] = args.prefill_buckets
    choices, peers = peers_of(args), None
    if choices:
        published = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        dtype = published if args.dtype == "auto" else args.dtype
        peers = partial(_contenders, open_contenders, choices, directory, dtype)
    return Sweep(directory, grid_of(args), engine, peers)


def _contenders(opener: Any, choices: Any, directory: Path, dtype: str, engine: EnginePoint, capacity: int) -> Any:
    return opener(choices, engine, model=directory, dtype=dtype, capacity=capacity)


def grid_of(args: BenchArgs) -> Grid:
    """What the sweep covers.

    Raises:
      ConfigError: a value is not allowed.
    """
    import jax

    from jaxspec.bench.grid import DrafterChoice, Grid, default_grid
    from jaxspec.draft.speculation_schedule import AUTO
    from jaxspec.draft.synthetic import Synthetic

    lengths, rows = default_grid(jax.default_backend())
    wrong = [k for k in args.k if k != AUTO and not k.isdecimal()]
    if wrong:
        raise ConfigError(f"bench: --k takes whole numbers and auto, got {wrong}")
    workloads = args.workload or (("file",) if args.prompts else ("code",))
    if args.prompts is not None and "file" not in workloads:
        raise ConfigError("bench: --prompts is for the workload file; add it to --workload or leave --workload out")
    synthetic = None
    if args.synthetic_rates or args.synthetic_length is not None:
        synthetic = Synthetic(args.synthetic_rates or None, args.synthetic_length)
    return Grid(
        drafters=tuple(DrafterChoice.parse(text) for text in args.drafters or default_drafters(args)),
        lengths=tuple(k if k == AUTO else int(k) for k in args.k) or tuple(lengths),
        rows=args.concurrency or tuple(rows),
        temperatures=args.temperature,
        workloads=workloads,
        input_tokens=args.input_tokens or (None,),
        output_tokens=args.output_tokens or (None,),
        rates=args.request_rate,
        requests=args.requests,
        rounds=args.rounds,
        precision=args.precision,
        most_rounds=args.most_rounds,
        warm_up_rounds=args.warm_up_rounds,
        turn_requests=args.turn_requests,
        turn_tokens=args.turn_tokens,
        seed=args.seed,
        rule=args.rule,
        synthetic=synthetic,
        experts=args.experts,
        against_fixed=args.against_fixed,
        price_per_hour=args.price_per_hour,
        prompts=args.prompts,
    )


def default_drafters(args: BenchArgs) -> tuple[str, ...]:
    """Drafters where none are named: those that come with the demo target know that target only."""
    own = (f"draft_model={demo_model_dir('draft')}", f"shared_expert={demo_model_dir('head')}")
    return (*own, "ngram") if resolve_model(args.model) == demo_model_dir("target") else ("ngram",)


def peers_of(args: BenchArgs) -> list[PeerChoice]:
    """Peers that take part.

    Raises:
      ConfigError: one is not known, or something that it needs is not named.
    """
    from jaxspec.bench.peers.contest import parse_choices

    names = [name for text in args.peers for name in text.split(",") if name]
    files = {"server": args.llama_server, "gguf": args.gguf, "draft_gguf": args.draft_gguf}
    return parse_choices(names, args.peer_python, {name: str(file) for name, file in files.items() if file})


class Notes:
    """What a sweep has found so far, shown line by line and kept in the file after every cell."""

    def __init__(self, args: BenchArgs, sweep: Sweep, core: int | None, file: Path):
        from jaxspec.checkpoint.load.model import read_config
        from jaxspec.inspect.describe import describe_machine, describe_model, describe_versions

        self.cells: list[Cell] = []
        self.skipped: list[Skipped] = []
        self._file, self._sweep, self._opened, self._began = file, sweep, 0, time.monotonic()
        grid = sweep.grid
        self._head: dict[str, Any] = {
            "synthetic": None if grid.synthetic is None else grid.synthetic.described(),
            "command": command_of(args),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "seed": grid.seed,
            "machine": describe_machine() | {"pinned_core": core},
            "versions": describe_versions(),
            "model": describe_model(read_config(sweep.directory)) | {"directory": sweep.directory.name},
            "settings": {
                **sweep.engine, "rule": grid.rule, "rounds": grid.rounds, "warm_up_rounds": grid.warm_up_rounds,
                "precision": grid.precision, "most_rounds": grid.most_rounds,
                "capacity": sweep.capacity, "price_per_hour": grid.price_per_hour,
                "drafters": {d.name: dict(d.config) for d in grid.drafters},
            },
        }  # fmt: skip

    def watcher(self, stages: Stages) -> Any:
        """The one who is told."""
        from jaxspec.bench.sweep import Watcher

        return Watcher(self._open, self._cell, self._skip, stages)

    def report(self, complete: bool) -> Report:
        """All of it."""
        from jaxspec.bench.record import SCHEMA, Report

        return Report(schema=SCHEMA, complete=complete, **self._head, cells=self.cells, skipped=self.skipped)

    def _open(self, point: EnginePoint) -> None:
        self._opened += 1
        total, spent = len(self._sweep.grid.engines()), time.monotonic() - self._began
        sys.stderr.write(f"jaxspec: {spent:.0f} s, engine {self._opened} of {total}: {point.name}\n")

    def _cell(self, cell: Cell) -> None:
        self.cells.append(cell)
        rate = cell.plain.decode_tokens_per_s or cell.plain.tokens_per_s
        text = f"{cell.name}: {rate.median:.0f} tokens/s"
        if cell.speedup is not None and cell.acceptance is not None:
            mark = "synthetic " if self._head["synthetic"] else ""
            spread = f"{cell.speedup.least:.2f} to {cell.speedup.most:.2f}"
            text += f" plain, {mark}speed-up {cell.speedup.median:.2f}x ({spread})"
            text += f", {mark}acceptance length {cell.acceptance.length:.2f}"
            if cell.regret is not None:
                text += f", {cell.regret.over_best.median:.2f} of the best fixed K ({cell.regret.best})"
            text += ", OTHER TEXT" if cell.same_text is False else ""
        sys.stdout.write(f"{text}\n")
        for peer in cell.peers:
            ours = f"{peer.ours.median:.2f}x" if peer.ours else "?"
            sys.stdout.write(f"  {peer.peer} {peer.mode}: {peer.tokens_per_s.median:.0f} tokens/s, jaxspec is {ours}\n")
        sys.stdout.flush()
        self._save()

    def _skip(self, skipped: Skipped) -> None:
        self.skipped.append(skipped)
        sys.stderr.write(f"jaxspec: not measured: {skipped.what}: {skipped.reason}\n")
        self._save()

    def _save(self) -> None:
        from jaxspec.bench.record import save

        save(self.report(complete=False), self._file)


def command_of(args: BenchArgs) -> list[str]:
    """The command line that gives these arguments."""
    found = ["jaxspec", NAME, *([str(args.model)] if args.model != DEMO else [])]
    for f in fields(args):
        value = getattr(args, f.name)
        if f.name == "model" or value == f.default:
            continue
        flag = f.name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            found += [f"--{flag}", *map(str, value if isinstance(value, tuple) else (value,))]
    return found


def conclude(report: Report, folder: Path, draws: bool) -> None:
    """Writes tables and pictures, and says where they are."""
    from jaxspec.bench import plot, tables

    write_whole(folder / "bench.csv", tables.csv_text(report))
    write_whole(folder / "bench.md", tables.markdown_text(report))
    pictures = plot.draw(report, folder) if draws else []
    names = ["bench.json", "bench.csv", "bench.md", *(file.name for file in pictures)]
    sys.stdout.write(f"{len(report.cells)} cells; {folder}: {', '.join(names)}\n")
