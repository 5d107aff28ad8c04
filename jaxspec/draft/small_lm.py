"""A small language model as drafter: dense or MoE, its own cache, chains and trees."""

from typing import Literal

import jax.numpy as jnp

from jaxspec.cache.kv import Window
from jaxspec.draft.autoregress import draft
from jaxspec.models.caches import init_caches
from jaxspec.models.transformer import Caches, Transformer, forward, head
from jaxspec.nn.inputs import Inputs
from jaxspec.protocol import NO_CAPTURE, Anchor, CaptureSpec, Commit, Proposal
from jaxspec.pytree import pytree, static
from jaxspec.shapes import Array, Params
from jaxspec.topology import DynamicTree, Topology


@pytree
class SmallLm:
    """Drafts with a model that shares the target's tokenizer (Leviathan 2023).

    Vocabularies may differ by rows that no token has, which makers add so that devices divide them: such tokens are
    never drafted, and read as another one if the target should ever say one. The text is the target's either way.

    Attributes:
      params: the model's parameters.
      net: its network.
      topology: what is drafted; a static tree's nodes are numbered level by level.
      block: positions that attention reads at a time.
      target_vocab: V of the target, 0 where it is the model's own.
    """

    params: Params
    net: Transformer = static()
    topology: Topology | DynamicTree = static()
    block: int = static(default=128)
    target_vocab: int = static(default=0)

    @property
    def needs(self) -> Literal["none", "tokens", "hidden"]:
        """What of the text it must have observed to draft well."""
        return "tokens"

    @property
    def reads(self) -> CaptureSpec:
        """What it reads of the target besides its last hidden states."""
        return NO_CAPTURE

    @property
    def slack(self) -> int:
        """Positions written beyond the committed ones."""
        return self.topology.write_ahead

    @property
    def vocab_size(self) -> int:
        """V of the target."""
        return self.target_vocab or self.net.arch.vocab_size

    @property
    def stages(self) -> int:
        """All cells are alike."""
        return 0

    def init_state(self, rows: int, capacity: int, slack: int) -> Caches:
        """Allocates the state of empty rows."""
        slack = max(slack, self.slack)
        room = -(-(capacity + slack) // self.block) * self.block
        return init_caches(self.net.arch, self.net.policy, rows, room, slack=slack, block=self.block)

    def propose(self, state: Caches, anchor: Anchor, rule: str) -> tuple[Proposal, Caches]:
        """Drafts every node; commits nothing."""
        return draft(self, state, anchor, rule)

    def observe(self, state: Caches, commit: Commit) -> Caches:
        """Takes over committed tokens."""
        if commit.row is None and self.topology.is_chain:
            return state  # the accepted prefix already stands where it belongs
        position = commit.start_B[:, None] + jnp.arange(commit.token_BT.shape[1], dtype=jnp.int32)[None]
        window = Window(commit.start_B, row_B=None if commit.row is None else commit.row[None], block=self.block)
        return self.run(state, commit.token_BT, None, position, window, 0)[2]

    def run(
        self, state: Caches, token_BT: Array, feature: None, position_BT: Array, window: Window, stage: int
    ) -> tuple[Array, None, Caches]:
        """Reads T tokens; the cache says everything."""
        if self.net.arch.vocab_size < self.vocab_size:
            token_BT = jnp.minimum(token_BT, self.net.arch.vocab_size - 1)
        hidden = forward(self.net, self.params, Inputs(token_BT, position_BT, window, state))
        return hidden.last_BTD, None, hidden.caches

    def logits(self, last_BTD: Array) -> Array:
        """Logits over the target's vocabulary, float32 [B, T, V]."""
        logits, lacking = head(self.net, self.params, last_BTD), self.vocab_size - self.net.arch.vocab_size
        if lacking > 0:
            return jnp.pad(logits, ((0, 0), (0, 0), (0, lacking)), constant_values=-jnp.inf)
        return logits[..., : self.vocab_size] if lacking else logits

    def experts(self, last_BTD: Array) -> None:
        """It predicts none."""
