"""The comparison of draft heads as a table: means over seeds with 95 % confidence intervals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

LENGTHS, TEMPERATURES = (3, 5), ("0", "1")


def interval(values: list[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval (Student's t), nan for a single value."""
    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return mean, float("nan")
    return mean, float(stats.t.ppf(0.975, count - 1) * np.std(values, ddof=1) / np.sqrt(count))


def table(directory: Path) -> str:
    """All seeds of a directory, one line per head; draft costs where ``compare_cost.py`` measured them.

    Raises:
      FileNotFoundError: no seed is done.
    """
    seeds = [json.loads(file.read_text()) for file in sorted(directory.glob("seed*.json"))]
    if not seeds:
        raise FileNotFoundError(f"{directory}: no seed*.json; run a seed first")
    columns = [(k, t) for t in TEMPERATURES for k in LENGTHS]
    lines = [f"{len(seeds)} seeds, {seeds[0]['steps']} steps of {seeds[0]['tokens_per_step']} tokens", ""]
    titles = [f"length, K = {k}, T = {t}" for k, t in columns]
    file = directory / "costs.json"
    costs = json.loads(file.read_text())["heads"] if file.exists() else {}
    cost_title = ["draft cost, K = 5"] * bool(costs)
    lines += [_line("head", "parameters", *titles, *cost_title, "accepted by position, K = 5, T = 0")]
    lines += [_line(*["---"] * (7 + bool(costs)))]
    names = [name for name in seeds[0]["heads"] if all(name in seed["heads"] for seed in seeds)]
    for name in names:
        heads: list[dict[str, Any]] = [seed["heads"][name] for seed in seeds]
        cells = [_of(heads, f"k{k}/t{t}/acceptance_length") for k, t in columns]
        rates = [f"{np.mean([f[f'k5/t0/accepted_at_{i}'] for f in heads]):.2f}" for i in range(1, 6)]
        cost = [f"{costs[name]['draft_cost']:.2f}" if name in costs else "?"] * bool(costs)
        lines.append(_line(name, f"{heads[0]['parameters'] / 1e6:.2f} M", *cells, *cost, " ".join(rates)))
    lines += ["", _line("head", *(f"{what}, {d} ahead" for what in ("recall", "previous token") for d in (1, 4)))]
    lines.append(_line(*["---"] * 5))
    for name in names:
        heads = [seed["heads"][name] for seed in seeds]
        if "routing_recall_1" in heads[0]:
            keys = [f"{what}_recall_{d}" for what in ("routing", "previous") for d in (1, 4)]
            lines.append(_line(name, *(_of(heads, key) for key in keys)))
    return "\n".join(lines)


def _of(heads: list[dict[str, Any]], key: str) -> str:
    mean, half = interval([f[key] for f in heads])
    return f"{mean:.2f} ± {half:.2f}"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
