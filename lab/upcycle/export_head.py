"""Puts the mixture's trained draft head into the package: int8, without what the target has, with its provenance.

Run ``python -m lab.upcycle.export_head RUN [RUN ...] --own OWN [OWN ...]``: runs of ``jaxspec train`` in their order,
the last one's head ships; and what the mixture wrote (``own.npz`` of ``lab.upcycle.train`` and ``write_own``), whose
most frequent tokens are the draft vocabulary.
"""

import argparse
import hashlib
import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoint.heads.compact import COMPACT, shrink
from jaxspec.checkpoint.load.model import read_config
from jaxspec.models.vocab import choose_ids
from jaxspec.serve.upcycled_model import HEAD, upcycled_model_dir
from jaxspec.train.run_log import read_metrics
from lab.upcycle.head_texts import own

FIGURES = ("step", "time_s", "loss", "accuracy_0", "accuracy_1", "accuracy_2")


def frequent(files: list[Path], size: int, vocab: int) -> np.ndarray:
    """Returns the most frequent tokens of what the mixture wrote, prompts left out."""
    texts = (own(file, kind) for file in files for kind in ("chats", "code"))
    written = [ids[prompt:] for ids, prompt in chain.from_iterable(texts)]
    return choose_ids(np.bincount(np.concatenate(written), minlength=vocab), size)


def described(run: Path, head: Path) -> dict[str, Any]:
    """Returns what a run was, and of its curve every fourth entry, the last one among them."""
    about = json.loads((head / "training.json").read_text())
    entries = [entry for entry in read_metrics(run) if entry["step"] <= about["step"]]
    curve = {name: [round(entry[name], 4) for entry in entries[::-4][::-1] if name in entry] for name in FIGURES}
    return about | {"trained_positions": int(sum(entry["trained_tokens"] for entry in entries)), "curve": curve}


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--own", type=Path, nargs="+", required=True)
    parser.add_argument(
        "--before", type=Path, help="provenance.json of the exported head that the first run began with"
    )
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--out", type=Path, default=HEAD)
    args = parser.parse_args()
    heads = [run / "best" if (run / "best").exists() else run / "last" for run in args.runs]
    vocab = read_config(upcycled_model_dir())["vocab_size"]
    shrink(heads[-1], args.out, frequent(args.own, args.vocabulary, vocab))
    earlier = json.loads(args.before.read_text())["runs"] if args.before else []
    about = {
        "made_by": "lab/upcycle/export_head.py",
        "weights_sha256": hashlib.sha256((args.out / COMPACT).read_bytes()).hexdigest(),
        "texts": "written by the mixture (lab/upcycle/train.py and write_own.py), chosen by head_texts.py",
        "runs": earlier + [described(run, head) for run, head in zip(args.runs, heads, strict=True)],
    }
    (args.out / "provenance.json").write_text(json.dumps(about) + "\n")
    print(args.out, (args.out / COMPACT).stat().st_size, "bytes")


if __name__ == "__main__":
    main()
