"""Multi-head latent attention: all heads' keys and values are products of one small cached vector per position."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from jaxspec.cache.addressing import StreamSpec, write
from jaxspec.cache.window import pack, take_outputs, unpack
from jaxspec.nn.cached_attention import attend_cached, attend_new
from jaxspec.nn.dense import dense, per_head_dense
from jaxspec.nn.fused_latents import RANK_NORM_EPS, latents_by_kernel, values_by_kernel
from jaxspec.nn.fused_norm import PartialSum
from jaxspec.nn.inputs import Inputs, Mixed
from jaxspec.nn.matrix import Matrix, own_of
from jaxspec.nn.norm import rms_norm
from jaxspec.nn.param import Param, declare
from jaxspec.nn.policy import Policy, Weight
from jaxspec.nn.rope import RopeSpec, rotate
from jaxspec.nn.sparse_index import STREAM, Indexer, IndexSpec
from jaxspec.nn.steady import sigmoid
from jaxspec.nn.temperature import Temperature
from jaxspec.nn.unrolled import Unrolled, attend_unrolled
from jaxspec.pytree import replace
from jaxspec.shapes import Array
from pallas_kernels.quantized import widen

Q = Param("q_DHC", ("embed", "heads", "head_dim"))
Q_A = Param("q_a_DR", ("embed", "rank"))
Q_A_BIAS = Param("q_a_bias_R", ("rank",), "bias")
Q_NORM = Param("q_norm_R", ("rank",), "norm")
Q_B = Param("q_b_RHC", ("rank", "heads", "head_dim"))
KV_A = Param("kv_a_DX", ("embed", "latent"))
KV_A_BIAS = Param("kv_a_bias_X", ("latent",), "bias")
KV_NORM = Param("kv_norm_R", ("rank",), "norm")
KV_B = Param("kv_b_HXR", ("heads", "kv_channels", "rank"), "weight")
OUT = Param("out_HCD", ("heads", "head_dim", "embed"), inputs=2)
HEAD_GATE = Param("head_gate_DH", ("embed", "heads"))
OUT_BIAS = Param("out_bias_D", ("embed",), "bias")


@dataclass(frozen=True)
class LatentSpec:
    """One layer of multi-head latent attention (DeepSeek-V2, section 2.1).

    Attributes:
      heads: H.
      plain_dim: channels of a query or key head that are not rotated.
      value_dim: channels of a value head.
      rank: R, width of the vector that keys and values are products of.
      rope: rotation of the further channels of each query head, and of one key that all heads share.
      scale: of the scores.
      query_rank: width of what queries are products of, None where they come straight from the input.
      bias: whether the projections from and to the stream have biases, except that of queries without a rank.
      index: indexer that limits what a query attends to, None for none.
      reuses_selection: whether the selection of an earlier layer's indexer does.
      rotates: whether the rotation is applied; without it the channels are there all the same.
      gated: whether a sigmoid of the input, one number per head, multiplies what heads give.
      latent_scale: multiplies the normalized vector.
      temperature: what queries are multiplied by at their positions, None for nothing.
    """

    chain_only = None

    heads: int
    plain_dim: int
    value_dim: int
    rank: int
    rope: RopeSpec
    scale: float
    query_rank: int | None = None
    bias: bool = False
    index: IndexSpec | None = None
    reuses_selection: bool = False
    rotates: bool = True
    gated: bool = False
    latent_scale: float = 1.0
    temperature: Temperature | None = None

    @property
    def one_text_only(self) -> bool:
        """Whether a row without a cache can hold one text alone: an indexer knows no others."""
        return self.index is not None

    @property
    def streams(self) -> dict[str, StreamSpec]:
        """Returns what it caches: the vector with the shared rotated key at its end, and the indexer's keys."""
        latent = {"latent": StreamSpec(1, self.rank + self.rope.dim)}
        return latent | ({STREAM: self.index.stream} if self.index else {})


