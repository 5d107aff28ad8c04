"""Multi-head latent attention: all heads' keys and values are products of one small cached vector per position."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax.numpy as jnp

from jaxspec.cache.addressing import StreamSpec, write
from jaxspec.cache.window import pack, take_outputs, unpack
from jaxspec.nn.cached_attention import attend_cached, attend_new
from jaxspec.nn.dense import dense, per_head_dense
from jaxspec.nn.fused_norm import PartialSum
from jaxspec.nn.inputs import Inputs, Mixed
from jaxspec.nn.matrix import own_of
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

RANK_NORM_EPS = 1e-6  # fixed in the reference, whatever the model's own


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
        q_BTHC, low_BTR = self._queries(x_BTD, inputs.position_BT)
        c_BTR, turned_BT1C = self._latent(x_BTD, inputs.position_BT)
        q_BTHC, c_BTR, turned_BT1C = (unpack(x, window) for x in (q_BTHC, c_BTR, turned_BT1C))
        kv_HXR = declare(self, p, KV_B, (s.heads, s.plain_dim + s.value_dim, s.rank))
        inputs = replace(inputs.unpack(), selection=inputs.selection if s.reuses_selection else None)
        if s.index is not None:
            assert low_BTR is not None, "an indexer reads the low-rank queries"
            indexer = Indexer(s.index, self.model_dim, p, name="indexer")
            selection, memory = indexer(unpack(x_BTD, window), unpack(low_BTR, window), inputs)
            inputs = replace(inputs, selection=selection, memory=memory)
        new_BT1C = jnp.concatenate([c_BTR[:, :, None], turned_BT1C], axis=-1)
        if isinstance(inputs.memory, Unrolled):
            memory = inputs.memory.append(new_BT1C, c_BTR[:, :, None])
            out = _absorbed(q_BTHC, partial(attend_unrolled, memory=memory, scale=s.scale), kv_HXR, s, p)
        elif (cache := inputs.cache_window) is None:
            k_BTHC, v_BTHC = _written_out(c_BTR, turned_BT1C, kv_HXR, s, p.compute.dtype)
            out, memory = attend_new(q_BTHC, k_BTHC, v_BTHC, inputs, scale=s.scale)
        else:
            latent = write(inputs.memory["latent"], s.streams["latent"], cache, new_BT1C)
            memory = inputs.memory | {"latent": latent}
            attend = partial(
                attend_cached, pages=(latent, None), inputs=inputs.of_outputs(), stream=s.streams["latent"], policy=p,
                scale=s.scale, value_width=s.rank,
            )  # fmt: skip
            out = _absorbed(take_outputs(q_BTHC, window), attend, kv_HXR, s, p)
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

    def _queries(self, x_BTD: Array, position_BT: Array) -> tuple[Array, Array | None]:
        """Queries, rotated at the end, and the normalized vector that they are products of."""
        s, p = self.spec, self.policy
        each, low = (s.heads, s.plain_dim + s.rope.dim), None
        if s.query_rank is None:
            q = dense(x_BTD, declare(self, p, Q, (x_BTD.shape[-1], *each)), dtype=p.compute.dtype)
        else:
            w_a = declare(self, p, Q_A, (x_BTD.shape[-1], s.query_rank))
            low = dense(x_BTD, w_a, self._bias(Q_A_BIAS, s.query_rank), dtype=p.compute.dtype)
            low = rms_norm(low, declare(self, p, Q_NORM, (s.query_rank,)), RANK_NORM_EPS)
            q = dense(low, declare(self, p, Q_B, (s.query_rank, *each)), dtype=p.compute.dtype)
        turned = self._turned(q[..., s.plain_dim :], position_BT)
        q = jnp.concatenate([q[..., : s.plain_dim], turned], axis=-1)
        return (q if s.temperature is None else q * s.temperature.at(position_BT)[..., None, None]), low

    def _latent(self, x_BTD: Array, position_BT: Array) -> tuple[Array, Array]:
        """The normalized vector of each position, and its rotated key."""
        s, p = self.spec, self.policy
        width = s.rank + s.rope.dim
        w_a, bias = declare(self, p, KV_A, (x_BTD.shape[-1], width)), self._bias(KV_A_BIAS, width)
        both = dense(x_BTD, w_a, bias, dtype=p.compute.dtype)
        c = rms_norm(both[..., : s.rank], declare(self, p, KV_NORM, (s.rank,)), RANK_NORM_EPS)
        c = c if s.latent_scale == 1 else c * s.latent_scale
        return c, self._turned(both[:, :, None, s.rank :], position_BT)

    def _turned(self, x_BTHC: Array, position_BT: Array) -> Array:
        return rotate(x_BTHC, position_BT, self.spec.rope) if self.spec.rotates else x_BTHC

    def _bias(self, param: Param, width: int) -> Array | None:
        return declare(self, self.policy, param, (width,)) if self.spec.bias else None


def _written_out(
    c_BTR: Array, turned_BT1C: Array, kv_HXR: Weight, spec: LatentSpec, dtype: jnp.dtype
) -> tuple[Array, Array]:
    """Computes every head's keys and values, for sequences that attend to themselves."""
    kv_BTHX = dense(c_BTR, widen(kv_HXR, dtype).transpose(2, 0, 1), dtype=dtype)
    turned = jnp.broadcast_to(turned_BT1C, (*kv_BTHX.shape[:3], spec.rope.dim))
    return jnp.concatenate([kv_BTHX[..., : spec.plain_dim], turned], axis=-1), kv_BTHX[..., spec.plain_dim :]


def _absorbed(
    q_BTHC: Array, attend: Callable[[Array], Array], kv_HXR: Weight, spec: LatentSpec, policy: Policy
) -> Array:
    """Computes attention to the vectors themselves (DeepSeek-V2, appendix C); a key begins with the value."""
    dtype, cut = policy.compute.dtype, spec.plain_dim
    kv_HXR = widen(kv_HXR, dtype)
    product = partial(per_head_dense, dtype=dtype, apart=policy.compute.splits_rows)
    plain_BTHR = product(q_BTHC[..., :cut], kv_HXR[:, :cut], contract=1)
    q = jnp.concatenate([plain_BTHR, q_BTHC[..., cut:]], axis=-1)
    return product(attend(q), kv_HXR[:, cut:], contract=2)
