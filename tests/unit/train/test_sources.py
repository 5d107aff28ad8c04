"""Every form of training data gives the ids and the trained tokens that the target would see and write."""

import json
from pathlib import Path

import pytest

from jaxspec.checkpoint.text.codec import Text
from jaxspec.errors import ConfigError
from jaxspec.train.sources import Document, DocumentReader
from tests.unit.train.conftest import FORGETFUL, VOCAB, write_tokenizer

TALK = [
    {"role": "system", "content": "be"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "and"},
    {"role": "assistant", "content": "on"},
]


def read(folder: Path, text: Text | None, *records: object) -> list[Document]:
    file = folder / "data.jsonl"
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    file.write_text("\n".join(lines) + "\n")
    return list(DocumentReader(text, VOCAB).read(file))


def shown(text: Text, document: Document) -> tuple[str, str]:
    """The whole text, and what of it is trained on, other places as dots."""
    whole = [text.decode([i], skip_special_tokens=False).replace("<end>", "$") for i in document.token_T.tolist()]
    return "".join(whole), "".join(c if on else "." for c, on in zip(whole, document.loss_T, strict=True))


def test_only_answers_of_a_conversation_are_trained_on(tmp_path: Path, text: Text):
    (document,) = read(tmp_path, text, {"messages": TALK})
    assert shown(text, document) == ("[s]be[u]hi[a]yo$\n[u]and[a]on$\n", ".............yo$..........on$.")
    assert document.prompt_length == 13
    assert document.source.endswith("data.jsonl:1")


def test_what_a_server_would_see_is_what_is_trained(tmp_path: Path, text: Text):
    (document,) = read(tmp_path, text, {"messages": TALK[:3]})
    assert document.token_T[: document.prompt_length].tolist() == text.encode_chat(TALK[:2])


def test_turns_behind_the_last_answer_are_left_out(tmp_path: Path, text: Text):
    (document,) = read(tmp_path, text, {"messages": TALK[:4]})
    assert shown(text, document)[0] == "[s]be[u]hi[a]yo$\n"


def test_sharegpt_is_a_conversation_under_other_names(tmp_path: Path, text: Text):
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [{"from": names[m["role"]], "value": m["content"]} for m in TALK]
    one, other = read(tmp_path, text, {"conversations": turns}, {"messages": TALK})
    assert shown(text, one) == shown(text, other)


def test_a_template_that_rewrites_earlier_turns_gives_each_answer_a_document(tmp_path: Path):
    text = write_tokenizer(tmp_path, FORGETFUL)
    talk = [dict(m, content=f"hm|{m['content']}") if m["role"] == "assistant" else m for m in TALK[1:]]
    first, second = (shown(text, d) for d in read(tmp_path, text, {"messages": talk}))
    assert first == ("[u]hi[a]hm|yo$", "........hm|yo$")
    assert second == ("[u]hi[a]yo$[u]and[a]hm|on$", "....................hm|on$")


def test_pairs_end_with_the_end_of_text(tmp_path: Path, text: Text):
    (document,) = read(tmp_path, text, {"prompt": "1+1=", "response": "2"})
    assert shown(text, document) == ("1+1=2$", "....2$")


def test_plain_text_is_trained_on_as_a_whole(tmp_path: Path, text: Text):
    (document,) = read(tmp_path, text, {"text": "abc"})
    assert shown(text, document) == ("abc", "abc")
    assert document.plain
    (tmp_path / "a.txt").write_text("ab\nc")
    (document,) = DocumentReader(text, VOCAB).read(tmp_path / "a.txt")
    assert shown(text, document) == ("ab\nc", "ab\nc")


def test_ids_need_no_tokenizer(tmp_path: Path):
    whole, after = read(
        tmp_path, None, {"token_ids": [5, 6, 7], "prompt_length": 2}, {"prompt_token_ids": [5, 6], "token_ids": [7]}
    )
    assert whole.token_T.tolist() == after.token_T.tolist() == [5, 6, 7]
    assert whole.loss_T.tolist() == after.loss_T.tolist() == [False, False, True]


