"""What form a text may be asked for, and what is refused."""

from typing import Any

import pytest

from jaxspec.errors import RequestError
from jaxspec.serve.request import SamplingParams
from jaxspec.serve.structured_outputs import StructuredOutputsParams

OPEN = {"type": "object", "properties": {"a": {"anyOf": [{"properties": {}}, {"type": "null"}]}}}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, r"exactly one of \['json', 'regex', 'choice', 'grammar', 'json_object'\] is needed, got none"),
        ({"json": {}, "regex": "a"}, "exactly one of .* got .*'json', 'regex'"),
        ({"json": "{"}, "json must be a JSON Schema, as a mapping or as text"),
        ({"json": "[]"}, "json must be a JSON Schema, an object"),
        ({"json": {"a": {1}}}, "json must be a JSON Schema, as a mapping"),
        ({"choice": []}, "choice must be a list of texts"),
        ({"choice": ["a", 1]}, "choice must be a list of texts"),
        ({"choice": "ab"}, "choice must be a list of texts"),
        ({"regex": 3}, "regex must be a text"),
        ({"grammar": ""}, "grammar must be a text"),
        ({"json_object": 1}, "json_object must be true or false"),
        ({"regex": "a", "after": ""}, "after must be a text"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern is for json"),
        ({"structural_tag": "x"}, "'structural_tag' is not known; give grammar="),
        ({"schema": {}}, "'schema' is not known; known are .*'json'"),
    ],
)
def test_what_is_refused(values: dict[str, Any], says: str):
    with pytest.raises(RequestError, match=f"structured_outputs: {says}") as error:
        SamplingParams(structured_outputs=values)
    assert "\n" not in str(error.value)


def test_what_is_taken():
    params = SamplingParams(structured_outputs={"json": {"type": "integer"}, "after": None})
    assert params.structured_outputs == StructuredOutputsParams(json={"type": "integer"})
    assert params.clone() == params
    assert params.kind == SamplingParams().kind + 8
    with pytest.raises(RequestError, match="ignore_eos goes on where the form"):
        SamplingParams(structured_outputs={"regex": "a"}, ignore_eos=True)
    for wrong in (3, "json", [1]):
        with pytest.raises(RequestError, match="StructuredOutputsParams or a mapping"):
            SamplingParams(structured_outputs=wrong)


def test_objects_are_closed_where_it_is_asked_for():
    assert StructuredOutputsParams(json=OPEN).schema == OPEN
    closed = StructuredOutputsParams(json=OPEN, disable_additional_properties=True).schema
    assert closed["additionalProperties"] is False
    assert closed["properties"]["a"]["anyOf"] == [{"properties": {}, "additionalProperties": False}, {"type": "null"}]
    assert "additionalProperties" not in closed["properties"]
    said = {"properties": {}, "additionalProperties": True}
    assert StructuredOutputsParams(json=said, disable_additional_properties=True).schema == said
    assert StructuredOutputsParams(json_object=True).schema == {"type": "object"}
