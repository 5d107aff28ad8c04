"""Attention of a block of drafts through DeepSeek-V4's one key that is also the value (DSpark's stages)."""

from typing import Any

import flax.linen as nn

from jaxspec.cache.addressing import write
from jaxspec.nn.anchored import Anchored, BlockView, attend_anchored
from jaxspec.nn.block_attention import attend_around, streams_of
from jaxspec.nn.compressed_attention import (
    SINKS,
    CompressedSpec,
    declare_keys,
    declare_outputs,
    declare_queries,
    keys_of,
    project_groups,
    queries_of,
)
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.param import declare
from jaxspec.nn.policy import Policy
from jaxspec.nn.rope import rotate
from jaxspec.pytree import replace
from jaxspec.shapes import Array


class BlockOneKey(nn.Module):
    """As ``BlockAttention``, of layers that see a window alone and compress nothing.

    Attributes:
      spec: sizes and rotation.
      view: what a row of the block sees.
    """

    spec: CompressedSpec
    view: BlockView
    model_dim: int
    norm_eps: float
    policy: Policy

    def setup(self) -> None:
        """Declares the parameters."""
        own = self.spec, self.model_dim, self.policy
        self.query = declare_queries(self, *own)
        self.key = declare_keys(self, *own)
        self.sinks_H = declare(self, self.policy, SINKS, (self.spec.heads,))
        self.out = declare_outputs(self, *own)

    def observe(self, c_BTD: Array, inputs: Inputs) -> Any:
        """Returns the memory with the keys of the target's features at T positions."""
        kv_BT1C = self._keys(c_BTD, inputs)
        if isinstance(inputs.memory, Anchored):
            return inputs.memory.with_text(kv_BT1C, kv_BT1C)
        return self._written(kv_BT1C, inputs)

    def __call__(self, x_BTD: Array, inputs: Inputs) -> tuple[Array, Any]:
        """Returns the output at all rows of the blocks, and the memory."""
        s, p, memory, scale = self.spec, self.policy, inputs.memory, self.spec.head_dim**-0.5
        _, q_BTHC = queries_of(x_BTD, inputs.position_BT, self.query, self.norm_eps, s, p)
        kv_BT1C = self._keys(x_BTD, inputs)
        if isinstance(memory, Anchored):
            out = attend_anchored(
                q_BTHC, kv_BT1C, kv_BT1C, memory, self.view, scale=scale, dtype=p.compute.dtype, sinks_H=self.sinks_H
            )
        else:
            memory = self._written(kv_BT1C, inputs)
            out = attend_around(
                q_BTHC, (memory["kv"], memory["kv"]), replace(inputs, memory=memory), self.view, streams_of(s)["kv"],
                scale=scale, dtype=p.compute.dtype, sinks_H=self.sinks_H,
            )  # fmt: skip
        return project_groups(rotate(out, inputs.position_BT, s.rope, back=True), self.out, s, p), memory

    def _keys(self, x_BTD: Array, inputs: Inputs) -> Array:
        return keys_of(x_BTD, inputs.position_BT, self.key, self.norm_eps, self.spec, self.policy)

    def _written(self, kv_BT1C: Array, inputs: Inputs) -> Any:
        window = inputs.cache_window
        assert window is not None, "blocks are drafted from a cache"
        return {"kv": write(inputs.memory["kv"], streams_of(self.spec)["kv"], window, kv_BT1C)}
