"""Memory of one update of a head for a published model, by XLA's compiler for a GPU that need not be there.

    python -m lab.measure_update --model qwen3-30b-a3b --set data.length=4096 --set train.micro_rows=4

Nothing is allocated but by the compiler; JAX's CUDA plugin is needed, see docs/kernels.md.
"""

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.aot import process
from jaxspec.aot.programs import abstract_target
from jaxspec.inspect.shipped import model_config
from jaxspec.nn.policy import policy_for
from jaxspec.sharding.targets import target_context, target_devices
from jaxspec.train.batch import Batch
from jaxspec.train.head_nets import net_of
from jaxspec.train.head_run import cut_product, loss_fn
from jaxspec.train.head_start import head_policy, init_params
from jaxspec.train.objective import HeadObjective
from jaxspec.train.optimizer import optimizer_of
from jaxspec.train.settings import RunSettings, load_run_settings
from jaxspec.train.update import TrainState, make_update


def arguments_of(settings: RunSettings, config: dict[str, Any]) -> tuple[TrainState, HeadObjective, Batch]:
    """State, objective and batch of a run, as shapes and dtypes."""
    t = settings.train
    target = abstract_target(config, policy_for(t.target_dtype, "gpu"))
    base: Any = target.net
    net = net_of(settings.head, base.arch, config, head_policy(t))
    params = jax.eval_shape(lambda: init_params(net, jax.random.key(0)))
    width = getattr(getattr(net, "spec", None), "draft_vocab", 0)
    ids: Any = jax.ShapeDtypeStruct((width,), jnp.int32) if 0 < width < base.arch.vocab_size else None
    product = jax.eval_shape(cut_product, target.params, ids if settings.loss.draft_only else None)
    objective = HeadObjective(
        target.params, ids, base, net, settings.loss, remat=bool(t.remat), product=product, vocabulary=t.vocabulary
    )
    moments = jax.eval_shape(optimizer_of(settings.optimizer, t.steps).init, params)
    token: Any = jax.ShapeDtypeStruct((t.accumulation, t.rows, settings.data.length), jnp.int32)
    truth: Any = jax.ShapeDtypeStruct(token.shape, bool)
    number: Any = jax.ShapeDtypeStruct((), jnp.int32)
    return TrainState(params, moments, number), objective, Batch(token, token, token, truth)


def report(config: dict[str, Any], wanted: str, changes: Sequence[str], gpu: str) -> dict[str, float]:
    """Compiles the update; to be called through ``process.run``."""
    settings = load_run_settings(wanted, changes)
    t = settings.train
    devices = target_devices(process.target_text(gpu), 1, 1)
    place = NamedSharding(Mesh(devices, ("x",)), PartitionSpec())
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments_of(settings, config)
    )
    parts, began = t.rows // (t.micro_rows or t.rows), time.monotonic()
    update: Any = make_update(loss_fn, optimizer_of(settings.optimizer, t.steps), settings.seed, parts=parts)
    with target_context(devices):
        compiled = update.lower(*shapes).compile()
    sizes = compiled.memory_analysis()
    return {
        "temporaries_gb": round(sizes.temp_size_in_bytes / 1e9, 2),
        "arguments_gb": round(sizes.argument_size_in_bytes / 1e9, 2),
        "compile_s": round(time.monotonic() - began, 1),
    }


def main() -> None:
    """Prints what an update takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-30b-a3b", help="a config in configs/models, or a config.json")
    parser.add_argument("--config", default="eagle3", help="a config in configs/train")
    parser.add_argument("--set", action="append", default=[], help="a setting, such as data.length=4096")
    parser.add_argument("--gpu", default="h100", help="a description in configs/hardware/targets")
    args = parser.parse_args()
    name, config = model_config(args.model)
    sizes = process.run(
        "lab.measure_update:report", config=config, wanted=args.config, changes=args.set, gpu=args.gpu, timeout_s=7200
    )
    print(json.dumps({"model": name, "set": args.set, **sizes}))


if __name__ == "__main__":
    main()
