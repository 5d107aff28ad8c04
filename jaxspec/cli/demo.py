"""``jaxspec demo``: the same model decoding plainly and speculatively, first to watch, then measured."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from rich.table import Table

from jaxspec.bench.compare import Comparison, compare
from jaxspec.bench.workload import HELD_OUT, Excerpt, choose, load_excerpts, repeat
from jaxspec.checkpoint.heads.directory import plan_head
from jaxspec.checkpoint.heads.identify import is_head
from jaxspec.checkpoint.load.model import read_config
from jaxspec.cli.colored_stream import ColoredStream
from jaxspec.cli.screen import Screen
from jaxspec.draft import methods
from jaxspec.errors import ConfigError
from jaxspec.inspect.describe import describe_machine, describe_model, describe_versions
from jaxspec.inspect.model_sizes import parameters
from jaxspec.models.catalog import arch_of
from jaxspec.nn.policy import Policy
from jaxspec.serve.compile_cache import use_compile_cache
from jaxspec.serve.demo_pair import DEMO, demo_model_dir, resolve_model, resolve_speculation
from jaxspec.serve.engine import OnProgress
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams
from jaxspec.whole_file import write_whole

PROMPTS = HELD_OUT
HEAD_LENGTH, DRAFT_LENGTH, NGRAM_LENGTH = 5, 4, 4
SHOWN, BATCH_REPETITIONS = 3, 3
PROMPT_ROOM = 512


@dataclass(frozen=True)
class DemoArgs:
    """Shows a model decoding plainly and speculatively, then measures both.

    Attributes:
      model: Directory of the target, or demo, the packaged model.
      draft: Directory of a draft model, or demo, the packaged one; by default the packaged head for the packaged
        model, n-gram lookup for any other.
      speculative_config: JSON with vLLM's keys, instead of --draft and --k.
      k: Drafts per step; by default 5 of the head, else 4.
      prompts: Held-out prompts that are measured; the first three of them are shown.
      max_tokens: Tokens generated per prompt.
      repetitions: Measured rounds; figures are medians over them.
      batch: Rows decoded together in the second measurement; 1 leaves it out.
      dtype: Of weights and activations.
      quick: One prompt to watch, and a measurement of a few seconds.
      color: Color on a terminal; the environment's NO_COLOR switches it off too.
      report: Writes the figures to this JSON file.
    """

    GROUPS: ClassVar = {
        "speculation": ("draft", "speculative_config", "k"),
        "measurement": ("prompts", "max_tokens", "repetitions", "batch", "dtype"),
        "output": ("color", "report"),
    }

    model: str | Path = DEMO
    draft: str | Path | None = None
    speculative_config: str | None = None
    k: int | None = None
    prompts: int = 8
    max_tokens: int = 128
    repetitions: int = 5
    batch: int = 8
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    quick: bool = False
    color: bool = True
    report: Path | None = None


@dataclass(frozen=True)
class DemoPlan:
    """What ``DemoArgs`` come down to.

    Attributes:
      model: directory of the target.
      config: its published config.
      speculative: speculative_config.
      shown, measured: excerpts to watch and to measure.
      max_tokens, repetitions: of each measured run.
      batches: rows of each measurement.
      dtype: of weights and products.
    """

    model: Path
    config: dict[str, Any]
    speculative: dict[str, Any]
    shown: list[Excerpt]
    measured: list[Excerpt]
    max_tokens: int
    repetitions: int
    batches: list[int]
    dtype: str


def plan_of(args: DemoArgs) -> DemoPlan:
    """Checks the arguments and fills in what they leave open.

    Raises:
      ConfigError: they are not usable.
    """
    for name in ("prompts", "max_tokens", "repetitions", "batch"):
        if getattr(args, name) < 1:
            raise ConfigError(f"demo: --{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    model = resolve_model(args.model)
    speculative = dict(resolve_speculation(speculative_of(args)) or {})
    fewest = 2 * (methods.parse(speculative).topology.max_depth + 1)
    if args.max_tokens < fewest:
        raise ConfigError(f"demo: --max-tokens must be at least {fewest} to be measured, got {args.max_tokens}")
    excerpts = load_excerpts(PROMPTS)
    return DemoPlan(
        model=model,
        config=read_config(model),
        speculative=speculative,
        shown=choose(excerpts, min(1 if args.quick else SHOWN, args.prompts)),
        measured=choose(excerpts, min(args.prompts, 2) if args.quick else args.prompts),
        max_tokens=min(args.max_tokens, 48) if args.quick else args.max_tokens,
        repetitions=min(args.repetitions, 2) if args.quick else args.repetitions,
        batches=[1] if args.quick or args.batch == 1 else [1, args.batch],
        dtype=args.dtype,
    )


def speculative_of(args: DemoArgs) -> dict[str, Any]:
    """Returns the ``speculative_config`` that the arguments ask for.

    Raises:
      ConfigError: they contradict each other, or the JSON is none.
    """
    if args.speculative_config is not None:
        if args.draft is not None or args.k is not None:
            raise ConfigError("demo: --speculative-config says everything; leave --draft and --k out")
        try:
            return dict(json.loads(args.speculative_config))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"demo: --speculative-config is not a JSON object ({error})") from error
    if args.draft is not None:
        method, model, length = "draft_model", resolve_model(args.draft, part="draft"), DRAFT_LENGTH
    elif resolve_model(args.model) == demo_model_dir("target"):
        method, model, length = "shared_expert", demo_model_dir("head"), HEAD_LENGTH
    else:
        method, model, length = "ngram", None, NGRAM_LENGTH
    settings = {"method": method, "num_speculative_tokens": length if args.k is None else args.k}
    return settings if model is None else {**settings, "model": str(model)}


def model_line(model: dict[str, Any]) -> str:
    """Puts ``describe_model`` into words."""
    text = f"{model['family']}, {model['parameters'] / 1e6:.1f} M parameters"
    if "experts" in model:
        text += f", {model['active_parameters'] / 1e6:.1f} M of them active per token"
        text += f" ({model['experts_per_token']} of {model['experts']} experts)"
    return f"{text}, {model['layers']} layers"


def drafter_line(speculative: dict[str, Any], target: dict[str, Any]) -> str:
    """Puts the drafter into words, for a target's published config."""
    config = methods.parse(speculative)
    ahead = f"{config.topology.max_depth} tokens ahead"
    without_model = {
        "ngram": "n-gram lookup in the text so far",
        "mtp": "the target's layers of multi-token prediction",
        "early_exit": f"the target's first {config.exit_layer} layers",
    }
    if config.model is None:
        return f"{without_model[config.method]}, {ahead}"
    draft = read_config(Path(config.model))
    if is_head(draft):
        plan = plan_head(config.model, arch_of(target), Policy())
        kind = "draft" if config.method == "hybrid" else config.method
        words = f"{kind} head, {sum(parameters(plan.leaves).values()) / 1e6:.1f} M parameters"
    else:
        words = model_line(describe_model(draft))
    return f"{without_model['ngram']}, else {words}, {ahead}" if config.method == "hybrid" else f"{words}, {ahead}"


