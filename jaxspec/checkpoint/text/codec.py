"""Tokenizer and chat template of a model directory: text and conversations to token ids, and ids to text."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxspec.checkpoint.files.model_files import read_json
from jaxspec.checkpoint.text import deepseek_v4_chat
from jaxspec.checkpoint.text.chat_template import ChatTemplate
from jaxspec.checkpoint.text.conversation import Message, arranged, joined, messages_of, tools_of, with_ending
from jaxspec.checkpoint.text.token_bytes import TokenBytes
from jaxspec.checkpoint.text.tokenizer import TOKENIZER_FILES, load_tokenizer
from jaxspec.errors import ConfigError, RequestError

__all__ = ["CHAT_KEYS", "FORMATS", "TOKENIZER_FILES", "Text"]
# Chat formats of models that are published without a Jinja template, by model_type.
FORMATS: dict[str, Callable[..., str]] = {"deepseek_v4": deepseek_v4_chat.encode}
# What says how a conversation is written, by the names of ``Text.write_chat``.
CHAT_KEYS = (
    "messages", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "tools", "chat_template",
)  # fmt: skip
SET_ALREADY = {"tokenize", "conversation", "messages", "documents", *CHAT_KEYS}
TAG = "CONTINUE_FINAL_MESSAGE_TAG "


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
        """Loads the tokenizer of a directory or GGUF file, None if it has none or only one that takes code of its own.

        Raises:
          ConfigError: tokenizer files are there but cannot be read.
        """
        tokenizer = load_tokenizer(directory)
        return None if tokenizer is None else cls(tokenizer, _model_type(directory))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of a text.

        Args:
          text: a prompt, or what ``write_chat`` wrote.
          add_special_tokens: adds those that the model expects at a prompt's start; a written chat has them.

        Raises:
          RequestError: it is not Unicode, or the tokenizer fails.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"prompt: not valid Unicode at character {error.start}; remove lone surrogates"
            ) from error
        try:
            return self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        except BaseException as error:
            # A panic of the tokenizers library is no Exception.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise RequestError(f"prompt: the tokenizer fails on it ({error}); give prompt_token_ids") from error

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[int]:  # fmt: skip
        """Returns the ids of a conversation; arguments and errors as for ``write_chat``."""
        return self.encode(self.write_chat(messages, chat_template_kwargs, **options), add_special_tokens=False)

    def write_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
    ) -> str:
        """Returns the text of a conversation, by default ready for the assistant's answer.

        The published chat template writes it; where a model has none, the format that its makers document.

        Args:
          messages: ``role`` and ``content`` each, a text or a list of text parts.
          chat_template_kwargs: settings that the template knows, such as ``enable_thinking``.
          add_generation_prompt: starts the assistant's answer; by default unless the final message is continued.
          continue_final_message: leaves the last message open for the model to go on with it.
          tools: functions that the model may call, for templates that write them.
          chat_template: Jinja template, or the name of one of the model's, in place of the published one.

        Raises:
          RequestError: the messages are malformed, or the model cannot chat so.
        """
        talk, tools = messages_of(messages), tools_of(tools)
        options = {} if chat_template_kwargs is None else chat_template_kwargs
        if not isinstance(options, Mapping):
            raise RequestError(f"chat_template_kwargs: a mapping is needed, got {options!r:.200}")
        if taken := sorted(str(name) for name in SET_ALREADY & set(options)):
            raise RequestError(f"chat_template_kwargs: {taken} are set already; give what is an argument as one")
        prompted, continued = _ending(add_generation_prompt, continue_final_message)
        source = self.template(chat_template, with_tools=tools is not None)
        if source is None:
            if tools:
                raise RequestError("tools: this model's chat format has none here; leave them out")
            plain = arranged(talk, parts=False, tells_strings=True)
            return FORMATS[self.model_type](plain, options, answered=not prompted, ended=not continued)
        template = ChatTemplate.of(source)
        if tools and "tools" not in template.reads:
            raise RequestError("tools: this model's chat template does not use them; leave them out")
        if unread := sorted(set(options) - template.reads):
            warnings.warn(
                f"chat_template_kwargs: {unread} are not read by this model's chat template", RuntimeWarning, 2
            )
        variables = {**self._special_tokens(), "documents": None, **options, "tools": tools}
        return _write(template, talk, variables | {"add_generation_prompt": prompted}, continued=continued)

    def template(self, wanted: str | None, *, with_tools: bool) -> str | None:
        """Returns the Jinja source to use, None for a format without one; raises RequestError if there is neither."""
        published: Any = getattr(self.tokenizer, "chat_template", None)
        named = published if isinstance(published, Mapping) else {}
        if wanted is not None:
            if not isinstance(wanted, str):
                raise RequestError(f"chat_template: a Jinja template is needed, got {wanted!r:.200}")
            return named.get(wanted, wanted)
        if named:
            names = ("tool_use", "default") if with_tools else ("default",)
            if source := next((named[name] for name in names if name in named), None):
                return source
            raise RequestError(
                f"messages: the model has no default chat template; name one of {sorted(named)} as chat_template"
            )
        if not published and self.model_type not in FORMATS:
            raise RequestError(
                "messages: this model has no chat template; give a plain prompt, "
                "or put the template that you want into chat_template.jinja next to its tokenizer"
            )
        return published if isinstance(published, str) and published else None

    def _special_tokens(self) -> dict[str, Any]:
        tokens = self.tokenizer.special_tokens_map
        return {name: [str(t) for t in v] if isinstance(v, list | tuple) else str(v) for name, v in tokens.items()}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of ids."""
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """The bytes and characters that each id adds to a text."""
        return TokenBytes(self.tokenizer)


def _ending(add_generation_prompt: Any, continue_final_message: Any) -> tuple[bool, bool]:
    """Whether the assistant's answer is started, and whether the last message is left open."""
    for name, value in (
        ("add_generation_prompt", add_generation_prompt), ("continue_final_message", continue_final_message),
    ):  # fmt: skip
        if not isinstance(value, bool | None):
            raise RequestError(f"{name}: true or false is needed, got {value!r:.200}")
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "continue_final_message and add_generation_prompt are not both possible: "
            "the last message is continued, or a new one is started"
        )
    continued = bool(continue_final_message)
    return not continued if add_generation_prompt is None else add_generation_prompt, continued


def _write(template: ChatTemplate, talk: list[Message], variables: dict[str, Any], *, continued: bool) -> str:
    """Writes a conversation, cut at the end of its last message if that is to be continued."""
    final = joined(talk[-1]["content"][-1:] if isinstance(talk[-1]["content"], list) else talk[-1]["content"])
    if continued:
        talk = with_ending(talk, TAG)
    chat = arranged(talk, parts=template.parts, tells_strings=template.tells_strings)
    text = template.render(variables | {"messages": chat})
    if any(isinstance(m["content"], list) and m["content"] and str(m["content"]) in text for m in chat):
        # The template goes through the parts of some roles' contents and prints others' as they are.
        text = template.render(variables | {"messages": arranged(talk, parts=False, tells_strings=True)})
    if not continued:
        return text
    end = text.rfind(TAG.strip())
    if end < 0 or final.strip() not in text:
        raise RequestError("continue_final_message: the chat template does not write the last message as it is")
    return text[:end] if text.startswith(TAG, end) else text[:end].rstrip()


def _model_type(directory: Path) -> str:
    try:
        return str(read_json(directory / "config.json").get("model_type", ""))
    except ConfigError:
        return ""
