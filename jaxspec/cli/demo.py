"""``jaxspec demo``: a model that answers and writes code, plainly, then with speculation, then measured."""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.cells import cell_len
from rich.table import Table

from jaxspec.bench.compare import Comparison, compare
from jaxspec.checkpoint.load.model import read_config
from jaxspec.cli.colored_stream import ColoredStream
from jaxspec.cli.demo_plan import FULL, QUICK, DemoPlan, Length, Scene, plan_of
from jaxspec.cli.drafters import drafter_line, model_line
from jaxspec.cli.screen import Screen
from jaxspec.errors import ConfigError
from jaxspec.inspect.describe import describe_machine, describe_model, describe_versions
from jaxspec.models.catalog import arch_of
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams, SpeculationMetrics
from jaxspec.serve.upcycled_model import NAME as UPCYCLED
from jaxspec.whole_file import write_whole

LONGEST = 1024


@dataclass(frozen=True)
class DemoArgs:
    """Shows a model that answers and writes code, plainly and with speculation, then measures both.

    Attributes:
      model: smollm2-moe, which is made once of a wheel of PyPI (93 MB); demo, a tiny model in the package, which is
        also what is shown without a network; or any model with a chat template, as for jaxspec generate.
      speculative_config: JSON with vLLM's keys; by default the head that comes with the model, else n-gram lookup.
      quick: Shorter texts, and a measurement of a few seconds.
      full: Six kinds of prompts, measured for minutes.
      color: Color on a terminal; the environment's NO_COLOR switches it off too.
      report: Writes the figures to this JSON file.
    """

    GROUPS: ClassVar = {"output": ("color", "report")}

    model: str = UPCYCLED
    speculative_config: str | None = None
    quick: bool = False
    full: bool = False
    color: bool = True
    report: Path | None = None


def run(args: DemoArgs) -> int:
    """Shows the demo.

    Returns:
      The exit status: 1 if any text differed, else 0.

    Raises:
      JaxspecError: arguments or model are not usable.
    """
    if args.quick and args.full:
        raise ConfigError("demo: --quick and --full exclude each other")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    began, screen = time.monotonic(), Screen(color=args.color)
    screen.line("jaxspec: the same text, in fewer passes of the model", "bold")
    length = QUICK if args.quick else FULL if args.full else Length()
    plan = plan_of(args.model, args.speculative_config, length, screen.line)
    introduce(screen, plan)
    with screen.waiting("Loading and compiling (the next start is quicker)") as progress:
        plain = engine(plan, plan.model, None, on_progress=progress)
    # What drafts compiles while the first texts are read.
    with ThreadPoolExecutor(1) as background:
        drafting = background.submit(engine, plan, plain.model, plan.speculative)
        same, speculative = watch(screen, plan, plain, drafting)
    results = measure(screen, plan, plain, speculative)
    screen.console.print(table_of(results))
    screen.line("Each prompt by itself, greedy, both ways in turns; means over prompts with 95 % intervals.", "dim")
    identical = same and all(r.identical for r in results)
    if args.report is not None:
        report = report_of(plan, results, time.monotonic() - began) | {"identical": identical}
        write_whole(args.report, json.dumps(report, indent=2) + "\n")
        screen.line(f"Report: {args.report}", "dim")
    return 0 if identical else 1


def engine(plan: DemoPlan, model: Any, speculative: dict[str, Any] | None, **keywords: Any) -> LLM:
    """Builds an engine of one row that has little to compile."""
    longest = min(LONGEST, arch_of(read_config(plan.model)).max_position)
    return LLM(
        model, speculative_config=speculative, max_model_len=longest, max_num_seqs=1, max_logprobs=0,
        prefill_buckets=(32,), **keywords,
    )  # fmt: skip


def introduce(screen: Screen, plan: DemoPlan) -> None:
    """Prints the heading."""
    config, machine = read_config(plan.model), describe_machine()
    device = "" if machine["backend"] == "cpu" else f"{machine['device']}, "
    screen.line(f"model    {model_line(describe_model(config), plan.name)}")
    screen.line(f"drafter  {drafter_line(plan.speculative, config)}")
    screen.line(f"machine  {device}{machine['cpu']}, {machine['cores']} cores")


