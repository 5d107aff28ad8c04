"""Products of a few rows with big weights, and lookups of their rows, in forms that are fast and row-invariant."""

import math
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.nn.matrix import Matrix
from jaxspec.shapes import Array
from pallas_kernels.quantized import Quantized, widen

FEW_COLUMNS = 4
TILE, ROWS_OF_TILE = 32, 16  # an AMX tile: bfloat16 numbers in a row, and rows


@cache
def has_tiles() -> bool:
    """Whether this CPU has AMX bfloat16 tiles; assumed so if /proc/cpuinfo cannot be read."""
    if jax.default_backend() != "cpu":
        return False
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return True
    return "amx_bf16" in flags


def fewest_rows() -> int:
    """Returns the rows from which bfloat16 products on a CPU round each row alike, see ``padded_rows``."""
    return (5 if jax.__version_info__ >= (0, 12) else 3) if has_tiles() else 2


def padded_rows(rows: int) -> int:
    """Returns how many rows a bfloat16 product is computed of, so that a CPU rounds each alike, whatever their number.

    One row takes a path of its own, with AMX two do, too, and so do as many after each 16 where a weight has some
    hundred thousand numbers; with jax 0.12 up to four rows of small products do.
    """
    last = rows % ROWS_OF_TILE if has_tiles() else rows
    return rows + max(fewest_rows() - last, 0) if last else rows


def whole_tiles(x: Array, axis: int, dtype: jnp.dtype) -> Array:
    """Pads a contracted axis with zeros to whole tiles, where a CPU has them.

    With fewer than a tile's numbers at the end, rounding depends on how many rows there are.
    """
    if dtype != jnp.bfloat16 or not x.shape[axis] % TILE or not has_tiles():
        return x
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, -x.shape[axis] % TILE)
    return jnp.pad(x, pads)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _dot(x_MD: Array, w_DX: Array, dtype: jnp.dtype) -> Array:
    return _typed_dot(x_MD, w_DX, dtype)


def _typed_dot(a: Array, b: Array, dtype: jnp.dtype, *, contract: int = 0) -> Array:
    """Contracts the last axis of a with an axis of b."""
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    a, b = whole_tiles(a.astype(dtype), 1, dtype), whole_tiles(b.astype(dtype), contract, dtype)
    numbers = (((1,), (contract,)), ((), ()))
    return lax.dot_general(a, b, numbers, precision=precision, preferred_element_type=jnp.float32)


def _transposed(x_MX: Array) -> Array:
    """Transposes in parts of 16 rows: XLA:CPU moves a plain transposition into a product, which then is float32."""
    rows, width = x_MX.shape
    return x_MX.reshape(-1, math.gcd(rows, 16), width).transpose(2, 0, 1).reshape(width, rows)


def _dot_fwd(x_MD: Array, w_DX: Array, dtype: jnp.dtype):
    return _typed_dot(x_MD, w_DX, dtype), (x_MD, w_DX)


def _dot_bwd(dtype: jnp.dtype, saved: tuple[Array, Array], grad_MX: Array):
    x_MD, w_DX = saved
    # Both factors in the compute dtype: a mixed float32 x bfloat16 product is 10 times slower on CPU.
    grad_x = _typed_dot(grad_MX, w_DX, dtype, contract=1)
    grad_w = _typed_dot(_transposed(x_MD.astype(dtype)), grad_MX, dtype)
    # The gradient of a transposed weight is transposed; XLA:CPU would move that into the product and cannot run that.
    grad_w = lax.optimization_barrier(grad_w)
    return grad_x.astype(x_MD.dtype), grad_w.astype(w_DX.dtype)


_dot.defvjp(_dot_fwd, _dot_bwd)


