"""Steps of Qwen3-30B-A3B with random weights at a few rows and drafts; a line of JSON as soon as each is known."""

import argparse
import json
import time
from dataclasses import replace
from typing import Any

import jax

from lab.gpu.decoding import REAL, TINY, decoding
from lab.gpu.report import Section

SHOWN = (
    "rows", "drafts", "step_s", "bound_s", "fraction_of_bound", "verify_ratio", "byte_ratio", "host_s",
    "launches_per_step",
)  # fmt: skip


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--label", default="", help="of every line, for example the flags of XLA")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 3])
    args = parser.parse_args()
    tiny, began, printed = jax.default_backend() != "gpu", time.monotonic(), [0, 0]
    # One number of rows at a time: something is known before everything is compiled.
    sizes = TINY if tiny else replace(REAL, waves=tuple(((b,), tuple(args.drafts)) for b in args.rows), rounds=7)

    def save(record: dict[str, Any]) -> None:
        cells, checks = record["tables"].get("cells", []), record["checks"]
        news = [{name: cell[name] for name in SHOWN} for cell in cells[printed[0] :]] + checks[printed[1] :]
        printed[:] = len(cells), len(checks)
        for line in news:
            print(json.dumps({"label": args.label, "at_s": round(time.monotonic() - began), **line}), flush=True)

    section = Section("decoding", tiny, 600.0, save)
    decoding(section, "qwen3-30b-a3b", sizes)
    print(json.dumps({"label": args.label, "skipped": section.skipped, "time_s": round(time.monotonic() - began)}))


if __name__ == "__main__":
    main()
