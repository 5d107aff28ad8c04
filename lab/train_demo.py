"""Reproduces the demo pair: an MoE target trained on the standard library, and a draft distilled from it.

Run ``python lab/train_demo.py --work DIR``; started again, it goes on where it stopped.
"""

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import demo_corpus
import demo_losses as losses
import jax
import numpy as np
from demo_models import DEMO, FROZEN, TINY, Recipe, draft_figures, forward, init, net_of, target_figures
from demo_optimizer import build as muon_for
from demo_record import describe, export, figures, write_provenance
from demo_text import write_text

from jaxspec.checkpoint.load.model import load_model
from jaxspec.shapes import Array, Params
from jaxspec.train import loop


def prepare_corpus(data: Path, recipe: Recipe, root: Path | None) -> None:
    """Writes tokenizer and token streams, unless they are there."""
    if (data / "corpus.json").exists():
        return
    corpus = demo_corpus.collect(root)
    demo_corpus.train_tokenizer(corpus, data, recipe.target["vocab_size"])
    demo_corpus.encode(corpus, data, data)


def run_of(directory: Path, steps: int, recipe: Recipe, **more: Any) -> loop.TrainRun:
    """A run of the recipe's intervals; the directory is made."""
    directory.mkdir(parents=True, exist_ok=True)
    every = {name: getattr(recipe, name) for name in ("save_every", "log_every", "evaluate_every")}
    return loop.TrainRun(directory=directory, steps=steps, **every, **more)


def on_from(batch_of: Callable[[int], Any]) -> Callable[[int], Iterator[Any]]:
    """Batches from an update on, each a single pass, of a function of the update."""
    return lambda first: (jax.tree.map(lambda x: np.asarray(x)[None], batch_of(step)) for step in count(first))


def show(entry: dict[str, float]) -> None:
    """Prints a log entry."""
    print("  ".join(f"{name} {value:.4g}" for name, value in entry.items()), flush=True)


def held_out_windows(data: Path, recipe: Recipe) -> np.ndarray:
    """The fixed held-out rows that training looks at."""
    tokens = np.load(data / "held_out.npy")
    return demo_corpus.batch(tokens, step=0, batch_size=recipe.windows, length=recipe.length, seed=recipe.held_out_seed)


def train_target(data: Path, directory: Path, steps: int, recipe: Recipe) -> Params:
    """Next-token training of the target with load balancing."""
    net, tokens, windows = net_of(recipe.target), np.load(data / "train.npy"), held_out_windows(data, recipe)
    measure = target_figures(net, recipe.target_batch)

    def loss_fn(params: Params, frozen: None, batch: tuple[Array, Array], key: Array) -> tuple[Array, dict[str, Array]]:
        rows, weight = batch
        logits, hidden = forward(net, params, rows[:, :-1])
        ce = losses.cross_entropy(logits, rows[:, 1:])
        balance = losses.load_balance(hidden.routing)
        return ce + weight * balance + 0.001 * losses.router_z(hidden.routing), {"ce": ce, "balance": balance}

    def batch_of(step: int) -> tuple[np.ndarray, np.float32]:
        size, seed = recipe.target_batch, recipe.target_seed
        rows = demo_corpus.batch(tokens, step=step, batch_size=size, length=recipe.length, seed=seed)
        weight = next(w for first, w in reversed(recipe.balance) if step >= first)
        return rows, np.float32(weight)

    def evaluate(params: Params) -> dict[str, float]:
        figures = measure(params, windows)
        share = figures.pop("share_YE")
        return figures | {"busiest_expert": float(share.max()), "idlest_expert": float(share.min())}

    muon = muon_for(steps, matrix_peak=2e-3, other_peak=3e-3, warmup=recipe.warmup)
    run = run_of(
        directory, steps, recipe, init=lambda: init(net, recipe.target_seed), optimizer=muon, loss_fn=loss_fn,
        batches=on_from(batch_of), evaluate=evaluate,
    )  # fmt: skip
    return loop.train(run, show)


def mixed_batch(tokens: np.ndarray, text: np.ndarray, step: int, recipe: Recipe) -> np.ndarray:
    """Rows of the corpus, then as many of the target's own text, a pure function of its arguments."""
    half, seed = recipe.draft_batch // 2, recipe.draft_seed
    corpus = demo_corpus.batch(tokens, step=step, batch_size=half, length=recipe.length, seed=seed)
    epochs = [divmod(step * half + row, len(text)) for row in range(half)]
    own = [text[np.random.default_rng((seed, epoch)).permutation(len(text))[index]] for epoch, index in epochs]
    return np.concatenate([corpus, np.stack(own)])


