"""Packs documents into rows of T tokens, several in one where they fit, none of them split."""

from collections.abc import Sequence
from typing import NotRequired, Protocol, TypedDict

import numpy as np

from jaxspec.train.batch import TeacherOutput
from jaxspec.train.sources import Document


class Row(TypedDict):
    """One row of a ``Batch``."""

    token_BT: np.ndarray
    segment_BT: np.ndarray
    position_BT: np.ndarray
    loss_BT: np.ndarray
    cached: NotRequired[TeacherOutput]


class RowSource(Protocol):
    """Rows by number: ``PackedRows``, or ``FeatureRows`` with what the target computed for them."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Row: ...


class PackedRows:
    """Rows by number, each made when it is asked for; ``window`` rows stay open while documents are packed.

    ``alone`` gives every document a row of its own, see ``ArchSpec.one_text_only``.
    """

    def __init__(self, documents: Sequence[Document], length: int, window: int, *, alone: bool = False):
        self.documents, self.length = documents, length
        self.rows = pack([len(d.token_T) for d in documents], length, 0 if alone else window)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        """Returns the arrays of a row, [T] each."""
        token_T, segment_T, position_T = (np.zeros(self.length, np.int32) for _ in range(3))
        loss_T, first = np.zeros(self.length, bool), 0
        for segment, number in enumerate(self.rows[index], 1):
            document = self.documents[number]
            count = len(document.token_T)
            part = slice(first, first + count)
            token_T[part], loss_T[part] = document.token_T, document.loss_T
            segment_T[part], position_T[part] = segment, np.arange(count, dtype=np.int32)
            first += count
        return {"token_BT": token_T, "segment_BT": segment_T, "position_BT": position_T, "loss_BT": loss_T}


def pack(lengths: Sequence[int], length: int, window: int) -> list[list[int]]:
    """Puts each document into the first of the ``window`` newest rows that has room, else into a new one.

    A window of 0 puts each into a row of its own. Returns the documents of each row, by number.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for number, needed in enumerate(lengths):
        assert needed <= length, "no document is longer than a row"
        first = max(len(rows) - window, 0)
        target = next((row for row in range(first, len(rows)) if room[row] >= needed), None)
        if target is None:
            target = len(rows)
            rows.append([])
            room.append(length)
        rows[target].append(number)
        room[target] -= needed
    return rows
