"""``jaxspec token-map``: the tokens that are worth drafting, counted in answers."""

import sys
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Annotated

import tyro

from jaxspec.errors import ConfigError
from jaxspec.whole_file import write_whole

HELD_OUT = 0.1  # of the documents, to see how much of a text that was not counted the tokens cover


@dataclass(frozen=True)
class TokenMapArgs:
    """Flags of ``jaxspec token-map``.

    Attributes:
      model: Directory of the model, or a packaged one.
      data: Its answers, or texts like them: the files that jaxspec train reads. Of chats the answers are counted.
      size: How many tokens are drafted from then on.
      output: File that gets their ids.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    data: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DATA ...")]
    size: int = 32768
    output: Annotated[Path, tyro.conf.arg(metavar="FILE.npy", aliases=["-o"])] = Path("token_map.npy")


def run(args: TokenMapArgs) -> None:
    """Counts, writes, and says what the tokens cover."""
    import numpy as np

    from jaxspec.checkpoint.files.fingerprint import fingerprint
    from jaxspec.checkpoint.load.model import read_config
    from jaxspec.checkpoint.text.codec import Text
    from jaxspec.models.catalog import arch_of
    from jaxspec.models.vocab import choose_ids, coverage
    from jaxspec.serve.demo_pair import resolve_model
    from jaxspec.train.data import load_corpus, token_counts
    from jaxspec.train.settings import DataSettings

    if args.output.suffix != ".npy":
        raise ConfigError(f"--output: the file's name must end in .npy, got {args.output}")
    if not args.output.parent.is_dir():
        raise ConfigError(f"--output: there is no directory {args.output.parent}")
    if not args.data:
        raise ConfigError("token-map: name the files whose answers are counted, as jaxspec train reads them")
    directory = resolve_model(args.model)
    size = arch_of(read_config(directory)).vocab_size
    if not 1 <= args.size <= size:
        raise ConfigError(f"--size: from 1 to the model's {size} tokens, got {args.size}")
    settings = DataSettings(train=args.data, length=1 << 20, held_out_fraction=HELD_OUT)
    corpus = load_corpus(settings, Text.load(directory), size, target=fingerprint(directory))
    counted_V, other_V = corpus.token_counts(size), token_counts(corpus.held_out, size)
    covered = coverage(other_V, choose_ids(counted_V, args.size)) if other_V.any() else None
    ids_W = choose_ids(counted_V + other_V, args.size)
    data = BytesIO()
    np.save(data, ids_W)
    write_whole(args.output, data.getvalue())
    held = "" if covered is None else f"; {covered:.2%} of a tenth of the texts that is not counted for that"
    sys.stderr.write(
        f"jaxspec: {args.output} written: {len(ids_W)} of {size} tokens, {coverage(counted_V + other_V, ids_W):.2%} of "
        f"{int((counted_V + other_V).sum())} in the answers{held}\n"
    )
