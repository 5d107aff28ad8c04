"""Takes rows to the devices that hold their experts, and brings the experts' outputs back.

Every transport runs on each device of the axis ``expert`` and takes what computes the device's own experts. None drops
a row, however uneven the choices are: room is made for the worst case, so that there is no overflow to send again.
"""

from collections.abc import Callable, Mapping

import jax.numpy as jnp
from jax import lax

from jaxspec.shapes import Array

AXIS = "expert"
Compute = Callable[[Array, Array, Array], Array]
Transport = Callable[[Compute, Array, Array, Array, int, jnp.dtype], Array]


def sum_everywhere(
    compute: Compute, x_MD: Array, expert_MA: Array, weight_MA: Array, local: int, dtype: jnp.dtype
) -> Array:
    """Every device has all rows and computes its own experts; the caller sums over the devices by one all-reduce.

    Args:
      compute: takes rows, choices counted from the device's first expert (-1 for those of other devices) and combine
        weights; returns float32 [M, D].
      x_MD: rows.
      expert_MA: choices among all experts, negative for none.
      weight_MA: combine weights.
      local: number of experts of each device.
      dtype: in which rows are computed with, and sent.

    Returns:
      float32 [M, D].
    """
    return compute(x_MD, _local_choices(expert_MA, local), weight_MA)


def exchange_padded(
    compute: Compute, x_MD: Array, expert_MA: Array, weight_MA: Array, local: int, dtype: jnp.dtype
) -> Array:
    """Every device has rows of its own: one all-to-all takes them to the experts, one brings the outputs back.

    Between each two devices there is room for all M rows, and a row takes its slot whether it goes there or not: the
    bytes do not depend on the choices, they are those of the worst case (``exchange_ragged`` sends what is needed). A
    row goes to a device once, with all its choices; what comes back is the sum over the experts there. Arguments as of
    ``sum_everywhere``; the M rows are the device's own.
    """
    devices, (rows, width) = lax.axis_size(AXIS), x_MD.shape
    goes_NM = jnp.any((expert_MA // local)[None] == jnp.arange(devices, dtype=jnp.int32)[:, None, None], axis=2)
    packed_MX = _pack(x_MD.astype(dtype), expert_MA, weight_MA)
    empty_MX = _pack(jnp.zeros((1, width), dtype), jnp.full_like(expert_MA[:1], -1), jnp.zeros_like(weight_MA[:1]))
    sent_NMX = jnp.where(goes_NM[..., None], packed_MX, empty_MX)
    here_NMX = lax.all_to_all(sent_NMX, AXIS, 0, 0)
    x, expert, weight = _unpack(here_NMX.reshape(devices * rows, -1), width, expert_MA.shape[1], dtype)
    out_NMD = compute(x, _local_choices(expert, local), weight).reshape(devices, rows, width)
    return _sum_in_order(lax.all_to_all(out_NMD, AXIS, 0, 0))


def exchange_ragged(
    compute: Compute, x_MD: Array, expert_MA: Array, weight_MA: Array, local: int, dtype: jnp.dtype
) -> Array:
    """As ``exchange_padded``, but only rows that go to a device are sent there; XLA has it on GPUs alone.

    Counts are exchanged first, by a small all-gather. Rows from device n arrive from index n * M on, so each side
    knows all indices from the counts; memory is that of the worst case, traffic that of the choices.
    """
    devices, me, (rows, width) = lax.axis_size(AXIS), lax.axis_index(AXIS), x_MD.shape
    top_k, number_N = expert_MA.shape[1], jnp.arange(devices, dtype=jnp.int32)
    goes_MN = jnp.any((expert_MA // local)[..., None] == number_N, axis=1)
    sent_N = jnp.sum(goes_MN, axis=0, dtype=jnp.int32)
    came_N = lax.all_gather(sent_N, AXIS)[:, me]
    rank_MN = jnp.cumsum(goes_MN, axis=0, dtype=jnp.int32) - 1
    first_N = jnp.cumsum(sent_N, dtype=jnp.int32) - sent_N
    most = rows * min(top_k, devices)
    packed_MX = _pack(x_MD.astype(dtype), expert_MA, weight_MA)
    source_MN = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32)[:, None], goes_MN.shape)
    row_S = jnp.zeros(most, jnp.int32).at[jnp.where(goes_MN, first_N + rank_MN, most)].set(source_MN, mode="drop")
    mine_N = jnp.broadcast_to(me.astype(jnp.int32) * rows, (devices,))
    empty_MX = _pack(jnp.zeros((1, width), dtype), jnp.full_like(expert_MA[:1], -1), jnp.zeros_like(weight_MA[:1]))
    room_SX = jnp.broadcast_to(empty_MX, (devices * rows, empty_MX.shape[1]))
    here_SX = lax.ragged_all_to_all(packed_MX[row_S], room_SX, first_N, sent_N, mine_N, came_N, axis_name=AXIS)
    x, expert, weight = _unpack(here_SX, width, top_k, dtype)
    out_SD = compute(x, _local_choices(expert, local), weight)
    back_SD = lax.ragged_all_to_all(
        out_SD, jnp.zeros_like(out_SD), number_N * rows, came_N, mine_N, sent_N, axis_name=AXIS
    )
    slot_NM = (number_N * rows + jnp.maximum(rank_MN, 0)).T
    return _sum_in_order(jnp.where(goes_MN.T[..., None], back_SD[slot_NM], 0.0))


TRANSPORTS: Mapping[str, Transport] = {
    "sum": sum_everywhere,
    "padded": exchange_padded,
    "ragged": exchange_ragged,
}


def _local_choices(expert_MA: Array, local: int) -> Array:
    """Choices counted from the device's first expert; -1 for those that it does not hold."""
    first = lax.axis_index(AXIS).astype(jnp.int32) * local
    return jnp.where((expert_MA >= first) & (expert_MA < first + local), expert_MA - first, -1)


def _sum_in_order(x_NMD: Array) -> Array:
    total = x_NMD[0]
    for device in range(1, x_NMD.shape[0]):
        total = total + x_NMD[device]
    return total


def _pack(x_MD: Array, expert_MA: Array, weight_MA: Array) -> Array:
    """Rows, choices and weights as bits side by side, so that one exchange carries all of them."""
    word = jnp.uint16 if x_MD.dtype.itemsize == 2 else jnp.uint32
    parts = (x_MD, expert_MA, weight_MA.astype(jnp.float32))
    return jnp.concatenate([lax.bitcast_convert_type(x, word).reshape(x.shape[0], -1) for x in parts], axis=1)


def _unpack(packed_MX: Array, width: int, top_k: int, dtype: jnp.dtype) -> tuple[Array, Array, Array]:
    rows, words = packed_MX.shape[0], 4 // packed_MX.dtype.itemsize
    x, *rest = jnp.split(packed_MX, (width, width + top_k * words), axis=1)
    shape = (rows, top_k, words) if words > 1 else (rows, top_k)
    expert, weight = (
        lax.bitcast_convert_type(part.reshape(shape), kind)
        for part, kind in zip(rest, (jnp.int32, jnp.float32), strict=True)
    )
    return lax.bitcast_convert_type(x, dtype), expert, weight
