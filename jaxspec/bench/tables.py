"""A report as CSV and as Markdown."""

import csv
import shlex
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from typing import Any

from jaxspec.bench.record import BenchReport, Figures, PeerFigures, Spread, SweepCell, Waits

TITLE = "jaxspec bench"
SYNTHETIC = "SYNTHETIC ACCEPTANCE"


def heading(report: BenchReport) -> str:
    """Returns one line that says what it is; synthetic acceptance is named first."""
    name = f"{TITLE}: {report.model.get('family', 'model')} on {report.machine.get('device', '?')}"
    if report.synthetic is None:
        return name
    how = ", ".join(f"{key} {value}" for key, value in report.synthetic.items())
    return f"{SYNTHETIC} ({how}) - {name}"


def csv_text(report: BenchReport) -> str:
    """Returns one line per cell and way of decoding, peers included."""
    rows = [row for cell in report.cells for row in _rows(cell, synthetic=report.synthetic is not None)]
    out = StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _rows(cell: SweepCell, *, synthetic: bool) -> Iterable[dict[str, Any]]:
    point = {
        "synthetic": synthetic, "drafter": cell.drafter, "k": cell.k, "concurrency": cell.concurrency,
        "temperature": cell.temperature, "workload": cell.workload, "input_tokens": cell.input_tokens,
        "output_tokens": cell.output_tokens, "arrival": cell.arrival, "rounds": cell.rounds or None,
    }  # fmt: skip
    yield {**point, "engine": "jaxspec", "mode": "plain", **_figures(cell.plain)}
    if cell.speculative is not None:
        row = {**point, "engine": "jaxspec", "mode": "speculative", **_figures(cell.speculative)}
        row |= _spread("speedup", cell.speedup) | _spread("total_speedup", cell.total_speedup)
        if cell.acceptance is not None:
            a = cell.acceptance
            row |= {"acceptance_rate": a.rate, "acceptance_length": a.length, "mean_drafted": a.mean_drafted}
            row |= {"drafted_acceptance_length": a.drafted_length}
            row |= {f"acceptance_at_{i}": rate for i, rate in enumerate(a.per_pos, 1)}
        if cell.experts is not None:
            row |= {"experts_per_step": cell.experts.speculative, "experts_per_plain_step": cell.experts.plain}
        row |= {"lengths": "" if cell.lengths is None else lengths_text(cell.lengths)}
        row |= _spread("decision_s", cell.decision_s) if cell.decision_s is not None else {}
        yield row | {"same_text": cell.same_text}
    for peer in cell.peers:
        row = {**point, "engine": peer.peer, "mode": peer.mode, "version": peer.version}
        row |= _spread("tokens_per_s", peer.tokens_per_s) | _spread("decode_tokens_per_s", peer.decode_tokens_per_s)
        row |= _spread("ours_over_peer", peer.ours)
        yield row | {"acceptance_length": peer.tokens_per_step, "same_texts": peer.same_texts}


def lengths_text(lengths: Mapping[str, int]) -> str:
    """Returns the share of steps by chain length and tree."""
    total = max(sum(lengths.values()), 1)
    return ", ".join(f"{arm_text(arm)} {steps / total:.0%}" for arm, steps in lengths.items())


def arm_text(name: str) -> str:
    """Returns a chain's length or a tree in words."""
    return f"K={name}" if name.isdigit() else f"tree {name}"


def _figures(figures: Figures) -> dict[str, Any]:
    waits: Mapping[str, Waits | None] = {
        "ttft_s": figures.ttft_s, "itl_s": figures.itl_s, "tpot_s": figures.tpot_s, "latency_s": figures.latency_s
    }  # fmt: skip
    row: dict[str, Any] = _spread("tokens_per_s", figures.tokens_per_s)
    row |= _spread("decode_tokens_per_s", figures.decode_tokens_per_s)
    for name, wait in waits.items():
        for part in ("mean", "p50", "p95", "p99"):
            row[f"{name}_{part}"] = getattr(wait, part) if wait is not None else None
    return row | {"usd_per_million_tokens": figures.usd_per_million_tokens}


def _spread(name: str, spread: Spread | None) -> dict[str, Any]:
    parts = ("median", "least", "most", "low", "high")
    return {name if part == "median" else f"{name}_{part}": getattr(spread, part, None) for part in parts}


