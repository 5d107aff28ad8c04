"""The tokenizer of a model directory, read without running any code that comes with it."""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

from jaxspec.checkpoint.files.model_files import read_json
from jaxspec.checkpoint.gguf.gguf_header import is_gguf, read_gguf
from jaxspec.checkpoint.gguf.gguf_tokenizer import write_tokenizer
from jaxspec.checkpoint.text import tiktoken
from jaxspec.errors import ConfigError

FULL, CONFIG = "tokenizer.json", "tokenizer_config.json"
TOKENIZER_FILES = (FULL, "tokenizer.model", "tiktoken.model", "qwen.tiktoken", CONFIG, "vocab.json")
TEMPLATE_FILES = ("chat_template.jinja", "special_tokens_map.json")
TEMPLATE_FOLDER = "additional_chat_templates"
OWN_CODE = ("auto_map", "tokenizer_class", "tokenizer_file", "added_tokens_decoder")
READABLE = "tokenizer.json, tokenizer.model, vocab.json and Kimi's, Qwen's and Llama 3's ranks"


def import_early(directory: Path) -> None:
    """Begins to import transformers where a directory or GGUF file has a tokenizer, while its weights are read.

    Beside programs that compile the same import takes several times as long, for both need Python's lock.
    """
    if is_gguf(directory) or any((directory / name).exists() for name in TOKENIZER_FILES):
        _importing()


@functools.cache
def _importing() -> Thread:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it advises to install torch
    thread = Thread(target=import_module, args=("transformers.models.auto.tokenization_auto",))
    thread.start()
    return thread


def load_tokenizer(directory: Path) -> Any | None:
    """Loads transformers' tokenizer of a directory or GGUF file.

    Python files of the directory are never run, whatever its configuration says. A tokenizer that cannot be read
    without them is left out with one warning: the model then takes token ids.

    Returns:
      The tokenizer, None if there is none that can be read so.

    Raises:
      ConfigError: tokenizer files are there but cannot be read.
    """
    if is_gguf(directory):
        return _of_gguf(directory)
    there = [directory / name for name in (*TOKENIZER_FILES, *TEMPLATE_FILES) if (directory / name).exists()]
    if not any(file.name in TOKENIZER_FILES for file in there):
        return None
    if special := [file for file in there if not file.is_file()]:
        raise ConfigError(f"{special[0]}: is not a regular file; put the published file there")
    _importing().join()
    settings = read_json(directory / CONFIG) if (directory / CONFIG).exists() else {}
    try:
        if (directory / FULL).exists() or not (layout := tiktoken.layout_of(directory, settings)):
            tokenizer = _load(directory, settings)
        else:
            tokenizer = _from_ranks(directory, layout, settings)
    except ConfigError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{directory}: the tokenizer cannot be read ({reason}); get its files anew") from error
    if tokenizer is None:
        warnings.warn(
            f"{directory}: {settings.get('tokenizer_class') or 'its tokenizer'} is code that comes with the model, "
            f"which is never run, so the model takes token ids only; read are {READABLE}",
            RuntimeWarning,
            stacklevel=3,
        )
    return tokenizer


def _load(directory: Path, settings: Mapping[str, Any]) -> Any | None:
    """Loads the tokenizer as transformers reads it, None if only code that comes with the model could."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if _class_is_known(settings):
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    if (directory / FULL).exists():
        return PreTrainedTokenizerFast.from_pretrained(directory, trust_remote_code=False)
    return None  # transformers would guess how to read the files of a class that it may not run


def _class_is_known(settings: Mapping[str, Any]) -> bool:
    """Whether the tokenizer's class is part of transformers, or nothing says otherwise."""
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    if name := settings.get("tokenizer_class"):
        return tokenizer_class_from_name(name) is not None
    return not tiktoken.own_class(settings)


def _of_gguf(file: Path) -> Any | None:
    """Loads the tokenizer of a GGUF file, None if it has none."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(Path(folder)) if write_tokenizer(read_gguf(file), Path(folder)) else None
    if tokenizer is not None:
        tokenizer.name_or_path = str(file)
    return tokenizer


def _from_ranks(directory: Path, layout: tiktoken.RankLayout, settings: Mapping[str, Any]) -> Any:
    """Loads the tokenizer of ranks from a tokenizer.json that says the same."""
    from transformers import PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / FULL).write_text(json.dumps(tiktoken.tokenizer_json(directory, layout, settings)), encoding="utf-8")
        rest = {key: value for key, value in settings.items() if key not in OWN_CODE}
        (folder / CONFIG).write_text(json.dumps(rest), encoding="utf-8")
        for file in (*(directory / name for name in TEMPLATE_FILES), *(directory / TEMPLATE_FOLDER).glob("*.jinja")):
            if file.is_file():
                copy = folder / file.relative_to(directory)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False)
    tokenizer.name_or_path = str(directory)
    return tokenizer
