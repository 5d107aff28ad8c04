"""What form a text must have, in vLLM's words."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from jaxspec.errors import RequestError

FORMS = ("json", "regex", "choice", "grammar", "json_object")
NOT_HERE = {
    "structural_tag": "give grammar=, which may refer to special tokens",
    "backend": "llguidance checks all grammars",
    "disable_fallback": "llguidance checks all grammars; leave it out",
}


@dataclass(frozen=True)
class StructuredOutputsParams:
    """A form that the generated text has, whole; exactly one of the first five is given, or none beside forced calls.

    Names and defaults are vLLM's but for ``after``.

    Attributes:
      json: a JSON Schema, as a mapping or as text; keys come in the order of the schema.
      regex: an expression that the whole text matches, in the syntax of Rust's ``regex``, without look-around.
      choice: texts of which it is one.
      grammar: a context-free grammar, in llguidance's variant of Lark or in GBNF.
      json_object: true for any JSON object.
      disable_any_whitespace: writes JSON without white space between its parts.
      disable_additional_properties: objects have only the properties that the schema names, unless it says otherwise.
      whitespace_pattern: expression for the white space between parts of JSON.
      after: text, such as ``</think>``, after which the form begins, with the next token. Before it, and in a text that
        never has it, everything is allowed. A prompt that ends with it begins at once.

    Raises:
      RequestError: a value is not allowed, or a name is not known.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    after: str | None = None

    def __post_init__(self) -> None:
        given = self._given
        if len(given) > 1 or (not given and self.after is None):
            raise _wrong(f"exactly one of {list(FORMS)} is needed, got {given or 'none'}")
        for name in ("regex", "grammar", "whitespace_pattern", "after"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or (not value and name != "regex")):
                raise _wrong(f"{name} must be a text, got {value!r:.200}")
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool | None):
                raise _wrong(f"{name} must be true or false, got {getattr(self, name)!r:.200}")
        if self.choice is not None and not _are_texts(self.choice):
            raise _wrong(f"choice must be a list of texts, got {self.choice!r:.200}")
        if self.whitespace_pattern is not None and given not in (["json"], ["json_object"]):
            raise _wrong("whitespace_pattern is for json and json_object; leave it out")
        if self.json is not None:
            self.schema  # noqa: B018  raises

    @classmethod
    def of(cls, value: Any) -> Self | None:
        """Returns parameters that are given, or made of parsed JSON."""
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise _wrong(f"StructuredOutputsParams or a mapping of its names is needed, got {value!r:.200}")
        known = [f.name for f in fields(cls)]
        for name in value:
            if name not in known:
                way = NOT_HERE.get(name, f"known are {known}")
                raise _wrong(f"{name!r:.200} is not known; {way}")
        return cls(**{name: v for name, v in value.items() if v is not None})

    @property
    def _given(self) -> list[str]:
        return [name for name in FORMS if getattr(self, name) not in (None, False)]

    @property
    def form(self) -> str | None:
        """The form that is given, None beside forced calls."""
        return next(iter(self._given), None)

    @property
    def schema(self) -> Any:
        """The JSON Schema; raises RequestError if it is none."""
        if self.json_object:
            return {"type": "object"}
        schema = self.json
        try:
            schema = json_module.loads(schema if isinstance(schema, str) else json_module.dumps(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise _wrong(f"json must be a JSON Schema, as a mapping or as text ({error})") from error
        if not isinstance(schema, dict):
            raise _wrong(f"json must be a JSON Schema, an object, got {schema!r:.200}")
        return _closed(schema) if self.disable_additional_properties else schema


def _closed(schema: Any) -> Any:
    """Returns a schema whose objects have only the properties that it names."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    names = {"properties", "patternProperties"} & set(schema)
    extra = {"additionalProperties": False} if names and "additionalProperties" not in schema else {}
    return {name: _closed(part) for name, part in schema.items()} | extra


def _are_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(text, str) for text in value)


def _wrong(message: str) -> RequestError:
    return RequestError(f"structured_outputs: {message}")
