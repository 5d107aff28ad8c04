"""Steps of an architecture with random weights at a few rows and drafts; a line of JSON as soon as each is known."""

import argparse
import json
import time
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from lab.gpu.decoding import REAL, TINY, Runner, decoding
from lab.gpu.profile import profile
from lab.gpu.report import Section

SHOWN = (
    "rows", "drafts", "step_s", "bound_s", "fraction_of_bound", "verify_ratio", "byte_ratio", "host_s",
    "launches_per_step",
)  # fmt: skip


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-30b-a3b", help="a file of configs/models")
    parser.add_argument("--label", default="", help="of every line, for example the flags of XLA")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--together", action="store_true", help="compile all rows side by side, then measure")
    parser.add_argument("--profile", action="store_true", help="also print the time of every kernel in a step")
    args = parser.parse_args()
    tiny, began, printed = jax.default_backend() != "gpu", time.monotonic(), [0, 0]
    # One number of rows at a time: something is known before everything is compiled.
    groups = [args.rows] if args.together else [[b] for b in args.rows]
    waves = tuple((tuple(rows), tuple(args.drafts)) for rows in groups)
    sizes = TINY if tiny else replace(REAL, waves=waves, rounds=7)

    def show(**line: Any) -> None:
        about = {"model": args.model, "label": args.label, "at_s": round(time.monotonic() - began)}
        print(json.dumps(about | line), flush=True)

    def save(record: dict[str, Any]) -> None:
        cells, checks = record["tables"].get("cells", []), record["checks"]
        news = [{name: cell[name] for name in SHOWN} for cell in cells[printed[0] :]] + checks[printed[1] :]
        printed[:] = len(cells), len(checks)
        for line in news:
            show(**line)

    def watch(runner: Runner, programs: dict[int, Any]) -> None:
        for drafts, program in programs.items():
            for line in profile(partial(runner.run, program, drafts, sizes.steps), sizes.steps):
                show(rows=runner.rows, drafts=drafts, **line)

    section = Section("decoding", tiny, 600.0, save)
    decoding(section, args.model, sizes, watch if args.profile else None)
    show(skipped=section.skipped)


if __name__ == "__main__":
    main()