def markdown_text(report: BenchReport) -> str:
    """Returns what was measured on what, the table, the peers, and what is missing."""
    lines = [f"# {heading(report)}", ""]
    if report.synthetic is not None:
        lines += ["Drafts were accepted by a coin: the texts are no model's, speeds hold at that acceptance only.", ""]
    if not report.complete:
        lines += ["The sweep did not come to its end.", ""]
    device = f"{report.machine.get('cpu', '?')}, {report.machine.get('cores', '?')} cores"
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    lines += [f"{report.date}; {device}; {versions}; `{shlex.join(report.command)}`", ""]
    rounds = report.settings.get("rounds", "?")
    lines += [
        f"Medians of {rounds} interleaved rounds, after one that warms up, with least and greatest; times in ms at "
        "P50 / P95 / P99.", "",
        *_table(_header(report), [_line(cell, report) for cell in report.cells]), "",
    ]  # fmt: skip
    peers = [(cell, peer) for cell in report.cells for peer in cell.peers]
    if peers:
        header = ["cell", "peer", "decode tokens/s", "jaxspec over it", "tokens/pass", "same texts"]
        lines += ["## Peers, in the same rounds", "", *_table(header, [_peer_line(*pair) for pair in peers]), ""]
    if report.skipped:
        lines += ["## Not measured", "", *(f"- {s.what}: {s.reason}" for s in report.skipped), ""]
    return "\n".join(lines)


def _header(report: BenchReport) -> list[str]:
    speed = "speed-up (synthetic)" if report.synthetic is not None else "speed-up"
    names = ["cell", "plain tokens/s", "tokens/s", speed, "whole runs", "accepted", "tokens/pass", "where drafted"]
    names += ["per position", "drafted", "experts", "TTFT", "ITL", "latency", "same text"]
    return [*names, "$/M tokens"] if _priced(report) else names


def _priced(report: BenchReport) -> bool:
    return any(cell.plain.usd_per_million_tokens is not None for cell in report.cells)


def _line(cell: SweepCell, report: BenchReport) -> list[str]:
    main, a = cell.speculative or cell.plain, cell.acceptance
    cells = [
        cell.name + (f" ({lengths_text(cell.lengths)})" if cell.lengths else ""),
        _rate(cell.plain),
        _rate(main) if cell.speculative else "",
        _ratio(cell.speedup),
        _ratio(cell.total_speedup),
        f"{a.rate:.1%}" if a else "",
        f"{a.length:.2f}" if a else "",
        f"{a.drafted_length:.2f}" if a else "",
        " ".join(f"{rate:.2f}" for rate in a.per_pos) if a else "",
        f"{a.mean_drafted:.2f}" if a else "",
        f"{cell.experts.plain:.1f} -> {cell.experts.speculative:.1f}" if cell.experts else "",
        *(_wait(wait) for wait in (main.ttft_s, main.itl_s, main.latency_s)),
        {True: "yes", False: "NO", None: ""}[cell.same_text],
    ]
    if _priced(report):
        cells.append("" if main.usd_per_million_tokens is None else f"{main.usd_per_million_tokens:.3f}")
    return cells


def _peer_line(cell: SweepCell, peer: PeerFigures) -> list[str]:
    rate = peer.decode_tokens_per_s or peer.tokens_per_s
    return [
        cell.name,
        f"{peer.peer} {peer.version} {peer.mode}",
        f"{rate.median:.0f} ({rate.least:.0f} to {rate.most:.0f})",
        _ratio(peer.ours),
        "" if peer.tokens_per_step is None else f"{peer.tokens_per_step:.2f}",
        f"{peer.same_texts} of {len(peer.first_differences)}",
    ]


def _rate(figures: Figures) -> str:
    """Returns the decode rate, or that of whole runs where not all rows ever decoded."""
    rate = figures.decode_tokens_per_s
    return f"{figures.tokens_per_s.median:.0f} (whole)" if rate is None else f"{rate.median:.0f}"


def _ratio(ratio: Spread | None) -> str:
    return "" if ratio is None else f"{ratio.median:.2f}x ({ratio.least:.2f} to {ratio.most:.2f})"


def _wait(waits: Waits | None) -> str:
    return "" if waits is None else " / ".join(f"{1e3 * value:.1f}" for value in (waits.p50, waits.p95, waits.p99))


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
