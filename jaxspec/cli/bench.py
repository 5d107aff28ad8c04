"""``jaxspec bench``: speed and acceptance over rows, speculation lengths, drafters and workloads, as files."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from jaxspec.cli.progress import acceptance_words
from jaxspec.cli.stages import Stages
from jaxspec.errors import ConfigError
from jaxspec.serve.demo_pair import DEMO, demo_model_dir, resolve_model
from jaxspec.whole_file import write_whole

if TYPE_CHECKING:
    from jaxspec.bench.grid import EnginePoint, Grid
    from jaxspec.bench.record import BenchReport, Skipped, SweepCell
    from jaxspec.bench.sweep import Sweep
    from jaxspec.bench.synthetic import Synthetic

NAME = "bench"


@dataclass(frozen=True)
class BenchArgs:
    """Measures plain against speculative decoding over a grid; ``jaxspec bench compare A B`` compares two reports.

    On a CPU the default grid is 1, 2, 5 and 8 rows, K 0, 2, 4 and auto, temperatures 0 and 1 on code:
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
      rule: Verification: match keeps the text of plain decoding, standard and block its distribution.
      synthetic: Accept drafts by a coin: the share for draft 1, 2, ..., or one number above 1, the mean number of
        tokens per verification. For studies of hardware; every output says so.
      workload: chat, code, math, summarization, rewriting and multi-turn, which come with jaxspec; speed-bench=DIR or
        speed-bench/CATEGORY=DIR, and human-eval=FILE, from your copies; held-out, prefill, shuffled, mixed, random;
        and file for --prompts. By default held-out for the demo model, code for any other, or file with --prompts.
      prompts: JSONL of prompts for the workload file, as for jaxspec generate; settings in it are not used.
      input_tokens: Length of prompts; by default the workload's.
      output_tokens: Generated per prompt; by default the workload's.
      request_rate: Poisson arrivals per second; inf is a closed loop.
      requests: Per run; by default twice the rows and at least four.
      rounds: Measured rounds, after one that warms up.
      seed: Of prompts, arrivals and sampling.
      dtype: Of weights and activations; auto takes the checkpoint's.
      quantization: As for jaxspec generate.
      engine: Further keyword arguments of LLM as a JSON object, such as {"steps_per_dispatch": 1}.
      peers: Other engines in the same rounds: transformers=PYTHON and vllm=PYTHON, a Python that has them installed,
        and llamacpp=SERVER,MODEL.gguf or llamacpp=SERVER,MODEL.gguf,DRAFT.gguf. They join greedy closed-loop runs of
        workloads without penalties; then everything runs on one core, the first that this process may use.
      price_per_hour: Of the machine in dollars, for the cost of a million tokens.
      output: Directory for bench.json, bench.csv, bench.md, and pictures where matplotlib is installed.
    """

    GROUPS: ClassVar = {
        "grid": ("drafters", "k", "concurrency", "temperature", "rule", "synthetic"),
        "workload": ("workload", "prompts", "input_tokens", "output_tokens", "request_rate", "requests", "seed"),
        "engine": ("dtype", "quantization", "engine"),
    }

    model: tyro.conf.Positional[str | Path] = DEMO
    drafters: tuple[str, ...] = ()
    k: tuple[str, ...] = ()
    concurrency: tuple[int, ...] = ()
    temperature: tuple[float, ...] = (0.0, 1.0)
    rule: Literal["match", "standard", "block"] = "match"
    synthetic: tuple[float, ...] = ()
    workload: tuple[str, ...] = ()
    prompts: Path | None = None
    input_tokens: tuple[int, ...] = ()
    output_tokens: tuple[int, ...] = ()
    request_rate: tuple[float, ...] = (float("inf"),)
    requests: int | None = None
    rounds: int = 3
    seed: int = 0
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    quantization: Literal["auto", "none", "fp8", "int8"] = "auto"
    engine: Annotated[str, tyro.conf.arg(metavar="JSON")] = "{}"
    peers: tuple[str, ...] = ()
    price_per_hour: float | None = None
    output: Annotated[Path, tyro.conf.arg(metavar="DIR", aliases=["-o"])] = Path("bench-report")


def run(args: BenchArgs) -> int:
    """Runs the sweep and writes its files; returns the exit status, 1 if some text differed that may not."""
    report_file = args.output / "bench.json"
    if report_file.exists():
        raise ConfigError(f"bench: {report_file} exists; name another directory with --output")
    core = pin_to_first_core() if args.peers else None
    from jaxspec.bench.record import save
    from jaxspec.serve.compile_cache import use_compile_cache

    use_compile_cache()
    sweep = sweep_of(args)
    args.output.mkdir(parents=True, exist_ok=True)
    progress = SweepProgress(args, sweep, core, report_file)
    with Stages() as stages:
        sweep.callbacks = progress.callbacks(stages)
        sweep.run()
    report = progress.report(complete=True)
    save(report, report_file)
    write_tables(report, args.output)
    return 1 if any(cell.same_text is False for cell in report.cells) else 0


def pin_to_first_core() -> int:
    """Pins this process, and the peers that it starts, to one core before anything asks how many there are.

    Raises:
      ConfigError: this system cannot pin.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("bench: this system cannot pin a process to a core; leave --peers out")
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    return core


