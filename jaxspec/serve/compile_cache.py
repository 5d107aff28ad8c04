"""Compiled programs kept on disk, so that the second start of a command takes seconds."""

import os
from pathlib import Path

import jax

SHORTEST_TIME_S = 0.1


def default_directory() -> Path:
    """``jaxspec/xla`` in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxspec" / "xla"


def use_compile_cache() -> Path | None:
    """Switches JAX's persistent compile cache on; call it before the first compilation.

    A directory or threshold that the environment or the program has set already stays.

    Returns:
      The directory, or None if it cannot be made; programs are then compiled anew at each start.
    """
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", SHORTEST_TIME_S)
    chosen = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if chosen:
        return Path(chosen)
    directory = default_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    jax.config.update("jax_compilation_cache_dir", str(directory))
    return directory
