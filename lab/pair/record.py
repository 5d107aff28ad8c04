"""Writes how the pair came about, and what it measures."""

import datetime
import json
import os
import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoint.load.model import load_model
from jaxspec.nn.policy import make_policy
from jaxspec.train.run_log import read_metrics
from lab.pair import corpus, draft, target
from lab.pair.recipe import Recipe

POINTS = 40
PACKAGES = ("jax", "flax", "optax", "numpy", "tokenizers")


def described(run: Path) -> dict[str, Any]:
    """Returns what is known of a training run: its time, a few losses, all held-out figures."""
    entries = read_metrics(run)
    points = entries[:: max(1, len(entries) // POINTS)]
    held_out = [
        {name: round(value, 4) for name, value in entry.items() if name == "step" or is_measured(name)}
        for entry in entries
    ]
    return {
        "updates": int(entries[-1]["step"]),
        "wall_time_s": round(entries[-1]["time_s"]),
        "losses": [[int(entry["step"]), round(entry["loss"], 4)] for entry in points],
        "held_out": [entry for entry in held_out if len(entry) > 1],
    }


def is_measured(name: str) -> bool:
    """Says whether a figure is a held-out one."""
    return name.startswith("held_out") or "acceptance_length" in name or name in ("busiest", "idlest")


def machine() -> dict[str, Any]:
    """Returns the processor and the number of cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {"cpu": names[0] if names else platform.processor(), "cores": os.cpu_count()}


def write(out: Path, data: Path, runs: dict[str, Path], recipe: Recipe, rows: dict[str, np.ndarray]) -> None:
    """Writes ``provenance.json`` beside the models.

    Args:
      out: directory of the pair.
      data: the corpus.
      runs: directories of the trainings.
      recipe: what was asked for.
      rows: what the target wrote.
    """
    exact = make_policy("float32")
    models = {name: load_model(out / name, exact).params for name in ("target", "draft")}
    stream, length = np.load(data / "held_out.npy"), recipe.length
    windows = np.lib.stride_tricks.sliding_window_view(stream, length + 1)[::length].astype(np.int32)
    loss, share_YE = target.measure(models["target"], windows, recipe.target)
    ratio = (lambda about: about["bytes"] / about["tokens"])(json.loads((data / "corpus.json").read_text())["held_out"])
    figures = {
        "held_out_nats_per_token": loss,
        "held_out_bits_per_byte": loss / np.log(2) / ratio,
        "expert_share_by_layer": {"least": share_YE.min(1).tolist(), "most": share_YE.max(1).tolist()},
        "draft": draft.measure(models["draft"], models["target"], rows["held_out"], recipe),
    }
    record = {
        "made_by": "python -m lab.pair.make",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "recipe": asdict(recipe),
        "corpus": json.loads((data / "corpus.json").read_text()),
        "figures": figures,
        "runs": {name: described(run) for name, run in runs.items()},
    }
    corpus.write_json(out / "provenance.json", record)