def sweep_of(args: BenchArgs) -> Sweep:
    """Returns the sweep that the arguments ask for.

    Raises:
      ConfigError: they are not usable.
    """
    from jaxspec.bench.peers.sessions import parse_peers, start_sessions
    from jaxspec.bench.sweep import Sweep
    from jaxspec.checkpoint.load.model import read_config

    directory, grid = resolve_model(args.model), grid_of(args)
    config = read_config(directory)
    peers = parse_peers(args.peers)
    published = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    dtype = published if args.dtype == "auto" else args.dtype

    def start_peers(engine: EnginePoint, capacity: int) -> Any:
        return start_sessions(peers, engine, model=directory, dtype=dtype, capacity=capacity)

    settings = {"dtype": args.dtype, "quantization": args.quantization, "seed": args.seed, **engine_of(args.engine)}
    return Sweep(directory, grid, settings, start_peers if peers else None)


def engine_of(text: str) -> dict[str, Any]:
    """Returns keyword arguments of ``LLM`` from their JSON.

    Raises:
      ConfigError: it is no JSON object, or names what the sweep sets.
    """
    try:
        settings = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"bench: --engine is not valid JSON ({error})") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"bench: --engine takes a JSON object, got {text}")
    if swept := sorted(set(settings) & {"speculative_config", "max_model_len", "max_num_seqs", "max_logprobs"}):
        raise ConfigError(f"bench: leave {', '.join(swept)} out of --engine; the sweep sets it")
    return settings


def grid_of(args: BenchArgs) -> Grid:
    """Returns what the sweep covers.

    Raises:
      ConfigError: a value is not allowed.
    """
    import jax

    from jaxspec.bench.grid import DrafterChoice, Grid, default_grid
    from jaxspec.bench.workload import FILE, parse_workload
    from jaxspec.draft.speculative_keys import AUTO

    lengths, rows = default_grid(jax.default_backend())
    if wrong := [k for k in args.k if k != AUTO and not k.isdecimal()]:
        raise ConfigError(f"bench: --k takes whole numbers and auto, got {wrong}")
    named = [parse_workload(text) for text in args.workload or default_workloads(args)]
    workloads, files = tuple(name for name, _ in named), {name: path for name, path in named if path is not None}
    if args.prompts is not None:
        if FILE not in workloads:
            raise ConfigError("bench: --prompts is for the workload file; add it to --workload or leave --workload out")
        files[FILE] = args.prompts
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
        seed=args.seed,
        rule=args.rule,
        synthetic=synthetic_of(args.synthetic),
        price_per_hour=args.price_per_hour,
        files=files,
    )


