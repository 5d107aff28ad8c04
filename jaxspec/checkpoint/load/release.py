"""Every tensor that a release publishes, by its config alone: names, shapes and dtypes, quantised layouts included."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.checkpoint.files.header import Tensor
from jaxspec.checkpoint.files.stream import TensorFiles
from jaxspec.checkpoint.load.block_scales import E4M3
from jaxspec.checkpoint.load.places import TargetLeaf, abstract_params, flatten, hub_shapes, resolve_rules
from jaxspec.checkpoint.load.stored import E8M0, FP4_BLOCK, check_method, quantization_of
from jaxspec.checkpoint.names.known import known_tables
from jaxspec.models.arch import ArchSpec
from jaxspec.models.catalog import arch_of
from jaxspec.models.mtp import Mtp
from jaxspec.models.transformer import Transformer
from jaxspec.nn.policy import make_policy

# Matrices that no release quantises, by what their names contain.
WIDE = re.compile(r"embed|head\.|\.gate\.|shared_expert_gate\.|weights_proj\.|\.compressor\.|eh_proj\.|hc_")
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


@dataclass(frozen=True)
class ReleaseTensor:
    """One tensor of a release.

    Attributes:
      shape: in the file.
      dtype: in the file.
      leaf: path of the parameter that it is, or helps to make up.
      behind: whether it belongs to multi-token prediction.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    leaf: str
    is_mtp: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


Tensors = dict[str, ReleaseTensor]


def release_tensors(config: Mapping[str, Any]) -> Tensors:
    """Every tensor of a release by its published config.

    Raises:
      ConfigError: the config is wrong, or quantised in a way that is not supported.
    """
    tensors = unquantized_tensors(arch_of(config), _wide(config))
    block, settings = check_method(config), quantization_of(config)
    if settings is None:
        return tensors
    if settings.get("quant_method") == "mxfp4":
        return _spread(tensors, lambda name, t: _mxfp4(name, t) if ".experts." in name else None)
    skipped = tuple(settings.get("modules_to_not_convert") or ())
    tight = config.get("expert_dtype") == "fp4"
    exponents = known_tables()[config["model_type"]].scales == "scale"

    def layout(name: str, tensor: ReleaseTensor) -> Tensors | None:
        if len(tensor.shape) != 2 or not name.endswith(".weight") or WIDE.search(name):
            return None
        if any(_names(module, name) for module in skipped):
            return None
        if tight and ".experts." in name:
            return _fp4(name, tensor)
        return _fp8(name, tensor, block, exponents)

    return _spread(tensors, layout)


def release_files(config: Mapping[str, Any]) -> TensorFiles:
    """Returns the files of a release as its config promises them: names, dtypes and shapes, nothing to read.

    Raises:
      ConfigError: the config is wrong, or quantized in a way that is not supported.
    """
    return TensorFiles(
        {name: Tensor(Path(), t.dtype, t.shape, 0, t.size_bytes) for name, t in release_tensors(config).items()}
    )


def _wide(config: Mapping[str, Any]) -> str:
    """Name of the dtype of what is not quantised."""
    inside = [config, *(value for value in config.values() if isinstance(value, Mapping))]
    names = [c.get(key) for c in inside for key in ("torch_dtype", "dtype")]
    return next((str(name) for name in names if name in DTYPES), "bfloat16")