def distill_draft(
    data: Path, model: Path, directory: Path, steps: int, recipe: Recipe, text: dict[str, np.ndarray]
) -> Params:
    """Trains the draft towards the target's distribution, on the corpus and on the target's own text.

    Args:
      data: token streams.
      model: directory of the target.
      directory: of the run.
      steps: updates in all.
      recipe: sizes.
      text: rows that the target wrote, ``train`` and ``held_out``.
    """
    net, teacher = net_of(recipe.draft), load_model(model, FROZEN)
    tokens, windows = np.load(data / "train.npy"), held_out_windows(data, recipe)
    measure = draft_figures(net, teacher.net, recipe.target_batch)

    def loss_fn(params: Params, frozen: Params, token_BT: Array, key: Array) -> tuple[Array, dict[str, Array]]:
        inputs = token_BT[:, :-1]
        logits, _ = forward(net, params, inputs)
        wanted, _ = forward(teacher.net, frozen, inputs)
        return losses.distillation(logits, jax.lax.stop_gradient(wanted)), {}

    def batch_of(step: int) -> np.ndarray:
        return mixed_batch(tokens, text["train"], step, recipe)

    def evaluate(params: Params) -> dict[str, float]:
        corpus = measure(params, teacher.params, windows, 0)
        own = measure(params, teacher.params, text["held_out"], recipe.prompt - 1)
        names = [(f"held_out_{k}", v) for k, v in corpus.items()] + [(f"held_out_text_{k}", v) for k, v in own.items()]
        return dict(names)

    muon = muon_for(steps, matrix_peak=7e-3, other_peak=7e-3, warmup=recipe.warmup)
    run = run_of(
        directory, steps, recipe, init=lambda: init(net, recipe.draft_seed), optimizer=muon, loss_fn=loss_fn,
        batches=on_from(batch_of), frozen=teacher.params, evaluate=evaluate,
    )  # fmt: skip
    return loop.train(run, show)


def target_text(data: Path, model: Path, directory: Path, sequences: int, recipe: Recipe) -> dict[str, np.ndarray]:
    """Returns what the target writes after pieces of the training stream, and a little after held-out ones."""
    wanted = {"train": sequences, "held_out": 2 * recipe.rows}
    return {
        split: write_text(model, np.load(data / f"{split}.npy"), directory / f"text_{split}", recipe, rows)
        for split, rows in wanted.items()
    }


def make_pair(args: argparse.Namespace, recipe: Recipe) -> None:
    """Every stage in order; what an earlier run finished is not done again."""
    data, runs, out = args.work / "data", args.work / "runs", args.out
    prepare_corpus(data, recipe, args.root)

    params = train_target(data, runs / "target", args.target_steps, recipe)
    export(out / "target", params, recipe.target, data)
    # A draft belongs to one target: other weights get a directory of their own.
    digest = hashlib.sha256((out / "target" / "model.safetensors").read_bytes()).hexdigest()
    directory = runs / f"draft-{digest[:12]}"

    text = target_text(data, out / "target", directory, args.sequences, recipe)
    params = distill_draft(data, out / "target", directory, args.draft_steps, recipe, text)
    export(out / "draft", params, recipe.draft, data)

    of_target, of_draft = figures(out, data, text["held_out"], recipe)
    target_run = describe(runs / "target", recipe.target, args.target_steps, recipe.target_batch, recipe.length)
    draft_run = describe(directory, recipe.draft, args.draft_steps, recipe.draft_batch, recipe.length)
    draft_run |= {"target_sha256": digest, "target_text_rows": len(text["train"])}
    write_provenance(out, data, target_run | of_target, draft_run | of_draft, recipe)
    print(json.dumps({"target": of_target, "draft": of_draft}, indent=2))


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="directory for data and runs")
    parser.add_argument("--out", type=Path, default=Path("jaxspec/demo_model"), help="directory for the pair")
    parser.add_argument("--root", type=Path, help="a standard library other than the running Python's")
    parser.add_argument("--target-steps", type=int, default=1700)
    parser.add_argument("--draft-steps", type=int, default=700)
    parser.add_argument("--sequences", type=int, default=640, help="rows of the target's own text for the draft")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    make_pair(args, TINY if args.tiny else DEMO)


if __name__ == "__main__":
    main()
