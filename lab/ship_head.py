"""Puts a trained head beside the demo pair: bfloat16 weights, and the record of how it came about.

``python lab/ship_head.py RUN [RUN ...]`` takes the runs of ``jaxspec train`` in their order; the last one's best
head ships.
"""

import argparse
import datetime
import json
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from demo_record import curve

from jaxspec.checkpoint.heads.directory import load_head, plan_head, save_head
from jaxspec.checkpoint.load.model import read_config
from jaxspec.inspect.model_sizes import parameters
from jaxspec.models.catalog import arch_of
from jaxspec.models.trained_head import Head
from jaxspec.nn.policy import make_policy
from jaxspec.serve.demo_pair import demo_model_dir
from jaxspec.train.run_log import read_metrics

FILE = "provenance.json"


def record(run: Path) -> dict[str, Any]:
    """Returns what is known of one run; paths of this machine are left out."""
    known = json.loads((run / "run.json").read_text())
    settings = {k: v for k, v in known["settings"].items() if k not in ("out", "features")}
    data = {k: v for k, v in settings["data"].items() if k not in ("train", "held_out")}
    entries = read_metrics(run)
    return {
        "settings": {**settings, "data": data},
        "data_digest": known["data"],
        "target_digest": known["target"],
        "updates": int(entries[-1]["step"]),
        "wall_time_s": round(entries[-1]["time_s"], 1),
        "curve": curve(entries),
        "evaluations": [
            {k: v for k, v in entry.items() if k == "step" or "acceptance" in k} for entry in entries
            if any("acceptance" in k for k in entry)
        ],
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="directories of jaxspec train")
    parser.add_argument("--out", type=Path, default=Path("jaxspec/demo_model/head"))
    args = parser.parse_args(argv)
    arch, best = arch_of(read_config(demo_model_dir("target"))), args.runs[-1] / "best"
    exact = make_policy("float32")
    head = load_head(best, arch, exact)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), head.params)
    save_head(Head(head.net, params, head.ids_W), args.out)
    plan = plan_head(args.out, arch, exact)
    about = {
        "made_by": "lab/ship_head.py",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "prompts": "lab/make_head_prompts.py, answered by the demo target through jaxspec generate",
        "versions": {"python": platform.python_version(), **{n: version(n) for n in ("jax", "flax", "optax")}},
        "parameters": sum(parameters(plan.leaves).values()),
        "runs": [record(run) for run in args.runs],
    }
    (args.out / FILE).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
