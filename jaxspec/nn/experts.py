"""Routed experts as blocks of equal rows: every expert's weights are read once per forward, whatever the rows."""

import functools
import operator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.native.packing import Packed
from jaxspec.native.product import product
from jaxspec.nn.dense import fewest_rows, whole_tiles
from jaxspec.nn.expert_shards import as_rows, obstacles_on, on_each_device, own_experts, rows_on_each, split
from jaxspec.nn.ffn import Activation
from jaxspec.nn.fused_routing import SortedRows
from jaxspec.nn.grouped_experts import by_parts, groupable, grouped_experts, in_parts
from jaxspec.nn.matrix import UNPACKED
from jaxspec.nn.policy import Policy, Weight
from jaxspec.nn.router import Routing
from jaxspec.nn.steady import added_products
from jaxspec.pytree import pytree, replace
from jaxspec.shapes import Array
from pallas_kernels.quantized import widen
from pallas_kernels.routed_experts.api import (
    OP,
    case_name,
    mosaic_is_faster,
    mosaic_obstacles,
    obstacles,
    routed_experts,
    tiles_for,
)
from pallas_kernels.select import INSTEAD, Choice, choose

TRAINING_BLOCK = 128
COMPARED_ROWS = 256
GATHERED_BYTES = 1 << 30  # of weights that blocks take out of the stack at a time
GROUPED_ROWS = 4096  # from which on kernels compute rows in groups, see ``grouped_experts``
UNGATED = "its experts have no gate"
DIFFERENTIABLE = f"more than {GROUPED_ROWS:,} rows, as in training, have gradients"


@pytree
class Blocks:
    """Routed rows laid out by expert, each expert's rows padded to whole blocks.

    Attributes:
      routed_S: for each slot the routed row m * A + a that it holds, or M * A for padding.
      slot_MA: the slot that holds row m's a-th choice.
      expert_N: expert of each block.
      count: number of blocks in use, a scalar.
    """

    routed_S: Array
    slot_MA: Array
    expert_N: Array
    count: Array


def lay_out(expert_MA: Array, experts: int, block: int, live: Array | None = None) -> Blocks:
    """Sorts the M x A routed rows by expert into blocks of ``block`` rows; within an expert they keep their order.

    Rows [M] or choices [M, A] that are not live get no slot; ``slot_MA`` is then one past the last.
    """
    rows, top_k = expert_MA.shape
    if live is not None:
        expert_MA = jnp.where(live if live.ndim == 2 else live[:, None], expert_MA, experts)
    flat_R = expert_MA.reshape(-1)
    routed = flat_R.shape[0]
    most = min(routed, experts) + routed // block
    chosen_RE = flat_R[:, None] == jnp.arange(experts, dtype=jnp.int32)
    count_E = jnp.sum(chosen_RE, axis=0, dtype=jnp.int32)
    blocks_E = (count_E + block - 1) // block
    last_block_E = _running_sum(blocks_E)
    first_slot_E = (last_block_E - blocks_E) * block
    if routed <= COMPARED_ROWS:  # comparing all pairs is one small loop, sorting costs a call into the library
        before_RR = np.tri(routed, k=-1, dtype=bool)
        rank_R = jnp.sum((flat_R[:, None] == flat_R[None]) & before_RR, axis=1, dtype=jnp.int32)
    else:
        order_R = jnp.argsort(flat_R, stable=True).astype(jnp.int32)
        sorted_R = jnp.zeros(routed, jnp.int32).at[order_R].set(jnp.arange(routed, dtype=jnp.int32))
        rank_R = sorted_R - (_running_sum(count_E) - count_E)[jnp.minimum(flat_R, experts - 1)]
    slot_R = first_slot_E[jnp.minimum(flat_R, experts - 1)] + rank_R
    if live is not None:
        slot_R = jnp.where(flat_R < experts, slot_R, most * block)
    number_R = jnp.arange(routed, dtype=jnp.int32)
    routed_S = jnp.full(most * block, routed, jnp.int32).at[slot_R].set(number_R, mode="drop")
    expert_N = jnp.sum(jnp.arange(most)[:, None] >= last_block_E[None], axis=1, dtype=jnp.int32)
    return Blocks(routed_S, slot_R.reshape(rows, top_k), jnp.minimum(expert_N, experts - 1), last_block_E[-1])