def watch(screen: Screen, plan: DemoPlan, plain: LLM, drafting: Future[LLM]) -> tuple[bool, LLM]:
    """Streams every scene plainly, then every scene with speculation; returns whether all texts are the same.

    Args:
      screen: to print on.
      plan: has the scenes.
      plain: decodes plainly.
      drafting: becomes the engine that drafts.

    Returns:
      Whether the texts are the same, and the engine that drafts.
    """
    texts = [stream(screen, scene, plain, plan.length.shown_tokens).token_ids for scene in plan.scenes]
    if not drafting.done():
        with screen.waiting("Compiling what drafts"):
            drafting.result()
    speculative, same = drafting.result(), True
    speculative.finish_compiling()
    screen.line()
    legend = " Green: drafts that the model accepted." if screen.color else ""
    screen.line(f"The same again with speculation.{legend}", "bold")
    for scene, plainly in zip(plan.scenes, texts, strict=True):
        streamed = stream(screen, scene, speculative, plan.length.shown_tokens)
        same &= streamed.token_ids == plainly
        screen.line(verdict(streamed, same=streamed.token_ids == plainly), "bold cyan")
    return same, speculative


def stream(screen: Screen, scene: Scene, llm: LLM, max_tokens: int) -> ColoredStream:
    """Prints a prompt and what the model says to it."""
    screen.line()
    screen.line(scene.title, "bold")
    above, _, last = scene.shown.rpartition("\n")
    for line in above.splitlines():
        screen.line(line, "dim")
    if scene.goes_on:
        screen.piece(last, "dim")
    else:
        screen.line(last, "dim")
    streamed = ColoredStream(screen, llm, column=cell_len(last) if scene.goes_on else 0)
    streamed.run(scene.prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    screen.line()
    return streamed


def verdict(streamed: ColoredStream, *, same: bool) -> str:
    """Puts what drafts saved into words."""
    m = streamed.output.metrics if streamed.output else SpeculationMetrics()
    text = "the same text" if same else "NOT the same text"
    return f"[{text}: {len(streamed.token_ids)} tokens in {m.num_steps} passes of the model]"


def measure(screen: Screen, plan: DemoPlan, plain: LLM, speculative: LLM) -> list[Comparison]:
    """Compares both ways on the plan's prompts."""
    screen.line()
    with screen.counting("Measuring") as show:
        return compare(
            plain, speculative, plan.prompts, max_tokens=plan.length.tokens, time_s=plan.length.time_s, show=show
        )


def table_of(results: list[Comparison]) -> Table:
    """Returns a table with one row per kind of prompts."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="")
    for heading in ("", "plain", "speculative", "speed-up", "tokens per pass", "same text"):
        table.add_column(heading)
    for r in results:
        interval = f" ({r.speedup_interval[0]:.2f} to {r.speedup_interval[1]:.2f})" if r.speedup_interval else ""
        table.add_row(
            r.name, f"{r.plain_tok_per_s:.0f} tokens/s", f"{r.spec_tok_per_s:.0f} tokens/s",
            f"{r.speedup:.2f}x{interval}", f"{r.acceptance_length:.2f}", "yes" if r.identical else "NO",
        )  # fmt: skip
    return table


def report_of(plan: DemoPlan, results: list[Comparison], time_s: float) -> dict[str, Any]:
    """Returns everything measured."""
    return {
        "results": [asdict(r) for r in results],
        "speculative_config": plan.speculative,
        "model": {"name": plan.name, **describe_model(read_config(plan.model))},
        "max_tokens": plan.length.tokens,
        "time_s": time_s,
        "machine": describe_machine(),
        "versions": describe_versions(),
    }


if __name__ == "__main__":
    from jaxspec.cli.main import main

    sys.exit(main(["demo", *sys.argv[1:]]))
