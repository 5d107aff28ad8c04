"""Which prefixes of texts were read before, and what the device keeps of them; the least recently used go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from jaxspec.decode.chunks import UnreadPrompt, sizes_of
from jaxspec.decode.prefix import PrefixPlan, Store
from jaxspec.decode.state import DecodeState
from jaxspec.errors import ConfigError
from jaxspec.serve.engine_spec import EngineSpec
from jaxspec.serve.metrics import EngineMetrics
from jaxspec.serve.sample import Sample

if TYPE_CHECKING:
    from jaxspec.serve.compiled import Programs


@dataclass
class TextBlocks:
    """The whole blocks of one text.

    A drafter observes each token with the one after it, so a block is known by its own tokens and the next one.

    Attributes:
      keys: of each block, by all tokens from the first on.
      stops: numbers of blocks after which reading may go on.
      generation: of the cache when reading began.
      saved: how many of the first blocks the store has had.
    """

    keys: list[bytes]
    stops: set[int]
    generation: int
    saved: int = 0


@dataclass
class PrefixCache:
    """Copies what was read before instead of reading it again.

    Blocks are copied into a row before it is read, and out of it afterwards; rows never depend on the store, so any
    block may go at any time.

    Attributes:
      plan: what is copied, and in blocks of which size.
      blocks: that the store has room for.
      allocate: makes an empty store.
      programs: that copy.
      ids: blocks of the store by their keys, the least recently used first.
      generation: how often everything was forgotten.
    """

    plan: PrefixPlan
    blocks: int
    allocate: Callable[[], Store]
    programs: Programs
    _store: Store | None = None
    ids: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    generation: int = 0

    @property
    def store(self) -> Store:
        """Blocks on the device; a lost store is allocated anew."""
        if self._store is None:
            self._store = self.allocate()
        return self._store

    def reset(self) -> None:
        """Forgets everything; what is being read or runs now is not kept later either."""
        self.ids.clear()
        self.generation += 1

    def drop(self) -> None:
        """Forgets everything, and frees the store."""
        self.reset()
        self._store = None

    def begin(self, sample: Sample, metrics: EngineMetrics) -> TextBlocks:
        """Returns the blocks of a sample's text, which is to be read."""
        token_X = sample.tokens
        if not sample.completion.token_ids:
            metrics.prefix_queries += len(token_X)
            sample.output.num_cached_tokens = sample.output.num_cached_tokens or 0
        return self._blocks_of(token_X, sample.cache_salt)

    def load(
        self, state: DecodeState, sample: Sample, prompt: UnreadPrompt, blocks: TextBlocks, metrics: EngineMetrics
    ) -> DecodeState:
        """Copies the next blocks of a prompt into its row as far as they are there; the state is donated."""
        size = self.plan.size
        first, whole = divmod(prompt.start, size)
        # At least one position is read: the drafter's last hidden states come of it.
        most = (len(prompt.token_X) - 2) // size
        last = first
        while last < most and blocks.keys[last] in self.ids:
            last += 1
        last = max((stop for stop in blocks.stops if stop <= last), default=0)
        if whole or last <= first or not self._usable(blocks):
            return state
        ids = [self.ids[key] for key in blocks.keys[first:last]]
        state = self.programs.load_prefix(self.store, state, prompt, first, ids)
        prompt.start, blocks.saved = last * size, max(blocks.saved, last)
        self._touch(blocks.keys[:last])
        if not sample.completion.token_ids:
            metrics.prefix_hits += (last - first) * size
            if sample.completion.index == 0:
                sample.output.num_cached_tokens = (sample.output.num_cached_tokens or 0) + (last - first) * size
        return state

    def save(self, state: DecodeState, prompt: UnreadPrompt, blocks: TextBlocks, positions: int) -> None:
        """Keeps the whole blocks of a row's first positions, as far as they are new and there is room."""
        most = positions // self.plan.size
        if blocks.saved >= most or not self._usable(blocks):
            return
        while blocks.saved < most and blocks.keys[blocks.saved] in self.ids:
            blocks.saved += 1
        first, ids = blocks.saved, []
        self._touch(blocks.keys[:first])
        for key in blocks.keys[first:most]:
            number = self.ids[key] if key in self.ids else self._room(blocks)
            if number is None:
                break
            self.ids[key] = number
            ids.append(number)
        if ids:
            self._store = self.programs.save_prefix(self.store, state, prompt, first, ids)
        blocks.saved += len(ids)
        self._touch(blocks.keys[: blocks.saved])

    def save_text(self, state: DecodeState, row: int, sample: Sample, table_J: np.ndarray | None) -> None:
        """Keeps the blocks of a text that has ended, for the text that goes on with it."""
        blocks = sample.blocks
        if blocks is None or not self.plan.lasts or sample.completion.finish_reason not in ("stop", "length"):
            return
        token_X = sample.prompt
        if self.programs.any_cut and not (sample.unobserved and self.programs.drafter.needs != "none"):
            token_X = sample.tokens
            later = self._blocks_of(token_X, sample.cache_salt)
            blocks.keys, blocks.stops = later.keys, later.stops
        self.save(state, UnreadPrompt(row, token_X, table_J), blocks, len(token_X) - 1)

    def waits(self, prompt: UnreadPrompt, blocks: TextBlocks, coming: set[bytes]) -> bool:
        """Whether a prompt's next block is one that an older prompt reads now; else its own are coming, too."""
        left = blocks.keys[prompt.start // self.plan.size :]
        if left and left[0] in coming and self._usable(blocks):
            return True
        coming.update(left)
        return False

    def _usable(self, blocks: TextBlocks) -> bool:
        return blocks.generation == self.generation and bool(blocks.keys) and self.programs.copies_prefixes

    def _blocks_of(self, token_X: np.ndarray, salt: str) -> TextBlocks:
        size, chunks = self.plan.size, None
        count = (len(token_X) - 1) // size
        stops = set(range(count + 1))
        if not self.programs.any_cut:
            # Sizes round differently: a block is that of the same chunks alone, and reading goes on where one begins.
            chunks = sizes_of(len(token_X) - 1, self.programs.sizes)
            stops = {stop // size for stop in accumulate(chunks)}
            chunks = [chunk for chunk in chunks for _ in range(chunk // size)]
        text = blake2b(salt.encode(), digest_size=16)
        text.update(token_X[:1].astype("<i4").tobytes())
        keys = []
        for number in range(count):
            text.update(token_X[number * size + 1 : (number + 1) * size + 1].astype("<i4").tobytes())
            text.update(b"" if chunks is None else chunks[number].to_bytes(4, "little"))
            keys.append(text.copy().digest())
        return TextBlocks(keys, stops, self.generation)

    def _room(self, blocks: TextBlocks) -> int | None:
        """Returns a free block of the store, if need be the least recently used one; None if that is of this text."""
        if len(self.ids) < self.blocks:
            return len(self.ids)
        oldest = next(iter(self.ids))
        return None if oldest in blocks.keys else self.ids.pop(oldest)

    def _touch(self, keys: Iterable[bytes]) -> None:
        """Makes blocks the most recently used, the first block of all most: without it the others are of no use."""
        for key in reversed(list(keys)):
            if key in self.ids:  # or it went for other texts while this one ran
                self.ids.move_to_end(key)


def blocks_of(plan: PrefixPlan, spec: EngineSpec) -> tuple[int, dict[str, str]]:
    """Returns how many blocks of prefixes are kept, 0 for none, and what metrics say of it.

    Raises:
      ConfigError: there must be some, and cannot be.
    """
    tokens = spec.prefix_tokens
    why = plan.refusal if tokens else "it is switched off"
    if not why and tokens < plan.size:
        why = f"prefix_cache_tokens is {tokens}, less than a block of {plan.size}"
    if why and spec.prefix_required:
        raise ConfigError(f"LLM: enable_prefix_caching=True is not possible here: {why}")
    blocks = 0 if why else tokens // plan.size
    about = {"block_size": str(plan.size), "num_blocks": str(blocks)} if blocks else {"reason": why}
    return blocks, {"enable_prefix_caching": str(blocks > 0), **about}