def build(plan: DemoPlan, rows: int, on_progress: OnProgress | None = None) -> LLM:
    """Builds the engine of one measurement: one prefill size and no log-probabilities, to compile little."""
    room = -(-(plan.max_tokens + PROMPT_ROOM) // 512) * 512
    llm = LLM(
        plan.model,
        speculative_config=plan.speculative,
        dtype=plan.dtype,
        max_model_len=min(room, arch_of(plan.config).max_position),
        max_num_seqs=rows,
        max_logprobs=0,
        prefill_buckets=(128,),
        on_progress=on_progress,
    )
    llm.finish_compiling()
    return llm


def watch(screen: Screen, llm: LLM, excerpt: Excerpt, max_tokens: int) -> bool:
    """Streams one continuation plainly, then with speculation; returns whether both are the same."""
    screen.line()
    screen.line(f"{excerpt.file}, line {excerpt.line}", "bold")
    above, _, last = excerpt.prompt.rpartition("\n")
    screen.line(above, "dim")
    rates, texts = {}, {}
    for name, speculative in (("plain", False), ("speculative", None)):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, speculative=speculative)
        screen.piece(last, "dim")
        stream = ColoredStream(screen, llm)
        stream.run(excerpt.prompt, params)
        rates[name], texts[name] = stream.tokens_per_s, stream.token_ids
        screen.line()
        if name == "plain":
            screen.line(f"[plain: {rates[name]:.0f} tokens/s] Again with speculation:", "bold")
    same = texts["plain"] == texts["speculative"]
    verdict = "the same text" if same else "NOT the same text"
    ratio = rates["speculative"] / rates["plain"]
    screen.line(f"[speculative: {rates['speculative']:.0f} tokens/s, {ratio:.2f}x, {verdict}]", "bold cyan")
    return same


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _speedup(r: Comparison) -> str:
    return f"{r.speedup:.2f}x ({r.speedup_range[0]:.2f} to {r.speedup_range[1]:.2f})"


def _prompt_range(r: Comparison) -> str:
    return f"{r.prompt_speedup_range[0]:.2f}x to {r.prompt_speedup_range[1]:.2f}x" if r.batch == 1 else ""


