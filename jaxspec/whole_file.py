"""Atomic writes: a file appears whole or not at all, even if the process is killed."""

import os
from pathlib import Path


def write_whole(file: Path, data: bytes | str) -> None:
    """Writes a file atomically; no reader, and no later run after a kill, ever sees half of it."""
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data.encode() if isinstance(data, str) else data)
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)