def dense(
    x: Array,
    w: Array | Quantized | Matrix,
    bias: Array | None = None,
    *,
    dtype: jnp.dtype | None = None,
    axes: int = 1,
) -> Array:
    """Contracts the last axes of x with the first axes of w, accumulating in float32.

    Rows are padded to ``padded_rows`` and a few columns to four: on CPU fewer take other paths, 7 times slower for one
    row, whose rounding differs.

    Args:
      x: [..., D] float array.
      w: [D, ...] weight, plain or quantized; a ``Matrix`` is multiplied by its kernel where that is possible.
      bias: added to the result, of w's trailing shape.
      dtype: of both factors; w's own dtype by default.
      axes: how many axes are contracted.

    Returns:
      float32 [..., *w.shape[axes:]].
    """
    lead, trail = x.shape[: x.ndim - axes], w.shape[axes:]
    width = math.prod(w.shape[:axes])
    x_MD = x.reshape(-1, width)
    if isinstance(w, Matrix):
        product = w.product(x_MD, dtype or jnp.bfloat16, axes)
        if product is not None:
            out = product.reshape(*lead, *trail)
            return out if bias is None else out + bias.astype(jnp.float32)
        w = w.own()
    if isinstance(w, Quantized):
        dtype = dtype or jnp.dtype(jnp.bfloat16)
        w = widen(w, dtype)
    rows = x_MD.shape[0]
    if padded_rows(rows) > rows:
        x_MD = jnp.pad(x_MD, ((0, padded_rows(rows) - rows), (0, 0)), mode="edge")
    w_DX = w.reshape(width, -1)
    columns = w_DX.shape[1]
    if columns < FEW_COLUMNS:
        w_DX = jnp.pad(w_DX, ((0, 0), (0, FEW_COLUMNS - columns)))
    out: Array = _dot(x_MD, w_DX, jnp.dtype(dtype or w.dtype))  # pyright: ignore[reportAssignmentType]
    out = out[:rows, :columns].reshape(*lead, *trail)
    return out if bias is None else out + bias.astype(jnp.float32)


def batched_dense(x_XMC: Array, w: Array, *, contract: int, dtype: jnp.dtype, spare: int = 1) -> Array:
    """One product per entry of the first axis, such as per head, accumulating in float32.

    A row is added always: few rows would round differently, and XLA:CPU moves a transposition of x into the product,
    which it then computes in float32, weights widened and all.

    Args:
      x_XMC: M rows each.
      w: [X, C, N], or [X, N, C].
      contract: which axis of w is contracted, 1 or 2.
      dtype: of both factors.
      spare: rows to add at least, 0 where there are some already.

    Returns:
      float32 [X, M, N].
    """
    rows = x_XMC.shape[1]
    x_XMC = jnp.pad(x_XMC, ((0, 0), (0, padded_rows(rows + spare) - rows), (0, 0)))
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    numbers = (((2,), (contract,)), ((0,), (0,)))
    x, w = whole_tiles(x_XMC.astype(dtype), 2, dtype), whole_tiles(w.astype(dtype), contract, dtype)
    out = lax.dot_general(x, w, numbers, precision=precision, preferred_element_type=jnp.float32)
    return out[:, :rows]


def einsum(rule: str, a: Array, b: Array, dtype: Any) -> Array:
    """Computes ``jnp.einsum`` with both factors, and those of its gradients, in one dtype; sums are float32.

    Args:
      rule: in which every index is in two of its three terms, or in all of them.
      a: the first factor.
      b: the second factor.
      dtype: of both.
    """
    out: Any = _einsum(rule, a, b, dtype)
    return out


@partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def _einsum(rule: str, a: Array, b: Array, dtype: Any) -> Array:
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return jnp.einsum(rule, a.astype(dtype), b.astype(dtype), precision=precision, preferred_element_type=jnp.float32)


def _einsum_fwd(rule: str, a: Array, b: Array, dtype: Any) -> tuple[Array, tuple[Array, Array]]:
    return einsum(rule, a, b, dtype), (a, b)


