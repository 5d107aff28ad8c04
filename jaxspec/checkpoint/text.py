"""Tokenizer and chat template of a model directory: text and conversations to token ids, and ids to text."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxspec.checkpoint import deepseek_v4_chat
from jaxspec.checkpoint.token_bytes import TokenBytes
from jaxspec.errors import ConfigError, RequestError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
# Chat formats of models that are published without a Jinja template, by model_type.
FORMATS: dict[str, Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any], bool], str]] = {
    "deepseek_v4": deepseek_v4_chat.encode
}


class Text:
    """Encodes prompts and decodes ids; wraps the published tokenizer.

    Attributes:
      tokenizer: of transformers.
      model_type: of the published config, which says how to chat where there is no template.
    """

    def __init__(self, tokenizer: Any, model_type: str = ""):
        self.tokenizer, self.model_type = tokenizer, model_type

    @classmethod
    def load(cls, directory: Path) -> Text | None:
        """The directory's tokenizer, None if it has none.

        Raises:
          ConfigError: tokenizer files are there but cannot be read.
        """
        if not any((directory / name).exists() for name in TOKENIZER_FILES):
            return None
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it advises to install torch
        from transformers import AutoTokenizer

        try:
            return cls(AutoTokenizer.from_pretrained(directory), _model_type(directory))
        except Exception as error:
            raise ConfigError(f"{directory}: the tokenizer cannot be read ({error})") from error

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens that the model expects at its start."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"prompt: not valid Unicode at character {error.start}; remove lone surrogates"
            ) from error
        return self.tokenizer(text)["input_ids"]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        answered: bool = False,
    ) -> list[int]:
        """Ids of a conversation, ready for the assistant's answer or behind it.

        The published chat template writes it; where a model has none, the format that its makers document.

        Args:
          messages: ``role`` and ``content`` each.
          template_kwargs: settings that the template knows, such as ``enable_thinking``.
          answered: whether the last message is the assistant's answer, whose end is written too.

        Raises:
          RequestError: the messages are malformed, or the model cannot chat.
        """
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
            raise RequestError(f"messages: a list of at least one message is needed, got {messages!r}")
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
                raise RequestError(f'messages: each needs "role" and "content", got {message!r}')
        options = {} if template_kwargs is None else template_kwargs
        if not isinstance(options, Mapping):
            raise RequestError(f"chat_template_kwargs: a mapping is needed, got {options!r}")
        return self.tokenizer(self._write(messages, options, answered), add_special_tokens=False)["input_ids"]

    def _write(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], answered: bool) -> str:
        if not getattr(self.tokenizer, "chat_template", None):
            if self.model_type in FORMATS:
                return FORMATS[self.model_type](messages, options, answered)
            raise RequestError(
                "messages: this model has no chat template; give a plain prompt, "
                "or put the template that you want into chat_template.jinja next to its tokenizer"
            )
        if taken := sorted({"tokenize", "add_generation_prompt", "conversation"} & set(options)):
            raise RequestError(f"chat_template_kwargs: {taken} are set already; leave them out")
        try:
            return self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=not answered, **options
            )
        except Exception as error:
            raise RequestError(f"messages: the chat template refuses them ({error})") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids."""
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """What each id adds to a text."""
        return TokenBytes(self.tokenizer)


def _model_type(directory: Path) -> str:
    file = directory / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except ValueError:
        return ""
    return str(config.get("model_type", "")) if isinstance(config, dict) else ""
