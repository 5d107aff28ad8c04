"""Which blocks of texts the prefix cache has: known by all tokens that they depend on, the least recently used go."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxspec.decode.chunks import UnreadPrompt
from jaxspec.serve.metrics import EngineMetrics
from jaxspec.serve.prefix_cache import PrefixCache

SIZE = 4


class Copies:
    """Notes what would be copied: (first block, ids) per call."""

    def __init__(self, *, any_cut: bool = True):
        self.any_cut, self.sizes, self.copies_prefixes = any_cut, (SIZE, 3 * SIZE), True
        self.drafter: Any = SimpleNamespace(needs="hidden")
        self.saved, self.loaded = [], []

    def save_prefix(self, store: Any, state: Any, prompt: UnreadPrompt, first: int, ids: list[int]) -> Any:
        self.saved.append((first, ids))
        return store

    def load_prefix(self, store: Any, state: Any, prompt: UnreadPrompt, first: int, ids: list[int]) -> Any:
        self.loaded.append((first, ids))
        return state


class Desk:
    """A cache of some blocks, and texts that are read with it."""

    def __init__(self, blocks: int, **how: bool):
        self.copies, self.metrics = Copies(**how), EngineMetrics(0)
        programs: Any = self.copies
        plan: Any = SimpleNamespace(size=SIZE, lasts=True)
        self.cache = PrefixCache(plan, blocks, dict, programs, None)

    def read(
        self, tokens: list[int], salt: str = "", *, text: list[int] | None = None, unobserved: bool = False
    ) -> int:
        """Reads a prompt, maybe generates; returns how many tokens were copied."""
        completion = SimpleNamespace(token_ids=[], index=0, finish_reason="stop")
        prompt_X = np.asarray(tokens, np.int32)
        one: Any = SimpleNamespace(
            tokens=prompt_X, prompt=prompt_X, completion=completion, cache_salt=salt, unobserved=unobserved,
            output=SimpleNamespace(num_cached_tokens=None),
        )  # fmt: skip
        one.blocks = self.cache.begin(one, self.metrics)
        prompt, state = UnreadPrompt(0, prompt_X), Any
        self.cache.load(state, one, prompt, one.blocks, self.metrics)
        copied, prompt.start = prompt.start, len(tokens) - 1
        self.cache.save(state, prompt, one.blocks, prompt.start)
        if text is not None:
            completion.token_ids, one.tokens = text, np.asarray(tokens + text, np.int32)
            self.cache.save_text(state, 0, one, None)
        assert one.output.num_cached_tokens == copied
        return copied


def test_a_text_begins_with_what_was_read_and_reads_at_least_a_position():
    desk, text = Desk(8), list(range(1, 20))
    assert desk.read(text) == 0
    assert desk.copies.saved == [(0, [0, 1, 2, 3])]
    assert desk.read([*text[:14], 50, 51, 52]) == 12
    assert desk.read(text[:17]) == 12, "16 are there, and the last position must be read"
    assert desk.read(text[:18]) == 16
    assert desk.read([9, *text[1:]]) == 0, "the first token counts"
    assert [first for first, _ in desk.copies.loaded] == [0, 0, 0]
    assert (desk.metrics.prefix_queries, desk.metrics.prefix_hits) == (19 + 17 + 17 + 18 + 19, 12 + 12 + 16)


def test_a_block_is_known_by_the_token_after_it_too():
    """The drafter observes the last token of a block together with the next one."""
    desk, text = Desk(8), list(range(1, 10))
    desk.read(text)
    assert desk.read([*text[:4], 77, 78]) == 0
    assert desk.read([*text[:5], 77]) == 4


def test_texts_of_different_salts_share_nothing():
    desk, text = Desk(8), list(range(1, 10))
    desk.read(text)
    assert desk.read(text, "mine") == 0
    assert desk.read(text, "mine") == 4
    assert desk.read(text, "yours") == 0


def test_the_least_recently_used_go_and_their_ends_first():
    desk = Desk(4)
    old, new = list(range(1, 15)), list(range(101, 110))
    desk.read(old)
    desk.read(new)
    assert len(desk.cache.ids) == 4
    assert sorted(desk.cache.ids.values()) == [0, 1, 2, 3]
    assert desk.read(old) == 8, "of three blocks the last one went"
    assert desk.read(new) == 4
    assert Desk(2).read(old) == 0


def test_a_text_longer_than_the_store_keeps_its_beginning():
    desk, text = Desk(2), list(range(1, 30))
    desk.read(text)
    assert desk.read(text) == 8
    assert desk.copies.saved == [(0, [0, 1])]


def test_what_was_read_before_a_reset_is_never_kept():
    desk, text = Desk(8), list(range(1, 10))
    desk.read(text)
    desk.cache.reset()
    assert desk.read(text) == 0
    blocks = desk.cache._blocks_of(np.arange(9, dtype=np.int32), "")
    desk.cache.reset()
    desk.cache.save(Any, UnreadPrompt(0, np.arange(9)), blocks, 8)
    assert not desk.cache.ids


@pytest.mark.parametrize(
    ("needs", "unobserved", "copied"), [("hidden", False, 12), ("none", True, 12), ("tokens", True, 8)]
)
def test_answers_are_kept_where_the_drafter_observed_them(needs: str, unobserved: bool, copied: int):
    desk, text, answer = Desk(8), list(range(1, 10)), list(range(30, 36))
    desk.copies.drafter.needs = needs
    desk.read(text, text=answer, unobserved=unobserved)
    assert desk.read([*text, *answer, 60]) == copied


def test_where_sizes_round_differently_a_block_is_that_of_the_same_chunks():
    desk, text = Desk(16, any_cut=False), list(range(1, 40))
    assert desk.read(text[:26], text=text[26:32]) == 0, "chunks of 12, 12 and 4"
    assert desk.read([*text[:22], 99]) == 12, "where the second chunk begins, though two more blocks are there"
    assert desk.read([*text[:25], 99]) == 24
    assert desk.read([*text[:5], 99]) == 0, "whose chunks are of 4"
    assert desk.read(text[:36]) == 24, "answers are not read in chunks"


def test_a_text_ends_whose_blocks_went_while_it_ran():
    desk = Desk(blocks=2)
    prompt_X = np.arange(1, 6, dtype=np.int32)
    completion = SimpleNamespace(token_ids=[], index=0, finish_reason="stop")
    one: Any = SimpleNamespace(
        tokens=prompt_X, prompt=prompt_X, completion=completion, cache_salt="", unobserved=False,
        output=SimpleNamespace(num_cached_tokens=None),
    )  # fmt: skip
    one.blocks = desk.cache.begin(one, desk.metrics)
    desk.cache.save(Any, UnreadPrompt(0, prompt_X), one.blocks, 4)
    desk.read([20, *range(30, 38)])  # takes all of the room
    completion.token_ids, one.tokens = [6, 7, 8, 9], np.arange(1, 10, dtype=np.int32)
    desk.cache.save_text(Any, 0, one, None)
    assert desk.read([20, *range(30, 38)]) in (0, SIZE)
    assert len(desk.cache.ids) == 2