class LatentAttention(nn.Module):
    """Over a cache the products with key and value weights are moved to queries and results, so that it is read as is.

    The weights of keys and values lie as published, [H, key and value channels, R].

    Attributes:
      unsummed: as of ``Attention``.
    """

    spec: LatentSpec
    model_dim: int
    norm_eps: float
    policy: Policy
    unsummed: bool = False

    @nn.compact
    def __call__(self, x_BTD: Array, inputs: Inputs) -> Mixed:
        """Projects to the latent vector, selects where there is an indexer, and attends."""
        s, p, window = self.spec, self.policy, inputs.window
        params, new = self._params(x_BTD.shape[-1]), None
        made = latents_by_kernel(x_BTD, params, inputs, s, p.compute.dtype)
        if made is not None:
            q_BTHC, low_BTR, memory = made
            q_BTHC, inputs = unpack(q_BTHC, window), replace(inputs, memory=memory)
        else:
            q_BTHC, low_BTR = self._queries(x_BTD, inputs, params)
            q_BTHC, *new = (unpack(x, window) for x in (q_BTHC, *self._latent(x_BTD, inputs, params)))
        inputs = replace(inputs.unpack(), selection=inputs.selection if s.reuses_selection else None)
        if s.index is not None:
            assert low_BTR is not None, "an indexer reads the low-rank queries"
            indexer = Indexer(s.index, self.model_dim, p, name="indexer")
            selection, memory = indexer(unpack(x_BTD, window), unpack(low_BTR, window), inputs)
            inputs = replace(inputs, selection=selection, memory=memory)
        if inputs.cache_window is None:
            assert new is not None, "kernels write into a cache"
            out, memory = self._without_cache(q_BTHC, new, params["kv_b"], inputs)
        else:
            out, memory = self._cached(take_outputs(q_BTHC, window), new, params["kv_b"], inputs)
        w_o = declare(self, p, OUT, (s.heads, s.value_dim, self.model_dim))
        bias = declare(self, p, OUT_BIAS, (self.model_dim,), by_kernel=True) if s.bias else None
        out = pack(out, window)
        if s.gated:
            gate_DH = declare(self, p, HEAD_GATE, (x_BTD.shape[-1], s.heads))
            gate = dense(take_outputs(x_BTD, window), gate_DH, dtype=p.compute.dtype)
            out = out * sigmoid(gate)[..., None]
        parts = PartialSum.of(out, w_o, bias, p.compute.dtype, 2) if self.unsummed else None
        out = parts or dense(out, w_o, own_of(bias), dtype=p.compute.dtype, axes=2)
        shares = s.reuses_selection or (s.index is not None and s.index.shares_selection)
        return Mixed(out, memory, inputs.selection if shares else None)

    def _params(self, width: int) -> dict[str, Any]:
        """Parameters in front of the heads, by the names that ``latents_by_kernel`` has for them."""
        s, p = self.spec, self.policy
        each, both = (s.heads, s.plain_dim + s.rope.dim), s.rank + s.rope.dim

        def own(param: Param, *shape: int, by_kernel: bool = True) -> Any:
            return declare(self, p, param, shape, by_kernel=by_kernel)

        if s.query_rank is None:
            params = {"q": own(Q, width, *each)}
        else:
            params = {"q_a": own(Q_A, width, s.query_rank)}
            params |= {"q_bias": own(Q_A_BIAS, s.query_rank)} if s.bias else {}
            params |= {"q_norm": own(Q_NORM, s.query_rank), "q_b": own(Q_B, s.query_rank, *each)}
        params["kv_a"] = own(KV_A, width, both)
        params |= {"bias": own(KV_A_BIAS, both)} if s.bias else {}
        params |= {"norm": own(KV_NORM, s.rank), "kv_b": own(KV_B, s.heads, s.plain_dim + s.value_dim, s.rank)}
        return params

    def _queries(self, x_BTD: Array, inputs: Inputs, params: Mapping[str, Any]) -> tuple[Array, Array | None]:
        """Queries, rotated at the end, and the normalized vector that they are products of."""
        s, product, low = self.spec, partial(dense, dtype=self.policy.compute.dtype), None
        if s.query_rank is None:
            q = product(x_BTD, params["q"])
        else:
            low = product(x_BTD, params["q_a"], own_of(params.get("q_bias")))
            low = rms_norm(low, own_of(params["q_norm"]), RANK_NORM_EPS)
            q = product(low, params["q_b"])
        q = jnp.concatenate([q[..., : s.plain_dim], self._turned(q[..., s.plain_dim :], inputs)], axis=-1)
        return (q if s.temperature is None else q * s.temperature.at(inputs.position_BT)[..., None, None]), low

    def _latent(self, x_BTD: Array, inputs: Inputs, params: Mapping[str, Any]) -> tuple[Array, Array]:
        """The normalized vector of each position, and its rotated key."""
        s = self.spec
        both = dense(x_BTD, params["kv_a"], own_of(params.get("bias")), dtype=self.policy.compute.dtype)
        c = rms_norm(both[..., : s.rank], own_of(params["norm"]), RANK_NORM_EPS)
        c = c if s.latent_scale == 1 else c * s.latent_scale
        return c, self._turned(both[:, :, None, s.rank :], inputs)

    def _turned(self, x_BTHC: Array, inputs: Inputs) -> Array:
        rope = self.spec.rope
        return rotate(x_BTHC, inputs.rotation(rope), rope) if self.spec.rotates else x_BTHC

    def _without_cache(
        self, q_BTHC: Array, new: list[Array], kv_b: Weight | Matrix, inputs: Inputs
    ) -> tuple[Array, Any]:
        """Returns what heads give where texts, or a head in training, attend to themselves; and the memory."""
        s, p, kv_HXR, (c_BTR, turned_BT1C) = self.spec, self.policy, own_of(kv_b), new
        if not isinstance(inputs.memory, Unrolled):
            k_BTHC, v_BTHC = _written_out(c_BTR, turned_BT1C, kv_HXR, s, p.compute.dtype)
            return attend_new(q_BTHC, k_BTHC, v_BTHC, inputs, scale=s.scale, dtype=p.compute.dtype)
        memory = inputs.memory.append(_joined(c_BTR, turned_BT1C), c_BTR[:, :, None], p.compute.dtype)
        out = attend_unrolled(_to_latents(q_BTHC, kv_HXR, s, p), memory, scale=s.scale)
        return _to_values(out, kv_HXR, s, p), memory

    def _cached(
        self, q_BTHC: Array, new: list[Array] | None, kv_b: Weight | Matrix, inputs: Inputs
    ) -> tuple[Array, Any]:
        """The same over a cache, of queries in the latents' space if a kernel has written what is new."""
        s, p, memory, window = self.spec, self.policy, inputs.memory, inputs.cache_window
        assert window is not None, "asked of layers with a cache"
        if new is not None:
            latent = write(memory["latent"], s.streams["latent"], window, _joined(*new))
            memory, q_BTHC = memory | {"latent": latent}, _to_latents(q_BTHC, kv_b, s, p)
        out = attend_cached(
            q_BTHC, (memory["latent"], None), inputs.of_outputs(), s.streams["latent"], p, scale=s.scale,
            value_width=s.rank,
        )  # fmt: skip
        return _to_values(out, kv_b, s, p), memory


