"""Tensors of a plan to parameters on their devices: one tensor at a time, into its final layout and dtype."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxspec.checkpoint.files.finite import all_finite, fault
from jaxspec.checkpoint.files.stream import TensorName
from jaxspec.checkpoint.load.load_plan import LoadPlan, scale_steps
from jaxspec.checkpoint.load.places import TargetLeaf, flatten, part_shapes, unflatten
from jaxspec.checkpoint.load.stored import check_numbers, read_numbers, read_scales, read_values
from jaxspec.checkpoint.names.copies import shape_without_copies, with_copies
from jaxspec.checkpoint.names.packs import PACKS, Arrays
from jaxspec.checkpoint.names.table import NameRule
from jaxspec.errors import CheckpointError
from jaxspec.native.packing import Packed, write_numbers, write_scales
from jaxspec.nn.param import declared
from jaxspec.shapes import Params
from pallas_kernels.quantized import Quantized

ALIGNMENT = 64  # from here on JAX takes a numpy array on CPU as its own instead of copying it
TILE = 128
Shape = tuple[int, ...]
Index = tuple[slice, ...]
Read = tuple[np.ndarray, Mapping[TensorName, int]]  # a part of an array, and the bytes of the tensors that it took
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ArraySource:
    """One array of the parameters and how its parts are read.

    Attributes:
      shape, dtype: of the whole array.
      leaf: the rules of its parts.
      read: reads a slice of a rule's part.
    """

    shape: Shape
    dtype: np.dtype
    leaf: TargetLeaf
    read: Callable[[NameRule, Index], Read]


def fill(plan: LoadPlan, shardings: Any = None, show: Progress | None = None) -> Params:
    """Reads every tensor into its final layout, dtype and device.

    Args:
      plan: a checked one.
      shardings: of every parameter, as a tree like that of the parameters or as a function that makes it from the
        tree of their shapes; None puts all on the default device.
      show: called with (bytes loaded, bytes in all), of what this process's devices hold.

    Raises:
      CheckpointError: numbers or scales are not finite.
    """
    tree: Any = shardings(unflatten(plan.leaves)) if callable(shardings) else shardings
    sharding_of = flatten(tree) if tree is not None else {}
    sources = {path: _sources(plan, path) for path in plan.rules_by_leaf}
    targets = {(path, name): _part(sharding_of.get(path), name) for path in sources for name in sources[path]}
    total = sum(_local_bytes(sources[path][name], target) for (path, name), target in targets.items())
    loaded, params = 0, {}
    for path, leaf in plan.leaves.items():
        if path in plan.computed:
            params[path] = _put(plan.computed[path], sharding_of.get(path))
            continue
        packed = declared(path).packed(leaf, plan.net.policy)
        arrays = {}
        for name, source in sources[path].items():
            if packed is None:
                arrays[name] = _array(plan, source, targets[path, name])
            else:
                arrays[name] = jax.device_put(_packed(plan, source, packed, name, leaf))
            loaded += _local_bytes(source, targets[path, name])
            if show:
                show(loaded, total)
        if packed is not None:
            params[path] = replace(packed, scale=jnp.zeros(packed.scale.shape, jnp.float32))
            params[path] = replace(params[path], **arrays)
        else:
            params[path] = Quantized(**arrays, format=leaf.format) if isinstance(leaf, Quantized) else arrays["data"]
    return {"params": unflatten(params)}


def _part(sharding: Any, name: str) -> Sharding | None:
    return getattr(sharding, name) if isinstance(sharding, Quantized) else sharding


def _local_bytes(source: ArraySource, sharding: Sharding | None) -> int:
    """Returns the bytes of an array that this process's devices hold, each counted once."""
    indexes = [()] if sharding is None else sharding.addressable_devices_indices_map(source.shape).values()
    slices = {_bounds(index or (), source.shape) for index in indexes}
    return source.dtype.itemsize * sum(math.prod(stop - start for start, stop in bounds) for bounds in slices)


