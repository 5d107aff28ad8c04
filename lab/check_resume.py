"""Kills a training run many times at random updates and compares its end, bit by bit, with one that was left alone.

Run ``python lab/check_resume.py CONFIG --work DIR --kills 20 --set train.steps=60 --set train.save_every=2``.
"""

import argparse
import itertools
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxspec.errors import ConfigError
from jaxspec.train.run_log import read_metrics, without_times
from jaxspec.train.settings import load_run_settings

POLL_S = 0.02


def command(args: argparse.Namespace, out: Path) -> list[str]:
    """The command line of the run in a directory."""
    changes = [word for change in args.set for word in ("--set", change)]
    return [sys.executable, "-m", "jaxspec.cli.main", "train", args.config, *changes, "--out", str(out)]


def updates(out: Path) -> int:
    """The last update that is logged."""
    try:
        entries = read_metrics(out)
    except ConfigError:
        return 0
    return int(entries[-1]["step"]) if entries else 0


def run_until(args: argparse.Namespace, out: Path, update: int, rest_s: float) -> int:
    """Runs until an update is logged and a little longer, then kills; returns the exit code."""
    with (out.parent / f"{out.name}.log").open("ab") as log:
        process = subprocess.Popen(command(args, out), stdout=log, stderr=log)
        while process.poll() is None and updates(out) < update:
            time.sleep(POLL_S)
        time.sleep(rest_s)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        return process.wait()


def leaves(out: Path) -> dict[str, np.ndarray]:
    """Every array of the newest checkpoint by its path."""
    manager = ocp.CheckpointManager((out / "checkpoints").absolute())
    items = ocp.args.Composite(state=ocp.args.StandardRestore())
    state: Any = manager.restore(manager.latest_step(), args=items)
    manager.close()
    named, _ = jax.tree_util.tree_flatten_with_path(state["state"])
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in named}


def differences(whole: Path, killed: Path) -> Iterator[str]:
    """Whatever is not the same to the bit."""
    one, other = leaves(whole), leaves(killed)
    yield from (f"checkpoint: {name}" for name in sorted(set(one) ^ set(other)))
    for name in sorted(set(one) & set(other)):
        if one[name].tobytes() != other[name].tobytes():
            yield f"checkpoint: {name}"
    logs = [[without_times(entry) for entry in read_metrics(out)] for out in (whole, killed)]
    for number, (first, second) in enumerate(itertools.zip_longest(*logs), 1):
        if first != second:
            yield f"metrics.jsonl, line {number}: {first} and {second}"
    for name in ("best", "last"):
        for file in sorted(p for p in (whole / name).glob("*") if p.is_file()):
            if file.read_bytes() != (killed / name / file.name).read_bytes():
                yield f"{name}/{file.name}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, kills and compares; 0 where nothing differs."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("config", help="training config, a file or a name in configs/train")
    parser.add_argument("--work", type=Path, required=True, help="directory for both runs; it must be empty")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--set", action="append", default=[], help="as of jaxspec train")
    args = parser.parse_args(argv)
    # Every update is logged, so that moments can be told and every loss is compared.
    args.set = [*args.set, "train.log_every=1"]
    steps = load_run_settings(args.config, args.set).train.steps
    if steps <= args.kills:
        parser.error(f"--kills {args.kills} needs more updates than train.steps = {steps}")
    args.work.mkdir(parents=True, exist_ok=True)
    if any(args.work.iterdir()):
        parser.error(f"--work {args.work} is not empty")
    whole, killed = args.work / "whole", args.work / "killed"
    began = time.monotonic()
    if run_until(args, whole, steps + 1, 0):
        parser.error(f"the run that was left alone failed, see {whole}.log")
    entries = read_metrics(whole)
    pace_s = (entries[-1]["time_s"] - entries[0]["time_s"]) / max(len(entries) - 1, 1)
    chance = random.Random(args.seed)
    done = 0
    for update in sorted(chance.sample(range(1, steps), args.kills)):
        code = run_until(args, killed, update, chance.uniform(0, 2 * pace_s))
        if code not in (-signal.SIGKILL, 0):
            parser.error(f"exit code {code}, see {killed}.log")
        done += code != 0
        print(f"killed {done} times, at update {updates(killed)} of {steps}", flush=True)
    if run_until(args, killed, steps + 1, 0):
        parser.error(f"the last continuation failed, see {killed}.log")
    differing = list(differences(whole, killed))
    figures = {"kills": done, "updates": steps, "differences": differing, "time_s": round(time.monotonic() - began)}
    print(json.dumps(figures, indent=2))
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
