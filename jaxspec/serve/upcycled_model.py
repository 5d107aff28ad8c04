"""The mixture of experts that is made of a model from PyPI and the routed experts in this package, and its head."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from jaxspec.errors import ConfigError
from jaxspec.serve.wheel_model import Say, cache_directory, is_whole, publish, wheel_model_dir

NAME = "smollm2-moe"
DENSE = "smollm2"
SHIPPED = Path(__file__).resolve().parents[1] / "demo_model" / "experts"
HEAD = Path(__file__).resolve().parents[1] / "demo_model" / "smollm2_moe_head"


def upcycled_model_dir(say: Say | None = None) -> Path:
    """Returns the mixture's directory in Hugging Face layout, made at the first call and again for other experts.

    Args:
      say: called with a line on what takes a while; by default standard error.

    Raises:
      ConfigError: this installation came without the experts, or the dense model cannot be fetched.
    """
    from jaxspec.checkpoint.upcycled import assemble

    parts = sorted(SHIPPED.glob("experts-*.safetensors"))
    if not parts:
        raise ConfigError(f"{NAME}: {SHIPPED} is missing in this installation; {DENSE} is the dense model without it")
    digest = hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()
    directory = cache_directory() / f"{NAME}-{digest[:12]}"
    if is_whole(directory):
        return directory
    dense = wheel_model_dir(DENSE, say)
    _publish(directory, lambda made: assemble(dense, parts, made))
    return directory


def upcycled_head_dir(say: Say | None = None) -> Path:
    """Returns the directory of the mixture's draft head, made at the first call; arguments and errors as of it."""
    from jaxspec.checkpoint.heads.compact import COMPACT, expand

    files = [HEAD / "config.json", HEAD / COMPACT]
    if not all(file.exists() for file in files):
        raise ConfigError(f"{NAME}: {HEAD} is missing in this installation; draft without a head, such as by ngram")
    target = upcycled_model_dir(say)
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    directory = target.with_name(f"{target.name}-head-{digest[:12]}")
    if not is_whole(directory):
        _publish(directory, lambda made: expand(HEAD, target, made))
    return directory


def _publish(directory: Path, make: Callable[[Path], object]) -> None:
    try:
        publish(directory, make)
    except OSError as error:
        raise ConfigError(
            f"{NAME}: cannot write to {directory.parent} ({error.strerror}); make room, or set XDG_CACHE_HOME"
        ) from error
