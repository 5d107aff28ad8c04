"""The kernels' operations in float64 on the host, for a few rows: what results on the card are compared with."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from pallas_kernels.quantized import Quantized

FP4 = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def wide(w: Any, place: tuple[int, ...] = ()) -> np.ndarray:
    """One entry of the leading axes of a weight as float64.

    Args:
      w: an array, or quantized.
      place: index of the leading axes.
    """
    if not isinstance(w, Quantized):
        return np.asarray(w[place]).astype(np.float64)
    data, scale, how = np.asarray(w.data[place]), np.asarray(w.scale[place]), w.format
    values = data.astype(np.float64)
    if how.kind == "fp4":
        axis = data.ndim + how.packed_axis
        codes = np.stack([data & 15, data >> 4], axis=axis + 1)
        values = FP4[codes.reshape(*data.shape[:axis], -1, *data.shape[axis + 1 :])]
    factor = 2.0 ** (scale.astype(np.float64) - 127) if how.exponent_scales else scale.astype(np.float64)
    blocks = how.blocks[-values.ndim :]
    for axis, block in enumerate(blocks, start=values.ndim - len(blocks)):
        factor = np.repeat(factor, block, axis=axis).take(np.arange(values.shape[axis]), axis=axis)
    return values * factor


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Hidden units of most families."""
    return gate / (1 + np.exp(-gate)) * up


def gpt_oss(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Hidden units of gpt-oss."""
    gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
    return (up + 1) * gate / (1 + np.exp(-1.702 * gate))


def routed_experts(
    x_MD: Any, expert_MA: Any, weight_MA: Any, weights: Mapping[str, Any], layer: int | None, *, oss: bool, rows: int
) -> np.ndarray:
    """The first ``rows`` rows of ``pallas_kernels.routed_experts``; see there."""
    lead = () if layer is None else (layer,)
    experts = weights["down_EFD"].shape[len(lead)]
    x, choice, weight = (np.asarray(a)[:rows] for a in (x_MD, expert_MA, weight_MA))
    out = np.zeros((len(x), x.shape[1]))
    for m, a in np.argwhere((choice >= 0) & (choice < experts)):
        place = (*lead, int(choice[m, a]))
        both = np.tensordot(x[m].astype(np.float64), wide(weights["gate_up_ED2F"], place), 1)
        if "gate_up_bias_E2F" in weights:
            both = both + wide(weights["gate_up_bias_E2F"], place)
        y = (gpt_oss if oss else swiglu)(both[0], both[1]) @ wide(weights["down_EFD"], place)
        if "down_bias_ED" in weights:
            y = y + wide(weights["down_bias_ED"], place)
        out[m] += float(weight[m, a]) * y
    return out


def few_rows_dense(x_MD: Any, w: Any, layer: int, *, rows: int) -> np.ndarray:
    """The first ``rows`` rows of ``pallas_kernels.few_rows_dense``; see there."""
    return np.asarray(x_MD)[:rows].astype(np.float64) @ wide(w, (layer,))


def attention(
    q_THC: np.ndarray,
    k_GSC: np.ndarray,
    v_GSC: np.ndarray,
    position_T: np.ndarray,
    *,
    scale: float,
    sinks_H: Any = None,
) -> np.ndarray:
    """One row of ``pallas_kernels.verify_attention``: queries [T, H, C], its keys and values, float64 [T, H, C']."""
    heads, group = q_THC.shape[1], q_THC.shape[1] // k_GSC.shape[0]
    out = np.zeros((*q_THC.shape[:2], v_GSC.shape[2]))
    for t, last in enumerate(position_T):
        for h in range(heads):
            score = k_GSC[h // group, : last + 1] @ q_THC[t, h].astype(np.float64) * scale
            top = max(score.max(), -np.inf if sinks_H is None else float(sinks_H[h]))
            prob = np.exp(score - top)
            total = prob.sum() + (0 if sinks_H is None else np.exp(float(sinks_H[h]) - top))
            out[t, h] = prob @ v_GSC[h // group, : last + 1] / total
    return out


def apart(out: Any, exact: np.ndarray) -> float:
    """Norm of the difference over the norm of what it should be; not-a-number counts as infinitely far."""
    far = float(np.linalg.norm(np.asarray(out, np.float64) - exact) / np.linalg.norm(exact))
    return far if np.isfinite(far) else float("inf")
