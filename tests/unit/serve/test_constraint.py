"""What may follow each node of a proposal is what may follow its text, and nothing that was asked before changes it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.checkpoint.text.codec import Text
from jaxspec.errors import RequestError
from jaxspec.serve.constraint import Constraint
from jaxspec.serve.grammar import Grammars
from jaxspec.serve.structured_outputs import StructuredOutputsParams
from jaxspec.serve.tool_calls import FORMS, tool_calls_of
from lab.grammar_schemas import make_schema
from tests.oracle.conftest import LETTERS, write_tokenizer
from tests.oracle.grammar_model import VOCAB, write_grammar_tokenizer

EOS, WORDS = 0, VOCAB // 32
FORM_OF: list[dict[str, Any]] = [
    {"json": make_schema(4).schema}, {"json": make_schema(11).schema, "disable_any_whitespace": True},
    {"regex": "[a-c]{2,5}-20[0-9]"}, {"choice": ["yes", "yes, so", "é\n"]}, {"grammar": 'start: "a" start "b" | "-"'},
]  # fmt: skip


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return Grammars(text_of(tmp_path_factory.mktemp("words")), VOCAB, {EOS})


def text_of(directory: Path) -> Text:
    write_grammar_tokenizer(directory)
    text = Text.load(directory)
    assert text is not None
    return text


def one(grammars: Grammars, form: dict[str, Any], prompt: list[int] | None = None) -> Constraint:
    return grammars.constraints(StructuredOutputsParams(**form), prompt or [40], 1)[0]


def root_of(constraint: Constraint) -> np.ndarray:
    root_W = np.full(WORDS, 0xFFFFFFFF, np.uint32)
    constraint.fill_root(root_W)
    return root_W


def allowed(mask_W: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little")).tolist()


def after(grammars: Grammars, form: dict[str, Any], ids: list[int]) -> np.ndarray:
    fresh = one(grammars, form)
    fresh.follow(ids)
    return root_of(fresh)


@pytest.mark.parametrize("form", FORM_OF)
def test_every_node_of_any_tree(grammars: Grammars, form: dict[str, Any]):
    rng, constraint, ids = np.random.default_rng(0), one(grammars, form), []
    for _ in range(12):
        constraint.follow(ids)
        root_W = root_of(constraint)
        assert (root_W == after(grammars, form, ids)).all()
        parents, tokens, texts = [], [], [ids]
        for node in range(1, 9):  # mostly legal drafts, some that are not, some that end, some that are none
            parent = int(rng.integers(0, node))
            legal = allowed(after(grammars, form, texts[parent])) if texts[parent] is not None else []
            kind = rng.random()
            token = int(rng.choice(legal)) if legal and kind < 0.7 else int(rng.integers(-1, VOCAB))
            parents.append(parent)
            tokens.append(token)
            texts.append([*texts[parent], token] if token in legal and token != EOS else None)
        mask_NW = np.full((8, WORDS), 0xFFFFFFFF, np.uint32)
        constraint.fill(root_W, mask_NW, tokens, parents)
        for node, text in enumerate(texts[1:]):
            wanted = np.full(WORDS, 0xFFFFFFFF) if text is None else after(grammars, form, text)
            assert (mask_NW[node] == wanted).all()
        legal = allowed(root_W)
        ids = [*ids, int(rng.choice(legal))]
        if ids[-1] == EOS:
            ids = []
            constraint = one(grammars, form)


@pytest.mark.parametrize("form", FORM_OF)
def test_forced_tokens_are_all_that_may_come(grammars: Grammars, form: dict[str, Any]):
    rng, constraint, ids, most = np.random.default_rng(1), one(grammars, form), [], 0
    while not ids or (ids[-1] != EOS and len(ids) < 60):
        constraint.follow(ids)
        forced = constraint.forced(4)
        assert (root_of(constraint) == after(grammars, form, ids)).all()
        for place, token in enumerate(forced):
            assert allowed(after(grammars, form, [*ids, *forced[:place]])) == [token]
        most = max(most, len(forced))
        ids.append(int(rng.choice(allowed(root_of(constraint)))))
    assert most > 0
    assert constraint.forced(0) == []


def test_whatever_is_written_fits_its_schema(grammars: Grammars):
    rng, ended, blank = np.random.default_rng(3), 0, {" ", "\t", "\n", "\r"}
    spaces = [i for i, word in enumerate(grammars._words.tokens) if word.decode(errors="replace") in blank]
    for seed in range(40):
        form, ids = make_schema(seed), []
        constraint = one(grammars, {"json": form.schema, "disable_any_whitespace": seed % 2 == 0})
        while not ids or (ids[-1] != EOS and len(ids) < 200):
            constraint.follow(ids)
            legal = allowed(root_of(constraint))
            inked = [i for i in legal if i not in spaces]
            ids.append(EOS if EOS in legal else int(rng.choice(inked if inked and rng.random() < 0.8 else legal)))
        if ids[-1] == EOS:
            text = b"".join(grammars._words.tokens[i] for i in ids[:-1]).decode()
            assert form.accepts(json.loads(text)), (seed, text)
            ended += 1
    assert ended > 30


def test_a_matcher_that_fails_begins_again(grammars: Grammars):
    form = {"regex": "[a-c]{9}"}
    constraint = one(grammars, form)
    a = next(i for i in range(VOCAB) if grammars._words.tokens[i] == b"a")
    constraint.follow([a, a])
    root_W, mask_NW = root_of(constraint), np.full((2, WORDS), 0xFFFFFFFF, np.uint32)
    fails = constraint._matcher

    class Once:
        def __getattr__(self, name: str) -> Any:
            return getattr(fails, name)

        def consume_token(self, token: int) -> bool:
            fails.consume_token(EOS + 5)
            return False

    constraint._matcher = Once()  # pyright: ignore[reportAttributeAccessIssue]
    constraint.fill(root_W, mask_NW, [a, a], [0, 0])
    assert not mask_NW[0].any()
    assert (mask_NW[1] == after(grammars, form, [a, a, a])).all()
    assert constraint.error is None


def test_the_form_begins_after_its_marker(grammars: Grammars):
    form = {"regex": "ab", "after": "</think>"}
    words = grammars._words
    thought, marker = words(b"so {b"), words(b"</think>")
    assert len(marker) > 1
    for split in range(len(marker)):
        constraint = one(grammars, form)
        constraint.follow([*thought, *marker[:split]])
        assert (root_of(constraint) == 0xFFFFFFFF).all()
        assert constraint.forced(3) == []
        rest = marker[split:]
        mask_NW = np.full((len(rest), WORDS), 0xFFFFFFFF, np.uint32)
        constraint.fill(root_of(constraint), mask_NW, rest, list(range(len(rest))))
        assert (mask_NW[:-1] == 0xFFFFFFFF).all()
        assert (mask_NW[-1] == after(grammars, {"regex": "ab"}, [])).all()
    constraint.follow([*thought, *marker])
    assert (root_of(constraint) == after(grammars, {"regex": "ab"}, [])).all()
    for prompt, begins in ((b"x</think>\n\n", True), (b"</think>", True), (b"</think> no", False), (b"k>", False)):
        begun = (root_of(one(grammars, form, words(prompt))) != 0xFFFFFFFF).any()
        assert begun == begins


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"json": {"type": "objec"}}, "Invalid type: objec"),
        ({"json": {"not": {"type": "string"}}}, "Unimplemented keys"),
        ({"json": {"$ref": "http://example.com/a"}}, "not present in a registry"),
        ({"json": {"type": "string", "pattern": "(?=a)b"}}, "look-around"),
        ({"regex": "("}, "unclosed group"),
        ({"grammar": "bogus"}, "Expected"),
        ({"grammar": "start: other"}, "other"),
        ({"after": "x"}, "a form is needed besides after"),
    ],
)
def test_grammars_that_cannot_be_enforced_are_refused(grammars: Grammars, form: dict[str, Any], says: str):
    with pytest.raises(RequestError, match=f"structured_outputs: .*{says}") as error:
        one(grammars, form)
    assert "\n" not in str(error.value)


def test_a_vocabulary_of_characters(tmp_path: Path):
    write_tokenizer(tmp_path, LETTERS)
    text = Text.load(tmp_path)
    assert text is not None
    grammars = Grammars(text, 96, {0})
    constraint = one(grammars, {"regex": "AB[0-9]"})
    assert "".join(LETTERS[i] for i in constraint.forced(9)) == "AB"
    constraint.follow([LETTERS.index("A")])
    root_W = np.full(3, 0xFFFFFFFF, np.uint32)
    constraint.fill_root(root_W)
    assert allowed(root_W) == [LETTERS.index("B")]


WEATHER: dict[str, Any] = {
    "type": "object", "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"], "additionalProperties": False, "$defs": {"city": {"enum": ["Zürich", "Bern"]}},
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in (("weather", WEATHER), ("now", {}))]
TEMPLATES = {"Hermes": "<tool_call> arguments", "Mistral": "[TOOL_CALLS]", "Llama 3": '"parameters": '}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_forced_calls_are_read_back(grammars: Grammars, name: str, choice: Any):
    calls = tool_calls_of(TOOLS, choice, None, TEMPLATES[name])
    assert calls is not None
    form = {"grammar": calls.grammar({"[TOOL_CALLS]": EOS + 1} if name == "Mistral" else {})}
    rng, seen = np.random.default_rng(2), set()
    for _ in range(12):
        constraint, ids = one(grammars, form), []
        while not ids or (ids[-1] != EOS and len(ids) < 300):
            constraint.follow(ids)
            legal = allowed(root_of(constraint))
            ids.append(EOS if EOS in legal and rng.random() < 0.7 else int(rng.choice(legal)))
        if ids[-1] != EOS:
            continue
        text = b"".join(b"[TOOL_CALLS]" if i == EOS + 1 else grammars._words.tokens[i] for i in ids[:-1]).decode()
        read = calls.read(text)
        assert read is not None, text
        for call in read[1]:
            arguments = json.loads(call["arguments"])
            assert arguments == {} if call["name"] == "now" else arguments["city"] in ("Zürich", "Bern")
            seen.add(call["name"])
        assert read[0] == ""
    assert seen == ({"weather", "now"} if choice == "required" else {"weather"})


def test_calls_that_the_model_makes_by_itself():
    calls = tool_calls_of(TOOLS, "auto", None, TEMPLATES["Hermes"])
    assert calls is not None
    assert calls.forced == ()
    one_call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    call = {"name": "weather", "arguments": '{"city": "Bern"}'}
    assert calls.read(f"Let me see.\n{one_call}") == ("Let me see.", [call])
    assert calls.read(f"{one_call}\n{one_call}\n") == ("", [call, call])
    for text in ("no call", "<tool_call>\n{", one_call.replace("weather", "other"), f"{one_call} and so on"):
        assert calls.read(text) is None
    assert tool_calls_of(TOOLS, "none", None, TEMPLATES["Hermes"]) is None


@pytest.mark.parametrize(
    ("tools", "choice", "template", "says"),
    [
        (TOOLS, "required", "<function=", "forms of Hermes, Mistral, Llama 3"),
        (TOOLS, "maybe", "<tool_call> arguments", "tool_choice: auto, none, required or"),
        (TOOLS, {"function": {"name": "x"}}, "<tool_call> arguments", "'x' is none of the tools"),
        ([], "required", "<tool_call> arguments", "there are no tools to call"),
        ([{"type": "function"}], "auto", "", "tools: "),
        ([{"function": {"name": "a", "parameters": 3}}], "auto", "", "parameters of 'a' are a JSON Schema"),
    ],
)
def test_calls_that_are_refused(tools: Any, choice: Any, template: str, says: str):
    with pytest.raises(RequestError, match=says):
        tool_calls_of(tools, choice, None, template)
