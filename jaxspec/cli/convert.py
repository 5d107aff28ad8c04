"""``jaxspec convert``: a GGUF file as a directory in Hugging Face layout."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxspec.cli.screen import Screen, amount


@dataclass(frozen=True)
class ConvertArgs:
    """Flags of ``jaxspec convert``, such as: jaxspec convert model.gguf DIR.

    Attributes:
      file: GGUF file; of a model split into several the first.
      out: Directory to write, which must not exist yet.
      dtype: Of the written weights.
      color: Color on a terminal.
    """

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    color: bool = True


def run(args: ConvertArgs) -> None:
    """Converts a file."""
    from jaxspec.checkpoint.gguf.convert import convert_gguf
    from jaxspec.checkpoint.gguf.gguf_header import is_gguf
    from jaxspec.errors import ConfigError

    if not is_gguf(args.file):
        raise ConfigError(f"convert: {args.file} is no .gguf file; draft heads are converted by jaxspec import")
    screen = Screen(color=args.color)
    with screen.counting(f"Converting {args.file.name}") as show:
        convert_gguf(args.file, args.out, args.dtype, show)
    size = sum(file.stat().st_size for file in args.out.glob("*.safetensors"))
    screen.line(f"{args.out}: {amount(size)} of weights in {args.dtype}, ready")
