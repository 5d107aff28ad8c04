"""A GGUF file to a directory in Hugging Face layout, which transformers, vLLM and SGLang read, too."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxspec.checkpoint.files.shards import INDEX, SINGLE
from jaxspec.checkpoint.files.stream import TensorName
from jaxspec.checkpoint.gguf.config import config_of, generation_of
from jaxspec.checkpoint.gguf.gguf_header import read_gguf
from jaxspec.checkpoint.gguf.gguf_tensors import GgufFiles
from jaxspec.checkpoint.gguf.gguf_tokenizer import write_tokenizer
from jaxspec.errors import ConfigError

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
SHARD_BYTES = 4_000_000_000
WIDE = ("e_score_correction_bias",)  # float32 in every release
CLASSES = {
    "llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "qwen2_moe": "Qwen2MoeForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM", "glm4_moe": "Glm4MoeForCausalLM",
}  # fmt: skip
# As gpt-oss is published: all but its experts is wide.
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip
Progress = Callable[[int, int], None]


def convert_gguf(file: Path, directory: Path, dtype: str = "bfloat16", show: Progress | None = None) -> None:
    """Writes config, tokenizer and weights; the directory appears only when all of it is there.

    Args:
      file: the GGUF file, or the first of a split model.
      directory: which must not exist, or be empty.
      dtype: that weights are widened to; MXFP4 experts of gpt-oss stay as they are.
      show: called with (bytes written, bytes in all).

    Raises:
      ConfigError: the directory has something in it, cannot be written, or the file's architecture or tokenizer is not
        known.
      CheckpointError: the file is not sound.
    """
    header = read_gguf(file)
    files, config = GgufFiles(header, published=True), config_of(header)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory}: is there already; name a directory that does not exist yet")
    part = directory.with_name(f".{directory.name}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True)
        write_tokenizer(header, part)
        _write_weights(files, part, np.dtype(DTYPES[dtype]), show)
        if any(name.endswith("_blocks") for name in files):
            config["quantization_config"] = MXFP4
        config |= {"torch_dtype": dtype, "architectures": [CLASSES[config["model_type"]]]}
        for name, content in (("config.json", config), ("generation_config.json", generation_of(header))):
            (part / name).write_text(json.dumps(content, indent=2) + "\n")
        if directory.exists():
            directory.rmdir()
        part.rename(directory)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be written ({error.strerror}); choose another place") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write_weights(files: GgufFiles, directory: Path, dtype: np.dtype, show: Progress | None) -> None:
    sizes = {name: math.prod(t.shape) * _written(files, name, dtype).itemsize for name, t in files.tensors.items()}
    shards, done, places = list(_shards(sizes)), 0, {}
    for n, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{n:05d}-of-{len(shards):05d}.safetensors"
        arrays = {}
        for name in names:
            array = files[name]
            arrays[name] = np.ascontiguousarray(array.astype(_written(files, name, dtype), copy=False))
            places[name], done = file, done + sizes[name]
            files.release(TensorName(name), sizes[name])
            if show:
                show(done, sum(sizes.values()))
        save_file(arrays, directory / file, metadata={"format": "pt"})
        (directory / file).chmod(0o644)  # safetensors writes for the owner alone
    if len(shards) > 1:
        index: dict[str, Any] = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _written(files: GgufFiles, name: str, dtype: np.dtype) -> np.dtype:
    own = files.tensors[name].dtype
    return np.dtype(np.float32) if name.endswith(WIDE) else own if own.kind in "iu" else dtype


def _shards(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yields the names of each file of the weights."""
    names: list[str] = []
    for name in sorted(sizes):
        if names and sum(sizes[n] for n in names) + sizes[name] > SHARD_BYTES:
            yield names
            names = []
        names.append(name)
    yield names
