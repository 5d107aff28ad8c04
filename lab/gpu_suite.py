"""Measures kernels and real architectures on this machine's GPU and writes one JSON; one command, under 9 minutes.

Sections: a correctness, b ceilings, c experts, d attention, e decoding of real architectures with random weights, m
experts by Mosaic GPU. The most telling ones run first: ceilings, one architecture, experts, attention, the other
architectures, correctness; what has run on no card yet comes last. They
run in a process of their own, so that one that crashes or hangs costs only itself; what is found is written as it is
found. With ``--tiny`` every section runs on the CPU in interpret mode, which proves nothing but the script itself.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LETTERS = {"b": "ceilings", "e": "decoding", "c": "experts", "d": "attention", "a": "correctness", "m": "mosaic"}
# Shares of the budget.
WEIGHTS = {"ceilings": 2, "decoding": 10, "experts": 14, "attention": 6, "correctness": 12, "mosaic": 8}
MODELS = ("qwen3-30b-a3b", "gpt-oss-120b", "gpt-oss-20b", "mixtral-8x7b", "qwen2-57b-a14b")
BUDGET_S, GRACE_S, LEAST_S, VERSION = 500.0, 20.0, 20.0, 1


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measures kernels and real architectures on this machine's GPU.")
    parser.add_argument("--sections", default="a,b,c,d,e,m", help="letters, by default all")
    parser.add_argument("--models", default=",".join(MODELS), help="architectures of section e")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for everything")
    parser.add_argument("--out", type=Path, default=Path("gpu_suite.json"))
    parser.add_argument("--tiny", action="store_true", help="tiny shapes in interpret mode on the CPU")
    parser.add_argument("--commit", default=None, help="of this tree, where git does not know it")
    parser.add_argument("--worker", nargs="*", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    unknown = sorted(set(args.sections.split(",")) - set(LETTERS)) + sorted(set(args.models.split(",")) - set(MODELS))
    if unknown:
        parser.error(f"not known: {', '.join(unknown)}; sections are {', '.join(LETTERS)}, models {', '.join(MODELS)}")
    return args


def names(args: argparse.Namespace) -> list[str]:
    """Sections in the order in which they run; each architecture is one, and all but the first come late."""
    first, *others = [f"decoding {model}" for model in args.models.split(",")[: 1 if args.tiny else None]]
    wanted = [name for letter, name in LETTERS.items() if letter in args.sections.split(",")]
    ordered = [first if name == "decoding" else name for name in wanted]
    place = ordered.index("correctness") if "correctness" in ordered else len(ordered)
    return ordered[:place] + (others if first in ordered else []) + ordered[place:]


def work(args: argparse.Namespace) -> None:
    """The process that measures: runs sections and writes what they find to ``args.out``."""
    from jaxspec.inspect.describe import describe_machine, describe_versions
    from jaxspec.serve.compile_cache import use_compile_cache
    from lab.gpu.report import Section, run_section

    use_compile_cache()
    machine = {**describe_machine(), "versions": describe_versions()}
    done: dict[str, Any] = {}
    began, left = time.monotonic(), list(args.worker)
    while left:
        name = left.pop(0)
        weights = [WEIGHTS[n.split()[0]] for n in (name, *left)]
        budget_s = max(args.budget - (time.monotonic() - began), 0.0) * weights[0] / sum(weights)
        until = time.time() + budget_s + (600 if args.tiny else GRACE_S)

        def save(record: dict[str, Any], name: str = name, until: float = until) -> None:
            done[name] = record
            write(args.out, {"machine": machine, "until": until, "sections": done})

        section = Section(name, args.tiny, 600.0 if args.tiny else budget_s, save)
        save(section.record("running"))
        save(run_section(section, function_of(name)))
        clean_up()


def function_of(name: str) -> Callable[[Any], None]:
    """Returns what measures a section; imported late, so that only the working process needs JAX."""
    from lab.gpu.attention import attention
    from lab.gpu.ceilings import ceilings
    from lab.gpu.correctness import correctness
    from lab.gpu.decoding import decoding
    from lab.gpu.experts import experts
    from lab.gpu.mosaic import mosaic

    known = {
        "attention": attention, "ceilings": ceilings, "correctness": correctness, "experts": experts, "mosaic": mosaic,
    }  # fmt: skip
    kind, _, model = name.partition(" ")
    return partial(decoding, name=model) if kind == "decoding" else known[kind]


def clean_up() -> None:
    """Gives the memory of a section back before the next one."""
    import gc

    import jax

    jax.clear_caches()
    gc.collect()


def supervise(args: argparse.Namespace, report: dict[str, Any], began: float) -> None:
    """Runs sections in a process, and those after a crash or a hang in a fresh one."""
    from lab.gpu.report import empty_record

    part, remaining = args.out.with_suffix(".part"), names(args)
    while remaining and (left_s := args.budget - (time.monotonic() - began)) > (0 if args.tiny else LEAST_S):
        part.unlink(missing_ok=True)
        process = start(args, remaining, left_s, part)
        reason = follow(process, report, part, args.out, time.time() + left_s + GRACE_S)
        stuck = next((n for n in remaining if report["sections"].get(n, {"status": ""})["status"] == "running"), None)
        if stuck is None and reason:  # it never came to its first section
            stuck = remaining[0]
            report["sections"][stuck] = empty_record("failed", reason)
        elif stuck is not None:
            report["sections"][stuck] |= {"status": "cut", "reason": reason or "the process ended"}
        remaining = [name for name in remaining if name not in report["sections"]]
    for name in remaining:
        report["sections"][name] = empty_record("skipped", f"no time: the budget of {args.budget:.0f} s is spent")
    part.unlink(missing_ok=True)


def start(args: argparse.Namespace, sections: list[str], budget_s: float, part: Path) -> subprocess.Popen[bytes]:
    """The process that measures."""
    environment = {"PYTHONPATH": str(ROOT), **os.environ}
    if args.tiny:
        environment |= {"JAX_PLATFORMS": "cpu"}
    else:  # what is left is for torch, whose weights are JAX's
        environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.90")
    command = [sys.executable, __file__, "--out", str(part), "--budget", str(budget_s), "--worker", *sections]
    return subprocess.Popen([*command, *(["--tiny"] if args.tiny else [])], env=environment)


def follow(process: subprocess.Popen[bytes], report: dict[str, Any], part: Path, out: Path, end: float) -> str | None:
    """Copies what a process finds into the report until it ends; kills it when a section takes too long.

    Returns:
      Why it ended before its time, None if it did not.
    """
    reason, limit = None, end
    while True:
        ended = process.poll() is not None
        if part.exists():
            partial = json.loads(part.read_text(encoding="utf-8"))
            report["machine"] = partial["machine"]
            report["sections"] |= partial["sections"]
            write(out, report)
            end = min(limit, partial["until"])
        if ended:
            return reason or (f"the process ended with code {process.returncode}" if process.returncode else None)
        if time.time() > end:
            process.kill()
            reason = "took longer than its share of the budget"
        time.sleep(0.25)


def write(file: Path, content: dict[str, Any]) -> None:
    """Writes JSON so that a reader never sees half of it."""
    fresh = file.with_name(f"{file.name}.new")
    fresh.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    fresh.replace(file)


def commit() -> str:
    """Returns the commit of this tree."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def show(report: dict[str, Any]) -> None:
    """Prints a line per section and every check that failed."""
    for name, section in report["sections"].items():
        rows = sum(len(table) for table in section["tables"].values())
        passed = sum(check["passed"] for check in section["checks"])
        why = f"; {section['reason']}" if section["reason"] else ""
        print(
            f"{name}: {section['status']} in {section['time_s']:.0f} s, {rows} rows, {passed} of "
            f"{len(section['checks'])} checks passed, {len(section['skipped'])} things skipped{why}"
        )
        for check in section["checks"]:
            if not check["passed"]:
                print(f"  FAILED {check['name']}: {check['detail']}")


def main(argv: list[str] | None = None) -> int:
    """Runs everything; returns 1 if a check or a section failed."""
    args, began = arguments(argv), time.monotonic()
    if args.worker is not None:
        work(args)
        return 0
    report: dict[str, Any] = {
        "version": VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["lab/gpu_suite.py", *(sys.argv[1:] if argv is None else argv)]).replace(
            str(args.out), args.out.name
        ),
        "commit": args.commit or commit(),
        "tiny": args.tiny,
        "budget_s": args.budget,
        "time_s": 0.0,
        "machine": None,
        "sections": {},
    }
    supervise(args, report, began)
    report["time_s"] = round(time.monotonic() - began, 1)
    write(args.out, report)
    show(report)
    sections = report["sections"].values()
    wrong = [s for s in sections if s["status"] in ("failed", "cut") or not all(c["passed"] for c in s["checks"])]
    return int(bool(wrong))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
