"""JSON Schemas of the kinds that JSONSchemaBench has, made at random, and what each accepts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

WORDS = ["id", "name", "size", "tags", "state", "kind", "note", "url", "count", "is_new", "x-y", "Größe", "a b", "unit"]
PATTERNS = ["^[A-Z]{2}[0-9]{3}$", "^(red|green|blue)$", "^[a-f0-9]{4}(-[a-f0-9]{2})?$", "^v[0-9]\\.[0-9]{1,2}$"]
DEEPEST = 3


@dataclass(frozen=True)
class Form:
    """A schema, and whether a value fits it, by code of its own."""

    schema: dict[str, Any]
    accepts: Callable[[Any], bool]


def make_schema(seed: int) -> Form:
    """Makes the schema of a number: mostly an object, with definitions where it refers to some."""
    rng = Random(seed)
    definitions: dict[str, Form] = {}
    form = _object(rng, 0, definitions) if rng.random() < 0.8 else _any(rng, 0, definitions)
    if not definitions:
        return form
    parts = {name: definition.schema for name, definition in definitions.items()}
    return Form({**form.schema, "$defs": parts}, form.accepts)


def _any(rng: Random, depth: int, definitions: dict[str, Form]) -> Form:
    leaves = [_boolean, _null, _integer, _number, _string, _pattern, _enum, _const]
    inner = [_object, _object, _array, _tuple, _any_of, _reference]
    kind = rng.choice(leaves if depth >= DEEPEST or rng.random() < 0.45 else inner)
    return kind(rng, depth, definitions)


def _boolean(rng: Random, depth: int, definitions: dict[str, Form]) -> Form:
    return Form({"type": "boolean"}, lambda value: isinstance(value, bool))


def _null(rng: Random, depth: int, definitions: dict[str, Form]) -> Form:
    return Form({"type": "null"}, lambda value: value is None)


def _integer(rng: Random, depth: int, definitions: dict[str, Form]) -> Form:
    low, high = sorted((rng.randint(-50, 2000), rng.randint(-50, 2000)))
    schema: dict[str, Any] = {"type": "integer"}
    if rng.random() < 0.8:
        schema |= {"minimum": low, "maximum": high}
        return Form(schema, lambda value: _is_number(value) and value == int(value) and low <= value <= high)
    return Form(schema, lambda value: _is_number(value) and value == int(value))


def _number(rng: Random, depth: int, definitions: dict[str, Form]) -> Form:
    low, high = -rng.randint(0, 9), rng.randint(1, 99)
    if rng.random() < 0.5:
        schema = {"type": "number", "exclusiveMinimum": low, "maximum": high}
        return Form(schema, lambda value: _is_number(value) and low < value <= high)
    return Form({"type": "number"}, _is_number)


def _string(rng: Random, depth: int, definitions: dict[str, Form]) -> Form:
    least = rng.randint(0, 3)
    most = least + rng.randint(0, 8)
    schema: dict[str, Any] = {"type": "string", "maxLength": most}
    if least:
        schema["minLength"] = least
    return Form(schema, lambda value: isinstance(value, str) and least <= len(value) <= most)


def _pattern(rng: Random, depth: int, definitions: dict[str, Form]) -> Form:
    pattern = rng.choice(PATTERNS)
    search = re.compile(pattern).search
    return Form(
        {"type": "string", "pattern": pattern}, lambda value: isinstance(value, str) and search(value) is not None
    )


def _enum(rng: Random, depth: int, definitions: dict[str, Form]) -> Form:
    values: list[Any] = rng.sample([*WORDS, 1, 2.5, None, True, 'say "hi"', "é\n"], rng.randint(1, 5))
    return Form({"enum": values}, lambda value: any(_same(value, one) for one in values))


def _const(rng: Random, depth: int, definitions: dict[str, Form]) -> Form:
    fixed: Any = rng.choice([*WORDS, 7, False, ["a", 1], {"k": "v"}])
    return Form({"const": fixed}, lambda value: _same(value, fixed))


def _array(rng: Random, depth: int, definitions: dict[str, Form]) -> Form:
    items, least = _any(rng, depth + 1, definitions), rng.choice([0, 0, 1, 2])
    most = least + rng.randint(0, 3)
    schema = {"type": "array", "items": items.schema, "minItems": least, "maxItems": most}
    return Form(
        schema,
        lambda value: isinstance(value, list) and least <= len(value) <= most and all(map(items.accepts, value)),
    )


def _tuple(rng: Random, depth: int, definitions: dict[str, Form]) -> Form:
    parts = [_any(rng, depth + 1, definitions) for _ in range(rng.randint(1, 3))]
    count = len(parts)
    schema = {"type": "array", "prefixItems": [part.schema for part in parts], "items": False, "minItems": count}
    return Form(
        schema,
        lambda value: (
            isinstance(value, list)
            and len(value) == count
            and all(part.accepts(one) for part, one in zip(parts, value, strict=True))
        ),
    )


def _any_of(rng: Random, depth: int, definitions: dict[str, Form]) -> Form:
    parts = [_any(rng, depth + 1, definitions) for _ in range(rng.randint(2, 3))]
    return Form({"anyOf": [p.schema for p in parts]}, lambda value: any(part.accepts(value) for part in parts))


def _reference(rng: Random, depth: int, definitions: dict[str, Form]) -> Form:
    """Refers to a definition, at times one that refers to itself."""
    complete = [name for name, form in definitions.items() if form.schema]  # others would refer to themselves alone
    if complete and rng.random() < 0.5:
        name = rng.choice(complete)
        return Form({"$ref": f"#/$defs/{name}"}, lambda value: definitions[name].accepts(value))
    name = f"part{len(definitions)}"
    definitions[name] = Form({}, lambda value: True)
    if rng.random() < 0.3:
        leaf, itself = _any(rng, DEEPEST, definitions), {"$ref": f"#/$defs/{name}"}
        schema: dict[str, Any] = {"type": "object", "properties": {"value": leaf.schema, "next": itself}}
        schema |= {"required": ["value"], "additionalProperties": False}
        fields = {"value": leaf.accepts, "next": lambda value: definitions[name].accepts(value)}
        definitions[name] = Form(schema, lambda value: _fits(value, fields, {"value"}, None))
    else:
        definitions[name] = _any(rng, depth + 1, definitions)
    return Form({"$ref": f"#/$defs/{name}"}, lambda value: definitions[name].accepts(value))


def _object(rng: Random, depth: int, definitions: dict[str, Form]) -> Form:
    names = rng.sample(WORDS, rng.randint(1, 4 if depth < 2 else 2))
    parts = {name: _any(rng, depth + 1, definitions) for name in names}
    required = {name for name in names if rng.random() < 0.6}
    schema: dict[str, Any] = {"type": "object", "properties": {name: part.schema for name, part in parts.items()}}
    if required:
        schema["required"] = [name for name in names if name in required]
    others = None
    kind = rng.random()
    if kind < 0.8:
        schema["additionalProperties"] = False
    elif kind < 0.9:
        extra = _integer(rng, depth + 1, definitions)
        schema["additionalProperties"], others = extra.schema, extra.accepts
    else:
        others = _anything
    fields = {name: part.accepts for name, part in parts.items()}
    return Form(schema, lambda value: _fits(value, fields, required, others))


def _anything(value: Any) -> bool:
    return True


def _fits(value: Any, fields: dict[str, Any], required: set[str], others: Callable[[Any], bool] | None) -> bool:
    if not isinstance(value, dict) or not required <= set(value):
        return False
    extra = [one for name, one in value.items() if name not in fields]
    if extra and (others is None or not all(map(others, extra))):
        return False
    return all(fields[name](one) for name, one in value.items() if name in fields)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same(a: Any, b: Any) -> bool:
    """Whether two values are one in JSON, where true is no number."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b
