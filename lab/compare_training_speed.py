"""Times one update of an EAGLE-3 head here and in speculators: same head, same tokens, same features, one core each.

Run ``python lab/compare_training_speed.py --peer PYTHON``, with an interpreter that has speculators (see
``tests/peers/test_head_interop.py``). Both sides start from the same parameters, and their losses must agree. Both
compute the target's distribution over the draft vocabulary. In bfloat16 parameters are float32 and products are not, as
both trainers do it. They take turns on the same core, one waiting while the other works; every line printed is a JSON
record, the last one the result.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint.heads.directory import load_head, save_head
from jaxspec.checkpoint.heads.formats import Verifier
from jaxspec.checkpoint.load.model import Model, load_model, plan_model, read_config
from jaxspec.checkpoint.text.codec import Text
from jaxspec.cli.huge_pages import HUGE, TUNABLES
from jaxspec.errors import JaxspecError
from jaxspec.models.draft_head import DraftHead
from jaxspec.models.trained_head import Head
from jaxspec.models.vocab import choose_ids
from jaxspec.nn.policy import make_policy
from jaxspec.protocol import Features
from jaxspec.serve.compile_cache import use_compile_cache
from jaxspec.serve.demo_pair import resolve_model
from jaxspec.shapes import Array, Params
from jaxspec.train.batch import Batch, TeacherOutput
from jaxspec.train.head_loss import head_loss
from jaxspec.train.head_nets import ends_of, net_of, start_from_target
from jaxspec.train.objective import HeadObjective, cut_product, without_product
from jaxspec.train.optimizer import adamw
from jaxspec.train.settings import HeadSettings, LossSettings, OptimizerSettings
from jaxspec.train.target import TargetHeaders
from jaxspec.train.teacher import run_teacher
from jaxspec.train.update import TrainState, make_update

FLOAT32 = make_policy("float32", own_head=True)  # as the trainer holds a tied vocabulary product on a CPU
ROWS, LENGTH, BATCHES = 4, 512, 2
SIXTH = 6  # of the vocabulary, as the head that comes with smollm2-moe, is what drafts
LOSS = LossSettings(kind="kl", rounds=3, decay=1.0, skip_unknown=False, draft_only=True)
OPTIMIZER = OptimizerSettings(learning_rate=1e-3, schedule="constant", warmup=0)
PEER = Path(__file__).parents[1] / "tests" / "peers" / "train_speculators.py"
AGREE = 1e-3


def rows_of_text(target: Path) -> np.ndarray:
    """Pieces of the standard library in a model's tokens, int32 [BATCHES, ROWS, LENGTH]."""
    text = Text.load(target)
    assert text is not None, "the models that come with jaxspec have a tokenizer"
    lines = Path(argparse.__file__).read_text().splitlines(keepends=True)
    ids = [i for line in lines for i in text.encode(line)]
    count = BATCHES * ROWS * LENGTH
    return np.resize(np.asarray(ids, np.int32), count).reshape(BATCHES, ROWS, LENGTH)


def batch_of(token_BT: np.ndarray) -> Batch:
    """Rows that are one text each."""
    position_BT = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), token_BT.shape)
    ones = jnp.ones(token_BT.shape, jnp.int32)
    return Batch(token_BT=jnp.asarray(token_BT), segment_BT=ones, position_BT=position_BT, loss_BT=ones > 0)


def teacher_output_of(target: Model, net: DraftHead, token_BT: np.ndarray) -> TeacherOutput:
    """Returns what the target computes for a batch."""
    return jax.jit(run_teacher, static_argnums=(0, 3))(target.net, target.params, batch_of(token_BT), net.spec.reads)