def _einsum_bwd(rule: str, dtype: Any, saved: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    (a, b), (terms, out) = saved, rule.split("->")
    first, second = terms.split(",")
    grad_a = einsum(f"{out},{second}->{first}", grad, b, dtype)
    grad_b = einsum(f"{first},{out}->{second}", a, grad, dtype)
    return grad_a.astype(a.dtype), grad_b.astype(b.dtype)


_einsum.defvjp(_einsum_fwd, _einsum_bwd)


def per_head_dense(x_BTHC: Array, w: Array, *, contract: int, dtype: jnp.dtype, apart: bool) -> Array:
    """Each head's product with its own weights, or each group's of heads.

    Args:
      x_BTHC: [B, T, H, C].
      w: [H, C, N], or [H, N, C].
      contract: which axis of w is contracted, 1 or 2.
      dtype: of both factors.
      apart: whether rows lie on several devices. Each of them then gets more positions instead of all more rows, for
        which most rows would have to move to another device.

    Returns:
      float32 [B, T, H, N].
    """
    rows, count, heads, width = x_BTHC.shape
    if apart:
        # However many rows a device has, their positions never end shortly after a tile.
        whole = 1 << (fewest_rows() - 1).bit_length() if has_tiles() else 1
        x_BTHC = jnp.pad(x_BTHC, ((0, 0), (0, whole - count % whole), (0, 0), (0, 0)))
    x_HMC = x_BTHC.reshape(-1, heads, width).swapaxes(0, 1)
    out_HMN = batched_dense(x_HMC, w, contract=contract, dtype=dtype, spare=0 if apart else 1)
    return out_HMN.swapaxes(0, 1).reshape(rows, -1, heads, out_HMN.shape[2])[:, :count]


def exact_dense(x: Array, w_DX: Array | Matrix, bias: Array | None = None, *, dtype: jnp.dtype) -> Array:
    """A product to float32's precision, for routers and mixing weights that are small and whose errors spread.

    Where the rest computes in bfloat16, both factors are split into bfloat16 parts (8 bits each) and the six products
    that matter are summed by one longer bfloat16 product: XLA:CPU's float32 products are not row-invariant.

    Args:
      x: [..., D].
      w_DX: [D, X].
      bias: [X].
      dtype: compute dtype of everything else.

    Returns:
      float32 [..., X].
    """
    if isinstance(w_DX, Matrix):
        product = _exactly(x, w_DX, dtype)
        if product is not None:
            return product if bias is None else product + bias.astype(jnp.float32)
        w_DX = cast(Array, w_DX.own())
    if dtype == jnp.float32:
        return dense(x, w_DX.astype(jnp.float32), bias, dtype=dtype)
    parts_x, parts_w = _parts(x), _parts(w_DX) if w_DX.dtype == jnp.float32 else [w_DX]
    pairs = [(i, j) for j in range(len(parts_w)) for i in range(3) if i + j < 3]
    # Where weights are constants, XLA makes several products of that with a plain concatenation, and adds them up.
    long_x = lax.optimization_barrier(jnp.concatenate([parts_x[i] for i, _ in pairs], axis=-1))
    return dense(long_x, jnp.concatenate([parts_w[j] for _, j in pairs], axis=0), bias, dtype=dtype)


def _exactly(x: Array, w: Matrix, dtype: jnp.dtype) -> Array | None:
    """The same by a kernel: a bfloat16 weight is read once, for the three parts of x as rows of one product."""
    x_MD, trail = x.reshape(-1, x.shape[-1]), w.shape[1:]
    if isinstance(w.whole, Quantized):
        return None
    rows, kind, thirds = exact_rows(x_MD, w, dtype)
    out = w.product(rows, kind)
    if thirds and out is not None:
        high, middle, low = jnp.split(out, 3)
        out = high + (middle + low)
    return None if out is None else out.reshape(*x.shape[:-1], *trail)


def is_cut(w: Matrix, dtype: jnp.dtype) -> bool:
    """Whether an exact product by a kernel is one of three parts of each row."""
    return isinstance(w.whole, jax.Array) and jnp.float32 not in (dtype, w.whole.dtype)


def exact_rows(x_MD: Array, w: Matrix, dtype: jnp.dtype) -> tuple[Array, jnp.dtype, bool]:
    """Returns the rows and the dtype of an exact product, and whether they are three parts of x, to be added up."""
    if not is_cut(w, dtype):
        return x_MD, jnp.dtype("float32"), False
    return jnp.concatenate(_parts(x_MD)), dtype, True


def _parts(x: Array) -> list[Array]:
    """Splits x into three bfloat16 arrays that add up to it."""
    parts, rest = [], x.astype(jnp.float32)
    for _ in range(3):
        # Cut, not rounded: XLA may drop a rounding that is undone at once, and the rest would then be 0.
        bits = lax.bitcast_convert_type(rest, jnp.uint32) & np.uint32(0xFFFF0000)
        head = lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(head.astype(jnp.bfloat16))
        rest = rest - head
    return parts


def lookup(table_VD: Array, row: Array) -> Array:
    """Looks up rows of a table by number, float32 [..., D].

    XLA:CPU widens the table of a bfloat16 gather to float32. It must not do so in front of a loop that looks up, the
    whole table in every dispatch, but in the gather, a row at a time: so the table waits for the numbers, which
    change in every turn.

    Args:
      table_VD: weights, of any floating type.
      row: row numbers, int32 of any shape, below V.
    """
    table_VD, row = lax.optimization_barrier((table_VD, row))
    return table_VD[row].astype(jnp.float32)
