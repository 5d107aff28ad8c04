"""Bases of drafters that run a network of their own, without and with a cache."""

from abc import abstractmethod
from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxspec.cache.addressing import CacheSize
from jaxspec.cache.window import Window
from jaxspec.draft.draft_vocab import Candidates, DraftVocab
from jaxspec.errors import ConfigError
from jaxspec.native.packing import Packed, pack_like
from jaxspec.protocol import Commit, Drafter
from jaxspec.pytree import replace
from jaxspec.shapes import Array, Params


class NetworkDrafter(Drafter):
    """Drafts with parameters of its own, which turn hidden states into predictions.

    Attributes:
      params: its parameters.
      vocab: the tokens that it can draft, None for all.
    """

    params: Params
    vocab: DraftVocab | None

    @property
    def own_product(self) -> bool:
        """Whether it has a vocabulary product of its own, and with it the tokens that it drafts."""
        return False

    @abstractmethod
    def with_vocab(self, vocab: DraftVocab) -> Self:
        """Returns the drafter of some tokens alone, with the part of the vocabulary product that is theirs."""

    @abstractmethod
    def logits(self, last_BTD: Any) -> Array:
        """Computes logits of the tokens that it knows, float32 [B, T, W]."""

    def known(self, last_BTD: Any) -> DraftVocab | Candidates | None:
        """Returns which tokens these are; None for all of the target's."""
        return self.vocab

    def experts(self, last_BTD: Array) -> Array | None:
        """Predicts the experts that the target will choose for what is drafted, int32 [B, T, Y, A], if it can."""
        return None

    def confidence(self, last_BTD: Any) -> Array | None:
        """Predicts the probability [B, T] that what is drafted will be accepted, where something was trained to."""
        return None

    def update_params(self, params: Params) -> Self:
        own, new = _shapes(self.params), _shapes(params)
        if wrong := sorted(name for name in own.keys() | new.keys() if own.get(name) != new.get(name)):
            raise ConfigError(
                "update_draft: parameters must have the structure and shapes of those in use; these differ: "
                f"{wrong[:5]}"
            )
        return replace(self, params=jax.tree.map(_in_place_of, self.params, params, is_leaf=_is_packed))


class CachedDrafter(NetworkDrafter):
    """Drafts token by token from a cache of its own; one forward of it is a cell. Trees are numbered level by level.

    Attributes:
      block: positions that attention reads at a time.
      stages: how many of the first cells are programs of their own; the others share one.
    """

    block: int
    stages: int = 0

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """V of the target."""

    @abstractmethod
    def run(
        self, state: Any, token_BT: Array, feature: Any, position_BT: Array, window: Window, stage: int
    ) -> tuple[Array, Any, Any]:
        """Reads T tokens.

        Args:
          state: its caches, written ahead.
          token_BT: the tokens.
          feature: what it continues from, per token [B, T, ...]; None where the cache says everything.
          position_BT: where they are written along the text.
          window: where the caches are written and what is seen.
          stage: number of the cell, at most ``stages``.

        Returns:
          What the head reads [B, T, D], the feature that children continue from, and the state.
        """

    @property
    def slack(self) -> int:
        return self.topology.write_ahead

    def cache_size(self, rows: int, capacity: int, slack: int) -> CacheSize:
        """Returns the size of its cache; arguments as of ``init_state``."""
        slack = max(slack, self.slack)
        room = -(-(capacity + slack) // self.block) * self.block
        return CacheSize(rows, room, slack, self.block, drafts=self.slack)

    def window_of(self, commit: Commit, output_index_B: Array | None = None) -> Window:
        """Returns where a commit is written; ``output_index_B`` as of ``Window``."""
        live_BT = jnp.arange(commit.token_BT.shape[1], dtype=jnp.int32) < commit.count_B[:, None]
        return Window(
            commit.start_B, row_B=commit.row_B, live_BT=live_BT, output_index_B=output_index_B, block=self.block,
            committed=True,
        )  # fmt: skip


def _shapes(params: Params) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_packed)[0]
    return {jax.tree_util.keystr(path): x.shape for path, x in leaves}


def _is_packed(leaf: Any) -> bool:
    return isinstance(leaf, Packed)


def _in_place_of(old: Array | Packed, new: Array | Packed) -> Array | Packed:
    """Returns the new numbers in the old one's dtype, packed like it, on the devices where it lies."""
    if isinstance(old, Packed):
        return new if isinstance(new, Packed) else pack_like(old, new)
    array = jnp.array(new, old.dtype)  # a copy: a training donates what it updates
    # A move would also commit the array to its device, and that alone makes another signature of the program.
    return array if array.sharding == old.sharding else jax.device_put(array, old.sharding)
