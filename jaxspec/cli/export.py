"""``jaxspec export``: a draft head in the format of another engine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jaxspec.cli.screen import Screen
from jaxspec.serve.demo_pair import resolve_model

DEFAULTS: dict[str, Any] = {"Medusa": "medusa", "BlockHead": "dflash", "Mtp": "native"}  # format by network


@dataclass(frozen=True)
class ExportArgs:
    """Flags of ``jaxspec export``, such as: jaxspec export runs/mine/best OUT --verifier-name Qwen/Qwen3-8B.

    Attributes:
      head: Directory of a draft head, in any known format.
      out: Directory to write; an older head in it is replaced.
      format: eagle3 for vLLM, SGLang and SpecForge, dflash for heads that draft blocks; speculators for vLLM; medusa
        for Medusa heads; native is ours, and of multi-token prediction has the names of the model's own files. By
        default medusa for a Medusa head, dflash for a block's, native for multi-token prediction, eagle3 for others.
      dtype: Of the written numbers; published heads are bfloat16. float32 keeps every number of a trained head.
      target: Directory of the model that it drafts for, or demo. Not needed for heads in our own format.
      verifier_name: What a speculators config calls that model: the name of a hub, or a directory where vLLM runs. By
        default the name in the target's own config, or that of its directory.
      drafts: Tokens per step that vLLM drafts by default; speculators files say it.
      color: Colors on a terminal.
    """

    head: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="HEAD")]
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    format: Literal["eagle3", "dflash", "speculators", "medusa", "native"] | None = None
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    target: Path | None = None
    verifier_name: str | None = None
    drafts: int = 3
    color: bool = True


def run(args: ExportArgs) -> None:
    """Loads a head and writes it in another format."""
    from jaxspec.checkpoint.heads.directory import in_dtype, load_head, save_head, stored_policy
    from jaxspec.checkpoint.heads.formats import Verifier
    from jaxspec.checkpoint.heads.verifier import verifier_name
    from jaxspec.checkpoint.load.model import read_config
    from jaxspec.models.catalog import arch_of

    target = None if args.target is None else resolve_model(args.target)
    config = None if target is None else read_config(target)
    head = load_head(args.head, None if config is None else arch_of(config), stored_policy(args.head))
    form = args.format or DEFAULTS.get(type(head.net).__name__, "eagle3")
    name = args.verifier_name or verifier_name(args.head, target, config)
    verifier = None if name is None else Verifier(name, tuple((config or {}).get("architectures") or ()), args.drafts)
    save_head(in_dtype(head, args.dtype), args.out, form, verifier=verifier)
    named = f", drafting for {name}" if form == "speculators" else ""
    Screen(color=args.color).line(f"{args.out}: {form} head in {args.dtype}{named}, ready")
