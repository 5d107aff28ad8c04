"""Writes the demo pair as Hugging Face directories, and the record of how it came about."""

import datetime
import json
import os
import platform
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from demo_models import (
    FROZEN,
    Recipe,
    bits_per_byte,
    count,
    cut,
    draft_figures,
    target_figures,
)

from jaxspec.checkpoint.load.model import load_model
from jaxspec.checkpoint.load.save import save_model
from jaxspec.models.catalog import arch_of
from jaxspec.shapes import Params
from jaxspec.train.run_log import read_metrics

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
GENERATION = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "do_sample": False}
POINTS = 100


def export(out: Path, params: Params, config: dict[str, Any], data: Path) -> None:
    """Writes one model in bfloat16 with the tokenizer beside it."""
    out.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER:
        shutil.copyfile(data / name, out / name)
    (out / "generation_config.json").write_text(json.dumps(GENERATION, indent=2) + "\n")
    save_model(out, params, arch_of(config), config, np.dtype("bfloat16"))


def curve(entries: list[dict[str, float]]) -> dict[str, list[dict[str, float]]]:
    """Training losses thinned to about a hundred points, and all held-out figures, by step."""
    by_step = {int(entry["step"]): entry for entry in entries}
    steps = sorted(by_step)
    kept = steps[:: max(1, len(steps) // POINTS)]
    training = [{"step": step, "loss": round(by_step[step]["loss"], 4)} for step in dict.fromkeys([*kept, steps[-1]])]
    names = {name for entry in entries for name in entry if name.startswith("held_out")}
    held_out = [
        {"step": step} | {name: round(by_step[step][name], 4) for name in sorted(names & by_step[step].keys())}
        for step in steps
        if names & by_step[step].keys()
    ]
    return {"training": training, "held_out": held_out}


def describe(run: Path, config: dict[str, Any], steps: int, batch: int, length: int) -> dict[str, Any]:
    """Returns what is known of one training run."""
    entries = read_metrics(run)
    return {
        "config": config,
        "steps": steps,
        "batch": [batch, length],
        "tokens_seen": steps * batch * length,
        "wall_time_s": entries[-1]["time_s"],
        "curve": curve(entries),
    }


def machine() -> dict[str, Any]:
    """Processor and number of cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "devices": jax.device_count(),
    }


def figures(out: Path, data: Path, text: np.ndarray, recipe: Recipe) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures of the two exported models, over the whole held-out stream and over the target's own text."""
    target, draft = (load_model(out / name, FROZEN) for name in ("target", "draft"))
    windows = cut(np.load(data / "held_out.npy"), recipe.length)
    ratio = json.loads((data / "corpus.json").read_text())["held_out"]["bytes_per_token"]
    about_target = target_figures(target.net, recipe.target_batch)(target.params, windows)
    usage = {"least": about_target["share_YE"].min(1).tolist(), "most": about_target["share_YE"].max(1).tolist()}
    of_target = {
        "parameters": count(target.params),
        "held_out_nats_per_token": about_target["held_out_loss"],
        "held_out_bits_per_byte": bits_per_byte(about_target["held_out_loss"], ratio),
        "expert_share_by_layer": usage,
    }
    measure = draft_figures(draft.net, target.net, recipe.target_batch)
    corpus = measure(draft.params, target.params, windows, 0)
    own = measure(draft.params, target.params, text, recipe.prompt - 1)
    of_draft = {
        "parameters": count(draft.params),
        "held_out_nats_per_token": corpus["loss"],
        "held_out_bits_per_byte": bits_per_byte(corpus["loss"], ratio),
        "held_out_kl": corpus["kl"],
        "held_out_agreement": corpus["agreement"],
        "target_text_kl": own["kl"],
        "target_text_agreement": own["agreement"],
    }
    return of_target, of_draft


def write_provenance(out: Path, data: Path, target: dict[str, Any], draft: dict[str, Any], recipe: Recipe) -> None:
    """Writes ``provenance.json`` beside the two models."""
    corpus = json.loads((data / "corpus.json").read_text())
    packages = ("jax", "flax", "optax", "orbax-checkpoint", "numpy", "tokenizers")
    record = {
        "made_by": "lab/train_demo.py",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "corpus": {k: v for k, v in corpus.items() if k != "skipped"},
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "balance_weight": recipe.balance,
        "seeds": {k: v for k, v in vars(recipe).items() if k.endswith("seed")},
        "machine": machine(),
        "target": target,
        "draft": draft,
    }
    (out / "provenance.json").write_text(json.dumps(record, indent=2) + "\n")
