"""Calls of tools: the form in which a chat template writes them, forced by a grammar and read back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxspec.checkpoint.text.codec import Text
from jaxspec.errors import RequestError
from jaxspec.serve.request import SamplingParams
from jaxspec.serve.structured_outputs import StructuredOutputsParams

# As templates and training data write JSON.
SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
CHOICES = ("auto", "none", "required")


@dataclass(frozen=True)
class CallForm:
    """How a family of models writes calls of tools: JSON objects between texts.

    Attributes:
      marks: texts that a template of the family has.
      never: texts that it has not.
      start, end: before the first call and after the last.
      before, after: before and after each call.
      between: two calls.
      arguments: name of the arguments, next to ``name``.
    """

    marks: tuple[str, ...]
    never: tuple[str, ...]
    start: str
    end: str
    before: str
    after: str
    between: str
    arguments: str = "arguments"


FORMS = {
    "Hermes": CallForm(
        ("<tool_call>", "arguments"), ("<function=", "<arg_key>", "<parameter"),
        start="", end="", before="<tool_call>\n", after="\n</tool_call>", between="\n",
    ),
    "Mistral": CallForm(
        ("[TOOL_CALLS]",), ("[ARGS]", "[CALL_ID]"), start="[TOOL_CALLS][", end="]", before="", after="", between=", "
    ),
    "Llama 3": CallForm(
        ('"parameters": ',), ("<tool_call>", "[TOOL_CALLS]"),
        start="", end="", before="", after="", between="; ", arguments="parameters",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class ToolCalls:
    """The calls that a request may or must make.

    Attributes:
      form: of the model's template, None where it is not known.
      tools: their schemas of arguments, by name.
      forced: names of those of which one is called; empty where the model decides.
      several: whether it may call more than one.
    """

    form: CallForm | None
    tools: Mapping[str, Any]
    forced: tuple[str, ...]
    several: bool

    def grammar(self, specials: Mapping[str, int]) -> str:
        """Returns the grammar of forced calls; special tokens go by their ids."""
        form = self.form
        assert form is not None, "calls are forced in a known form"
        rules = [f"call_{i}" for i in range(len(self.forced))]
        call = [_text(form.before, specials), "one", _text(form.after, specials)]
        more = f"({_text(form.between, specials)} call)*" if self.several else ""
        lines = [
            " ".join(filter(None, ["start:", _text(form.start, specials), "call", more, _text(form.end, specials)])),
            " ".join(filter(None, ["call:", *call])),
            f"one: {' | '.join(rules)}",
        ]
        for rule, name in zip(rules, self.forced, strict=True):
            head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{form.arguments}": '
            schema = json.dumps({**self.tools[name], "x-guidance": SPACES})
            lines.append(f'{rule}: {json.dumps(head)} %json {schema} "}}"')
        return "\n".join(lines)

    def read(self, text: str) -> tuple[str, list[dict[str, str]]] | None:
        """Returns the text before the calls, and name and arguments of each; None where there are no sound calls."""
        if self.form is None:
            return None
        before, objects = _objects(self.form, text)
        calls = [_call(one, self.form.arguments) for one in objects]
        sound = [call for call in calls if call is not None and call["name"] in self.tools]
        return (before.strip(), sound) if sound and len(sound) == len(calls) else None


def tool_calls_of(tools: Any, choice: Any, parallel: Any, template: str) -> ToolCalls | None:
    """Reads what a request says about its tools; None where it makes no calls.

    Args:
      tools: in OpenAI's form, checked for being a list of mappings.
      choice: ``auto``, ``none``, ``required``, or ``{"type": "function", "function": {"name": ...}}``.
      parallel: whether several calls are allowed, None for yes.
      template: source of the chat template.

    Raises:
      RequestError: it is not sound, or calls are forced in a form that is not known.
    """
    functions = [_function(tool) for tool in tools or []]
    named = dict(functions)
    forced = _forced(choice, list(named))
    if not named or choice == "none":
        return None
    if not isinstance(parallel, bool | None):
        raise RequestError(f"parallel_tool_calls: true or false is needed, got {parallel!r:.200}")
    form = next((form for form in FORMS.values() if _written_by(template, form)), None)
    if form is None and forced:
        raise RequestError(
            f"tool_choice: calls can be forced in the forms of {', '.join(FORMS)}, and this model's chat template has "
            'another; give tool_choice "auto", or structured_outputs with a grammar of your own'
        )
    return ToolCalls(form, named, forced, parallel is not False and choice == "required")


def form_of(params: SamplingParams, calls: ToolCalls | None, text: Text | None) -> StructuredOutputsParams | None:
    """Returns the form that a text must have: that of its settings, or of the calls that it is forced to make.

    Raises:
      RequestError: there are both.
    """
    form = params.structured_outputs
    if calls is None or not calls.forced:
        return form
    if form is not None and form.form is not None:
        raise RequestError("tool_choice: a forced call has a form of its own; leave structured_outputs out")
    if params.ignore_eos:
        raise RequestError("tool_choice: ignore_eos goes on where a forced call ends; leave one out")
    grammar = calls.grammar(text.token_bytes.specials if text is not None else {})
    return StructuredOutputsParams(grammar=grammar, after=form and form.after)


def _written_by(template: str, form: CallForm) -> bool:
    return all(mark in template for mark in form.marks) and not any(mark in template for mark in form.never)


def _function(tool: Any) -> tuple[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name := function.get("name"), str) or not name:
        raise RequestError(f'tools: {{"type": "function", "function": {{"name": ...}}}} is needed, got {tool!r:.200}')
    parameters = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, Mapping):
        raise RequestError(f"tools: the parameters of {name!r:.200} are a JSON Schema, got {parameters!r:.200}")
    return name, parameters


def _forced(choice: Any, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of tools of which one must be called."""
    if choice in (None, "auto", "none"):
        return ()
    if choice == "required":
        if not names:
            raise RequestError("tool_choice: there are no tools to call; give tools")
        return tuple(names)
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(
            f'tool_choice: {", ".join(CHOICES)} or {{"type": "function", "function": {{"name": ...}}}} is needed, got '
            f"{choice!r:.200}"
        )
    if name not in names:
        raise RequestError(f"tool_choice: {name!r:.200} is none of the tools {list(names)!r:.200}")
    return (name,)


