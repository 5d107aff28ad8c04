"""Warnings and facts about a run's settings and data, before hours go by."""

import math
from collections.abc import Iterator

from msgspec.structs import replace

from jaxspec.train.data import Corpus
from jaxspec.train.settings import RunSettings

FEW_DOCUMENTS, FULL = 4, 0.75


def facts_of(settings: RunSettings, corpus: Corpus) -> dict[str, str]:
    """Returns how long the run is in passes over the data, and how full its rows are."""
    return {"epochs": f"{epochs(settings, corpus, settings.train.steps):,.3g}", "rows filled": f"{_filled(corpus):.0%}"}


def warnings_of(settings: RunSettings, corpus: Corpus) -> Iterator[str]:
    """Yields one line for each thing that is allowed and seldom meant."""
    t, rows = settings.train, len(corpus.rows)
    each = t.rows * t.accumulation
    if rows < each:
        yield (
            f"an epoch is {rows} row{'s' * (rows > 1)}, fewer than the {each} of one update: rows repeat "
            f"within an update, and {t.steps:,} updates are {epochs(settings, corpus, t.steps):,.0f} epochs; give more "
            "data, or lower train.rows, train.accumulation, train.steps or data.length"
        )
    if _filled(corpus) < FULL:
        longest = max(len(document.token_T) for document in corpus.rows.documents)
        yield (
            f"rows are {_filled(corpus):.0%} full, the rest is padding that costs as much; the longest document has "
            f"{longest} tokens: set data.length to a multiple of it, or raise data.window"
        )
    if 0 < (count := len(corpus.held_out)) < FEW_DOCUMENTS:
        yield (
            f"acceptance is measured on {count} held-out document{'s' * (count > 1)}, which says little; name a file "
            "with data.held_out, or raise data.held_out_fraction"
        )
    if not corpus.held_out:
        yield (
            "no document is held out: acceptance is not measured and no best/ is kept; name a file with "
            "data.held_out, or set data.held_out_fraction"
        )


def with_steps(settings: RunSettings, corpus: Corpus) -> RunSettings:
    """Returns the settings with the number of updates that their epochs are."""
    t = settings.train
    if t.epochs is None:
        return settings
    steps = max(1, math.ceil(t.epochs * len(corpus.rows) / (t.rows * t.accumulation)))
    return replace(settings, train=replace(t, steps=steps, epochs=None))


def epochs(settings: RunSettings, corpus: Corpus, updates: int) -> float:
    """Returns how many passes over the data so many updates are."""
    return updates * settings.train.rows * settings.train.accumulation / len(corpus.rows)


def _filled(corpus: Corpus) -> float:
    return corpus.counts["tokens"] / (len(corpus.rows) * corpus.rows.length)
