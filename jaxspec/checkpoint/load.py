"""A checkpoint directory to parameters on the device, in the layout that the compute path wants."""

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint.catalog import known_tables
from jaxspec.checkpoint.packs import PACKS
from jaxspec.checkpoint.places import Leaf, abstract_params, flatten, places, published_shapes, unflatten
from jaxspec.checkpoint.stream import TensorFiles
from jaxspec.checkpoint.table import Table
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.arch import ArchSpec
from jaxspec.models.catalog import arch_of
from jaxspec.models.transformer import Transformer
from jaxspec.nn.policy import Policy
from jaxspec.shapes import Params


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


def check_names(directory: Path, table: Table, arch: ArchSpec, found: Mapping[str, Leaf], files: TensorFiles) -> None:
    """Compares published names and shapes with what the architecture needs.

    Raises:
      CheckpointError: names every missing, extra and misshaped tensor at once.
    """
    expected = {
        name: shape
        for leaf in found.values()
        for rule in leaf.rules.values()
        for name, shape in zip(rule.hub, published_shapes(leaf, rule), strict=True)
    }
    whole = {name.partition("[")[0] for name in expected}
    missing = sorted({name.partition("[")[0] for name in expected} - set(files))
    behind = {name for rule in table.mtp_rules(arch) for name in rule.hub}
    extra = [n for n in files if n not in whole and n not in behind and not n.endswith(table.ignored)]
    if "lm_head.weight" in extra and arch.tied:
        extra.remove("lm_head.weight")
    wrong = [
        f"{name}: {files.shape(name)} in the file, {shape} by the config"
        for name, shape in expected.items()
        if name.partition("[")[0] in files and files.shape(name) != tuple(shape)
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
    found = places(table.rules(net.arch), leaves, net.arch)
    check_names(directory, table, net.arch, found, files)
    done: dict[str, Any] = {}
    for path, leaf in found.items():
        done[path] = jnp.asarray(_read(files, leaf, np.dtype(leaves[path].dtype)))
        if show:
            show(len(done), len(leaves))
    return {"params": unflatten(done)}


def _read(files: TensorFiles, leaf: Leaf, dtype: np.dtype) -> np.ndarray:
    """One parameter, filled part by part."""
    out = np.empty(leaf.shape, dtype)
    for index in itertools.product(*map(range, leaf.shape[: leaf.lead])):
        rule = leaf.rules[index]
        out[index] = PACKS[rule.pack].join([files.read(name) for name in rule.hub], leaf.part)
    return out


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
