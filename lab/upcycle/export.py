"""Puts trained experts into the package, with what is known about them.

Run ``python -m lab.upcycle.export TRAINED RECORD``: TRAINED is what ``lab.upcycle.train`` left, RECORD the record.json
of ``lab.upcycle.prepare``.
"""

import argparse
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.serve.upcycled_model import SHIPPED
from jaxspec.serve.wheel_model import WHEEL_MODELS
from lab.upcycle.network import SMOLLM2


def provenance(trained: dict[str, Any], record: dict[str, Any], parts: list[Path]) -> dict[str, Any]:
    """Returns where the experts are from, how they were made, and what was measured."""
    wheel = WHEEL_MODELS["smollm2"]
    return {
        "dense_model": {name: getattr(wheel, name) for name in ("package", "version", "sha256", "member")},
        "files": {part.name: hashlib.sha256(part.read_bytes()).hexdigest() for part in parts},
        "shape": {
            "first_layer": SMOLLM2.first, "layers": SMOLLM2.upper, "experts": SMOLLM2.experts,
            "chosen": SMOLLM2.top_k, "width": SMOLLM2.width,
        },
        "training": {
            "tokens": trained["tokens"], "tokens_s": trained["log"][-1]["tokens_s"], "rows_of": trained["shares"],
            "peak_rate": trained["peak"], "device": trained["device"], "attention": trained["kernel"],
            "peak_bytes": trained["bytes"],
        },
        "texts": record,
        "held_out_nats_per_token": {"dense": trained["dense"], "mixture": trained["routed"]},
        "use_of_experts": summary(trained["use"]),
    }  # fmt: skip


def summary(use: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Returns how unequally experts are used: by all texts together, and how far the kinds differ.

    Args:
      use: share of choices [layers, E] by kind of text.
    """
    share_KYE = np.asarray(list(use.values()))
    mean_YE = share_KYE.mean(0)
    apart_KY = np.abs(share_KYE - mean_YE).sum(-1) / 2
    apart = {kind: round(float(apart_Y.mean()), 4) for kind, apart_Y in zip(use, apart_KY, strict=True)}
    return {
        "least_share": round(float(mean_YE.min()), 4),
        "greatest_share": round(float(mean_YE.max()), 4),
        "even_share": round(1 / mean_YE.shape[1], 4),
        "choices_that_differ_from_the_mean": apart,
        "by_kind": use,
    }


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("trained", type=Path)
    parser.add_argument("record", type=Path)
    parser.add_argument("--out", type=Path, default=SHIPPED)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    parts = [args.out / part.name for part in sorted(args.trained.glob("experts-*.safetensors"))]
    for part in parts:
        shutil.copyfile(args.trained / part.name, part)
    trained, record = (json.loads(path.read_text()) for path in (args.trained / "train.json", args.record))
    made = provenance(trained, record, parts)
    (args.out / "provenance.json").write_text(json.dumps(made, indent=1) + "\n")
    for kind, before in made["held_out_nats_per_token"]["dense"].items():
        after = made["held_out_nats_per_token"]["mixture"][kind]
        print(f"{kind:16} dense {before:.4f}  mixture {after:.4f}  {after - before:+.4f}")
    print({name: value for name, value in made["use_of_experts"].items() if name != "by_kind"})


if __name__ == "__main__":
    main()
