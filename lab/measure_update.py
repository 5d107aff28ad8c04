"""Memory of one update of a head for a published model, as planned and as XLA's compiler for a GPU allots it.

    python -m lab.measure_update --model qwen3-30b-a3b --set data.length=4096 --set train.micro_rows=4
    python -m lab.measure_update --model deepseek-v3 --set mesh.expert=8 --set train.rows=8

No GPU need be there, and nothing is allocated but by the compiler; JAX's CUDA plugin is needed, see docs/kernels.md.
"""

import argparse
import json

from jaxspec.aot import process
from jaxspec.inspect.shipped import model_config


def main() -> None:
    """Prints what an update takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b", help="a config in configs/models, or a config.json")
    parser.add_argument("--config", default="eagle3", help="a config in configs/train")
    parser.add_argument("--set", action="append", default=[], help="a setting, such as data.length=4096")
    parser.add_argument("--gpu", default="h100", help="a description in configs/hardware/targets")
    parser.add_argument("--layers", type=int, default=0, help="layers of the target that are compiled, 0 for all")
    args = parser.parse_args()
    name, config = model_config(args.model)
    sizes = process.run(
        "jaxspec.aot.train_program:report_update", config=config, wanted=args.config, changes=args.set, gpu=args.gpu,
        layers=args.layers, timeout_s=7200,
    )  # fmt: skip
    print(json.dumps({"model": name, "set": args.set, **sizes}))


if __name__ == "__main__":
    main()
