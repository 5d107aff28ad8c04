"""A small language model as drafter: dense or MoE, its own cache, chains and trees."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.kv import Window
from jaxspec.keys import Purpose, gumbel, within_step
from jaxspec.models.caches import compact_caches, init_caches
from jaxspec.models.transformer import Caches, Transformer, forward, head
from jaxspec.protocol import Anchor, Commit, Proposal
from jaxspec.pytree import pytree, static
from jaxspec.shapes import Array, Params
from jaxspec.topology import Topology


@pytree
class SmallLm:
    """Drafts with a model that shares the target's vocabulary (Leviathan 2023).

    A chain runs K + 1 cells, so that full acceptance leaves no hole in the cache; a tree runs one forward per level.

    Attributes:
      params: the model's parameters.
      net: its network.
      topology: what is drafted; a tree's nodes are numbered level by level.
      block: positions that attention reads at a time.
    """

    params: Params
    net: Transformer = static()
    topology: Topology = static()
    block: int = static(default=128)

    @property
    def slack(self) -> int:
        """Positions written beyond the committed ones."""
        return self.topology.nodes

    def init_state(self, rows: int, capacity: int, slack: int) -> Caches:
        """Allocates the state of empty rows."""
        slack = max(slack, self.slack)
        room = -(-(capacity + slack) // self.block) * self.block
        return init_caches(self.net.arch, self.net.policy, rows, room, slack=slack, block=self.block)

    def propose(self, state: Caches, anchor: Anchor, rule: str) -> tuple[Proposal, Caches]:
        """Drafts every node; commits nothing."""
        return self._chain(state, anchor, rule) if self.topology.is_chain else self._tree(state, anchor, rule)

    def observe(self, state: Caches, commit: Commit) -> Caches:
        """Takes over committed tokens."""
        if commit.row is not None:  # prefill of one row
            position = commit.start_B[:, None] + jnp.arange(commit.token_BT.shape[1], dtype=jnp.int32)[None]
            window = Window(commit.start_B, row_B=commit.row[None], block=self.block)
            return self._forward(commit.token_BT, position, state, window)[1]
        if self.topology.is_chain or commit.path_BT is None:
            return state  # the accepted prefix already stands where it belongs
        window = Window(commit.start_B, block=self.block)
        return compact_caches(state, self.net.arch, self.net.policy, window, commit.path_BT)

    def _forward(self, token_BT: Array, position_BT: Array, state: Caches, window: Window):
        hidden, state = forward(self.net, self.params, token_BT, position_BT, state, window)
        return hidden.last_BTD, state

    def _scores(self, last_BTD: Array, anchor: Anchor, position_BT: Array, rule: str) -> tuple[Array, Array]:
        """Scores at each row's temperature (log-probabilities where the rule needs them), and with ranking noise."""
        logits = head(self.net, self.params, last_BTD)
        if rule == "greedy":
            return logits, logits
        warm_B = (anchor.sampling.temperature_B > 0)[:, None, None]
        score = logits / jnp.where(warm_B, anchor.sampling.temperature_B[:, None, None], 1.0)
        # match: the target's own noise, so that drafts agree; reject and block need draws that no other step sees.
        purpose, place_BT = Purpose.TARGET, position_BT + 1
        if rule != "match":
            score = jax.nn.log_softmax(score)
            purpose, place_BT = Purpose.DRAFT, within_step(anchor.length_B, place_BT - anchor.length_B[:, None])

        def noisy(score: Array) -> Array:
            noise = gumbel(anchor.sampling.key_BX, place_BT, purpose, score.shape[-1])
            return jnp.where(warm_B, score + noise, score)

        return score, lax.cond(jnp.any(warm_B), noisy, lambda x: x, score)

    def _chain(self, state: Caches, anchor: Anchor, rule: str):
        rows, drafts, vocab = anchor.token_B.shape[0], self.topology.drafts, self.net.arch.vocab_size
        keep = rule in ("reject", "block")

        def cell(k: Array, carry):
            layers, token_B, token_BN, logp_BNV = carry
            start_B = anchor.length_B + k
            last, layers = self._forward(
                token_B[:, None], start_B[:, None], layers, Window(start_B, block=self.block)
            )
            logp, score = self._scores(last, anchor, start_B[:, None], rule)
            token_B = jnp.argmax(score[:, 0], axis=-1).astype(jnp.int32)
            token_BN = lax.dynamic_update_slice(token_BN, token_B[:, None], (0, k))
            if keep:
                logp_BNV = lax.dynamic_update_slice(logp_BNV, logp, (0, k, 0))
            return layers, token_B, token_BN, logp_BNV

        # One place more than drafts: the last cell only fills the cache.
        room = jnp.zeros((rows, drafts + 1), jnp.int32)
        kept = jnp.zeros((rows, (drafts + 1) if keep else 0, vocab), jnp.float32)
        state, _, token_BN, logp_BNV = lax.fori_loop(0, drafts + 1, cell, (state, anchor.token_B, room, kept))
        token_BN = token_BN[:, :drafts]
        return Proposal(token_BN, jnp.ones_like(token_BN, bool), logp_BNV[:, :drafts] if keep else None), state

    def _tree(self, state: Caches, anchor: Anchor, rule: str):
        top = self.topology
        see = top.ancestors_TT
        tokens: dict[int, Array] = {0: anchor.token_B}
        logps: dict[int, Array] = {}
        for depth in range(top.max_depth + 1):
            level = [n for n in range(top.nodes) if top.depth[n] == depth]
            first, end = level[0], level[-1] + 1
            window = Window(
                anchor.length_B,
                ancestors=tuple(tuple(bool(v) for v in see[n, :end]) for n in level),
                offset=first,
                block=self.block,
            )
            token_BT = jnp.stack([tokens[n] for n in level], axis=1)
            position_BT = jnp.broadcast_to((anchor.length_B + depth)[:, None], token_BT.shape)
            last, state = self._forward(token_BT, position_BT, state, window)
            if depth == top.max_depth:
                break
            logp, score = self._scores(last, anchor, position_BT, rule)
            for place, node in enumerate(level):
                children = top.children[node]
                if children:
                    _, best = lax.top_k(score[:, place], len(children))
                    for rank, child in enumerate(children):
                        tokens[child] = best[:, rank].astype(jnp.int32)
                        logps[child] = logp[:, place]
        order = range(1, top.nodes)
        token_BN = jnp.stack([tokens[n] for n in order], axis=1)
        logp_BNV = jnp.stack([logps[n] for n in order], axis=1) if rule in ("reject", "block") else None
        return Proposal(token_BN, jnp.ones_like(token_BN, bool), logp_BNV), state
