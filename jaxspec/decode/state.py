"""Everything that decoding carries from step to step, as one donated pytree."""

from dataclasses import fields

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.cache.addressing import UNROLLED_ROWS, CacheSize
from jaxspec.models.caches import init_caches
from jaxspec.models.transformer import Caches, Transformer
from jaxspec.protocol import Anchor, DraftCosts, Drafter, DraftState, Sampling
from jaxspec.pytree import pytree, replace, static
from jaxspec.shapes import Array, Params
from jaxspec.verify.logits import Context

BAD_WORDS = 64, 16  # sequences per row, and tokens of the longest


@pytree
class Target:
    """The model that decides the text.

    Attributes:
      params: parameters.
      net: network.
      block: positions that attention reads at a time.
    """

    params: Params
    net: Transformer = static()
    block: int = static(default=128)


@pytree
class DecodeState:
    """State of B rows.

    Attributes:
      layers: the target's cache.
      table_BJ: page ids per row; None when row i owns page i.
      length_B: committed positions in the cache; the anchor comes next.
      anchor_B: last committed token.
      history_BS: all committed tokens, prompt included.
      count_BV: generated tokens counted, kept only while some row has penalties.
      prompt_BV: tokens of the prompt, likewise.
      bias_BV: added to the logits of rows that are biased, -inf for tokens that may not be sampled.
      sampling: settings of each row.
      active_B: rows in use.
      draft: the drafter's own state.
      draft_costs: of drafts, which are then cut where they do not pay; None verifies them all.
    """

    layers: Caches
    table_BJ: Array | None
    length_B: Array
    anchor_B: Array
    history_BS: Array
    count_BV: Array
    prompt_BV: Array
    bias_BV: Array
    sampling: Sampling
    active_B: Array
    draft: DraftState
    draft_costs: DraftCosts | None = None

    @property
    def anchor(self) -> Anchor:
        """Returns where the next drafts start."""
        sampling = self.sampling
        if self.draft_costs is not None:  # an idle row's drafts must keep no drafting going
            sampling = replace(sampling, draft_limit_B=jnp.where(self.active_B, sampling.draft_limit_B, 0))
        return Anchor(self.anchor_B, self.length_B, self.history_BS, sampling, self.draft_costs, self.bias_BV)

    def context(self, token_BT: Array, mask_BTW: Array | None = None) -> Context:
        """Returns the text so far for nodes with these tokens, the anchor first, and what grammars allow there."""
        return Context(self.count_BV, self.prompt_BV, token_BT, self.length_B, self.history_BS, self.bias_BV, mask_BTW)


def init_sampling(rows: int, stop_ids: int) -> Sampling:
    """Returns neutral settings: greedy, nothing switched on, everything is prompt."""
    special = {"top_p_B": 1.0, "repetition_B": 1.0, "logprobs_B": -1, "prompt_length_B": np.iinfo(np.int32).max}
    integers = {"top_k_B", "min_length_B", "max_length_B", "draft_limit_B", "logprobs_B", "prompt_length_B"}
    values = {  # one array each: a donated buffer must not appear twice
        f.name: jnp.full(rows, special.get(f.name, 0), jnp.int32 if f.name in integers else jnp.float32)
        for f in fields(Sampling)  # pyright: ignore[reportArgumentType]
    }
    values |= {"key_BX": jnp.zeros((rows, 2), jnp.uint32), "stop_BX": jnp.full((rows, stop_ids), -1, jnp.int32)}
    values |= {"biased_B": jnp.zeros(rows, bool), "bad_words_BWL": jnp.full((rows, *BAD_WORDS), -1, jnp.int32)}
    return Sampling(**values)


def init_state(
    target: Target,
    drafter: Drafter,
    rows: int,
    capacity: int,
    *,
    slack: int,
    stop_ids: int = 8,
    pool: tuple[int, int] | None = None,
    draft_costs: DraftCosts | None = None,
) -> DecodeState:
    """Allocates empty rows.

    Args:
      target: gives the cache's shapes.
      drafter: allocates its own state; its topology is the widest of those that the state serves.
      rows: B.
      capacity: longest text in tokens, prompt included.
      slack: provisional positions beyond the capacity (the widest verification or prefill chunk).
      stop_ids: most stop ids per row.
      pool: page count and page size in tokens of a shared pool; None gives every row one page of its own.
      draft_costs: of drafts, None where none are cut.
    """
    arch = target.net.arch
    room = -(-(capacity + slack) // target.block) * target.block
    size = CacheSize(rows, room, slack, target.block, pool=pool, drafts=drafter.topology.drafts)
    return DecodeState(
        layers=init_caches(arch, target.net.policy, size),
        table_BJ=None if pool is None else jnp.zeros((rows, -(-room // pool[1])), jnp.int32),
        length_B=jnp.zeros(rows, jnp.int32),
        anchor_B=jnp.zeros(rows, jnp.int32),
        history_BS=jnp.zeros((rows, room), jnp.int32),
        count_BV=jnp.zeros((rows, arch.vocab_size), jnp.int32),
        prompt_BV=jnp.zeros((rows, arch.vocab_size), bool),
        bias_BV=jnp.zeros((rows, arch.vocab_size), jnp.float32),
        sampling=init_sampling(rows, stop_ids),
        active_B=jnp.zeros(rows, bool),
        draft=drafter.init_state(rows, capacity, slack),
        draft_costs=jax.tree.map(jnp.asarray, draft_costs),
    )


def write_rows(x_BS: Array, new_BT: Array, start_B: Array, *, apart: bool = False) -> Array:
    """Overwrites T entries of each row from ``start`` on; ``apart`` says that rows may lie on several devices."""
    rows = x_BS.shape[0]
    if rows <= UNROLLED_ROWS and not apart:
        for row in range(rows):
            x_BS = lax.dynamic_update_slice(x_BS, new_BT[row][None], (row, start_B[row]))
        return x_BS
    return jax.vmap(lambda x, new, start: lax.dynamic_update_slice(x, new, (start,)))(x_BS, new_BT, start_B)
