"""Trains a head of every kind for smollm2-moe, on the same cached features, and tabulates what they give.

Run ``python -m lab.compare_heads train KIND ... --out DIR [--seed N] [--steps N]``, after the data and features of
``configs/train/smollm2_moe_head_more.toml``, and for ``mtp``, ``dflash2``
and ``draft_model`` after

    jaxspec token-map smollm2-moe runs/smollm2-moe/data/train.jsonl --size 8192 --output runs/smollm2-moe/token_map.npy

Then for each kind, into its run's directory,

    python -m lab.upcycle.measure_head --head RUN/last --method KIND --out RUN/measured.json ...
    jaxspec calibrate smollm2-moe --speculative-config '{"method": KIND, "model": RUN/last}' --output RUN/cost.json ...

and ``python -m lab.compare_heads table DIR``. Sizes are chosen so that each has about 5.5 million trained numbers in
its products (the shared-expert head, which reads six vectors, 6.5). The vocabulary product is the target's rows and is
not trained. One recipe trains all: what tuned it was an EAGLE-3 head.
"""

import argparse
import copy
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.config import find_config, read_toml, set_value, to_record
from jaxspec.serve.compile_cache import use_compile_cache
from jaxspec.serve.demo_pair import resolve_model
from jaxspec.train.run import train
from jaxspec.train.settings import RunSettings

CONFIG, FIRST = "smollm2_moe_head_more", "eagle3"
MAP = "runs/smollm2-moe/token_map.npy"
DRAWS = 2000
COSTS = {"drafting in plain steps, rows x K": "draft_s", "pass": "step_s"}
TAPS: dict[str, Any] = {"taps": (2, 15, 27), "qk_norm": True}
SOME = TAPS | {"draft_vocab_size": 8192}
ROUNDS = SOME | {"fc_norm": True, "norm_output": True}
HEADS: dict[str, dict[str, Any]] = {
    "eagle": {"qk_norm": True, "intermediate_size": 2304, "draft_vocab_size": 8192},
    "eagle3": ROUNDS,
    "peagle": ROUNDS | {"layers": 2, "intermediate_size": 640},
    "medusa": {"heads": 8, "layers": 2, "draft_vocab_size": 8192},
    "dflash": SOME | {"layers": 2, "intermediate_size": 800, "block": {"size": 8}},
    "dflash2": TAPS | {
        "layers": 2, "intermediate_size": 800, "own_head": False,
        "block": {"size": 8, "conv_taps": 2, "conv_group": 16, "selector_rank": 64, "selector_top_k": 16},
    },
    "dspark": SOME | {
        "layers": 2, "intermediate_size": 640, "block": {"size": 7, "markov_rank": 64, "confidence": "markov"},
    },
    "mtp": {},
    "shared_expert": {"commons": "default", "draft_vocab_size": 8192, "qk_norm": True, "norm_output": True},
    "draft_model": {"layers": 2, "intermediate_size": 960},
}  # fmt: skip
LOSSES: dict[str, dict[str, Any]] = {
    "eagle": {"rounds": 3, "token": 0.1, "feature": 1.0, "noise": 0.2, "draft_only": True},
    "eagle3": {"rounds": 5, "draft_only": True},
    "peagle": {"rounds": 7, "decay": 1.0, "keep": 0.8, "draft_only": True},
    "medusa": {"decay": 0.8, "draft_only": True},
    "dflash": {"decay": 0.867, "draft_only": True, "block": {"anchors": 128}},
    "dflash2": {"kind": "kl", "decay": 0.779, "token_map": MAP, "block": {"anchors": 128, "selector": 1.0}},
    "dspark": {
        "token": 0.1, "decay": 0.779, "draft_only": True, "block": {"anchors": 128, "tv": 1.8, "confidence": 1.0},
    },
    "mtp": {"kind": "lk_hybrid", "rounds": 3, "decay": 0.6, "token_map": MAP},
    "shared_expert": {"rounds": 5, "draft_only": True},
    "draft_model": {"token_map": MAP},
}  # fmt: skip


