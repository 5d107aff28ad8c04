"""Parameters to a checkpoint directory that transformers, vLLM and llama.cpp read."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxspec.checkpoint.load.load_plan import scale_steps
from jaxspec.checkpoint.load.places import abstract_params, flatten, resolve_rules
from jaxspec.checkpoint.load.stored import E8M0, FP4_BLOCK, FP8_BLOCK, check_method, matrix_form
from jaxspec.checkpoint.names.copies import without_copies
from jaxspec.checkpoint.names.known import known_tables
from jaxspec.checkpoint.names.packs import PACKS
from jaxspec.checkpoint.names.table import NameRule, Table
from jaxspec.errors import ConfigError
from jaxspec.models.arch import ArchSpec
from jaxspec.models.transformer import Transformer
from jaxspec.nn.param import kind_of
from jaxspec.nn.policy import make_policy
from jaxspec.pytree import replace
from jaxspec.shapes import Params
from pallas_kernels.quantized import Format, Quantized

Named = Iterator[tuple[str, np.ndarray]]


def export_tensors(
    params: Params, arch: ArchSpec, dtype: np.dtype, block: tuple[int, int] = FP8_BLOCK
) -> dict[str, np.ndarray]:
    """Returns every parameter under its published name and shape, plain weights in ``dtype``.

    What the network keeps in float32 stays so; ``block`` are the numbers per scale of fp8 weights.

    Raises:
      ConfigError: weights are quantized in a way that no published layout has.
    """
    table, net = known_tables()[arch.family], Transformer(arch, make_policy(dtype, depth="stacked"))
    return named_tensors(params, net, table.rules(arch), table, dtype, block)


def named_tensors(
    params: Params, net: Any, rules: Iterable[NameRule], table: Table, dtype: np.dtype,
    block: tuple[int, int] = FP8_BLOCK,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Returns the parameters of a network that ``rules`` of a table name; else as ``export_tensors``."""
    leaves, arch = flatten(params["params"]), net.arch
    fixed = _fixed_dtypes(net, dtype)
    out: dict[str, np.ndarray] = {}
    entries: dict[str, dict[int, np.ndarray]] = {}
    for path, target in resolve_rules(rules, leaves, arch).items():
        leaf = _on_host(leaves[path])
        own_dtype = fixed.get(kind_of(path.split("/")), dtype)
        for index, rule in target.rules.items():
            if isinstance(leaf, Quantized):
                parts = _quantized(table, rule, leaf, index, block)
            else:
                split = PACKS[rule.pack].split(without_copies(leaf[index], rule.copies))
                parts = zip(rule.hub, (part.astype(own_dtype) for part in split), strict=True)
            for name, part in parts:
                if rule.entry is None:
                    out[name] = np.ascontiguousarray(part)
                else:
                    entries.setdefault(name, {})[rule.entry] = part
    return out | {
        name: np.ascontiguousarray(np.stack([parts[e] for e in sorted(parts)])) for name, parts in entries.items()
    }


def _on_host(leaf: Any) -> Any:
    if isinstance(leaf, Quantized):
        return replace(leaf, data=np.asarray(leaf.data), scale=np.asarray(leaf.scale))
    return np.asarray(leaf)


def _fixed_dtypes(net: Any, dtype: np.dtype) -> dict[str, np.dtype]:
    """Returns the dtypes of the kinds of parameters that do not have the network's own."""
    net = net.clone(policy=make_policy(dtype, depth="stacked"))
    dtypes = {kind_of(path.split("/")): leaf.dtype for path, leaf in flatten(abstract_params(net)).items()}
    return {kind: np.dtype(np.int64) if np.issubdtype(d, np.integer) else d for kind, d in dtypes.items() if d != dtype}


def _quantized(table: Table, rule: NameRule, leaf: Any, index: tuple[int, ...], block: tuple[int, int]) -> Named:
    """Yields numbers and scales as published."""
    pack, form = PACKS[rule.pack], leaf.format
    if form.kind == "int8":
        raise ConfigError(
            "export: no published layout has int8 weights with a scale per output; load with quantization none or fp8"
        )
    published = matrix_form(form, block, transposed=table.scales == "blocks")
    down, across = scale_steps(rule.pack, form, published)
    data, scale = (pack.split(without_copies(array[index], rule.copies)) for array in (leaf.data, leaf.scale))
    for name, numbers, factors in zip(rule.hub, data, scale, strict=True):
        yield from _as_published(table, name, numbers, factors[::down, ::across], form)


def _as_published(table: Table, name: str, data: np.ndarray, scale: np.ndarray, form: Format) -> Named:
    if table.scales == "blocks":
        yield f"{name}_blocks", np.ascontiguousarray(data.T).reshape(data.shape[1], -1, FP4_BLOCK // 2)
        yield f"{name}_scales", scale.T
        return
    scale_name = f"{name.removesuffix('.weight')}.scale" if table.scales == "scale" else f"{name}_scale_inv"
    yield name, np.ascontiguousarray(data).view(np.int8) if form.kind == "fp4" else data
    yield scale_name, np.ascontiguousarray(scale).view(E8M0) if form.exponent_scales else scale


def save_model(directory: Path, params: Params, arch: ArchSpec, config: Mapping[str, Any], dtype: np.dtype) -> None:
    """Writes ``config.json`` and ``model.safetensors``; the weights appear under their name only when complete.

    The config is corrected: whether weights are quantized, and whether the head is tied.

    Raises:
      ConfigError: weights are quantized in a way that no published layout has.
    """
    block, config = check_method(config), dict(config)
    if config.get("tie_word_embeddings") and not arch.tied:
        config["tie_word_embeddings"] = False  # the files had a head of their own
    if not any(isinstance(leaf, Quantized) for leaf in flatten(params["params"]).values()):
        config.pop("quantization_config", None)
    elif "quantization_config" not in config:
        config["quantization_config"] = {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block),
        }  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    part = directory / "model.safetensors.part"
    save_file(export_tensors(params, arch, dtype, block), part, metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    part.chmod((directory / "config.json").stat().st_mode)  # safetensors writes for the owner alone
    part.rename(directory / "model.safetensors")