def _running_sum(x_E: Array) -> Array:
    size = x_E.shape[0]
    return jnp.sum(jnp.where(np.tri(size, dtype=bool), x_E[None], 0), axis=1, dtype=jnp.int32)


def block_rows(routed: int, experts: int) -> int:
    """Returns rows per block for R routed rows: a power of two up to 32, about twice what an expert gets on average."""
    return next((block for block in (2, 4, 8, 16) if block >= fewest_rows() and block * experts >= 1.5 * routed), 32)


def gather(x_MD: Array, weight_MA: Array, blocks: Blocks) -> tuple[Array, Array]:
    """Gathers the input row and combine weight of every slot, zeros for padding."""
    top_k = weight_MA.shape[1]
    x_SD = jnp.pad(x_MD, ((0, 1), (0, 0)))[blocks.routed_S // top_k]
    return x_SD, jnp.pad(weight_MA.reshape(-1), (0, 1))[blocks.routed_S]


def combine(out_SD: Array, blocks: Blocks, live: Array | None = None) -> Array:
    """Sums each row's A weighted expert outputs, in order of preference (a fixed order, hence row-invariant).

    The weights are already in, by exact products: others would be fused with their sum here into one rounding in some
    programs and not in others.
    """
    if live is not None and live.ndim == 2:
        out_SD = jnp.pad(out_SD, ((0, 1), (0, 0)))  # what choices without a slot read
    total = out_SD[blocks.slot_MA[:, 0]]
    for a in range(1, blocks.slot_MA.shape[1]):
        total = total + out_SD[blocks.slot_MA[:, a]]
    return total if live is None or live.ndim == 2 else jnp.where(live[:, None], total, 0.0)


def run_stacked(
    x_MD: Array,
    routing: Routing,
    experts: dict[str, Weight],
    activation: Activation,
    dtype: jnp.dtype,
    layer: Array | None = None,
    live: Array | None = None,
) -> Array:
    """Computes routed experts as batched products: every block gathers its expert's weights; no row is dropped.

    Args:
      x_MD: rows.
      routing: their choices.
      experts: ``gate_up_ED2F``, ``down_EFD`` and maybe biases, with a leading axis of layers if ``layer`` is given.
      activation: of all experts.
      dtype: compute dtype.
      layer: which layer of the stack; the stack itself is never sliced, for a slice would be a copy.
      live: rows [M] or choices [M, A] that are computed, None for all; the others add nothing.
    """
    width, first = x_MD.shape[1], 0 if layer is None else 1
    count, hidden = (experts["gate_up_ED2F"].shape[first + i] for i in (0, 3))
    routed = routing.expert_MA.size
    block = TRAINING_BLOCK if routed > 32 * count else block_rows(routed, count)
    blocks = lay_out(routing.expert_MA, count, block, live)
    x_SD, weight_S = gather(x_MD, routing.weight_MA, blocks)
    wide = hidden * experts["gate_up_ED2F"].shape[first + 2]

    def some(each: tuple[Array, Array]) -> Array:
        """Computes some blocks, [N, Z, D]."""
        x_NZD, expert_N = each
        index = expert_N if layer is None else (layer, expert_N)
        own = {name: widen(jax.tree.map(lambda leaf: leaf[index], w), dtype) for name, w in experts.items()}
        both: Array = _batched_dot(x_NZD, own["gate_up_ED2F"].reshape(-1, width, wide), jnp.dtype(dtype))
        if "gate_up_bias_E2F" in own:
            both = both + own["gate_up_bias_E2F"].reshape(-1, 1, wide).astype(jnp.float32)
        inner = activation(both[..., :hidden], both[..., wide - hidden :])
        y_NZD: Array = _batched_dot(inner, own["down_EFD"], jnp.dtype(dtype))
        if "down_bias_ED" in own:
            y_NZD = y_NZD + own["down_bias_ED"][:, None].astype(jnp.float32)
        return y_NZD

    size = max(GATHERED_BYTES // (jnp.dtype(dtype).itemsize * (wide + hidden) * width), 1)
    y_NZD = by_parts(some, (x_SD.reshape(-1, block, width), blocks.expert_N), size)
    return combine(added_products([(y_NZD.reshape(-1, width), weight_S[:, None])]), blocks, live)


def run_experts(
    x: Array,
    routing: Routing,
    experts: dict[str, Weight],
    activation: Activation,
    policy: Policy,
    layer: Array | None = None,
    live: Array | None = None,
    sorted_rows: SortedRows | None = None,
) -> Array:
    """Computes routed experts that lie in one array, by their kernel or by XLA; on a mesh each device its own.

    Args:
      x: rows [M, D], or [2, M, D / 2], even columns and odd ones, as 4-bit weights are multiplied by.
      routing: their choices.
      experts: as of ``run_stacked``.
      activation: of all experts.
      policy: what computes, and in which dtype.
      layer: index in the stack.
      live: rows [M] or choices [M, A] that are computed, None for all; the others give zeros.
      sorted_rows: those rows in the order of their experts, in blocks of ``sorted_height``.
    """
    mesh, dtype = policy.compute.mesh, policy.compute.dtype
    native = isinstance(experts["down_EFD"], Packed)

    def whole(x: Array, own: Routing, live: Array | None) -> Array:
        return (run_packed if native else run_stacked)(x, own, experts, activation, dtype, layer, live)

    if native:
        return in_parts(whole, as_rows(x), routing, live)
    rows, top_k = routing.expert_MA.shape
    choice = choose_kernel(rows, top_k, experts, policy, stacked=layer is not None)
    if choice.implementation == "xla" and (not split(mesh) or obstacles_on(mesh, experts)):
        return in_parts(whole, as_rows(x), routing, live)
    expert_MA = routing.expert_MA
    if live is not None:
        expert_MA = jnp.where(live if live.ndim == 2 else live[:, None], expert_MA, -1)

    def compute(
        x: Array, choices: Array, weights: Array, experts: dict[str, Weight], layer: Array | None,
        sorted_rows: SortedRows | None,
    ) -> Array:  # fmt: skip
        def some(x: Array, own: Routing, live: Array | None) -> Array:
            if choice.implementation == "xla":
                return run_stacked(as_rows(x), own, experts, activation, dtype, layer, own.expert_MA >= 0)
            many = len(own.expert_MA) > GROUPED_ROWS or policy.compute.grouped != "xla"
            grouped = choice.implementation not in INSTEAD and many and groupable(experts, stacked=layer is not None)
            run = grouped_experts if grouped else partial(routed_experts, sorted_rows=sorted_rows)
            return run(
                x, own.expert_MA, own.weight_MA, experts, layer=layer, activation=activation, dtype=dtype,
                implementation=choice,
            )  # fmt: skip

        return in_parts(some, x, replace(routing, expert_MA=choices, weight_MA=weights), None)

    operands = (expert_MA, routing.weight_MA, experts, layer, sorted_rows)
    return on_each_device(compute, policy, x, *operands) if split(mesh) else compute(x, *operands)


def sorted_height(rows: int, top_k: int, experts: dict[str, Weight], policy: Policy, *, stacked: bool) -> int | None:
    """Returns the rows per block in which the experts' kernel wants M rows sorted, None where it sorts them itself."""
    compute = policy.compute
    if rows > GROUPED_ROWS or compute.grouped != "xla":
        return None
    if compute.row_axes or (compute.mesh is not None and compute.mesh.shape.get("expert", 1) > 1):
        return None
    if any(isinstance(w, Packed) for w in experts.values()):
        return None
    choice = choose_kernel(rows, top_k, experts, policy, stacked=stacked)
    own = own_experts(compute.mesh, experts)
    return None if choice.implementation == "xla" else tiles_for(own, rows, top_k, by=choice.implementation).rows


def run_weighed(
    x_MD: Array,
    routing: Routing,
    experts: dict[str, Weight],
    activation: Activation,
    policy: Policy,
    layer: Array | None = None,
    live: Array | None = None,
) -> Array:
    """Computes routed experts that read their rows times the weight of the choice, each choice a row; else as above."""
    rows, top_k = routing.expert_MA.shape
    x_RD = (x_MD[:, None] * routing.weight_MA[..., None]).reshape(rows * top_k, -1)
    one_R1 = jnp.ones((rows * top_k, 1), jnp.float32)
    each = replace(routing, expert_MA=routing.expert_MA.reshape(-1, 1), weight_MA=one_R1)
    if live is not None:
        live = live.reshape(-1) if live.ndim == 2 else jnp.repeat(live, top_k)
    out_MAD = run_experts(x_RD, each, experts, activation, policy, layer, live).reshape(rows, top_k, -1)
    return functools.reduce(operator.add, (out_MAD[:, a] for a in range(top_k)))


def run_packed(
    x_MD: Array,
    routing: Routing,
    experts: dict[str, Any],
    activation: Activation,
    dtype: jnp.dtype,
    layer: Array | None = None,
    live: Array | None = None,
) -> Array:
    """Computes routed experts by native kernels, each row's products where they are; see ``run_experts``."""
    expert_MA, hidden = routing.expert_MA, experts["gate_up_ED2F"].outer[1]
    choose(OP, f"M{x_MD.shape[0]} A{expert_MA.shape[1]} {experts['gate_up_ED2F'].kind}", "native", "cpu", [])
    if live is not None:
        expert_MA = jnp.where(live if live.ndim == 2 else live[:, None], expert_MA, -1)

    both_RX = product(
        x_MD, experts["gate_up_ED2F"], experts.get("gate_up_bias_E2F"), expert_MA=expert_MA, layer=layer, dtype=dtype
    )
    return product(
        activation(both_RX[:, :hidden], both_RX[:, -hidden:]), experts["down_EFD"], experts.get("down_bias_ED"),
        expert_MA=expert_MA.reshape(-1, 1), layer=layer, weight_MA=routing.weight_MA, dtype=dtype,
    )  # fmt: skip


def choose_kernel(rows: int, top_k: int, experts: dict[str, Weight], policy: Policy, *, stacked: bool) -> Choice:
    """Chooses what computes M rows of routed experts, and says why."""
    kernels, grouped = policy.compute.kernels, policy.compute.grouped
    gated = experts["gate_up_ED2F"].shape[-2] != 1
    whole = gated and not obstacles_on(policy.compute.mesh, experts)
    if grouped != "xla" and whole and groupable(experts, stacked=stacked):
        return Choice(OP, "", grouped, "in groups, for their gradients")
    if kernels == "xla":
        return Choice(OP, "", "xla", "no kernels are wanted")
    name = case_name(rows_on_each(policy, rows), top_k, experts)
    if kernels == "native":
        return choose(OP, name, kernels, "cpu", [UNPACKED])
    blocked = obstacles_on(policy.compute.mesh, experts)
    blocked += [] if gated else [UNGATED]
    mosaic = blocked + mosaic_obstacles(experts, policy.compute.dtype)
    mosaic += [DIFFERENTIABLE] if rows > GROUPED_ROWS else []
    return choose(
        OP, name, policy.compute.wanted_kernels, "cuda", obstacles(experts, stacked=stacked) + blocked,
        mosaic=mosaic, faster=mosaic_is_faster(experts, rows),
    )  # fmt: skip


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _batched_dot(x_NZD: Array, w_NDF: Array, dtype: jnp.dtype) -> Array:
    x_NZD, w_NDF = whole_tiles(x_NZD.astype(dtype), 2, dtype), whole_tiles(w_NDF.astype(dtype), 1, dtype)
    return jnp.einsum("nzd,ndf->nzf", x_NZD, w_NDF, preferred_element_type=jnp.float32)


def _batched_dot_fwd(x_NZD: Array, w_NDF: Array, dtype: jnp.dtype):
    return _batched_dot(x_NZD, w_NDF, dtype), (x_NZD, w_NDF)


def _batched_dot_bwd(dtype: jnp.dtype, saved: tuple[Array, Array], grad_NZF: Array):
    x_NZD, w_NDF = saved
    grad = grad_NZF.astype(dtype)
    grad_x = jnp.einsum("nzf,ndf->nzd", grad, w_NDF.astype(dtype), preferred_element_type=jnp.float32)
    grad_w = jnp.einsum("nzd,nzf->ndf", x_NZD.astype(dtype), grad, preferred_element_type=jnp.float32)
    return grad_x.astype(x_NZD.dtype), grad_w.astype(w_NDF.dtype)


_batched_dot.defvjp(_batched_dot_fwd, _batched_dot_bwd)
