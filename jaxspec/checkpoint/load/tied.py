"""A check of tied models' files, which hold a head of their own in some fine-tuned copies."""

from dataclasses import replace

import numpy as np

from jaxspec.checkpoint.files.stream import TensorFiles, TensorName
from jaxspec.checkpoint.names.table import Table
from jaxspec.models.arch import ArchSpec

BLOCK_BYTES = 1 << 26


def with_own_head(arch: ArchSpec, table: Table, files: TensorFiles) -> ArchSpec:
    """Returns the architecture that a model's files have: untied if their head is not the embedding.

    Only where a tied config's files hold both are they read, up to the first difference.
    """
    (embedding,), (head,) = table.hub_names("embed_VD"), table.hub_names("head_DV")
    if not arch.tied or head not in files or embedding not in files or _equal(files, embedding, head):
        return arch
    return replace(arch, tied=False)


def _equal(files: TensorFiles, one: str, other: str) -> bool:
    first, second = files.tensors[one], files.tensors[other]
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    bytes_of_one, others = (files[name].reshape(-1).view(np.uint8) for name in (one, other))
    for start in range(0, len(bytes_of_one), BLOCK_BYTES):
        block = slice(start, start + BLOCK_BYTES)
        same = np.array_equal(bytes_of_one[block], others[block])
        for name in (one, other):
            files.release(TensorName(name), 0)
        if not same:
            return False
    return True
