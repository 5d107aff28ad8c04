"""One sample's grammar: where its text is in it, and what may follow each node of a proposal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher

TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True)
class Nodes:
    """Nodes of a proposal, the anchor first.

    Attributes:
      masks: words of each.
      token_N: tokens of the drafts.
      children: of each node.
    """

    masks: list[np.ndarray]
    token_N: Sequence[int]
    children: Mapping[int, list[int]]


class Constraint:
    """Follows a text through a grammar.

    It knows nothing but the text so far: a row that begins again after a failure only needs another ``follow``.

    Attributes:
      error: why the grammar cannot go on, None while it can.
    """

    def __init__(
        self, grammar: LLMatcher, eos: Sequence[int], *, after: bytes = b"", bytes_of: TokenBytes = lambda token: b""
    ):
        """Starts before the first token.

        Args:
          grammar: at its beginning; copied.
          eos: ids that may end the text where the grammar is complete.
          after: text after which the grammar begins, with the next token; none where it begins at once.
          bytes_of: text of each token.
        """
        self._grammar, self._matcher = grammar, grammar.deep_copy()
        self._eos, self._after, self._bytes_of = frozenset(eos), after, bytes_of
        self._seen: bytes | None = b"" if after else None  # text that the marker may end in; None once it came
        self._taken: list[int] = []  # tokens within the grammar
        self._length, self.error = 0, None

    def follow(self, token_ids: Sequence[int]) -> None:
        """Takes over what is new of the text; of a text that ended nothing is asked any more."""
        for token in token_ids[self._length :]:
            if self._seen is not None:
                self._seen = self._look(self._seen, token)
            elif token not in self._eos:
                self._taken.append(token)
                self._matcher.consume_token(token)
        self._length = len(token_ids)

    def forced(self, most: int) -> list[int]:
        """Returns the next tokens, as far as the grammar leaves no choice."""
        matcher = self._matcher
        if self._seen is not None or most == 0 or matcher.is_error():
            return []
        tokens = matcher.compute_ff_tokens()[:most]
        count = matcher.try_consume_tokens(tokens)
        tokens = tokens[:count]
        ends = count < most and matcher.is_stopped() and not matcher.is_error()
        if not matcher.rollback(count):
            self._begin_again([])
        return [*tokens, *self._eos] if ends and len(self._eos) == 1 else tokens

    def fill_root(self, mask_W: np.ndarray) -> None:
        """Writes what may follow the text into packed words, of which all bits are set."""
        if self._seen is None:
            self._fill(mask_W, [])

    def fill(
        self, root_W: np.ndarray, mask_NW: np.ndarray, token_N: Sequence[int], parent_N: Sequence[int]
    ) -> None:  # fmt: skip
        """Writes what may follow each draft of a proposal into its words, of which all bits are set.

        Drafts after a draft that the grammar forbids, or that ends the text, allow everything: nothing leads there.
        Where the grammar itself fails, which has limits of time and memory, nothing is allowed.

        Args:
          root_W: as ``fill_root`` wrote it.
          mask_NW: packed masks of the drafts.
          token_N: tokens of the drafts, negative where there is none.
          parent_N: nodes that they follow, 0 for the text.
        """
        children: dict[int, list[int]] = {}
        for child, parent in enumerate(parent_N, start=1):
            children.setdefault(parent, []).append(child)
        self._descend(0, self._seen, [], Nodes([root_W, *mask_NW], token_N, children))

    def _descend(self, node: int, seen: bytes | None, path: list[int], nodes: Nodes) -> None:
        """Fills all after a node; ``path`` are the drafts within the grammar that lead to it."""
        masks, token_N, children = nodes.masks, nodes.token_N, nodes.children
        for child in children.get(node, ()):
            token = token_N[child - 1]
            if token < 0 or token in self._eos:
                continue
            if seen is not None:
                after = self._look(seen, token)
                if after is None:
                    self._fill(masks[child], path)
                self._descend(child, after, path, nodes)
            elif masks[node][token >> 5] >> np.uint32(token & 31) & np.uint32(1):
                if not self._matcher.consume_token(token):
                    masks[child][:] = 0
                    self._begin_again(path)
                    continue
                self._fill(masks[child], [*path, token])
                self._descend(child, None, [*path, token], nodes)
                if not self._matcher.rollback(1):
                    self._begin_again(path)

    def _fill(self, mask_W: np.ndarray, path: list[int]) -> None:
        self._matcher.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
        if self._matcher.is_error():
            mask_W[:] = 0
            if not path:
                reason = self._matcher.get_error().partition("\n")[0]
                self.error = f"the grammar allows nothing after this text ({reason})"
            self._begin_again(path)

    def _begin_again(self, path: list[int]) -> None:
        """Brings a matcher that has failed, which it never leaves, back to a draft."""
        self._matcher = self._grammar.deep_copy()
        self._matcher.consume_tokens([*self._taken, *path])

    def _look(self, seen: bytes, token: int) -> bytes | None:
        """Returns the end of a text after a token, None where the marker is in it."""
        text = seen + self._bytes_of(token)
        return None if self._after in text else text[max(len(text) - len(self._after) + 1, 0) :]
