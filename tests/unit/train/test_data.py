"""Documents become packed rows, and rows become batches in an order that only the seed decides."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.checkpoint.text.codec import Text
from jaxspec.errors import ConfigError
from jaxspec.train.data import batches, load_corpus, prompts, split
from jaxspec.train.packed_rows import PackedRows, pack
from jaxspec.train.settings import DataSettings
from jaxspec.train.sources import Document
from tests.unit.train.conftest import VOCAB


def ids(count: int, first: int = 1, given: int = 0) -> dict[str, Any]:
    return {"token_ids": [first] * count, "prompt_length": given}


def write(folder: Path, *records: dict[str, Any], name: str = "data.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(folder / name)


def document(length: int, token: int = 1) -> Document:
    return Document(np.full(length, token, np.int32), np.ones(length, bool), "here:1")


@pytest.mark.parametrize(
    ("lengths", "window", "wanted"),
    [
        ([3, 3, 2, 1, 4], 8, [[0, 2], [1, 3], [4]]),
        ([3, 3, 2, 1, 4], 1, [[0], [1, 2], [3, 4]]),
        ([5, 5], 8, [[0], [1]]),
        ([], 8, []),
    ],
)
def test_documents_go_where_they_fit_first(lengths: list[int], window: int, wanted: list[list[int]]):
    assert pack(lengths, 5, window) == wanted


def test_rows_tell_documents_apart():
    first, second = document(3, 7), Document(np.array([8, 9], np.int32), np.array([False, True]), "here:2")
    row = PackedRows([first, second], 6, 4)[0]
    assert row["token_BT"].tolist() == [7, 7, 7, 8, 9, 0]
    assert row["segment_BT"].tolist() == [1, 1, 1, 2, 2, 0]
    assert row["position_BT"].tolist() == [0, 1, 2, 0, 1, 0]
    assert row["loss_BT"].tolist() == [True, True, True, False, True, False]
    assert [row[name].dtype for name in ("token_BT", "segment_BT", "position_BT", "loss_BT")] == [np.int32] * 3 + [bool]


def taken(count: int, **options: Any) -> np.ndarray:
    """The first token of every row of some batches, [updates, A, B]."""
    rows = PackedRows([document(4, token) for token in range(13)], 4, 1)
    made = batches(rows, seed=3, **options)
    return np.stack([np.asarray(next(made).token_BT)[..., 0] for _ in range(count)])


def test_the_order_is_the_same_for_any_number_of_threads():
    alone = taken(9, size=4, accumulation=2, workers=1)
    assert alone.shape == (9, 2, 4)
    assert np.array_equal(alone, taken(9, size=4, accumulation=2, workers=5))


def test_every_row_comes_once_per_pass_and_passes_differ():
    passes = taken(26, size=4).reshape(-1, 13)
    assert (np.sort(passes, axis=1) == np.arange(13)).all()
    assert not np.array_equal(passes[0], passes[1])


def test_batches_of_one_row_are_the_rows():
    assert np.array_equal(taken(26, size=1).reshape(-1), taken(13, size=2).reshape(-1))


def test_hosts_share_the_global_order():
    whole = taken(6, size=4)
    parts = [taken(6, size=4, part=part, parts=2) for part in range(2)]
    assert np.array_equal(np.concatenate(parts, axis=-1), whole)
    with pytest.raises(ConfigError, match="4 rows cannot be split evenly over 3 hosts"):
        batches(PackedRows([document(4)], 4, 1), seed=0, size=4, parts=3)


def test_a_resumed_run_goes_on_in_the_order():
    whole = taken(9, size=4, accumulation=2)
    assert np.array_equal(taken(4, size=4, accumulation=2, first=5), whole[5:])


def test_corpus_counts_what_it_holds(tmp_path: Path, text: Text):
    file = write(tmp_path, ids(5, 1, 2), {"prompt": "ab", "response": "c"}, ids(3, 1, 3))
    corpus = load_corpus(DataSettings(train=(file,), length=8), text, VOCAB)
    assert corpus.counts == {
        "rows": 2, "documents": 2, "held_out": 0, "tokens": 9, "trained_tokens": 5,
        "documents without a token to train on": 1,
    }  # fmt: skip
    counts = corpus.token_counts(VOCAB)
    assert counts[1] == 3
    assert counts[text.encode("c")[0]] == 1
    assert counts.sum() == 5


def test_long_conversations_are_an_error_with_their_places(tmp_path: Path):
    file = write(tmp_path, ids(9), ids(4), ids(12))
    with pytest.raises(ConfigError, match=r"2 conversations .* = 8: .*:1 \(9 tokens\), .*:3 \(12 tokens\); raise it"):
        load_corpus(DataSettings(train=(file,), length=8), None, VOCAB)


@pytest.mark.parametrize(("choice", "lengths", "word"), [("cut", [8, 4], "cut"), ("drop", [4], "dropped")])
def test_long_conversations_are_cut_or_dropped_when_asked(tmp_path: Path, choice: Any, lengths: list[int], word: str):
    file = write(tmp_path, ids(9), ids(4))
    corpus = load_corpus(DataSettings(train=(file,), length=8, too_long=choice), None, VOCAB)
    assert [len(d.token_T) for d in corpus.rows.documents] == lengths
    assert corpus.counts[f"conversations {word} as too long"] == 1


def test_an_answer_that_is_cut_away_leaves_nothing(tmp_path: Path):
    file = write(tmp_path, ids(9, given=8), ids(4))
    corpus = load_corpus(DataSettings(train=(file,), length=8, too_long="cut"), None, VOCAB)
    assert corpus.counts["documents without a token to train on"] == 1


def test_plain_text_is_cut_into_pieces(tmp_path: Path, text: Text):
    file = write(tmp_path, {"text": "x" * 19})
    corpus = load_corpus(DataSettings(train=(file,), length=8), text, VOCAB)
    assert [len(d.token_T) for d in corpus.rows.documents] == [8, 8, 3]


@pytest.mark.parametrize("records", [[], [ids(4, given=4)], [{"messages": [{"role": "user", "content": "hi"}]}]])
def test_nothing_to_train_on(tmp_path: Path, text: Text, records: list):
    with pytest.raises(ConfigError, match=r"nothing to train on in .*data\.jsonl; .*no token of an answer is left"):
        load_corpus(DataSettings(train=(write(tmp_path, *records),), length=8), text, VOCAB)


def test_held_out_documents_are_chosen_by_content():
    documents = [document(4, token) for token in [*range(20), 5]]
    train, held_out = split(documents, 0.2)
    again, same = split(documents[::-1], 0.2)
    found, first = ({d.token_T[0] for d in part} for part in (held_out, train))
    assert len(train) + len(held_out) == 21
    assert found
    assert not found & first, "equal documents stay together"
    assert found == {d.token_T[0] for d in same}
    assert len(again) == len(train)


def test_held_out_files_are_kept_apart(tmp_path: Path):
    train, other = write(tmp_path, ids(4)), write(tmp_path, ids(6, 2, 1), name="other.jsonl")
    corpus = load_corpus(DataSettings(train=(train,), held_out=(other,), length=8), None, VOCAB)
    assert [len(d.token_T) for d in corpus.held_out] == [6]
    assert corpus.counts["documents"] == 1


def test_digest_notices_data_and_packing(tmp_path: Path):
    one, other = write(tmp_path, ids(4), ids(3)), write(tmp_path, ids(4), ids(3, 2), name="other.jsonl")
    found = [
        load_corpus(DataSettings(train=(file,), length=length), None, VOCAB).digest()
        for file, length in ((one, 8), (one, 8), (other, 8), (one, 4))
    ]
    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_prompts_are_what_stands_before_the_first_answer():
    talk = Document(np.arange(6, dtype=np.int32), np.array([False] * 2 + [True] * 4), "here:1")
    found = prompts([document(3), talk, document(20, 9)], count=9, length=4)
    assert [p.tolist() for p in found] == [[1], [0, 1], [9] * 4]
    assert len(prompts([document(3), talk], count=1, length=4)) == 1
    with pytest.raises(ConfigError, match="none of 1 held-out documents has a prompt of 1 to 1 tokens"):
        prompts([talk], count=1, length=1)


def test_named_files_are_held_out_whatever_the_share(tmp_path: Path):
    train = write(tmp_path, *(ids(4, first=n) for n in range(1, 9)))
    held_out = write(tmp_path, ids(3, first=9), name="held.jsonl")
    corpus = load_corpus(DataSettings(train=(train,), held_out=(held_out,), held_out_fraction=0.5, length=4), None, 99)
    assert corpus.counts["documents"] == 8
    assert [d.token_T[0] for d in corpus.held_out] == [9]


def test_rows_know_their_number_in_an_update():
    rows = PackedRows([document(4, token) for token in range(13)], 4, 1)
    made = next(batches(rows, seed=3, size=4, accumulation=2, part=1, parts=2))
    assert np.asarray(made.row_B).tolist() == [[2, 3], [2, 3]]
