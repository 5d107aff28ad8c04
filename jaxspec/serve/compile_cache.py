"""JAX's persistent compile cache: the second start of a program takes seconds."""

import os
from pathlib import Path

import jax

from jaxspec.errors import ConfigError
from jaxspec.serve.parameters import show_value

DIRECTORY, THRESHOLD = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
SHORTEST_TIME_S, JAX_SHORTEST_TIME_S = 0.1, 1.0  # what is worth keeping, and what JAX keeps by default


def default_directory() -> Path:
    """Returns ``jaxspec/xla`` in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxspec" / "xla"


def use_compile_cache(*, wanted: bool | str | Path | None = True) -> Path | None:
    """Enables JAX's persistent compile cache; what is compiled from now on is kept.

    Args:
      wanted: its directory; True for the one that the environment or the program has set already, or the user's.
        False and None leave JAX's settings alone. A threshold that is set already stays.

    Returns:
      The directory, or None if there is none, or the user's cannot be made; programs are then compiled at each start.

    Raises:
      ConfigError: it is something else, the directory cannot be made, or another one is in use.
    """
    if wanted in (False, None):
        return None
    if wanted is not True and not (isinstance(wanted, str | Path) and str(wanted)):
        raise ConfigError(f"LLM: compile_cache must be True, False or a directory, got {show_value(wanted)}")
    directory = None if wanted is True else Path(wanted)
    threshold, chosen = getattr(jax.config, THRESHOLD), getattr(jax.config, DIRECTORY)
    if THRESHOLD.upper() not in os.environ and threshold == JAX_SHORTEST_TIME_S:
        jax.config.update(THRESHOLD, SHORTEST_TIME_S)
    if chosen and directory is not None and Path(chosen).resolve() != directory.resolve():
        raise ConfigError(
            f"compile_cache: this process keeps compiled programs in {chosen} already, not in {directory}; "
            "leave compile_cache out, or set JAX_COMPILATION_CACHE_DIR before it starts"
        )
    if chosen:
        return Path(chosen)
    try:
        made = directory or default_directory()
        made.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        if directory is None:
            return None
        raise ConfigError(
            f"compile_cache: {directory} cannot be made ({error.strerror}); name another directory"
        ) from error
    jax.config.update(DIRECTORY, str(made))
    return made
