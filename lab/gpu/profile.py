"""Time of every kernel in a step of a real architecture with random weights, from XLA's profiler, as lines of JSON."""

import argparse
import json
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import jax

from jaxspec.inspect.model_cost import model_cost
from jaxspec.nn.policy import make_policy
from lab.gpu.decoding import REAL, TINY, Model, Runner, compile_cells
from lab.gpu.random_model import published_config, random_target

SHOWN = 40  # kernels, those that take longest first


def main() -> None:
    """Profiles and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--cells", default="1x0,1x3,8x0", help="rows x drafts")
    args = parser.parse_args()
    tiny = jax.default_backend() != "gpu"
    sizes = TINY if tiny else replace(REAL, waves=())
    config = published_config(args.model, tiny=tiny)
    target = random_target(config, make_policy(depth="stacked", kernels=sizes.kernels), block=sizes.block)
    model = Model(args.model, target, model_cost(config, name=args.model), sizes)
    cells = [(int(rows), int(drafts)) for rows, _, drafts in (cell.partition("x") for cell in args.cells.split(","))]
    for (rows, drafts), program in compile_cells(model, cells).items():
        if isinstance(program, Exception):
            print(json.dumps({"rows": rows, "drafts": drafts, "failed": str(program)[:500]}), flush=True)
            continue
        runner = Runner(model, rows)
        jax.block_until_ready(runner.run(program, drafts, sizes.steps))
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready(runner.run(program, drafts, sizes.steps))
            for line in kernels(Path(folder), sizes.steps):
                print(json.dumps({"rows": rows, "drafts": drafts, **line}), flush=True)
        del runner


def kernels(folder: Path, steps: int) -> list[dict[str, object]]:
    """Returns the sums over all lines of the device, then each kernel's launches and microseconds in a step.

    Args:
      folder: that the profiler wrote into.
      steps: of the dispatch that was profiled.
    """
    count: dict[str, int] = defaultdict(int)
    busy_ns: dict[str, float] = defaultdict(float)
    first, last, lines = float("inf"), 0.0, set()
    for file in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for line in plane.lines if plane.name.startswith("/device:GPU") else ():
                lines.add(f"{plane.name} {line.name}")
                if not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    count[event.name] += 1
                    busy_ns[event.name] += event.duration_ns
                    first, last = min(first, event.start_ns), max(last, event.start_ns + event.duration_ns)
    order = sorted(busy_ns, key=lambda name: busy_ns[name], reverse=True)
    total = {
        "kernels": sum(count.values()) / steps, "busy_us": sum(busy_ns.values()) / steps / 1e3,
        "span_us": max(last - first, 0) / steps / 1e3, "lines": sorted(lines),
    }  # fmt: skip
    return [
        total,
        *({"kernel": n, "launches": count[n] / steps, "us": busy_ns[n] / steps / 1e3} for n in order[:SHOWN]),
    ]


if __name__ == "__main__":
    main()