def _bounds(index: Index, shape: Shape) -> tuple[tuple[int, int], ...]:
    """Returns first and last entry along each axis; axes that an index leaves out are whole."""
    spans = (*index, *[slice(None)] * (len(shape) - len(index)))
    return tuple(s.indices(n)[:2] for s, n in zip(spans, shape, strict=True))


def _sources(plan: LoadPlan, path: str) -> dict[str, ArraySource]:
    """Returns what a parameter consists of: its data, and its scales if it stays quantized."""
    leaf, rules = plan.leaves[path], plan.rules_by_leaf[path]
    if not isinstance(leaf, Quantized):
        dtype = np.dtype(leaf.dtype)
        return {"data": ArraySource(leaf.shape, dtype, rules, partial(_plain, plan, rules.part, dtype))}
    data, scale = leaf.format.data_shape(rules.part), leaf.format.scale_shape(rules.part)
    return {
        "data": ArraySource(leaf.data.shape, np.dtype(leaf.data.dtype), rules, partial(_data, plan, data)),
        "scale": ArraySource(leaf.scale.shape, np.dtype(leaf.scale.dtype), rules, partial(_scale, plan, scale, leaf)),
    }


def _plain(plan: LoadPlan, part: Shape, dtype: np.dtype, rule: NameRule, index: Index) -> Read:
    stored = [plan.stored[name] for name in rule.names]
    out, cut = _joined(rule, [read_values(plan.files, s, dtype) for s in stored], part, index)
    read = {s.data: a.nbytes for s, a in zip(stored, cut, strict=True) if s.form is None}
    # A quantized matrix is widened before it is cut, for the cut may go through its blocks.
    read |= {name: plan.files.size(name) for s in stored if s.form for name in s.tensors}
    return out, read


def _data(plan: LoadPlan, part: Shape, rule: NameRule, index: Index) -> Read:
    stored = [plan.stored[name] for name in rule.names]
    out, cut = _joined(rule, [read_numbers(plan.files, s) for s in stored], part, index)
    read = {}
    for s, array in zip(stored, cut, strict=True):
        check_numbers(plan.files, array, s)
        read[s.data] = plan.files.size(s.data) if s.to_quantize else array.nbytes
    return out, read


def _joined(rule: NameRule, arrays: Arrays, part: Shape, index: Index) -> tuple[np.ndarray, Arrays]:
    """Returns a slice of what a rule's arrays make, and what of them it took; all of them where heads are copied."""
    pack = PACKS[rule.pack]
    if rule.copies > 1:
        return _copied(rule, arrays, part)[index], arrays
    cut, small, rest = pack.cut(arrays, part, index)
    return pack.join(cut, small)[rest], cut


def _copied(rule: NameRule, arrays: Arrays, part: Shape) -> np.ndarray:
    return with_copies(PACKS[rule.pack].join(arrays, shape_without_copies(part, rule.copies)), rule.copies)


def _scale(plan: LoadPlan, part: Shape, leaf: Quantized, rule: NameRule, index: Index) -> Read:
    stored = [plan.stored[name] for name in rule.names]
    parts = []
    shapes = part_shapes(rule.pack, shape_without_copies(part, rule.copies))
    for s, (rows, columns) in zip(stored, shapes, strict=True):
        assert s.form is not None, "the plan keeps only quantized tensors quantized"
        down, across = scale_steps(rule.pack, leaf.format, s.form)
        parts.append(np.repeat(np.repeat(read_scales(plan.files, s), down, 0), across, 1)[:rows, :columns])
    # Scales are few, and read whole.
    return _copied(rule, parts, part)[index], {s.tensors[-1]: plan.files.size(s.tensors[-1]) for s in stored}


