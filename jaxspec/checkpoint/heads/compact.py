"""A head that ships small: matrices in int8, and without the vocabulary product, whose rows are the target's."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoint.files.stream import TensorFiles
from jaxspec.checkpoint.upcycled import dequantize, quantize
from jaxspec.models.vocab import check_ids, from_d2t, to_d2t, to_t2d

PRODUCT, IDS, MASK, SCALE = "lm_head.weight", "d2t", "t2d", ".scale"
ROWS = "model.embed_tokens.weight"
FILE, COMPACT = "model.safetensors", "head.npz"


def shrink(head: Path, out: Path, ids_W: np.ndarray) -> None:
    """Writes a trained head in the form that ships.

    Args:
      head: directory, whose vocabulary product was not trained.
      out: directory to write.
      ids_W: draft vocabulary, which need not be the one that it was trained with.
    """
    out.mkdir(parents=True, exist_ok=True)
    kept = {name: x for name, x in load_file(head / FILE).items() if name not in (PRODUCT, IDS, MASK)}
    tensors: dict[str, np.ndarray] = {IDS: to_d2t(ids_W).astype(np.int32)}
    for name, x in kept.items():
        if x.ndim == 2:
            numbers, scale = quantize(np.asarray(x, np.float32).T[None])
            tensors |= {name: np.ascontiguousarray(numbers[0].T), name + SCALE: scale[0]}
        else:
            tensors[name] = x.astype(np.float32)
    np.savez_compressed(out / COMPACT, allow_pickle=False, **tensors)  # an eighth smaller than as it is
    config = json.loads((head / "config.json").read_text())
    config["dtype"], config["head"]["draft_vocab"] = "bfloat16", len(ids_W)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def expand(compact: Path, target: Path, out: Path) -> None:
    """Writes a head that ships as one that ``load_head`` reads.

    Args:
      compact: directory that ``shrink`` wrote.
      target: directory of the model that it drafts for, whose embedding is its vocabulary product, too.
      out: directory to write.
    """
    with np.load(compact / COMPACT) as file:
        small = dict(file)
    rows_VD = TensorFiles.of(target)[ROWS]
    ids_W = check_ids(from_d2t(small[IDS], len(rows_VD)), len(rows_VD))
    tensors = {IDS: small[IDS].astype(np.int64), MASK: to_t2d(ids_W, len(rows_VD)), PRODUCT: rows_VD[ids_W]}
    for name, x in small.items():
        if name + SCALE in small:
            tensors[name] = np.ascontiguousarray(dequantize(x.T[None], small[name + SCALE][None])[0].T)
        elif name != IDS and not name.endswith(SCALE):
            tensors[name] = x.astype(rows_VD.dtype)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / FILE, metadata={"format": "pt"})
    shutil.copyfile(compact / "config.json", out / "config.json")
