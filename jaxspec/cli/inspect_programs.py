"""What ``jaxspec inspect`` shows of a model's programs on a GPU: the kernels chosen, and the compiled programs."""

from typing import Any

from jaxspec.cli.screen import Screen, amount

MOST_COPIES = 12
GROUPS = {
    "dense": "dense products, norms", "experts": "routed experts, routing", "kv": "attention over the cache",
    "head": "head", "sampling": "sampling, the step", "all": "all",
}  # fmt: skip


def show_kernels(by_program: dict[str, list[dict[str, Any]]], screen: Screen) -> None:
    """Prints the choices of each program."""
    from rich.table import Table

    for name, choices in by_program.items():
        table = Table("operation", "case", "computed by", "why", title=name, title_justify="left")
        for choice in choices:
            style = "yellow" if choice["implementation"] == "xla" else None
            table.add_row(*(choice[part] for part in ("op", "case", "implementation", "reason")), style=style)
        screen.console.print(table)


def show_compiled(report: dict[str, Any], screen: Screen) -> None:
    """Prints what compiled programs do, a column each."""
    from rich.table import Table

    mesh = ", ".join(f"{axis} {size}" for axis, size in report["mesh"].items() if size > 1)
    where = f"{report['devices']} x {report['gpu']}" + (f" ({mesh})" if mesh else "")
    shape = (
        f"{report['rows']} rows of {report['capacity']} tokens, {report['drafts']} drafts, kernels {report['kernels']}"
    )
    screen.line(f"{where}   {shape}", "bold")
    programs = report["programs"]
    table = Table("per step", *programs, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    rows = [_rows(program) for program in programs.values()]
    for label in dict.fromkeys(label for row in rows for label in row):
        table.add_row(label, *(row.get(label, "") for row in rows))
    screen.console.print(table)
    for name, program in programs.items():
        _show_groups(name, program["groups"], screen)
        _show_faults(name, program, screen)


def _show_groups(name: str, groups: list[dict[str, Any]], screen: Screen) -> None:
    """Prints what a step's groups of operations must move and compute, and the time that the card's record predicts."""
    from rich.table import Table

    if not groups:
        return
    title = f"{name}: a step at full length, uniform routing, predicted from the card's record, not measured"
    table = Table("operations", "launches", "bytes", "GFLOP", "work us", "launches us", "all us", title=title)
    for group in groups:
        times = (f"{1e6 * group[key]:.0f}" for key in ("work_s", "launch_s", "time_s"))
        table.add_row(
            GROUPS[group["group"]], str(group["launches"]), amount(group["size_bytes"]), f"{group['flops'] / 1e9:.3g}",
            *times,
        )  # fmt: skip
    screen.console.print(table)


def _rows(program: dict[str, Any]) -> dict[str, str]:
    """Returns words by label."""
    launches, graphs, sizes = program["launches"], program["graphs"], program["bytes"]
    rows = {
        "launches": str(launches["per_step"]),
        "launches per position": f"{launches['per_position']:g}" if program["positions"] else "",
        "more in branches": str(launches["in_branches"]),
        "more per turn of open loops": str(launches["per_turn"]),
        "launches outside CUDA graphs": str(graphs["launches_outside"]),
        "CUDA graphs": str(graphs["per_step"]),
        "host waits": str(graphs["host_waits"]),
    }
    for kind, entry in program["collectives"].items():
        rows[f"{kind}, all / per MoE layer"] = f"{entry['per_step']} / {entry['per_moe_layer']:g}"
        rows[f"{kind}, bytes"] = amount(entry["bytes_per_step"])
    rows |= {
        "arguments": amount(sizes["arguments"]),
        "temporary memory": amount(sizes["temp"]),
        "updated in place": amount(sizes["aliased"]),
        "of them caches": amount(sizes["caches"]),
        "most shared memory of a kernel": amount(max(program["shared_bytes"].values(), default=0)),
        "compile time": f"{program['compile_s']:.0f} s",
    }
    return rows


def _show_faults(name: str, program: dict[str, Any], screen: Screen) -> None:
    for kernel, size in program["spills"].items():
        screen.line(f"{name}: {kernel} spills {amount(size)} of registers", "red")
    copies = [entry for entry in program["copies"] if not entry["setup"]]
    for entry in copies[:MOST_COPIES]:
        often = " per turn" if entry["looped"] else " in a branch" if entry["optional"] else ""
        words = f"{amount(entry['bytes'])} written again, {entry['times']} times{often}: {entry['result']}"
        screen.line(f"{name}: {words}   {entry['where']}", "yellow")
    if len(copies) > MOST_COPIES:
        screen.line(f"{name}: and {len(copies) - MOST_COPIES} more such arrays; --json lists them", "yellow")
