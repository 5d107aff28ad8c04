"""Reads the files of ``prompt_lookup_corpus`` into token ids of a target."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxspec.checkpoint.text.codec import Text
from jaxspec.draft.corpus import LookupCorpus
from jaxspec.draft.methods import SpeculativeConfig
from jaxspec.errors import ConfigError

IDS = ".npy"


def load_corpus(config: SpeculativeConfig, directory: Path, vocab_size: int) -> LookupCorpus | None:
    """Loads and indexes what a ``speculative_config`` names, None if it names nothing.

    Args:
      config: its ``corpus`` are text files in UTF-8, or ``.npy`` arrays of token ids.
      directory: of the target, whose tokenizer reads the text.
      vocab_size: of the target.

    Raises:
      ConfigError: a file cannot be read, holds nothing that fits, or there is no tokenizer for it.
    """
    if not config.corpus:
        return None
    text = Text.load(directory) if any(Path(name).suffix != IDS for name in config.corpus) else None
    return LookupCorpus.of(
        [_tokens(Path(name), text, directory, vocab_size) for name in config.corpus], config.lookup_max
    )


def _tokens(file: Path, text: Text | None, directory: Path, vocab_size: int) -> Sequence[int] | np.ndarray:
    try:
        if file.suffix == IDS:
            ids = np.load(file, allow_pickle=False)
        elif text is None:
            raise ConfigError(
                f"prompt_lookup_corpus: {directory} has no tokenizer to read {file} with; give an {IDS} array of ids"
            )
        else:
            return text.encode(file.read_text(encoding="utf-8"), add_special_tokens=False)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"prompt_lookup_corpus: {file} cannot be read ({reason}); name text files in UTF-8, or {IDS} arrays of ids"
        ) from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or (ids.size and not 0 <= ids.min() <= ids.max() < vocab_size):
        raise ConfigError(
            f"prompt_lookup_corpus: {file} must hold one row of integers from 0 to {vocab_size - 1}, got {ids.dtype} "
            f"{ids.shape}" + (f" from {ids.min()} to {ids.max()}" if ids.size and ids.dtype.kind in "iu" else "")
        )
    return ids
