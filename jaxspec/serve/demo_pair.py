"""The packaged demo models and head: where they lie, and the one name that stands for them everywhere."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.errors import ConfigError

NAMES = ("target", "draft", "head")
DEMO = "demo"


def demo_model_dir(name: str) -> Path:
    """Directory of the demo's ``target``, its ``draft`` model or its ``head``, a shared-expert one.

    Raises:
      ConfigError: there is no such model, or this installation came without it.
    """
    if name not in NAMES:
        raise ConfigError(f"demo model {name!r} is not known; known are {list(NAMES)}")
    directory = Path(__file__).resolve().parents[1] / "demo_model" / name
    if not (directory / "config.json").exists():
        raise ConfigError(
            f"demo model: {directory} is missing in this installation; name a model directory of your own"
        )
    return directory


def resolve_model(name: str | Path, part: str = "target") -> Path:
    """The directory (or file) that a user means by the name of a model.

    What is there under that name wins; then ``demo`` is the packaged one.

    Args:
      name: directory, a ``config.json``, or ``demo``.
      part: what of the demo is meant, one of ``NAMES``.

    Raises:
      ConfigError: the demo is meant, and this installation came without it.
    """
    path = Path(name)
    return demo_model_dir(part) if str(name) == DEMO and not path.exists() else path


def resolve_draft(name: str | Path, method: str | None) -> Path:
    """The same for what drafts: ``demo`` is the packaged draft model, or the head where the method is a head's.

    Raises:
      ConfigError: the demo is meant, and this installation came without it.
    """
    return resolve_model(name, "draft" if method in (None, "draft_model") else "head")


def resolve_speculation(config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A ``speculative_config`` whose ``model`` is a directory where it was ``demo``; anything else as it is.

    Raises:
      ConfigError: the demo is meant, and this installation came without it.
    """
    if not isinstance(config, Mapping) or not isinstance(config.get("model"), str | Path):
        return config
    return {**config, "model": str(resolve_draft(config["model"], config.get("method")))}