def table_of(results: list[Comparison]) -> Table:
    """Returns a table with one column per batch size."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("")
    for r in results:
        table.add_column(f"{_rows(r.batch)} at a time", justify="left")

    def add(name: str, text: Any, style: str = "") -> None:
        table.add_row(name, *(text(r) for r in results), style=style)

    add("plain", lambda r: f"{r.plain_tok_per_s:.0f} tokens/s")
    add("speculative", lambda r: f"{r.spec_tok_per_s:.0f} tokens/s")
    add("speed-up", _speedup, "bold cyan")
    add("  from prompt to prompt", _prompt_range)
    add("  whole runs, prompts read", lambda r: f"{r.total_speedup:.2f}x")
    most = results[0].acceptance_per_pos
    add("tokens per target pass", lambda r: f"{r.acceptance_length:.2f} of at most {len(most) + 1}")
    add("  accepted up to draft 1, 2, ...", lambda r: " ".join(f"{p:.2f}" for p in r.acceptance_per_pos))
    add("drafting costs", lambda r: f"{r.draft_cost:.2f} plain steps")
    add("verifying costs", lambda r: f"{r.verify_ratio:.2f} plain steps")
    add("identical text", lambda r: "yes" if r.identical else "NO")
    return table


def report_of(plan: DemoPlan, results: list[Comparison], startup_s: float) -> dict[str, Any]:
    """Returns everything measured; the first measurement's figures stand at the top level."""
    return {
        **asdict(results[0]),
        "batches": [asdict(r) for r in results],
        "drafter": plan.speculative.get("method", "draft_model"),
        "k": len(results[0].acceptance_per_pos),
        "speculative_config": plan.speculative,
        "dtype": plan.dtype,
        "model": describe_model(plan.config),
        "excerpts": [{"file": e.file, "line": e.line} for e in plan.measured],
        "startup_time_s": startup_s,
        "machine": describe_machine(),
        "versions": describe_versions(),
    }


def introduce(screen: Screen, plan: DemoPlan) -> None:
    """Prints the heading."""
    machine, files = describe_machine(), sorted({e.file for e in plan.measured})
    screen.line("jaxspec: the same text, in fewer passes of the model", "bold")
    screen.line(f"model    {model_line(describe_model(plan.config))}")
    screen.line(f"drafter  {drafter_line(plan.speculative, plan.config)}")
    screen.line(f"prompts  modules of Python's library held out from training: {', '.join(files)}")
    device = "" if machine["backend"] == "cpu" else f"{machine['device']}, "
    screen.line(f"machine  {device}{machine['cpu']}, {machine['cores']} cores")


def conclude(screen: Screen, plan: DemoPlan, results: list[Comparison]) -> None:
    """Prints the table and what it stands for."""
    screen.console.print(table_of(results))
    screen.line()
    done = "; ".join(f"{_rows(r.batch)}: {r.prompts} prompts {r.repetitions} times" for r in results)
    what = f"{plan.max_tokens} new tokens, greedy, {plan.dtype}"
    screen.line(f"Medians of interleaved runs ({done}), {what}.", "dim")
    times = ", ".join(f"{r.plain_step_time_s * 1e3:.2f} ms for {_rows(r.batch)}" for r in results)
    screen.line(f"A plain step took {times}.", "dim")


def run(args: DemoArgs) -> int:
    """Shows the demo.

    Returns:
      The exit status: 1 if any text differed, else 0.

    Raises:
      JaxspecError: arguments or model are not usable.
    """
    began = time.monotonic()
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    use_compile_cache()
    plan, screen = plan_of(args), Screen(color=args.color)
    introduce(screen, plan)
    with screen.waiting("Loading and compiling (the next start is quicker)") as progress:
        llm = build(plan, 1, progress)
    startup_s = time.monotonic() - began
    if screen.color:
        screen.line("Dim: prompt. Plain: tokens of the model's own. Green: drafts that it accepted.", "dim")
    same = [watch(screen, llm, excerpt, plan.max_tokens) for excerpt in plan.shown]
    results = measure(screen, plan, llm)
    conclude(screen, plan, results)
    identical = all(same) and all(r.identical for r in results)
    if args.report is not None:
        report = report_of(plan, results, startup_s) | {"identical": identical}
        write_whole(args.report, json.dumps(report, indent=2) + "\n")
        screen.line(f"Report: {args.report}", "dim")
    return 0 if identical else 1


def measure(screen: Screen, plan: DemoPlan, llm: LLM) -> list[Comparison]:
    """Compares at every batch size; the first one's engine is there already."""
    results = []
    screen.line()
    for rows in plan.batches:
        prompts, repetitions = plan.measured, plan.repetitions
        if rows > 1:
            # Twice the rows, so that some are refilled while others go on.
            prompts = repeat(load_excerpts(PROMPTS), 2 * rows)
            repetitions = min(repetitions, BATCH_REPETITIONS)
            with screen.waiting(f"Compiling for {rows} rows") as progress:
                llm = build(plan, rows, progress)
        texts = [e.prompt for e in prompts]
        with screen.counting(f"Measuring {_rows(rows)} at a time") as show:
            results.append(compare(llm, texts, max_tokens=plan.max_tokens, repetitions=repetitions, show=show))
    return results


if __name__ == "__main__":
    from jaxspec.cli.main import main

    sys.exit(main(["demo", *sys.argv[1:]]))