def _array(plan: LoadPlan, source: ArraySource, sharding: Sharding | None) -> jax.Array:
    if sharding is None:
        return jax.device_put(_piece(plan, source, (slice(None),) * len(source.shape)))
    pieces: dict[Any, np.ndarray] = {}  # several devices may hold the same one

    def piece(index: Index | None) -> np.ndarray:
        bounds = _bounds(index or (), source.shape)
        if bounds not in pieces:
            pieces[bounds] = _piece(plan, source, tuple(slice(*pair) for pair in bounds))
        return pieces[bounds]

    return jax.make_array_from_callback(source.shape, sharding, piece)


def _put(value: np.ndarray, sharding: Sharding | None) -> jax.Array:
    if sharding is None:
        return jax.device_put(value)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _piece(plan: LoadPlan, source: ArraySource, index: Index) -> np.ndarray:
    """Reads a slice of an array; tensors that it does not touch are not read."""
    bounds = _bounds(index, source.shape)
    out = _aligned(tuple(stop - start for start, stop in bounds), source.dtype)
    lead = source.leaf.lead
    for entry in itertools.product(*(range(*b) for b in bounds[:lead])):
        rule = source.leaf.rules[entry]
        here = tuple(e - start for e, (start, _) in zip(entry, bounds, strict=False))
        _read_into(plan, source, rule, out[here], index[lead:], _copy)
    return out


def _read_into(
    plan: LoadPlan,
    source: ArraySource,
    rule: NameRule,
    out: np.ndarray,
    index: Index,
    copy: Callable[[np.ndarray, np.ndarray], None],
) -> None:
    """Reads a slice of what one rule fills to its place."""
    part, read = source.read(rule, index)
    copy(out, part)
    if not all_finite(out):
        raise CheckpointError(_damage(plan, rule, source.dtype))
    del part  # a view of the mapped file, whose memory is let go of now
    for tensor, size in read.items():
        plan.files.release(tensor, size)


def _packed(plan: LoadPlan, source: ArraySource, to: Packed, name: str, leaf: Any) -> np.ndarray:
    """Reads the numbers or scales of a packed weight, a matrix at a time."""
    like, lead = getattr(to, name), source.leaf.lead
    out = _aligned(like.shape, np.dtype(like.dtype))
    whole = (slice(None),) * (len(source.shape) - lead)

    def copy(place: np.ndarray, part: np.ndarray) -> None:
        for entry in np.ndindex(*to.lead[lead:]):
            if name == "data":
                write_numbers(place[entry], part[entry], to)
            else:
                write_scales(place[entry], part[entry], to, leaf.format)

    for entry in itertools.product(*map(range, to.lead[:lead])):
        _read_into(plan, source, source.leaf.rules[entry], out[entry], whole, copy)
    return out


def _damage(plan: LoadPlan, rule: NameRule, dtype: np.dtype) -> str:
    """Says which of the tensors of a parameter hold numbers that are not finite."""
    stored = [plan.stored[name] for name in rule.names]
    plain = [s.data for s in stored if s.form is None]
    text = next((text for name in plain if (text := fault(str(name), plan.files.read(name)))), None)
    names = ", ".join(str(s.name) for s in stored)
    return text or f"{names}: holds numbers that are too large for {dtype}; load it as float32"


def _aligned(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """Allocates an uninitialized array that JAX can take as its own."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _copy(out: np.ndarray, part: np.ndarray) -> None:
    """Copies with a change of dtype; transposed arrays by bands, which is 4 times faster."""
    if out.dtype == part.dtype and out.dtype.itemsize <= 2:
        plain = np.dtype(f"u{out.dtype.itemsize}")  # numpy moves its own dtypes faster
        out, part = out.view(plain), part.view(plain)
    for band in _bands(part):
        out[band] = part[band]


def _bands(part: np.ndarray) -> Iterator[Any]:
    if part.ndim < 2 or part.flags.c_contiguous or abs(part.strides[-1]) == part.itemsize:
        yield ...
        return
    for start in range(0, part.shape[-1], TILE):
        yield (..., slice(start, start + TILE))
