"""Reads the files that a ``speculative_config`` names, ``prompt_lookup_corpus`` and the token map, into token ids."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxspec.checkpoint.text.codec import Text
from jaxspec.draft.corpus import LookupCorpus
from jaxspec.draft.methods import SpeculativeConfig
from jaxspec.errors import ConfigError
from jaxspec.models.vocab import check_ids

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


def load_token_map(config: SpeculativeConfig, vocab_size: int) -> np.ndarray | None:
    """Loads the tokens that are drafted alone, int32 ascending, None where all are.

    Args:
      config: its ``token_map`` is an ``.npy`` array of token ids, in any order.
      vocab_size: of the target.

    Raises:
      ConfigError: the file cannot be read, or holds what are no ids of the target.
    """
    if config.token_map is None:
        return None
    where = f"speculative_token_map: {config.token_map}"
    try:
        ids = np.load(config.token_map, allow_pickle=False)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{where} cannot be read ({reason}); an {IDS} array of token ids is needed, as jaxspec token-map writes it"
        ) from error
    if ids.dtype.kind not in "iu":
        raise ConfigError(f"{where} must hold integers, got {ids.dtype} {list(ids.shape)}")
    try:
        return check_ids(np.unique(ids), vocab_size)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
