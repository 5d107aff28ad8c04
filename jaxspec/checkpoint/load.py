"""A checkpoint directory to parameters on the device, in the layout that the compute path wants."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint.catalog import known_tables
from jaxspec.checkpoint.stream import TensorFiles
from jaxspec.checkpoint.table import PACKS, Rule, Table
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.arch import ArchSpec
from jaxspec.models.catalog import arch_of
from jaxspec.models.transformer import Policy, Transformer
from jaxspec.shapes import Params

STACKED = {"gate_up_D2F": "gate_up_ED2F", "down_FD": "down_EFD"}


@dataclass(frozen=True)
class Model:
    """A loaded model.

    Attributes:
      net: the network, hashable.
      params: its parameters.
      config: the published config.
      generation: the published generation defaults, empty if there are none.
      directory: where it came from.
    """

    net: Transformer
    params: Params
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    directory: Path


def read_config(directory: Path) -> dict[str, Any]:
    """The published ``config.json``.

    Raises:
      ConfigError: the directory or file is missing, or the file is not a JSON object.
    """
    file = directory / "config.json"
    if not directory.is_dir():
        raise ConfigError(
            f"{directory}: no such directory; a model is a directory with config.json and .safetensors files"
        )
    if not file.exists():
        raise ConfigError(f"{directory}: no config.json; a model is a directory in Hugging Face layout")
    return _read_json(file)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{file}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: a JSON object is needed, got {type(value).__name__}")
    return value


def abstract_params(net: Transformer) -> Params:
    """Shapes and dtypes of every parameter, nothing allocated."""
    token = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    shapes = jax.eval_shape(lambda t: net.init(jax.random.key(0), t, t, method="logits_of"), token)
    return shapes["params"]


def flatten(params: Params) -> dict[str, Any]:
    """Leaves by path, parts joined with a slash."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return {"/".join(part.key for part in path): leaf for path, leaf in leaves}


def place_of(rule: Rule, leaves: Mapping[str, Any]) -> tuple[str, int | None] | None:
    """Leaf path of a rule and its index along a stack of experts, if any; None if the rule does not apply."""
    if rule.leaf in leaves:
        return rule.leaf, None
    folder, _, name = rule.leaf.rpartition("/")
    base, _, number = name.rpartition("_")
    if base in STACKED and f"{folder}/{STACKED[base]}" in leaves:
        return f"{folder}/{STACKED[base]}", int(number)
    return None


def wanted(
    table: Table, arch: ArchSpec, leaves: Mapping[str, Any]
) -> Iterator[tuple[Rule, str, int | None, list[tuple]]]:
    """Each rule that applies, its place, and the shapes of the published tensors it needs."""
    for rule in table.rules(arch):
        place = place_of(rule, leaves)
        if place is None:
            continue
        path, index = place
        shape = leaves[path].shape if index is None else leaves[path].shape[1:]
        parts = PACKS[rule.pack].split(np.broadcast_to(np.zeros((), np.int8), shape), arch)
        yield rule, path, index, [part.shape for part in parts]


def check_names(directory: Path, table: Table, arch: ArchSpec, leaves: Mapping[str, Any], files: TensorFiles) -> None:
    """Compares published names and shapes with what the architecture needs.

    Raises:
      CheckpointError: names every missing, extra and misshaped tensor at once.
    """
    expected = {
        name: shape
        for rule, _, _, shapes in wanted(table, arch, leaves)
        for name, shape in zip(rule.hub, shapes, strict=True)
    }
    missing = [name for name in expected if name not in files]
    extra = [name for name in files if name not in expected and not name.endswith(table.ignored)]
    if "lm_head.weight" in extra and arch.tied:
        extra.remove("lm_head.weight")
    wrong = [
        f"{name}: {files.tensors[name].shape} in the file, {shape} by the config"
        for name, shape in expected.items()
        if name in files and files.tensors[name].shape != tuple(shape)
    ]
    problems = [("missing", missing), ("not known", extra), ("of the wrong shape", wrong)]
    text = [f"{len(names)} {kind}: " + ", ".join(names) for kind, names in problems if names]
    if text:
        raise CheckpointError(f"{directory}: tensors do not match config.json; " + "; ".join(text))


def load_params(directory: Path, net: Transformer, show: Callable[[int, int], None] | None = None) -> Params:
    """Reads every tensor once into its final layout and dtype.

    Args:
      directory: checkpoint.
      net: says which parameters exist, in which layout and dtype.
      show: called with (parameters read, parameters in all).

    Raises:
      CheckpointError: files are unreadable or do not match.
    """
    table = known_tables()[net.arch.family]
    leaves = flatten(abstract_params(net))
    files = TensorFiles(directory)
    check_names(directory, table, net.arch, leaves, files)
    dtype = np.dtype(net.policy.param)
    done: dict[str, Any] = {}
    stacks: dict[str, np.ndarray] = {}
    left = dict.fromkeys(leaves, 0)
    for rule, path, index, _ in wanted(table, net.arch, leaves):
        joined = PACKS[rule.pack].join([files[name] for name in rule.hub], net.arch)
        if index is None:
            done[path] = jnp.asarray(np.ascontiguousarray(joined).astype(dtype, copy=False))
        else:
            stack = stacks.setdefault(path, np.empty(leaves[path].shape, dtype))
            stack[index] = joined
            left[path] += 1
            if left[path] == len(stack):
                done[path] = jnp.asarray(stacks.pop(path))
        if show:
            show(len(done), len(leaves))
    return {"params": unflatten(done)}


def unflatten(leaves: Mapping[str, Any]) -> Params:
    """The inverse of ``flatten``."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *folders, name = path.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = leaf
    return tree


def load_model(directory: str | Path, policy: Policy, show: Callable[[int, int], None] | None = None) -> Model:
    """Loads a Hugging Face directory.

    Raises:
      ConfigError: the config is missing, corrupt or of an unknown family.
      CheckpointError: the tensors are unreadable or do not match.
    """
    directory = Path(directory)
    config = read_config(directory)
    net = Transformer(arch_of(config), policy)
    params = load_params(directory, net, show)
    generation = directory / "generation_config.json"
    return Model(net, params, config, _read_json(generation) if generation.exists() else {}, directory)
