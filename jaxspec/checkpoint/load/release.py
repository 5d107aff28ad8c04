"""Releases by their config alone: names, shapes and dtypes of every published tensor, quantized layouts included."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.checkpoint.files.header import Tensor
from jaxspec.checkpoint.files.packed_weights import with_packed_weights
from jaxspec.checkpoint.files.stream import TensorFiles
from jaxspec.checkpoint.load.block_scales import E4M3
from jaxspec.checkpoint.load.places import abstract_params, flatten, hub_shapes, resolve_rules
from jaxspec.checkpoint.load.release_packed import packed_layout
from jaxspec.checkpoint.load.stored import E8M0, FP4_BLOCK, check_method, quantization_of
from jaxspec.checkpoint.names.known import known_tables
from jaxspec.checkpoint.names.table import NameRule
from jaxspec.models.arch import ArchSpec
from jaxspec.models.catalog import arch_of
from jaxspec.models.mtp import Mtp
from jaxspec.models.transformer import Transformer
from jaxspec.nn.policy import make_policy

# Matrices that no release quantizes, by what their names contain.
WIDE = re.compile(r"embed|head\.|\.gate\.|shared_expert_gate\.|weights_proj\.|\.compressor\.|eh_proj\.|hc_")
FLOAT32 = np.dtype(np.float32)
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


@dataclass(frozen=True)
class ReleaseTensor:
    """One tensor of a release, as it is in the file.

    Attributes:
      shape, dtype: of the numbers.
      is_mtp: whether it belongs to multi-token prediction.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    is_mtp: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


Tensors = dict[str, ReleaseTensor]


def release_tensors(config: Mapping[str, Any]) -> Tensors:
    """Returns every tensor of a release by its published config.

    Raises:
      ConfigError: the config is wrong, or quantized in a way that is not supported.
    """
    tensors = unquantized_tensors(arch_of(config), _wide(config))
    block, settings = check_method(config), quantization_of(config)
    if settings is None:
        return tensors
    skipped = tuple(settings.get("modules_to_not_convert") or ())
    packed = packed_layout(settings)
    exponents = known_tables()[config["model_type"]].scales == "scale"

    def quantized(name: str, tensor: ReleaseTensor) -> Tensors:
        if settings.get("quant_method") == "mxfp4":
            return _mxfp4(name, tensor) if ".experts." in name and len(tensor.shape) == 3 else {name: tensor}
        if len(tensor.shape) != 2 or not name.endswith(".weight") or WIDE.search(name):
            return {name: tensor}
        if any(_names(module, name) for module in skipped):
            return {name: tensor}
        if packed is not None:
            stem = name.removesuffix("weight")
            parts = {} if packed.skips(name) else packed.parts((tensor.shape[0], tensor.shape[1]))
            return {stem + end: replace(tensor, shape=s, dtype=d) for end, (s, d) in parts.items()} or {name: tensor}
        if config.get("expert_dtype") == "fp4" and ".experts." in name:
            return _fp4(name, tensor)
        return _fp8(name, tensor, block, exponents=exponents)

    return {stored: part for name, tensor in tensors.items() for stored, part in quantized(name, tensor).items()}


def release_files(config: Mapping[str, Any]) -> TensorFiles:
    """Returns the files of a release as its config promises them: names, dtypes and shapes, nothing to read.

    Raises:
      ConfigError: the config is wrong, or quantized in a way that is not supported.
    """
    return with_packed_weights(
        TensorFiles(
            {name: Tensor(Path(), t.dtype, t.shape, 0, t.size_bytes) for name, t in release_tensors(config).items()}
        )
    )


def _wide(config: Mapping[str, Any]) -> str:
    """Returns the name of the dtype of what is not quantized."""
    inside = [config, *(value for value in config.values() if isinstance(value, Mapping))]
    names = [c.get(key) for c in inside for key in ("torch_dtype", "dtype")]
    return next((str(name) for name in names if name in DTYPES), "bfloat16")


@cache
def unquantized_tensors(arch: ArchSpec, wide: str = "bfloat16") -> Tensors:
    """Returns every tensor of a release that is not quantized, multi-token prediction last.

    Args:
      arch: of the model.
      wide: dtype of everything but what is float32, or a table of ids, in any release.
    """
    table, policy = known_tables()[arch.family], make_policy(depth="stacked")
    tensors = _tensors(Transformer(arch, policy), table.rules(arch), wide)
    if not arch.mtp:
        return tensors
    rules, dtype = list(table.mtp_rules(arch)), np.dtype(DTYPES[wide])
    tensors = {**tensors, **{n: t for n, t in _tensors(Mtp(arch, policy), rules, wide).items() if n not in tensors}}
    for rule in rules:
        if re.fullmatch(r"mtp_\d+/embed_norm_D", rule.leaf):
            prefix = rule.hub[0].removesuffix("enorm.weight")
            copy = ReleaseTensor((arch.vocab_size, arch.model_dim), dtype, is_mtp=True)
            tensors |= {prefix + name: copy for name in table.mtp.copies}
    return tensors


def _tensors(net: Any, rules: Iterable[NameRule], wide: str) -> Tensors:
    """Returns what fills a network; entries of one tensor are put together."""
    tensors: Tensors = {}
    leaves = flatten(abstract_params(net))
    for path, target in resolve_rules(rules, leaves, net.arch).items():
        in_memory = str(np.dtype(leaves[path].dtype))
        dtype = np.dtype({"float32": np.float32, "int32": np.int64}.get(in_memory, DTYPES[wide]))
        for rule in target.rules.values():
            for name, shape in zip(rule.names, hub_shapes(target, rule), strict=True):
                if name.entry is not None:
                    before = tensors[name.whole].shape[0] if name.whole in tensors else 0
                    shape = (max(name.entry + 1, before), *shape)
                tensors[name.whole] = ReleaseTensor(shape, dtype, isinstance(net, Mtp))
    return tensors


def _names(module: str, name: str) -> bool:
    """Whether a module that a config exempts is the one of a tensor, or a part of its path."""
    return module in name.split(".") or name.startswith(f"{module}.") or fnmatch(name, f"{module}.*")


def _fp8(name: str, tensor: ReleaseTensor, block: tuple[int, int], *, exponents: bool) -> Tensors:
    grid = tuple(-(-n // b) for n, b in zip(tensor.shape, block, strict=True))
    scale, dtype = (name.removesuffix("weight") + "scale", E8M0) if exponents else (f"{name}_scale_inv", FLOAT32)
    return {name: replace(tensor, dtype=E4M3), scale: replace(tensor, shape=grid, dtype=dtype)}


def _fp4(name: str, tensor: ReleaseTensor) -> Tensors:
    rows, columns = tensor.shape
    return {
        name: replace(tensor, shape=(rows, columns // 2), dtype=np.dtype(np.int8)),
        name.removesuffix("weight") + "scale": replace(tensor, shape=(rows, columns // FP4_BLOCK), dtype=E8M0),
    }


def _mxfp4(name: str, tensor: ReleaseTensor) -> Tensors:
    experts, columns, rows = tensor.shape
    grid, byte = (experts, rows, columns // FP4_BLOCK), np.dtype(np.uint8)
    return {
        f"{name}_blocks": replace(tensor, shape=(*grid, FP4_BLOCK // 2), dtype=byte),
        f"{name}_scales": replace(tensor, shape=grid, dtype=byte),
    }