def prepare(directory: Path, target: Model, dtype: str) -> None:
    """Writes the initial head, and for the peer what the target computed."""
    token_NBT, vocab_size = rows_of_text(target.directory), target.net.arch.vocab_size
    head = HeadSettings(kind="eagle3", draft_vocab_size=vocab_size // SIXTH)
    ids_W = choose_ids(np.bincount(token_NBT.ravel(), minlength=vocab_size), vocab_size // SIXTH)
    net = net_of(head, target.net.arch, target.config, FLOAT32)
    assert isinstance(net, DraftHead)
    params = start_from_target(jax.jit(net.initial)(jax.random.key(0)), ends_of(target.params, ids_W))
    teacher_outputs = [teacher_output_of(target, net, token_BT) for token_BT in token_NBT]
    feature = np.stack([net.spec.feature(teacher.features) for teacher in teacher_outputs])
    last = np.stack([teacher.features.last_BTD for teacher in teacher_outputs])
    given: dict[str, Any] = {"token": token_NBT, "feature": feature, "last": last}
    np.savez(directory / "lessons.npz", **given)
    save_head(Head(net, params, ids_W), directory / "head", "speculators", verifier=Verifier(str(target.directory)))
    chosen = {name: getattr(OPTIMIZER, name) for name in ("learning_rate", "betas", "eps", "clip")}
    chosen |= {"rounds": LOSS.rounds, "decay": LOSS.decay, "dtype": dtype, "target": str(target.directory)}
    (directory / "settings.json").write_text(json.dumps(chosen))


def lessons(directory: Path, net: DraftHead) -> list[tuple[Batch, TeacherOutput]]:
    """Returns the updates' batches and what the target computed for them, as a cache of features has it."""
    with np.load(directory / "lessons.npz") as stored:
        arrays = [stored[name] for name in ("token", "feature", "last")]
    outputs = []
    for token_BT, feature_BTX, last_BTD in zip(*arrays, strict=True):
        taps = tuple(map(jnp.asarray, np.split(feature_BTX, net.spec.parts, axis=-1)))
        features = Features(jnp.asarray(last_BTD), jnp.asarray(last_BTD[..., :0]), taps)
        outputs.append(jax.tree.map(lambda x: x[None], (batch_of(token_BT), TeacherOutput(features, ()))))
    return outputs


def serve(directory: Path) -> None:
    """Our side: as many updates as each line of the input says, and what they took."""
    settings = json.loads((directory / "settings.json").read_text())
    place = Path(settings["target"])
    config = read_config(place)
    target = TargetHeaders(config, plan_model(place, FLOAT32, config=config)).outside.load()
    policy = make_policy(settings["dtype"], param=jnp.dtype("float32"))
    head = load_head(directory / "head", target.net.arch, policy)
    assert isinstance(head.net, DraftHead)
    net, ids_W = head.net, jnp.asarray(head.ids_W)
    bare = replace(target.net.arch, layers=())
    base = target.net.clone(arch=bare, policy=policy.update(own_head=True))  # as the trainer has it
    product = cut_product(target.params, ids_W)
    objective = HeadObjective(without_product(target.params, product), ids_W, base, net, LOSS, product=product)
    del target  # as the trainer keeps no more of it

    def loss_fn(
        params: Params, frozen: HeadObjective, given: tuple[Batch, TeacherOutput], key: Array
    ) -> tuple[Array, Any]:
        return head_loss(frozen, params, given[1], given[0], key)

    given = lessons(directory, net)
    rule = adamw(OPTIMIZER, 1)
    update = make_update(loss_fn, rule, seed=0)
    state = TrainState(head.params, rule.init(head.params), jnp.int32(0))
    print(json.dumps({"parameters": sum(x.size for x in jax.tree.leaves(head.params))}), flush=True)
    done = 0
    for line in sys.stdin:
        losses, wall, cpu = [], time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            state, metrics = update(state, objective, given[done % BATCHES])
            losses.append(float(metrics["loss"]))
            done += 1
        spent = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        print(json.dumps(spent | {"loss": losses}), flush=True)


class Side:
    """A process that trains when it is told to."""

    def __init__(self, name: str, core: int, command: Sequence[str], environment: dict[str, str]):
        self.name = name
        taken = ["taskset", "-c", str(core), *command]
        self.process = subprocess.Popen(
            taken, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environment
        )

    @cached_property
    def parameters(self) -> int:
        """Parameters that it trains, which it says when it is ready."""
        return self.answer()["parameters"]

    def answer(self) -> dict[str, Any]:
        """The next line."""
        assert self.process.stdout is not None, "its output is a pipe"
        line = self.process.stdout.readline()
        if not line:
            raise JaxspecError(f"{self.name}: it ended with exit code {self.process.wait()}; see its messages above")
        return json.loads(line)

    def train(self, updates: int) -> dict[str, Any]:
        """Some updates, and what they took."""
        assert self.process.stdin is not None, "its input is a pipe"
        self.process.stdin.write(f"{updates}\n")
        self.process.stdin.flush()
        return self.answer()

    def peak(self) -> float:
        """Most memory that it had at once, in GB."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e9

    def close(self) -> None:
        """Lets it end."""
        assert self.process.stdin is not None, "its input is a pipe"
        self.process.stdin.close()
        self.process.wait()


def compare(sides: Sequence[Side], rounds: int, updates: int) -> dict[str, Any]:
    """Interleaved rounds: tokens per second of each side, and how much faster the first one is than each other."""
    sizes = {side.name: side.parameters for side in sides}
    warm = {side.name: side.train(3)["loss"] for side in sides}
    rates: dict[str, dict[str, list[float]]] = {side.name: {"cpu_s": [], "wall_s": []} for side in sides}
    for number in range(rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            side.train(1)  # some kernels take memory away from who waits
            timing = side.train(updates)
            for clock, rate in rates[side.name].items():
                rate.append(updates * ROWS * LENGTH / timing[clock])
            record = {clock: round(rate[-1], 1) for clock, rate in rates[side.name].items()}
            print(json.dumps({"round": number, "side": side.name, "tokens_per": record}), flush=True)
    ours, result = sides[0].name, dict[str, Any]()
    for side in sides:
        entry: dict[str, Any] = {"parameters": sizes[side.name], "first_losses": warm[side.name]}
        entry["peak_gb"] = round(side.peak(), 2)
        for clock, rate in rates[side.name].items():
            ratio = [one / other for one, other in zip(rates[ours][clock], rate, strict=True)]
            entry[clock] = {"tokens_per": spread(rate), "ours_is_faster": spread(ratio)}
        result[side.name] = entry
    return result


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and extremes."""
    figures = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return {name: round(value, 3) for name, value in figures.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--peer", help="Python with speculators")
    parser.add_argument("--target", default="smollm2-moe", help="model directory, or demo")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of products")
    parser.add_argument("--core", type=int, default=0, help="on which both sides take turns")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--updates", type=int, default=4, help="of one round of one side")
    parser.add_argument(
        "--forms", nargs="*", default=["rows trained", "rows frozen", "packed trained"], help="of the peer"
    )
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    use_compile_cache()
    if args.serve:
        serve(args.serve)
        return
    with tempfile.TemporaryDirectory() as place:
        prepare(Path(place), load_model(resolve_model(args.target), FLOAT32), args.dtype)
        commands = {"jaxspec": [sys.executable, __file__, "--serve", place]}
        commands |= {f"speculators, {form}": [args.peer, str(PEER), place, *form.split()] for form in args.forms}
        ours = {TUNABLES: os.environ.get(TUNABLES, f"{HUGE}=1")}  # as jaxspec train has it
        sides = [Side(name, args.core, made, {} if args.peer in made else ours) for name, made in commands.items()]
        result = compare(sides, args.rounds, args.updates)
        for side in sides:
            side.close()
    print(json.dumps(result, indent=2))
    # Packed, the peer's rounds also learn across the ends of rows; frozen, they learn something else.
    first = {name: np.asarray(entry["first_losses"]) for name, entry in result.items()}
    exact = [name for name in first if name.endswith("rows trained")]
    if off := [name for name in exact if not np.allclose(first[name], first["jaxspec"], rtol=AGREE)]:
        raise JaxspecError(f"{', '.join(off)}: other losses than ours, so the two do not do the same; see first_losses")


if __name__ == "__main__":
    main()