@cache
def unquantized_tensors(arch: ArchSpec, wide: str = "bfloat16") -> Tensors:
    """Every tensor of a release that is not quantised, multi-token prediction last.

    Args:
      arch: of the model.
      wide: dtype of everything but what is float32, or a table of ids, in any release.
    """
    table, policy = known_tables()[arch.family], make_policy(depth="stacked")
    net: Any = Transformer(arch, policy)
    leaves = flatten(abstract_params(net))
    tensors = _tensors(leaves, resolve_rules(table.rules(arch), leaves, arch), wide, is_mtp=False)
    if not arch.mtp:
        return tensors
    mtp: Any = Mtp(arch, policy)
    leaves, rules = flatten(abstract_params(mtp)), list(table.mtp_rules(arch))
    tensors |= _tensors(leaves, resolve_rules(rules, leaves, arch), wide, is_mtp=True)
    shape, dtype = (arch.vocab_size, arch.model_dim), np.dtype(DTYPES[wide])
    for n in range(len(arch.mtp)):
        norm = next(rule.hub[0] for rule in rules if rule.leaf == f"mtp_{n}/embed_norm_D")
        for name in table.mtp_copies:
            copy = norm.removesuffix("enorm.weight") + name
            tensors[copy] = ReleaseTensor(shape, dtype, f"mtp_{n}/copy", is_mtp=True)
    return tensors


def _tensors(leaves: Mapping[str, Any], targets: Mapping[str, TargetLeaf], wide: str, *, is_mtp: bool) -> Tensors:
    """Returns what fills some leaves; entries of one tensor are put together."""
    tensors: Tensors = {}
    for path, target in targets.items():
        own = np.dtype(leaves[path].dtype)
        dtype = {np.dtype(np.float32): own, np.dtype(np.int32): np.dtype(np.int64)}.get(own, np.dtype(DTYPES[wide]))
        for rule in target.rules.values():
            for name, shape in zip(rule.names, hub_shapes(target, rule), strict=True):
                if name.entry is not None:
                    before = tensors[name.whole].shape[0] if name.whole in tensors else 0
                    shape = (max(name.entry + 1, before), *shape)
                tensors[name.whole] = ReleaseTensor(shape, dtype, path, is_mtp)
    return tensors


def _spread(tensors: Tensors, layout: Callable[[str, ReleaseTensor], Tensors | None]) -> Tensors:
    found: Tensors = {}
    for name, tensor in tensors.items():
        found |= layout(name, tensor) or {name: tensor}
    return found


def _names(module: str, name: str) -> bool:
    """Whether a module that a config exempts is the one of a tensor, or a part of its path."""
    return module in name.split(".") or name.startswith(f"{module}.") or fnmatch(name, f"{module}.*")


def _fp8(name: str, tensor: ReleaseTensor, block: tuple[int, int], exponents: bool) -> Tensors:
    scale = name.removesuffix("weight") + "scale" if exponents else f"{name}_scale_inv"
    return dict(zip((name, scale), _fp8_pair(tensor, block, exponents), strict=True))


@cache
def _fp8_pair(tensor: ReleaseTensor, block: tuple[int, int], exponents: bool) -> tuple[ReleaseTensor, ReleaseTensor]:
    grid = tuple(-(-n // b) for n, b in zip(tensor.shape, block, strict=True))
    factor = E8M0 if exponents else np.dtype(np.float32)
    return replace(tensor, dtype=E4M3), replace(tensor, shape=grid, dtype=factor)


def _fp4(name: str, tensor: ReleaseTensor) -> Tensors:
    return dict(zip((name, name.removesuffix("weight") + "scale"), _fp4_pair(tensor), strict=True))


@cache
def _fp4_pair(tensor: ReleaseTensor) -> tuple[ReleaseTensor, ReleaseTensor]:
    rows, columns = tensor.shape
    bytes_of = replace(tensor, shape=(rows, columns // 2), dtype=np.dtype(np.int8))
    return bytes_of, replace(tensor, shape=(rows, columns // FP4_BLOCK), dtype=E8M0)


def _mxfp4(name: str, tensor: ReleaseTensor) -> Tensors | None:
    if len(tensor.shape) != 3:
        return None
    experts, columns, rows = tensor.shape
    grid, byte = (experts, rows, columns // FP4_BLOCK), np.dtype(np.uint8)
    return {
        f"{name}_blocks": replace(tensor, shape=(*grid, FP4_BLOCK // 2), dtype=byte),
        f"{name}_scales": replace(tensor, shape=grid, dtype=byte),
    }
