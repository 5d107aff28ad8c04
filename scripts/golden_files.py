"""Packs and unpacks the tensors of ``tests/golden``: git has ``*.safetensors.xz``, tests read ``*.safetensors``."""

import lzma
import os
from pathlib import Path

GOLDENS = Path(__file__).resolve().parent.parent / "tests" / "golden"
PACKED = ".xz"
# Numbers of four bytes each.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 1, "lp": 2, "pb": 0}]


def unpack_goldens() -> None:
    """Writes the tensor files whose packed form is newer; git ignores them."""
    for packed in GOLDENS.glob(f"*/*.safetensors{PACKED}"):
        plain, when = packed.with_suffix(""), packed.stat().st_mtime_ns
        if plain.exists() and plain.stat().st_mtime_ns == when:
            continue
        partial = plain.with_suffix(f".{os.getpid()}")
        partial.write_bytes(lzma.decompress(packed.read_bytes()))
        os.utime(partial, ns=(when, when))
        partial.replace(plain)


def pack_golden(directory: Path) -> None:
    """Packs the tensor files of one golden, after which both forms are of the same time."""
    for plain in directory.glob("*.safetensors"):
        packed = plain.with_name(plain.name + PACKED)
        packed.write_bytes(lzma.compress(plain.read_bytes(), filters=FILTERS))
        when = packed.stat().st_mtime_ns
        os.utime(plain, ns=(when, when))
