"""Other weights for a loaded model, in its own layout: from a directory, published tensors or a tree of parameters."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.checkpoint.files.in_memory import TensorsInMemory
from jaxspec.checkpoint.files.stream import TensorFiles
from jaxspec.checkpoint.gguf.gguf_tensors import open_tensors
from jaxspec.checkpoint.load.fill import fill
from jaxspec.checkpoint.load.load_plan import make_plan
from jaxspec.checkpoint.load.model import Model, read_config, shardings_on
from jaxspec.checkpoint.load.places import flatten, resolve_rules, unflatten
from jaxspec.checkpoint.load.save import export_tensors
from jaxspec.checkpoint.load.slots import slots_of_model
from jaxspec.checkpoint.load.stored import check_method
from jaxspec.checkpoint.names.known import known_tables
from jaxspec.errors import ConfigError
from jaxspec.models.cache_dtype import cache_dtype_of, with_cache_dtype
from jaxspec.models.catalog import arch_of
from jaxspec.models.kv_copies import with_kv_copies, without_kv_copies
from jaxspec.models.text_length import for_texts
from jaxspec.native.packing import Packed, pack_like
from jaxspec.perf.expert_placement import Placement
from jaxspec.shapes import Params
from pallas_kernels.quantized import Quantized

MOST_NAMED = 8
Given = str | Path | Mapping[str, Any]


def refill(
    model: Model, given: Given, *, quantization: str, mesh: Mesh | None = None, placement: Placement | None = None
) -> Params:
    """Returns other parameters for a model, of the shapes, dtypes, packing and places of those that it has.

    Args:
      model: loaded.
      given: a directory or GGUF file of the same architecture; arrays by published name; or the tree of parameters in
        the model's own layout or in that of training, whose layers are apart and whose weights are plain.
      quantization: that the model was loaded with; so are the others.
      mesh: devices.
      placement: of experts.

    Raises:
      ConfigError: it is of another architecture, layout or quantization; mismatches are listed.
      CheckpointError: tensors are missing, not known, misshaped or not finite, all named.
    """
    if isinstance(given, str | Path):
        directory = Path(given)
        own = model.net.arch
        arch = for_texts(with_kv_copies(arch_of(read_config(directory)), model.net.policy.compute), own.max_position)
        arch = with_cache_dtype(arch, cache_dtype_of(own))
        if replace(arch, tied=own.tied) != own:
            raise ConfigError(f"update_target: {directory} is of another architecture than {model.directory}")
        return _load(model, directory, open_tensors(directory), quantization, mesh, placement)
    if not isinstance(given, Mapping) or not given:
        raise ConfigError(
            "update_target: a directory, arrays by published name, or a tree of parameters is needed, got "
            f"{type(given).__name__}"
        )
    if set(given) != {"params"}:
        if wrong := sorted(name for name, x in given.items() if not hasattr(x, "dtype")):
            raise ConfigError(f"update_target: what is not an array: {_named(wrong)}")
        return _load(model, model.directory, TensorsInMemory(given), quantization, mesh, placement)
    own, new = flatten(model.params["params"]), flatten(given["params"])
    if own.keys() == new.keys():
        return {"params": unflatten(_in_place(own, new))}
    return _load(model, model.directory, TensorsInMemory(_published(model, new)), quantization, mesh, placement)


def _load(
    model: Model, directory: Path, files: TensorFiles, quantization: str, mesh: Mesh | None, placement: Placement | None
) -> Params:
    """Loads tensors as the model's own were."""
    net, table = model.net, known_tables()[model.net.arch.family]
    plan = make_plan(
        directory, net.clone(policy=net.policy.update(formats=())), table.rules(net.arch, files),
        unread=table.unread(net.arch), block=check_method(model.config), quantization=quantization, files=files,
        slots_by_layer=slots_of_model(placement),
    )  # fmt: skip
    plan.check()
    if plan.net != net:
        was, now = dict(net.policy.storage.formats), dict(plan.net.policy.storage.formats)
        wrong = sorted(kind for kind in was.keys() | now.keys() if was.get(kind) != now.get(kind))
        raise ConfigError(f"update_target: quantized otherwise than the weights in use: {_named(wrong)}")
    return fill(plan, shardings_on(mesh))


def _in_place(own: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Returns new parameters in the dtypes, packing and places of those in use; neither is changed."""
    wrong = [f"{path} {_words(own[path])}, got {_words(x)}" for path, x in new.items() if not _fits(own[path], x)]
    if wrong:
        raise ConfigError(f"update_target: parameters must fit those in use; these do not: {_named(sorted(wrong))}")
    return {path: _like(own[path], x) for path, x in new.items()}


def _fits(own: Any, new: Any) -> bool:
    if isinstance(new, Packed | Quantized):
        return jax.tree.structure(own) == jax.tree.structure(new) and all(
            (a.shape, a.dtype) == (b.shape, b.dtype)
            for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(new), strict=True)
        )
    plain = not isinstance(own, Quantized) and not (isinstance(own, Packed) and own.group)
    return plain and getattr(new, "shape", None) == own.shape


def _words(leaf: Any) -> str:
    """Says what kind of array a parameter is."""
    if isinstance(leaf, Quantized):
        return f"{leaf.format.kind} {leaf.data.shape}"
    kind = leaf.kind if isinstance(leaf, Packed) and leaf.group else getattr(leaf, "dtype", "")
    return f"{kind} {getattr(leaf, 'shape', type(leaf).__name__)}".strip()


def _like(own: Any, new: Any) -> Any:
    if isinstance(own, Packed) and not isinstance(new, Packed):
        return pack_like(own, new)

    def one(old: jax.Array, x: Any) -> jax.Array:
        array = jnp.array(x, old.dtype)  # a copy: a training donates what it updates
        return array if array.sharding == old.sharding else jax.device_put(array, old.sharding)

    return jax.tree.map(one, own, new)


def _published(model: Model, new: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns a tree in the layout of training under its published names, in float32."""
    arch = without_kv_copies(model.net.arch)
    rules = resolve_rules(known_tables()[arch.family].rules(arch), new, arch)
    odd = [path for path, leaf in new.items() if path not in rules or not isinstance(leaf, jax.Array | np.ndarray)]
    if odd:
        raise ConfigError(f"update_target: no parameters of this model: {_named(sorted(odd))}")
    return export_tensors({"params": unflatten(new)}, arch, np.dtype(np.float32))


def _named(names: list[str]) -> str:
    rest = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + rest
