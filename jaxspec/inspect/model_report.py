"""Surveys what a model directory or a bare config holds and promises, without reading a weight."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.cache.prefix_blocks import why_not
from jaxspec.checkpoint.files.model_files import read_json
from jaxspec.checkpoint.files.shards import no_weights
from jaxspec.checkpoint.gguf.gguf_header import is_gguf, read_gguf
from jaxspec.checkpoint.gguf.gguf_tensors import GgufFiles, open_tensors
from jaxspec.checkpoint.load.load_plan import LoadPlan, make_plan
from jaxspec.checkpoint.load.model import read_config, read_generation
from jaxspec.checkpoint.load.release import release_files
from jaxspec.checkpoint.load.stored import check_method, quantization_of
from jaxspec.checkpoint.load.tied import with_own_head
from jaxspec.checkpoint.names.known import known_tables
from jaxspec.checkpoint.text.codec import FORMATS, TOKENIZER_FILES, Text
from jaxspec.draft.mtp_drafter import LATER_LAYERS
from jaxspec.errors import ConfigError
from jaxspec.inspect import model_sizes
from jaxspec.models.arch import ArchSpec, LayerSpec
from jaxspec.models.cache_dtype import with_cache_dtype
from jaxspec.models.catalog import arch_of, ignored_keys
from jaxspec.models.mtp import Mtp
from jaxspec.models.transformer import Transformer
from jaxspec.nn.moe import MoeSpec
from jaxspec.nn.policy import make_policy
from jaxspec.serve.defaults import end_ids, sampling_defaults
from jaxspec.serve.engine_spec import BUCKETS

MIXERS = {
    "AttentionSpec": "grouped-query attention",
    "LatentSpec": "latent attention",
    "CompressedSpec": "shared-key attention",
    "DeltaNetSpec": "gated delta net",
    "KdaSpec": "delta attention",
    "MambaSpec": "Mamba-2",
    "LightningSpec": "lightning attention",
    "ShortConvSpec": "short convolution",
    "NoMixer": "no mixer",
}
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def report_model(
    path: Path, *, dtype: str = "bfloat16", quantization: str = "auto", kv_cache_dtype: str = "auto"
) -> dict[str, Any]:
    """Sizes, caches, layout, files and possible drafters of a model, ready for JSON.

    Args:
      path: model directory in Hugging Face layout, a GGUF file, or a ``config.json`` alone, whose files are taken as
        promised.
      dtype: of weights that are not quantized, and of products.
      quantization: how weights would lie in memory, see ``make_plan``.
      kv_cache_dtype: of ``LLM``.

    Raises:
      ConfigError: there is no such config, or it is wrong or not supported.
      CheckpointError: the files are unreadable or quantized in a way that is not supported.
    """
    config, directory = config_at(path)
    arch, block = with_cache_dtype(arch_of(config), kv_cache_dtype), check_method(config)
    kind = np.dtype(dtype)
    policy, table = make_policy(kind, depth="stacked"), known_tables()[arch.family]
    there = directory is not None and (is_gguf(directory) or any(directory.glob("*.safetensors*")))
    files = open_tensors(path) if there else release_files(config)
    arch = with_own_head(arch, table, files)
    plan = make_plan(
        path, Transformer(arch, policy), table.rules(arch, files), unread=table.unread(arch), block=block,
        quantization=quantization, files=files,
    )  # fmt: skip
    prediction = None
    if arch.mtp:
        rules = table.mtp_rules(arch, files)
        prediction = make_plan(path, Mtp(arch, policy), rules, block=block, quantization=quantization, files=files)
    total = model_sizes.parameters(plan.leaves)
    active = sum(total.values()) - model_sizes.idle_parameters(arch.layers, arch.model_dim)
    return {
        "path": str(path),
        "family": arch.family,
        "layers": layer_kinds(arch.layers),
        "context_tokens": arch.max_position,
        "ignored_keys": list(ignored_keys(config)),
        "parameters": {"total": sum(total.values()), "active": active, "by_part": total},
        "bytes": _bytes(plan, prediction, on_disk=there),
        "cache": {
            "bytes_per_token": model_sizes.cached_bytes(arch, kind),
            "bytes_per_row": model_sizes.ring_bytes(arch, kind),
        },
        "prefix_cache": prefix_cache(arch),
        "quantization": _quantization(config, plan),
        "tensors": {**_counts(plan, there=there or directory is None), **_problems(plan)},
        "multi_token_prediction": _prediction(arch, prediction, on_disk=there),
        "drafters": drafters(arch, prediction),
        "text": _text(config, directory),
        "refused": {} if directory is None else _refused(directory, has_weights=there),
    }


def config_at(path: Path) -> tuple[dict[str, Any], Path | None]:
    """Reads the config of a model directory or of a bare ``config.json``, and returns the directory if it is one.

    Raises:
      ConfigError: there is no such config, or it is not a JSON object.
    """
    whole = path.is_dir() or is_gguf(path) or not path.exists()
    return (read_config(path), path) if whole else (read_json(path), None)


def _refused(directory: Path, *, has_weights: bool) -> dict[str, str]:
    """Returns what of a directory, besides its tensors, ``LLM`` would refuse, and why."""
    refused = {} if has_weights else {"weights": no_weights(directory)}
    looks = {
        "tokenizer": lambda: Text.load(directory),
        "generation_config": lambda: sampling_defaults(read_generation(directory)),
    }
    for what, look in looks.items():
        try:
            look()
        except ConfigError as error:
            refused[what] = str(error)
    return refused


def layer_kinds(layers: Iterable[LayerSpec]) -> dict[str, int]:
    """Counts layers of each kind."""
    return dict(Counter("; ".join(map(_half, layer.halves)) for layer in layers))


def _half(layer: LayerSpec) -> str:
    return f"{_mixer(layer.attention)}; {_feed_forward(layer.ffn)}"


def _mixer(spec: Any) -> str:
    words = [MIXERS.get(type(spec).__name__, type(spec).__name__)]
    if getattr(spec, "window", None):
        words.append(f"{'chunks' if getattr(spec, 'chunked', False) else 'window'} of {spec.window}")
    compressor = getattr(spec, "compressor", None)
    if compressor is not None:
        words.append(f"entries of {compressor.entries.stride}")
    if getattr(spec, "index", None) is not None:
        words.append("own index")
    if getattr(spec, "reuses_selection", False):
        words.append("index of an earlier layer")
    if getattr(spec, "sinks", False):
        words.append("sinks")
    return ", ".join(words)


def _feed_forward(spec: Any) -> str:
    if spec is None:
        return "no feed-forward"
    if not isinstance(spec, MoeSpec):
        return f"dense of {spec.hidden}"
    shared = f" and a shared one of {spec.shared_hidden}" if spec.shared_hidden else ""
    by = ", by token id" if spec.router.kind == "hash" else ""
    none = f" or {spec.identities} that change nothing" if spec.identities else ""
    return f"{spec.top_k} of {spec.experts} experts of {spec.hidden}{none}{shared}{by}"


def _bytes(plan: LoadPlan, prediction: LoadPlan | None, *, on_disk: bool) -> dict[str, Any]:
    plans = [plan, *([prediction] if prediction else [])]
    in_files, in_memory = ({}, {})
    for one in plans:
        in_files |= model_sizes.file_bytes(one)
        in_memory |= model_sizes.memory_bytes(one.leaves)
    stored = sum(tensor.end - tensor.begin for tensor in plan.files.tensors.values())
    read = sum(in_files.values())
    return {
        "on_disk" if on_disk else "promised": {"total": stored, "not_read": stored - read, "by_part": in_files},
        "in_memory": {"total": sum(in_memory.values()), "by_part": in_memory},
    }


def _quantization(config: Mapping[str, Any], plan: LoadPlan) -> dict[str, Any]:
    published = quantization_of(config)
    kinds = Counter(s.form.kind if s.form else "plain" for s in plan.stored.values())
    in_memory = {kind: form.kind for kind, form in plan.kinds().items() if form is not None}
    method = None if published is None else published.get("quant_method")
    if isinstance(plan.files, GgufFiles):
        types = Counter(tensor.type for tensor in plan.files.header.tensors.values())
        method = f"GGUF: {', '.join(f'{count} {kind}' for kind, count in types.most_common())}"
    return {
        "config": method,
        "tensors": dict(kinds),
        "kept_in_memory": in_memory,
    }


def _counts(plan: LoadPlan, *, there: bool) -> dict[str, int]:
    """Counts tensors, and those of them that are read; a directory without weights has none."""
    read = {name.whole for s in plan.stored.values() for name in s.tensors}
    return {"in_files": len(plan.files) if there else 0, "read": len(read) if there else 0}


def _problems(plan: LoadPlan) -> dict[str, list[str]]:
    p = plan.problems
    wrong = {"missing": p["missing"], "extra": p["extra"]}
    return {kind: collapse(names) for kind, names in wrong.items()} | {"misshaped": p["shape"], "mistyped": p["dtype"]}


def _prediction(arch: ArchSpec, prediction: LoadPlan | None, *, on_disk: bool) -> dict[str, Any]:
    missing = [] if prediction is None else prediction.problems["missing"]
    there = prediction is not None and not missing
    return {
        "layers": len(arch.mtp),
        "present": there if on_disk else None,
        "parameters": sum(model_sizes.parameters(prediction.leaves).values()) if prediction else 0,
        "missing": collapse(missing),
    }


def drafters(arch: ArchSpec, prediction: LoadPlan | None = None) -> dict[str, str]:
    """Returns what can draft for a model, by method of ``speculative_config``, and in which shapes.

    Args:
      arch: of the model.
      prediction: plan of its multi-token prediction, None where the config has none.
    """
    chains_only = arch.chain_only
    shapes = f"chains only: {chains_only}" if chains_only else "chains and trees"
    methods = {"ngram": shapes, "draft_model": f"{shapes}; needs a model of {arch.vocab_size} tokens"}
    if prediction is None:
        return methods | {"mtp": "no: the config has no layers of multi-token prediction that are read"}
    if prediction.problems["missing"]:
        return methods | {"mtp": f"no: {len(prediction.problems['missing'])} of its tensors are missing"}
    why = chains_only or replace(arch, layers=arch.mtp).chain_only
    return methods | {"mtp": f"chains only: {why}" if why else "chains and trees"}


def prefix_cache(arch: ArchSpec) -> dict[str, str]:
    """Returns whether texts that begin alike share what was read, by what keeps it, with the default chunk sizes."""
    size, kinds = BUCKETS[0], {"target": arch.layers, **({"multi-token prediction": arch.mtp} if arch.mtp else {})}
    answers = {}
    for name, layers in kinds.items():
        streams = [layer.streams for layer in layers]
        why = why_not(streams, size)
        if name != "target" and len(layers) > 1:
            why = why or LATER_LAYERS
        lasts = all(spec.prefix.lasts for layer in streams for spec in layer.values())
        whole = "prompts and answers" if lasts else "prompts, not answers: windows do not keep them"
        answers[name] = f"no: {why}" if why else f"in blocks of {size} tokens: {whole}"
    return answers


def _text(config: Mapping[str, Any], directory: Path | None) -> dict[str, Any]:
    """Returns tokenizer, chat template and end-of-text ids; without a directory only what the config says."""
    generation = read_generation(directory) if directory else {}
    about: dict[str, Any] = {"eos_token_ids": sorted(end_ids(config, generation))}
    if directory is None:
        return about
    if is_gguf(directory):
        said = read_gguf(directory).metadata
        kind, template = said.get("tokenizer.ggml.model"), bool(said.get("tokenizer.chat_template"))
        return about | {"tokenizer": kind, "chat_template": template}
    settings = directory / "tokenizer_config.json"
    settings = read_json(settings) if settings.exists() else {}
    template = (directory / "chat_template.jinja").exists() or bool(settings.get("chat_template"))
    template = template or config.get("model_type") in FORMATS
    tokenizer = next((name for name in TOKENIZER_FILES if (directory / name).exists()), None)
    return about | {"tokenizer": tokenizer, "chat_template": template}


def collapse(names: Iterable[str]) -> list[str]:
    """Returns names that differ in numbers alone as one pattern each: ``layers.{0..3}.up.weight``.

    A number counts where it is a whole part between dots.
    """
    groups: dict[tuple[str, ...], set[tuple[int, ...]]] = {}
    for name in names:
        numbers = tuple(int(number) for number in NUMBER.findall(name))
        groups.setdefault(tuple(NUMBER.split(name)), set()).add(numbers)
    patterns = [
        "".join(f"{word}{place}" for word, place in zip(words, (*ranges, ""), strict=True))
        for words, numbers in groups.items()
        for ranges in _ranges(numbers)
    ]
    return sorted(patterns)


def _ranges(numbers: set[tuple[int, ...]]) -> list[tuple[str, ...]]:
    """Returns tuples of numbers as tuples of ranges, the last places put together first."""
    if numbers == {()}:
        return [()]
    tails: dict[int, set[tuple[int, ...]]] = {}
    for first, *rest in numbers:
        tails.setdefault(first, set()).add(tuple(rest))
    heads: dict[frozenset[tuple[int, ...]], list[int]] = {}
    for first, rest in tails.items():
        heads.setdefault(frozenset(rest), []).append(first)
    return [(_range(firsts), *rest) for tail, firsts in heads.items() for rest in _ranges(set(tail))]


def _range(numbers: list[int]) -> str:
    """Returns ``3``, ``{3..60}`` or ``{0,2..5}``."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    words = [f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    return words[0] if len(numbers) == 1 else "{" + ",".join(words) + "}"
