"""Warnings before a run: what is allowed and seldom meant is said in one line each, and what is fine is not."""

import re

import numpy as np
import pytest

from jaxspec.config import to_record
from jaxspec.train.advice import epochs, facts_of, warnings_of
from jaxspec.train.data import Corpus
from jaxspec.train.packed_rows import PackedRows
from jaxspec.train.settings import RunSettings
from jaxspec.train.sources import Document


def corpus_of(lengths: list[int], length: int, held_out: int) -> Corpus:
    documents = [Document(np.ones(n, np.int32), np.ones(n, bool), "here") for n in lengths]
    rows = PackedRows(documents, length, 64)
    return Corpus(rows, tuple(documents[:1] * held_out), {"tokens": sum(lengths)})


def settings_of(rows: int, steps: int = 100, accumulation: int = 1) -> RunSettings:
    values = {
        "target": "t", "out": "o", "head": {"kind": "medusa"}, "data": {"train": ["a.jsonl"]},
        "train": {"steps": steps, "rows": rows, "accumulation": accumulation},
    }  # fmt: skip
    return to_record(values, RunSettings, "here")


@pytest.mark.parametrize(
    ("lengths", "rows", "held_out", "says"),
    [
        ([10] * 8, 4, 8, []),
        ([10] * 3, 4, 8, ["an epoch is 3 rows, fewer than the 4 of one update: .* 100 updates are 133 epochs"]),
        ([6] * 8, 4, 8, ["rows are 60% full, .*longest document has 6 tokens"]),
        ([10] * 8, 4, 1, ["acceptance is measured on 1 held-out document, which says little"]),
        ([10] * 8, 4, 0, ["no document is held out: acceptance is not measured"]),
        ([6], 4, 1, ["an epoch is 1 row, fewer", "rows are 60% full", "on 1 held-out document,"]),
    ],
)
def test_one_line_for_each_thing(lengths: list[int], rows: int, held_out: int, says: list[str]):
    found = list(warnings_of(settings_of(rows), corpus_of(lengths, 10, held_out)))
    assert len(found) == len(says)
    for words, wanted in zip(found, says, strict=True):
        assert re.search(wanted, words), words
        assert "\n" not in words


def test_what_a_run_means_in_epochs():
    corpus = corpus_of([10] * 6, 10, 4)
    assert epochs(settings_of(3, accumulation=2), corpus, 10) == 10
    assert facts_of(settings_of(3), corpus) == {"epochs": "50", "rows filled": "100%"}
