"""Where the packaged demo models and head lie."""

from pathlib import Path

from jaxspec.errors import ConfigError

NAMES = ("target", "draft", "head")


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
