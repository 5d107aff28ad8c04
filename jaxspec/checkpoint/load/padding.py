"""A check that the vocabularies of a draft model and its target differ by nothing but padding."""

from pathlib import Path

from jaxspec.checkpoint.load.model import read_config
from jaxspec.checkpoint.text.codec import Text
from jaxspec.errors import ConfigError
from jaxspec.models.catalog import arch_of

SHOWN = 3  # tokens in a message


def check_vocabulary(draft: Path, target: Path, size: int) -> None:
    """Refuses a draft model of other tokens; Qwen2.5's sizes of 151936 and 152064 are fine, for they are padding.

    Raises:
      ConfigError: the sizes differ and so do the tokenizers, the smaller vocabulary lacks a token, or a directory has
        no tokenizer to tell.
    """
    draft_size = arch_of(read_config(draft)).vocab_size
    if draft_size == size:
        return
    why = _other_tokens(_ids(draft), _ids(target), min(draft_size, size))
    if why:
        raise ConfigError(
            f"speculative_config: the draft has a vocabulary of {draft_size}, the target of {size}; use a draft model "
            f"trained with the target's tokenizer ({why})"
        )


def _ids(directory: Path) -> dict[str, int] | None:
    """Returns the id of each token, None without a tokenizer."""
    text = Text.load(directory)
    vocabulary = getattr(text.tokenizer, "get_vocab", None) if text else None
    return vocabulary() if vocabulary else None


def _other_tokens(draft: dict[str, int] | None, target: dict[str, int] | None, smaller: int) -> str | None:
    """Says why ids do not mean the same, None if they do."""
    if draft is None or target is None:
        return f"no tokenizer of the {'draft' if draft is None else 'target'} says that the other rows are padding"
    wrong = sorted(token for token in draft.keys() | target.keys() if draft.get(token) != target.get(token))
    if wrong:
        return f"{len(wrong)} tokens have other ids, such as {wrong[:SHOWN]}"
    beyond = sorted(token for token, i in target.items() if i >= smaller)
    return f"{len(beyond)} tokens lie beyond {smaller}, such as {beyond[:SHOWN]}" if beyond else None
