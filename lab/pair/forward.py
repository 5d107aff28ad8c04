"""The pair's forward pass as training computes it on a CPU, several times faster than a served model's.

It reads the parameters of ``jaxspec.models.transformer.Transformer`` and gives what that gives, but for positions that
an expert has no room for.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.nn.router import Routing
from jaxspec.shapes import Array
from lab.upcycle.network import norm, rotate

Weights = Any  # nested dicts of arrays
ROOM, AMPLE = 1.5, 4.0
"""Positions that an expert takes, as a multiple of its even share: in training, and where none may be left out."""


def attend(layer: Weights, x_BTD: Array, theta: float) -> Array:
    """Computes causal attention of a normalized stream with grouped heads."""
    (b, t, dim), (_, g, parts, c) = x_BTD.shape, layer["qkv_DGQC"].shape
    qkv = x_BTD.reshape(-1, dim) @ layer["qkv_DGQC"].reshape(dim, -1)
    if "qkv_bias_GQC" in layer:
        qkv = qkv + layer["qkv_bias_GQC"].reshape(-1)
    qkv, heads, position_BT = qkv.reshape(b, t, g, parts, c), parts - 2, jnp.arange(t)[None]
    q = rotate(qkv[:, :, :, :heads].reshape(b, t, -1, c), position_BT, theta).reshape(b, t, g, heads, c)
    q_NSC = q.transpose(0, 2, 3, 1, 4).reshape(b * g, heads * t, c) * c**-0.5
    k_NTC = rotate(qkv[:, :, :, heads], position_BT, theta).transpose(0, 2, 1, 3).reshape(b * g, t, c)
    v_NTC = qkv[:, :, :, heads + 1].transpose(0, 2, 1, 3).reshape(b * g, t, c)
    seen_ST = jnp.tile(jnp.tril(jnp.ones((t, t), bool)), (heads, 1))
    score = jnp.where(seen_ST, jnp.einsum("nsc,ntc->nst", q_NSC, k_NTC), -1e30)
    share = jnp.exp(score - jax.lax.stop_gradient(jnp.max(score, -1, keepdims=True)))
    mixed = jnp.einsum("nst,ntc->nsc", share, v_NTC) / jnp.sum(share, -1, keepdims=True)
    mixed = mixed.reshape(b, g, heads, t, c).transpose(0, 3, 1, 2, 4).reshape(b, t, -1)
    return mixed @ layer["out_HCD"].reshape(-1, dim)


def dense(ffn: Weights, x_MD: Array) -> Array:
    """Computes a dense feed-forward."""
    gate, up = jnp.split(x_MD @ ffn["gate_up_D2F"].reshape(x_MD.shape[1], -1), 2, -1)
    return (jax.nn.silu(gate) * up) @ ffn["down_FD"]


@jax.custom_vjp
def pick(x_MD: Array, row_S: Array, slot_MA: Array) -> Array:
    """Returns the rows that slots hold; its gradient is a sum over the slots of a row, without a scatter.

    Args:
      x_MD: rows.
      row_S: row of each slot, M for an empty one.
      slot_MA: slots of each row, S for none.
    """
    return jnp.take(x_MD, row_S, axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def gather(y_SD: Array, row_S: Array, slot_MA: Array) -> Array:
    """Returns the sums [M, D] of the slots of every row; the transpose of ``pick``."""
    return sum(jnp.take(y_SD, slot_MA[:, a], axis=0, mode="fill", fill_value=0) for a in range(slot_MA.shape[1]))  # pyright: ignore[reportReturnType]


pick.defvjp(
    lambda x_MD, *at: (pick(x_MD, *at), at),
    lambda at, change_SD: (gather(change_SD, *at), None, None),
)
gather.defvjp(
    lambda y_SD, *at: (gather(y_SD, *at), at),
    lambda at, change_MD: (pick(change_MD, *at), None, None),
)


def lay_out(used_MAE: Array, room: int) -> tuple[Array, Array]:
    """Gives the choices of rows a slot each, expert by expert, as far as there is room; see ``pick``."""
    rows, top_k, experts = used_MAE.shape
    flat_RE = used_MAE.reshape(-1, experts).astype(jnp.int32)
    rank_R = jnp.sum(flat_RE * (jnp.cumsum(flat_RE, 0) - 1), -1)
    slot_R = jnp.where(rank_R < room, jnp.argmax(flat_RE, -1).astype(jnp.int32) * room + rank_R, experts * room)
    row_R = jnp.arange(rows * top_k, dtype=jnp.int32) // top_k
    row_S = jnp.full(experts * room, rows, jnp.int32).at[slot_R].set(row_R, mode="drop")
    return row_S, slot_R.reshape(rows, top_k)


def mixture(ffn: Weights, x_MD: Array, top_k: int, share: float) -> tuple[Array, Routing]:
    """Computes routed experts and the gated shared one; returns the routing beside it."""
    (experts, dim, *_), rows = ffn["gate_up_ED2F"].shape, x_MD.shape[0]
    room = min(rows, int(share * rows * top_k / experts))
    logits_ME = x_MD @ ffn["router_DE"]
    score_ME = jax.nn.softmax(logits_ME)
    _, expert_MA = jax.lax.top_k(jax.lax.stop_gradient(logits_ME), top_k)
    used_MAE = jax.nn.one_hot(expert_MA, experts)
    weight_MA = jnp.sum(used_MAE * score_ME[:, None], -1)
    weight_MA = weight_MA / jnp.sum(weight_MA, -1, keepdims=True)
    at = lay_out(used_MAE, room)
    x_ESD = pick(x_MD, *at).reshape(experts, room, dim)
    gate, up = jnp.split(jnp.einsum("esd,edf->esf", x_ESD, ffn["gate_up_ED2F"].reshape(experts, dim, -1)), 2, -1)
    # An expert's output is weighed by the row's weight for it, zero in empty slots.
    weight_S = jnp.sum(pick(jnp.sum(used_MAE * weight_MA[..., None], 1), *at).reshape(experts, room, experts)
                       * jnp.eye(experts)[:, None], -1)  # fmt: skip
    inner = jax.nn.silu(gate) * up * weight_S[..., None]
    out = gather(jnp.einsum("esf,efd->esd", inner, ffn["down_EFD"]).reshape(-1, dim), *at)
    out = out + dense(ffn["shared"], x_MD) * jax.nn.sigmoid(x_MD @ ffn["shared_gate_D1"])
    return out, Routing(expert_MA, weight_MA, logits_ME)


def forward(
    params: Weights, token_BT: Array, config: dict[str, Any], share: float = ROOM
) -> tuple[Array, list[Routing]]:
    """Computes logits [B, T, V], and every expert layer's routing."""
    weights, eps, routing = params["params"], config["rms_norm_eps"], []
    x_BTD = weights["embed_VD"][token_BT]
    for index in range(config["num_hidden_layers"]):
        layer = weights[f"layers_{index}"]
        read = norm(x_BTD, layer["attention_norm_D"], eps)
        x_BTD = x_BTD + attend(layer["attention"], read, config["rope_theta"])
        read_MD = norm(x_BTD, layer["ffn_norm_D"], eps).reshape(-1, x_BTD.shape[-1])
        if "router_DE" in layer["ffn"]:
            out_MD, about = mixture(layer["ffn"], read_MD, config["num_experts_per_tok"], share)
            routing.append(about)
        else:
            out_MD = dense(layer["ffn"], read_MD)
        x_BTD = x_BTD + out_MD.reshape(x_BTD.shape)
    last_MD = norm(x_BTD, weights["norm_D"], eps).reshape(-1, x_BTD.shape[-1])
    return (last_MD @ weights["embed_VD"].T).reshape(*token_BT.shape, -1), routing