def settings_of(kind: str, out: Path, seed: int, steps: int, changes: Sequence[str] = ()) -> RunSettings:
    """Returns one head's run: the config's but for the head, its loss, the length and ``loss.block.tv=0`` and such."""
    config = find_config(CONFIG, "train")
    values = read_toml(config)
    values |= copy.deepcopy({"head": {"kind": kind} | HEADS[kind], "loss": LOSSES[kind]})
    values |= {"out": str(out), "seed": seed}
    values["train"] |= {"steps": steps}
    if "taps" not in HEADS[kind]:  # the cache has last hidden states where they are learned from alone
        values["features"] = {}
    for change in changes:
        set_value(values, change)
    return to_record(values, RunSettings, str(config))


def place_of(directory: Path, kind: str, seed: int) -> Path:
    """Returns the directory of a run."""
    return directory / f"{kind}-{seed}"


def rate(passes: np.ndarray) -> float:
    """Returns tokens per pass of requests, [N, 2]: tokens committed and passes of the target."""
    return float(passes[:, 0].sum() / passes[:, 1].sum())


def ratio(over: np.ndarray, under: np.ndarray) -> tuple[float, float, float]:
    """Returns the ratio of two rates on the same requests, and its 95 % interval (bootstrap over requests)."""
    drawn = np.random.default_rng(0).integers(len(over), size=(DRAWS, len(over)))
    rates = [each[drawn].sum(axis=1) for each in (over, under)]
    ratios = rates[0][:, 0] / rates[0][:, 1] / (rates[1][:, 0] / rates[1][:, 1])
    low, high = np.percentile(ratios, (2.5, 97.5))
    return rate(over) / rate(under), float(low), float(high)


def requests(rows: Sequence[Mapping[str, Any]], length: int, heat: float) -> np.ndarray:
    """Returns tokens and passes of the requests of one length and temperature, of all kinds of text, [N, 2]."""
    return np.array([p for row in rows if (row["drafts"], row["temperature"]) == (length, heat) for p in row["passes"]])


def table(directory: Path) -> str:
    """Returns a line of Markdown for each measured run.

    Raises:
      FileNotFoundError: none is measured.
    """
    measured = {file.parent.name: json.loads(file.read_text()) for file in sorted(directory.glob("*/measured.json"))}
    if not measured:
        raise FileNotFoundError(f"{directory}: no */measured.json; measure a head first")
    grids = [{(row["temperature"], row["drafts"]) for row in rows} for rows in measured.values()]
    cells = sorted(set.intersection(*grids))
    titles = ["head", *(f"K = {length}, T = {heat:g}" for heat, length in cells), *COSTS]
    lines = [_line(*titles), _line(*["---"] * len(titles))]
    for name, rows in measured.items():
        base = measured.get(f"{FIRST}-{name.rsplit('-', 1)[1]}")
        base = None if base is rows else base
        texts = [_cell(rows, base, length, heat) for heat, length in cells]
        lines.append(_line(name, *texts, *_costs(directory / name / "cost.json")))
    return "\n".join(lines)


def _cell(rows: Sequence[Any], base: Sequence[Any] | None, length: int, heat: float) -> str:
    own = requests(rows, length, heat)
    if base is None:
        return f"{rate(own):.2f}"
    return "{:.2f} ({:.2f}, {:.2f} to {:.2f})".format(rate(own), *ratio(own, requests(base, length, heat)))


def _costs(file: Path) -> list[str]:
    """Returns what drafting and a whole pass take in plain steps of as many rows, at the shortest context."""
    if not file.exists():
        return [""] * len(COSTS)
    points = sorted(json.loads(file.read_text())["points"], key=lambda point: -point["context"])
    first = {(point["rows"], point["length"]): point for point in points}
    return [
        ", ".join(f"{b}x{k} {first[b, k][name] / first[b, 0]['step_s']:.2f}" for b, k in sorted(first) if k)
        for name in COSTS.values()
    ]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Reads the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train")
    training.add_argument("kinds", nargs="+", choices=list(HEADS))
    training.add_argument("--out", type=Path, required=True)
    training.add_argument("--seed", type=int, default=3)
    training.add_argument("--steps", type=int, default=150)
    training.add_argument("--set", nargs="+", default=(), help="KEY=VALUE of the run's settings, as for jaxspec train")
    showing = commands.add_parser("table")
    showing.add_argument("directory", type=Path)
    args = parser.parse_args()
    if args.command == "table":
        print(table(args.directory))
        return 0
    use_compile_cache()
    for kind in args.kinds:
        settings = settings_of(kind, place_of(args.out, kind, args.seed), args.seed, args.steps, args.set)
        train(settings, resolve_model(settings.target), lambda entry: print(json.dumps(dict(entry)), flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
