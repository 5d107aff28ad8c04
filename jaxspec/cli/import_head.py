"""``jaxspec import``: a draft head of any known format in ours."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jaxspec.cli.screen import Screen
from jaxspec.serve.demo_pair import resolve_model


@dataclass(frozen=True)
class ImportArgs:
    """Flags of ``jaxspec import``, such as: jaxspec import downloaded/head imported --target models/mine.

    Attributes:
      head: Directory of a draft head: EAGLE-1, EAGLE-3, P-EAGLE, DFlash, DSpark, speculators or Medusa, safetensors or
        PyTorch.
      out: Directory to write; an older head in it is replaced.
      target: Directory of the model that it drafts for, or demo.
      color: Colors on a terminal.
    """

    head: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="HEAD")]
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    target: Path
    color: bool = True


def run(args: ImportArgs) -> None:
    """Loads a head and writes it in our format, every number as it was."""
    from jaxspec.checkpoint.heads.directory import load_head, save_head, stored_policy
    from jaxspec.checkpoint.load.model import read_config
    from jaxspec.models.catalog import arch_of

    head = load_head(args.head, arch_of(read_config(resolve_model(args.target))), stored_policy(args.head))
    save_head(head, args.out)
    Screen(color=args.color).line(f"{args.out}: head in jaxspec's format, ready")
