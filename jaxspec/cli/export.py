"""``jaxspec export``: a draft head in the format of another engine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxspec.cli.screen import Screen


@dataclass(frozen=True)
class ExportArgs:
    """What ``jaxspec export`` is asked for.

    Attributes:
      head: Directory of a draft head, in any known format.
      out: Directory to write; an older head in it is replaced.
      format: eagle3 for vLLM, SGLang and SpecForge; speculators for vLLM; medusa for Medusa heads.
      target: Directory of the model that it drafts for. Not needed for heads in our own format, except by speculators,
        whose files name it.
      drafts: Tokens per step that vLLM drafts by default; speculators files say it.
      color: Colours on a terminal.
    """

    head: Annotated[Path, tyro.conf.Positional]
    out: Annotated[Path, tyro.conf.Positional]
    format: Literal["eagle3", "speculators", "medusa"] = "eagle3"
    target: Path | None = None
    drafts: int = 3
    color: bool = True


def run(args: ExportArgs) -> None:
    """Loads a head and writes it in another format, every number as it was."""
    from jaxspec.checkpoint.head_formats import Verifier
    from jaxspec.checkpoint.heads import load_head, save_head, stored_policy
    from jaxspec.checkpoint.load import read_config
    from jaxspec.models.catalog import arch_of

    config = None if args.target is None else read_config(args.target)
    head = load_head(args.head, None if config is None else arch_of(config), stored_policy(args.head))
    verifier = None
    if args.target is not None and config is not None:
        verifier = Verifier(str(args.target), tuple(config.get("architectures") or ()), args.drafts)
    save_head(head, args.out, args.format, verifier=verifier)
    Screen(args.color).line(f"{args.out}: {args.format} head, ready")