def _text(text: str, specials: Mapping[str, int]) -> str:
    """Returns a text in the words of a grammar, special tokens in it by their ids."""
    known = sorted((word for word in specials if word and word in text), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, known))})", text) if known else [text]
    return " ".join(f"<[{specials[p]}]>" if p in specials else json.dumps(p) for p in pieces if p)


def _objects(form: CallForm, text: str) -> tuple[str, list[Any]]:
    """Returns the text before the calls, and the JSON objects of the calls; none where it cannot be read."""
    opening = (form.start or form.before).strip().removesuffix("[")
    before, _, rest = text.partition(opening) if opening else ("", "", text)
    decoder, objects = json.JSONDecoder(), []
    try:
        if form.start:
            value = json.loads(rest)
            return before, value if isinstance(value, list) else [value]
        while rest.strip():
            rest = rest.strip().removeprefix(form.before.strip()).lstrip()
            value, end = decoder.raw_decode(rest)
            objects.append(value)
            rest = rest[end:].lstrip().removeprefix(form.after.strip()).lstrip().removeprefix(form.between.strip())
    except (ValueError, RecursionError):
        return text, []
    return before, objects


def _call(value: Any, arguments: str) -> dict[str, str] | None:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return None
    given = value.get(arguments)
    if not isinstance(given, Mapping):
        return None
    return {"name": value["name"], "arguments": json.dumps(given, ensure_ascii=False)}