def _joined(c_BTR: Array, turned_BT1C: Array) -> Array:
    """Returns what is cached of each position, [B, T, 1, R + rotated channels]."""
    return jnp.concatenate([c_BTR[:, :, None], turned_BT1C], axis=-1)


def _written_out(
    c_BTR: Array, turned_BT1C: Array, kv_HXR: Weight, spec: LatentSpec, dtype: jnp.dtype
) -> tuple[Array, Array]:
    """Computes every head's keys and values, for sequences that attend to themselves."""
    kv_BTHX = dense(c_BTR, widen(kv_HXR, dtype).transpose(2, 0, 1), dtype=dtype)
    turned = jnp.broadcast_to(turned_BT1C, (*kv_BTHX.shape[:3], spec.rope.dim))
    return jnp.concatenate([kv_BTHX[..., : spec.plain_dim], turned], axis=-1), kv_BTHX[..., spec.plain_dim :]


def _to_latents(q_BTHC: Array, kv_b: Weight | Matrix, spec: LatentSpec, policy: Policy) -> Array:
    """Computes queries that attend to the vectors themselves (DeepSeek-V2, appendix C); a key begins with the value."""
    cut = spec.plain_dim
    plain_BTHR = _per_head(q_BTHC[..., :cut], kv_b, slice(None, cut), policy, contract=1)
    return jnp.concatenate([plain_BTHR, q_BTHC[..., cut:]], axis=-1)


def _to_values(out_BTHR: Array, kv_b: Weight | Matrix, spec: LatentSpec, policy: Policy) -> Array:
    """Computes what heads give from what they give in the vectors' space."""
    out = values_by_kernel(out_BTHR, kv_b, spec, policy.compute.dtype)
    return _per_head(out_BTHR, kv_b, slice(spec.plain_dim, None), policy, contract=2) if out is None else out


def _per_head(x_BTHC: Array, kv_b: Weight | Matrix, channels: slice, policy: Policy, *, contract: int) -> Array:
    dtype, apart = policy.compute.dtype, policy.compute.splits_rows
    w_HXR = widen(own_of(kv_b), dtype)[:, channels]
    return per_head_dense(x_BTHC, w_HXR, contract=contract, dtype=dtype, apart=apart)
