"""Files that are there whole or not at all, whenever the process that writes them ends."""

import os
from pathlib import Path


def write_whole(file: Path, data: bytes | str) -> None:
    """Writes a file in one go; a reader, or whoever starts again after a kill, never sees half of it."""
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data.encode() if isinstance(data, str) else data)
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)
