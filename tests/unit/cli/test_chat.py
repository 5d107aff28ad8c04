"""A conversation in the terminal, with a model that says what it is told to."""

import io
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from jaxspec.cli import chat
from jaxspec.cli.chat import Conversation
from jaxspec.errors import RequestError
from jaxspec.serve.request import RequestOutput, SamplingParams
from jaxspec.serve.sample import new_samples
from jaxspec.serve.text import IncrementalText
from tests.unit.serve.layouts import KNOWN

ANSWERS = {"hello": " the cat", "long": " the cat isn't the cat", "escape": "\x1b[2J"}


class Model:
    """Answers by the last message, three tokens at a time; the first step has no drafts, the others two."""

    def __init__(self, *, interrupts: bool = False):
        known = KNOWN["byte_level"]()
        self.known, self.interrupts, self.asked, self.params = known, interrupts, [], []
        self.text: Any = known
        self.capacity = 100
        known.write_chat = lambda messages, *_, **__: ""
        known.encode_chat = lambda messages: [0] * 10 * len(messages)

    def stream(self, prompt: dict[str, Any], params: SamplingParams) -> Iterator[RequestOutput]:
        messages = prompt["messages"]
        self.asked.append(messages)
        self.params.append(params)
        if messages[-1]["content"] == "too long":
            raise RequestError("prompt: 9999 tokens are too many")
        ids = self.known.tokenizer(ANSWERS[messages[-1]["content"]])["input_ids"]
        (sample,) = new_samples(
            "0", "", [5], params, lambda p: IncrementalText(self.known, p, [5]),
            seeds=(0, 0), capacity=10**6, draft_length=2,
        )  # fmt: skip
        sample.take(ids[:1], 0, None, set())
        sample.show()
        yield sample.output
        if self.interrupts:
            raise KeyboardInterrupt
        for first in range(1, len(ids), 3):
            sample.take(ids[first : first + 3], 2, None, set())
            sample.show()
            yield sample.output


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def hold(lines: str, model: Model, **settings: Any) -> tuple[Conversation, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        llm: Any = model
        conversation = Conversation(llm, SamplingParams(temperature=0.0), **settings)
        conversation.hold()
        return conversation, *capsys.readouterr()

    return hold


def test_piped_answers_stand_alone(talk: Any):
    model = Model()
    conversation, out, err = talk("hello\n\nlong\n", model, system="Be brief.")
    assert out == " the cat\n the cat isn't the cat\n"
    assert [m["role"] for m in model.asked[1]] == ["system", "user", "assistant", "user"]
    assert model.asked[1][2]["content"] == " the cat"
    assert [m["content"] for m in conversation.messages][1::2] == ["hello", "long"]
    statuses = err.splitlines()
    assert len(statuses) == 2
    assert all(" tokens/s, " in line and " tokens per pass" in line and len(line) <= 80 for line in statuses)
    assert "where drafted)" in statuses[1]


def test_commands(talk: Any):
    model = Model()
    conversation, out, err = talk("hello\n/plain\nhello\n/reset\nhello\n/help\n/what\n/quit\nhello\n", model)
    assert out == " the cat\n" * 3
    assert [params.speculative for params in model.params] == [None, False, False]
    assert [len(messages) for messages in model.asked] == [1, 3, 1]
    assert "speculation is off" in err
    assert "without speculation]" in err
    assert "/what is not known" in err
    assert err.count("/reset  begins") == 2
    assert len(conversation.messages) == 2


def test_a_stopped_answer_stays_and_the_conversation_goes_on(talk: Any):
    model = Model(interrupts=True)
    conversation, out, err = talk("long\nhello\n", model)
    assert len(model.asked) == 2
    assert out == "\n\n" or out.strip()
    assert "[stopped; 1 tokens" in err
    assert [m["role"] for m in conversation.messages] == ["user", "assistant"] * 2


def test_a_refused_message_is_dropped(talk: Any):
    model = Model()
    conversation, out, err = talk("too long\nhello\n", model)
    assert out == " the cat\n"
    assert "9999 tokens are too many; /reset begins a new conversation" in err
    assert len(conversation.messages) == 2


def test_the_oldest_turns_make_room(talk: Any):
    """Of a system message, questions of 10 tokens and answers of 10, with room for an answer of 50."""
    model = Model()
    conversation, _, err = talk("hello\n" * 4, model, system="Be brief.")
    assert [len(messages) for messages in model.asked] == [2, 4, 4, 4]
    assert all(messages[0]["role"] == "system" for messages in model.asked)
    assert err.count("[the oldest turn is dropped: 100 tokens hold no more (--max-model-len)]") == 2
    assert len(conversation.messages) == 5


def test_lines_of_a_paste_are_one_message(monkeypatch: pytest.MonkeyPatch):
    waiting = ["first", "", "third"]
    ended: list[bool] = []

    def pasted(*_: str) -> str:
        if not waiting:
            raise EOFError
        return waiting.pop(0)

    monkeypatch.setattr("builtins.input", pasted)
    monkeypatch.setattr(chat.select, "select", lambda *_: (waiting or ended, [], []))
    assert chat.typed() == ("first\n\nthird", True)
    waiting, ended = ["last"], [True]
    assert chat.typed() == ("last", False)


def test_a_text_does_not_command_the_terminal(talk: Any):
    assert talk("escape\n", Model())[1] == "\u241b[2J\n"