def test_what_generate_wrote_is_trained_on(tmp_path: Path, text: Text):
    ids = text.encode("yes")
    records = [
        {"index": 0, "prompt": "well", "text": "yes", "token_ids": ids, "finish_reason": "stop", "metrics": {}},
        {"index": 1, "prompt": "no", "outputs": [{"index": i, "text": "yes", "token_ids": ids} for i in range(2)]},
        {"index": 2, "error": {"line": 3, "message": "too long"}},
    ]
    file = tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in records))
    reader = DocumentReader(text, VOCAB)
    assert [shown(text, d) for d in reader.read(file)] == [("wellyes", "....yes")] + [("noyes", "..yes")] * 2
    assert reader.skipped == {"failed requests": 1}


def test_conversations_without_an_answer_are_counted(tmp_path: Path, text: Text):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TALK[:2]}) + "\n")
    reader = DocumentReader(text, VOCAB)
    assert list(reader.read(tmp_path / "a.jsonl")) == []
    assert reader.skipped == {"conversations without an answer": 1}


MALFORMED = [
    ("{", "not valid JSON"),
    ("[1]", "a JSON object is needed, got list"),
    ({"question": "?"}, r"none of the known forms.*got keys \['question'\]"),
    ({"messages": []}, "messages: a list of at least one turn"),
    ({"messages": [{"role": "user"}]}, 'each turn needs "role" and "content"'),
    ({"conversations": [{"from": "alien", "value": "x"}]}, r"unknown speakers \['alien'\]; known are"),
    ({"prompt": 3, "response": "x"}, "prompt: a text is needed, got 3"),
    ({"response": "x"}, "prompt: a text is needed, got None"),
    ({"token_ids": [1, "2"], "prompt_length": 0}, "token_ids: a list of integers"),
    ({"token_ids": [1, VOCAB], "prompt_length": 0}, f"must be from 0 to {VOCAB - 1}, got 1 to {VOCAB}"),
    ({"token_ids": [1], "prompt_length": 2}, "prompt_length must be from 0 to the 1 token ids, got 2"),
    ({"token_ids": [1]}, "token_ids need prompt_length, prompt_token_ids or prompt"),
    ({"response": {"status_code": 200, "body": {}}}, "lines of the Batch API hold no prompts"),
    ({"text": "\ud800"}, "not valid JSON"),
]


@pytest.mark.parametrize(("record", "says"), MALFORMED, ids=[says[:24] for _, says in MALFORMED])
def test_malformed_lines_are_named(tmp_path: Path, text: Text, record: object, says: str):
    with pytest.raises(ConfigError, match=says) as caught:
        read(tmp_path, text, {"text": "fine"}, record)
    assert "data.jsonl:2" in str(caught.value)


def test_files_that_cannot_be_read_are_named(tmp_path: Path, text: Text):
    for name, says in (
        ("none.jsonl", "No such file"),
        ("a.csv", r"must end in \.jsonl"),
        ("b.txt", "invalid start byte"),
    ):
        if name == "b.txt":
            (tmp_path / name).write_bytes(b"\xff")
        with pytest.raises(ConfigError, match=f"{name} .*{says}"):
            list(DocumentReader(text, VOCAB).read(tmp_path / name))


def test_texts_need_a_tokenizer(tmp_path: Path):
    with pytest.raises(ConfigError, match="no tokenizer; give token_ids"):
        read(tmp_path, None, {"text": "abc"})


def test_token_ids_of_another_model_are_refused(tmp_path: Path, text: Text):
    """Its numbers are words of that model's vocabulary; trained on, they would be noise that nobody sees."""
    file, answers = tmp_path / "answers.jsonl", [{"prompt": "a", "outputs": [{"token_ids": [1, 2]}]}]
    file.write_text("".join(json.dumps(record) + "\n" for record in answers))
    job = tmp_path / "answers.jsonl.job.json"
    assert len(list(DocumentReader(text, VOCAB, target="mine").read(file))) == 1
    for written in ('{"model": "mine"}', '{"model": null}', "{"):
        job.write_text(written)
        assert len(list(DocumentReader(text, VOCAB, target="mine").read(file))) == 1
    job.write_text('{"format": 1, "model": "another"}')
    with pytest.raises(ConfigError, match=r"answers\.jsonl:1: its token ids are another model's.*jaxspec generate"):
        list(DocumentReader(text, VOCAB, target="mine").read(file))
    assert len(list(DocumentReader(text, VOCAB).read(file))) == 1
    file.write_text('{"prompt": "a", "response": "b"}\n')
    assert len(list(DocumentReader(text, VOCAB, target="mine").read(file))) == 1, "texts are anyone's"
