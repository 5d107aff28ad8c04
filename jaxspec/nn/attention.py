"""Grouped-query attention: projections, query and key norms, rotation, windows and sinks."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import flax.linen as nn

from jaxspec.cache.addressing import LayerCache, StreamSpec, write
from jaxspec.cache.float8 import float8_streams, quantize
from jaxspec.cache.window import pack, take_outputs, unpack
from jaxspec.nn.cached_attention import attend_cached, attend_new
from jaxspec.nn.dense import dense
from jaxspec.nn.fused_heads import heads_by_kernel
from jaxspec.nn.fused_norm import PartialSum
from jaxspec.nn.inputs import Inputs, Mixed
from jaxspec.nn.matrix import own_of
from jaxspec.nn.norm import rms_norm
from jaxspec.nn.param import Param, declare
from jaxspec.nn.policy import Policy
from jaxspec.nn.rope import RopeSpec, rotate
from jaxspec.nn.steady import sigmoid, softplus
from jaxspec.nn.temperature import Temperature
from jaxspec.shapes import Array

QKV = Param("qkv_DGQC", ("embed", "kv_heads", "group", "head_dim"))
QKV_BIAS = Param("qkv_bias_GQC", ("kv_heads", "group", "head_dim"), "bias")
NORMS = {
    "head": (Param("q_norm_C", ("head_dim",), "norm"), Param("k_norm_C", ("head_dim",), "norm")),
    "full": (Param("q_norm_HC", ("heads", "head_dim"), "norm"), Param("k_norm_GC", ("kv_heads", "head_dim"), "norm")),
}
QK = Param("qk_DGQC", QKV.axes)
QK_BIAS = Param("qk_bias_GQC", QKV_BIAS.axes, "bias")
V = Param("v_DGC", ("embed", "kv_heads", "head_dim"))
V_BIAS = Param("v_bias_GC", ("kv_heads", "head_dim"), "bias")
GATES = {
    "head": Param("head_gate_DH", ("embed", "heads")),
    "channel": Param("gate_DHC", ("embed", "heads", "head_dim")),
}
SINKS = Param("sinks_H", ("heads",), "weight")
OUT = Param("out_HCD", ("heads", "head_dim", "embed"), inputs=2)
OUT_BIAS = Param("out_bias_D", ("embed",), "bias")


@dataclass(frozen=True)
class AttentionSpec:
    """One attention layer.

    Attributes:
      heads, kv_heads, head_dim: H, G and C.
      rope: rotation of queries and keys, None where positions are learned.
      qkv_bias, out_bias: whether the projections have biases.
      qk_norm: ``head`` normalizes each query and key head before rotation, ``bare`` without a learned scale, ``full``
        the whole projection.
      window: keys that a query sees, itself included; None for all.
      chunked: whether it sees those from the last multiple of ``window`` on instead.
      sinks: whether each head has a logit that takes probability and has no value.
      norm_offset: of the query and key norms, see ``rms_norm``.
      norm_turned: whether queries and keys are normalized after rotation.
      gated: whether a sigmoid of the input, one number per channel, multiplies what heads give.
      scale: of the scores, None for ``head_dim ** -0.5``.
      value_dim: channels of a value head, None for C.
      value_scale: multiplies the values.
      outer_gate: whether a function of a further product of the input multiplies what heads give, and with how many
        numbers.
      gate_function: that function.
      shared_values: whether values are the keys as they are projected, before norm and rotation.
      value_norm: whether each value head is normalized, without a learned scale.
      float8: whether the cache holds keys and values as float8_e4m3fn, see ``jaxspec.cache.float8``.
      temperature: what queries are multiplied by at their positions, None for nothing.
      kv_copies: how many of the kv heads, one beside the other, are copies of one that was published.
    """

    chain_only = None
    one_text_only = False

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "bare", "full"] = "none"
    window: int | None = None
    chunked: bool = False
    sinks: bool = False
    norm_offset: float = 0.0
    gated: bool = False
    scale: float | None = None
    norm_turned: bool = False
    value_dim: int | None = None
    value_scale: float = 1.0
    outer_gate: Literal["none", "head", "channel"] = "none"
    gate_function: Literal["softplus", "sigmoid"] = "softplus"
    temperature: Temperature | None = None
    shared_values: bool = False
    value_norm: bool = False
    float8: bool = False
    kv_copies: int = 1

    @property
    def span(self) -> int | None:
        """Returns what a query sees, see ``first_seen``."""
        return -self.window if self.window and self.chunked else self.window

    @property
    def streams(self) -> dict[str, StreamSpec]:
        """Returns what it caches, by name."""
        keys = StreamSpec(self.kv_heads, self.head_dim, None if self.window is None else self.window - 1)
        values = replace(keys, width=self.value_width)
        return float8_streams(keys, values) if self.float8 else {"k": keys, "v": values}

    @property
    def value_width(self) -> int:
        """Channels of a value head."""
        return self.value_dim or self.head_dim

    @property
    def plain(self) -> bool:
        """Whether projections, norms of heads and a rotation are all that makes queries, keys and values."""
        values = self.value_width == self.head_dim and self.value_scale == 1
        values = values and not (self.shared_values or self.value_norm)
        turned = self.qk_norm in ("none", "head") and not self.norm_turned and self.temperature is None
        return values and turned and not self.gated


class Attention(nn.Module):
    """Projections around ``attend``; query, key and value weights of one kv head lie together, [X, G, R + 2, C].

    Value weights lie apart where their heads have another width, and there are none where values are keys. The input
    may be wider than the output (EAGLE-3 joins two vectors there).

    Attributes:
      unsummed: whether the output may be left in parts, where a kernel computes it.
    """

    spec: AttentionSpec
    model_dim: int
    norm_eps: float
    policy: Policy
    unsummed: bool = False

    @nn.compact
    def __call__(self, x_BTX: Array, inputs: Inputs) -> Mixed:
        """Projects, rotates and attends."""
        s, p, window, memory = self.spec, self.policy, inputs.window, inputs.memory
        new, gate_BTHC = None, None
        params = self._params(x_BTX.shape[-1])
        if (made := self._project_by_kernel(x_BTX, inputs, params)) is not None:
            q_BTHC, memory = unpack(made[0], window), made[1]
        else:
            *qkv, gate_BTHC = self._project(x_BTX, inputs, params)
            q_BTHC, *new = (unpack(x, window) for x in qkv)
        sinks = declare(self, p, SINKS, (s.heads,), by_kernel=True) if s.sinks else None
        scale, inputs = s.scale or s.head_dim**-0.5, inputs.unpack()
        if (cache := inputs.cache_window) is None:
            assert new is not None, "kernels write into a cache"
            k_BTGC, v_BTGC = new
            out, memory = attend_new(
                q_BTHC, k_BTGC, v_BTGC, inputs, scale=scale, dtype=p.compute.dtype, span=s.span, sinks_H=own_of(sinks)
            )
        else:
            streams = s.streams
            if new is not None:
                if s.float8:
                    (k, k_scale), (v, v_scale) = (quantize(x) for x in new)
                    new = [k, v, k_scale, v_scale]
                memory = {n: write(memory[n], streams[n], cache, x) for n, x in zip(streams, new, strict=True)}
            out = attend_cached(
                take_outputs(q_BTHC, window), (memory["k"], memory["v"]), inputs.of_outputs(), streams["k"], p,
                scale=scale, span=s.span, sinks=sinks,
                scales=(memory["k_scale"], memory["v_scale"]) if s.float8 else None,
            )  # fmt: skip
        w_o = declare(self, p, OUT, (s.heads, s.value_width, self.model_dim))
        b_o = declare(self, p, OUT_BIAS, (self.model_dim,), by_kernel=True) if s.out_bias else None
        out = pack(out, window)
        out = out if gate_BTHC is None else out * sigmoid(take_outputs(gate_BTHC, window))
        if s.outer_gate != "none":
            out = out * self._outer_gate(take_outputs(x_BTX, window))
        parts = PartialSum.of(out, w_o, b_o, p.compute.dtype, 2) if self.unsummed else None
        return Mixed(parts or dense(out, w_o, own_of(b_o), dtype=p.compute.dtype, axes=2), memory)

    def _params(self, width: int) -> dict[str, Any]:
        """Parameters of queries, keys and values, by the names that ``heads_by_kernel`` has for them."""
        s, p = self.spec, self.policy
        joined, group = s.value_width == s.head_dim and not s.shared_values, s.heads // s.kv_heads * (1 + s.gated)
        shape = (s.kv_heads, group + 1 + joined, s.head_dim)
        params = {"qkv": declare(self, p, QKV if joined else QK, (width, *shape))}
        if s.qkv_bias:
            params["bias"] = declare(self, p, QKV_BIAS if joined else QK_BIAS, shape, by_kernel=True)
        if not joined and not s.shared_values:
            params["v"] = declare(self, p, V, (width, s.kv_heads, s.value_width))
            if s.qkv_bias:
                params["v_bias"] = declare(self, p, V_BIAS, (s.kv_heads, s.value_width))
        if s.qk_norm in NORMS:
            whole = s.qk_norm == "full"
            for name, param, heads in zip(("q_norm", "k_norm"), NORMS[s.qk_norm], (s.heads, s.kv_heads), strict=True):
                own = (heads, s.head_dim) if whole else (s.head_dim,)
                params[name] = declare(self, p, param, own, by_kernel=True)
        return params

    def _project_by_kernel(
        self, x_BTX: Array, inputs: Inputs, params: dict[str, Any]
    ) -> tuple[Array, LayerCache] | None:
        """Queries, and the memory with keys and values in it; None where this needs more than the kernel computes."""
        s = self.spec
        if not s.plain:
            return None
        stacks = {name: param for name, param in params.items() if name != "qkv"}
        how: Any = {"dtype": self.policy.compute.dtype, "norm": (self.norm_eps, s.norm_offset)}
        return heads_by_kernel(x_BTX, params["qkv"], stacks, inputs, s.streams["k"], s.rope, **how)

    def _project(
        self, x_BTX: Array, inputs: Inputs, params: dict[str, Any]
    ) -> tuple[Array, Array, Array, Array | None]:
        """Queries, keys, values, and what gates the heads' outputs; a gate lies after the query of its head."""
        s = self.spec
        group = s.heads // s.kv_heads * (2 if s.gated else 1)
        product = partial(dense, x_BTX, dtype=self.policy.compute.dtype)
        qkv = product(params["qkv"], own_of(params.get("bias")))
        shape = (*x_BTX.shape[:2], s.heads, s.head_dim)
        gate = qkv[..., 1:group:2, :].reshape(shape) if s.gated else None
        q = qkv[..., : group : 2 if s.gated else 1, :].reshape(shape)
        k = qkv[..., group, :]
        v = product(params["v"], params.get("v_bias")) if "v" in params else k if s.shared_values else qkv[..., -1, :]
        v = v if s.value_scale == 1 else v * s.value_scale
        v = rms_norm(v, None, self.norm_eps) if s.value_norm else v
        q, k = (q, k) if s.norm_turned else self._normed(q, k, params)
        if s.rope is not None:
            angles = inputs.rotation(s.rope)
            q, k = rotate(q, angles, s.rope), rotate(k, angles, s.rope)
        q, k = self._normed(q, k, params) if s.norm_turned else (q, k)
        if s.temperature is not None:
            q = q * s.temperature.at(inputs.position_BT)[..., None, None]
        return q, k, v, gate

    def _outer_gate(self, x_BTX: Array) -> Array:
        """Gates of the heads' outputs, one of each head or channel, [B, T, H, 1 or C']."""
        s, p = self.spec, self.policy
        each = () if s.outer_gate == "head" else (s.value_width,)
        w = declare(self, p, GATES[s.outer_gate], (x_BTX.shape[-1], s.heads, *each))
        function = softplus if s.gate_function == "softplus" else sigmoid
        gate = function(dense(x_BTX, w, dtype=p.compute.dtype))
        return gate if each else gate[..., None]

    def _normed(self, q_BTHC: Array, k_BTGC: Array, params: dict[str, Any]) -> tuple[Array, Array]:
        if self.spec.qk_norm == "none":
            return q_BTHC, k_BTGC
        return self._norm(q_BTHC, params.get("q_norm")), self._norm(k_BTGC, params.get("k_norm"))

    def _norm(self, x_BTHC: Array, param: Any) -> Array:
        flat = x_BTHC.reshape(*x_BTHC.shape[:2], -1) if self.spec.qk_norm == "full" else x_BTHC
        scale = None if param is None else own_of(param).reshape(-1)
        return rms_norm(flat, scale, self.norm_eps, offset=self.spec.norm_offset).reshape(x_BTHC.shape)
