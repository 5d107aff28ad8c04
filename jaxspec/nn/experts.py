"""Routed experts as blocks of equal rows: every expert's weights are read once per forward, whatever the rows."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.nn.ffn import ACTIVATIONS, gated
from jaxspec.nn.router import Routing
from jaxspec.pytree import pytree
from jaxspec.shapes import Array

TRAINING_BLOCK = 128


@pytree
class Blocks:
    """Routed rows laid out by expert, each expert's rows padded to whole blocks.

    Attributes:
      row_S: for each slot the flattened row m that it holds, or M for padding.
      slot_MA: the slot that holds row m's a-th choice.
      expert_N: expert of each block.
      count: number of blocks in use, a scalar.
    """

    row_S: Array
    slot_MA: Array
    expert_N: Array
    count: Array


def lay_out(expert_MA: Array, experts: int, block: int) -> Blocks:
    """Sorts the M x A routed rows by expert into blocks of ``block`` rows (order within an expert is row order)."""
    rows, top_k = expert_MA.shape
    flat_R = expert_MA.reshape(-1)
    routed = flat_R.shape[0]
    most = min(routed, experts) + routed // block
    order_R = jnp.argsort(flat_R, stable=True).astype(jnp.int32)
    count_E = jnp.zeros(experts, jnp.int32).at[flat_R].add(1)
    blocks_E = (count_E + block - 1) // block
    first_E = jnp.cumsum(count_E) - count_E
    last_block_E = jnp.cumsum(blocks_E)
    sorted_R = flat_R[order_R]
    slot_sorted_R = (last_block_E - blocks_E)[sorted_R] * block + jnp.arange(routed, dtype=jnp.int32) - first_E[sorted_R]
    slot_R = jnp.zeros(routed, jnp.int32).at[order_R].set(slot_sorted_R)
    row_S = jnp.full(most * block, rows, jnp.int32).at[slot_sorted_R].set(order_R // top_k)
    expert_N = jnp.sum(jnp.arange(most)[:, None] >= last_block_E[None], axis=1, dtype=jnp.int32)
    return Blocks(row_S, slot_R.reshape(rows, top_k), jnp.minimum(expert_N, experts - 1), last_block_E[-1])


def block_rows(rows: int) -> int:
    """Rows per block: what holds all rows of a decode step, at most 8 of them; 32 in prefill."""
    if rows > 32:
        return 32
    return next(block for block in (2, 4, 8) if block >= min(rows, 8))


def combine(out_SD: Array, blocks: Blocks, weight_MA: Array) -> Array:
    """Weighted sum of each row's A expert outputs, in order of preference (a fixed order, hence row-invariant)."""
    total = jnp.zeros((weight_MA.shape[0], out_SD.shape[1]), jnp.float32)
    for a in range(weight_MA.shape[1]):
        total = total + out_SD[blocks.slot_MA[:, a]] * weight_MA[:, a, None]
    return total


def switched(x_MD: Array, routing: Routing, experts: tuple[dict[str, Array], ...], activation: str) -> Array:
    """Routed experts for CPU: a loop over the blocks in use, each choosing its expert's own arrays by a switch."""
    rows, width = x_MD.shape
    block = block_rows(rows)
    blocks = lay_out(routing.expert_MA, len(experts), block)
    x_SD = jnp.concatenate([x_MD, jnp.zeros((1, width), x_MD.dtype)])[blocks.row_S]
    branches = [partial(gated, activation=activation, **weights) for weights in experts]

    def compute(n: Array, out_SD: Array) -> Array:
        x = lax.dynamic_slice(x_SD, (n * block, 0), (block, width))
        y = lax.switch(blocks.expert_N[n], branches, x)
        return lax.dynamic_update_slice(out_SD, y, (n * block, 0))

    out_SD = lax.fori_loop(0, blocks.count, compute, jnp.zeros(x_SD.shape, jnp.float32))
    return combine(out_SD, blocks, routing.weight_MA)


def stacked(x_MD: Array, routing: Routing, gate_up_ED2F: Array, down_EFD: Array, activation: str, dtype: jnp.dtype) -> Array:
    """Routed experts for training: every block gathers its expert's weights, then batched products (no row is dropped)."""
    rows, width = x_MD.shape
    block = min(TRAINING_BLOCK, block_rows(rows) if rows <= 64 else TRAINING_BLOCK)
    blocks = lay_out(routing.expert_MA, gate_up_ED2F.shape[0], block)
    x_NZD = jnp.concatenate([x_MD, jnp.zeros((1, width), x_MD.dtype)])[blocks.row_S].reshape(-1, block, width)
    hidden = gate_up_ED2F.shape[-1]
    both = _batched_dot(x_NZD, gate_up_ED2F[blocks.expert_N].reshape(-1, width, 2 * hidden), jnp.dtype(dtype))
    gate, up = both[..., :hidden], both[..., hidden:]
    y_NZD = _batched_dot(ACTIVATIONS[activation](gate) * up, down_EFD[blocks.expert_N], jnp.dtype(dtype))
    return combine(y_NZD.reshape(-1, width), blocks, routing.weight_MA)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _batched_dot(x_NZD: Array, w_NDF: Array, dtype: jnp.dtype) -> Array:
    return jnp.einsum("nzd,ndf->nzf", x_NZD.astype(dtype), w_NDF.astype(dtype), preferred_element_type=jnp.float32)


def _batched_dot_fwd(x_NZD: Array, w_NDF: Array, dtype: jnp.dtype):
    return _batched_dot(x_NZD, w_NDF, dtype), (x_NZD, w_NDF)


def _batched_dot_bwd(dtype: jnp.dtype, saved: tuple[Array, Array], grad_NZF: Array):
    x_NZD, w_NDF = saved
    grad = grad_NZF.astype(dtype)
    grad_x = jnp.einsum("nzf,ndf->nzd", grad, w_NDF.astype(dtype), preferred_element_type=jnp.float32)
    grad_w = jnp.einsum("nzd,nzf->ndf", x_NZD.astype(dtype), grad, preferred_element_type=jnp.float32)
    return grad_x.astype(x_NZD.dtype), grad_w.astype(w_NDF.dtype)


_batched_dot.defvjp(_batched_dot_fwd, _batched_dot_bwd)
