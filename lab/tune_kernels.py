"""Measures tile sizes of kernels on this machine's GPU and writes them to ``configs/kernels/<operation>.toml``.

A file is written as soon as one of its shapes is measured, so that a cut leaves what there is. Sizes are searched from
an operation's default; candidates that do not compile, or that spill registers, are skipped and printed.

``--mosaic`` measures the kernels of Mosaic GPU instead, on the cases of more than 512 rows, and beside them Triton's: a
file ``<operation>_mosaic.toml`` whose times are shorter makes programs on this card take them.
"""

import argparse
import os
import sys
import time
from datetime import UTC, datetime
from importlib import import_module
from math import prod
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
INSTEAD_OF = {"triton": "mosaic", "interpret": "mosaic_interpret"}
SPILLING_FAILS = "--xla_gpu_fail_ptx_compilation_on_register_spilling=true"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measures tile sizes of kernels on this machine's GPU.")
    parser.add_argument("--ops", default=None, help="names of operations, by default all")
    parser.add_argument("--cases", default="", help="only cases whose names begin so")
    parser.add_argument("--budget", type=float, default=500.0, help="seconds; shapes that do not fit are named")
    parser.add_argument("--tries", type=int, default=24, help="most candidates per shape")
    parser.add_argument("--folder", type=Path, default=None, help="where the files lie, by default configs/kernels")
    parser.add_argument("--mosaic", action="store_true", help="kernels of Mosaic GPU for many rows, beside Triton's")
    parser.add_argument("--tiny", action="store_true", help="tiny cases in interpret mode; proves the script only")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Tunes every shape that there is time for; returns 1 where there is no GPU."""
    args, began = arguments(argv), time.monotonic()
    if not args.tiny:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {SPILLING_FAILS}".strip()
    import pallas_kernels
    from lab.gpu.tuning import groups
    from pallas_kernels import blocks
    from pallas_kernels.routed_experts.api import DECODE_ROWS

    if args.tiny == bool(blocks.card()):
        print("tune_kernels: needs a GPU, or --tiny without one", file=sys.stderr)
        return 1
    command = " ".join(["lab/tune_kernels.py", *(sys.argv[1:] if argv is None else argv)])
    known = sorted(module.name for module in iter_modules(pallas_kernels.__path__) if module.ispkg)
    for op in args.ops.split(",") if args.ops else known:
        cases = [c for c in import_module(f"pallas_kernels.{op}.cases").CASES if c.name.startswith(args.cases)]
        wanted = [c for c in cases if c.size == ("tiny" if args.tiny else "real")]
        how = "interpret" if args.tiny else "triton"
        if args.mosaic:
            op, how = f"{op}_mosaic", INSTEAD_OF[how]
            wanted = [c for c in wanted if c.mosaic and (args.tiny or prod(c.abstract()[0].shape[:-1]) > DECODE_ROWS)]
        for group in groups(op, wanted, how):
            name = f"{op} {group.key.shape} {group.key.form}"
            if time.monotonic() - began > args.budget:
                print(f"{name}: no time")
                continue
            tune_group(op, group, args, command, name)
    return 0


def tune_group(op: str, group: Any, args: argparse.Namespace, command: str, name: str) -> None:
    """Tunes one shape and writes its entry."""
    from lab.gpu.tuning import as_toml, entry, merged, tune
    from pallas_kernels import blocks

    rounds = {"rounds": 1, "round_s": 0.0} if args.tiny else {}
    plain = "interpret" if args.tiny else "triton"
    kernel, against = (INSTEAD_OF[plain], plain) if args.mosaic else (plain, None)
    try:
        tuned = tune(op, group, kernel, tries=args.tries, against=against, **rounds)
    except Exception as error:  # the default itself cannot run here; the other shapes may
        print(f"{name}: {type(error).__name__}: {str(error)[:300]}")
        return
    for candidate, reason in tuned.skipped.items():
        print(f"{name}: {candidate} skipped: {reason}")
    made = entry(
        group, tuned, card=blocks.card() or "interpret", date=datetime.now(UTC).date().isoformat(), command=command
    )
    file = (args.folder or blocks.folder()) / f"{op}.toml"
    old = blocks.parse(file.read_text(encoding="utf-8"), str(file)) if file.exists() else ()
    fresh = file.with_name(f"{file.name}.new")
    fresh.write_text(as_toml(merged(old, [made])), encoding="utf-8")
    fresh.replace(file)
    print(f"{name}: {made.default_time_us:.1f} to {made.time_us:.1f} us with {dict(made.tiles)}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