def synthetic_of(values: tuple[float, ...]) -> Synthetic | None:
    """Returns synthetic acceptance by rates, or by a single number above 1 as its mean length."""
    from jaxspec.bench.synthetic import Synthetic

    if not values:
        return None
    return Synthetic(length=values[0]) if len(values) == 1 and values[0] > 1 else Synthetic(rates=values)


def default_workloads(args: BenchArgs) -> tuple[str, ...]:
    """Returns the workload where none is named: the demo target writes nothing but code of Python's library."""
    if args.prompts:
        return ("file",)
    return ("held-out",) if resolve_model(args.model) == demo_model_dir("target") else ("code",)


def default_drafters(args: BenchArgs) -> tuple[str, ...]:
    """Returns the drafters where none are named; those that come with the demo target know that target only."""
    ours = (f"draft_model={demo_model_dir('draft')}", f"shared_expert={demo_model_dir('head')}")
    return (*ours, "ngram") if resolve_model(args.model) == demo_model_dir("target") else ("ngram",)


class SweepProgress:
    """The cells of a sweep so far, shown line by line and saved after every cell."""

    def __init__(self, args: BenchArgs, sweep: Sweep, core: int | None, file: Path):
        from jaxspec.checkpoint.load.model import read_config
        from jaxspec.inspect.describe import describe_machine, describe_model, describe_versions

        self.cells: list[SweepCell] = []
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
                **sweep.engine, "rule": grid.rule, "rounds": grid.rounds, "capacity": sweep.capacity,
                "price_per_hour": grid.price_per_hour,
                "drafters": {d.name: dict(d.config) for d in grid.drafters},
            },
        }  # fmt: skip

    def callbacks(self, stages: Stages) -> Any:
        """Returns the callbacks of the sweep."""
        from jaxspec.bench.sweep import SweepCallbacks

        return SweepCallbacks(self._open, self._cell, self._skip, stages)

    def report(self, *, complete: bool) -> BenchReport:
        """Returns the report so far."""
        from jaxspec.bench.record import SCHEMA, BenchReport

        return BenchReport(schema=SCHEMA, complete=complete, **self._head, cells=self.cells, skipped=self.skipped)

    def _open(self, point: EnginePoint) -> None:
        self._opened += 1
        total, spent = len(self._sweep.grid.engines()), time.monotonic() - self._began
        sys.stderr.write(f"jaxspec: {spent:.0f} s, engine {self._opened} of {total}: {point.name}\n")

    def _cell(self, cell: SweepCell) -> None:
        self.cells.append(cell)
        rate = cell.plain.decode_tokens_per_s or cell.plain.tokens_per_s
        text = f"{cell.name}: {rate.median:.0f} tokens/s"
        if cell.speedup is not None and cell.acceptance is not None:
            mark = "synthetic " if self._head["synthetic"] else ""
            spread = f"{cell.speedup.least:.2f} to {cell.speedup.most:.2f}"
            text += f" plain, {mark}speed-up {cell.speedup.median:.2f}x ({spread})"
            text += f", {mark}{acceptance_words(cell.acceptance.length, cell.acceptance.drafted_length)}"
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
    """Returns the command line that gives these arguments."""
    words = ["jaxspec", NAME, *([str(args.model)] if args.model != DEMO else [])]
    for f in fields(args):
        value = getattr(args, f.name)
        if f.name == "model" or value == f.default:
            continue
        flag = f.name.replace("_", "-")
        words += [f"--{flag}", *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def write_tables(report: BenchReport, folder: Path) -> None:
    """Writes tables, and pictures where they can be drawn, and says where they are."""
    from jaxspec.bench import pictures, tables

    write_whole(folder / "bench.csv", tables.csv_text(report))
    write_whole(folder / "bench.md", tables.markdown_text(report))
    drawn = []
    if why := pictures.missing():
        sys.stderr.write(f"jaxspec: no pictures: {why}\n")
    else:
        drawn = pictures.draw(report, folder)
    names = ["bench.json", "bench.csv", "bench.md", *(file.name for file in drawn)]
    sys.stdout.write(f"{len(report.cells)} cells; {folder}: {', '.join(names)}\n")
