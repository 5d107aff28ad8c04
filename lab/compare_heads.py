"""Trains every kind of draft head on the same data, with equal steps and about equal parameters, and compares them.

Run ``python lab/compare_heads.py --train FILE --held-out FILE --out DIR --seed N`` once per seed, then
``python lab/compare_heads.py --out DIR --table``. Started again, a seed goes on where it stopped.
The files are ``texts/train.jsonl`` and ``texts/held_out.jsonl`` of ``python -m lab.pair.make``.
"""

import argparse
import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from compare_table import table

from jaxspec.checkpoint.text.codec import Text
from jaxspec.config import to_record
from jaxspec.models.apply import apply
from jaxspec.models.catalog import arch_of
from jaxspec.models.draft_head import DraftHead
from jaxspec.protocol import CaptureSpec
from jaxspec.pytree import replace
from jaxspec.serve.demo_pair import demo_model_dir
from jaxspec.shapes import Array, Params
from jaxspec.train.batch import Batch, TeacherOutput, shift_left
from jaxspec.train.checkpoints import Checkpoints, replace_directory
from jaxspec.train.data import Corpus, batches, load_corpus
from jaxspec.train.draft_losses import recall
from jaxspec.train.head_loss import head_loss
from jaxspec.train.head_run import make_run
from jaxspec.train.objective import HeadObjective
from jaxspec.train.optimizer import adamw
from jaxspec.train.packed_rows import PackedRows
from jaxspec.train.settings import RunSettings
from jaxspec.train.target import read_headers
from jaxspec.train.teacher import run_teacher
from jaxspec.train.unroll import unroll, weights

VOCABULARY, ROUNDS, SAVE_EVERY = 512, 3, 10
EAGLE3 = {"kind": "eagle3", "draft_vocab_size": VOCABULARY, "intermediate_size": 128}
OURS = {"kind": "shared_expert", "draft_vocab_size": VOCABULARY, "intermediate_size": 128, "taps": (), "fc_norm": True}
# Sizes are chosen so that every one has 0.22 to 0.26 million trained parameters.
HEADS: dict[str, dict[str, Any]] = {
    "EAGLE-1": {"kind": "eagle", "own_head": False, "intermediate_size": 416},
    "EAGLE-3": EAGLE3,
    "EAGLE-3, fc_norm": EAGLE3 | {"fc_norm": True},
    "P-EAGLE": EAGLE3 | {"kind": "peagle"},
    "Medusa": {"kind": "medusa", "own_head": False, "heads": 5, "layers": 3},
    "shared expert": OURS | {"commons": "default", "routing": ()},
    "shared expert, routing": OURS | {"commons": "default", "routing": "default"},
    "shared expert, late layers, routing": OURS | {"commons": (1, 2, 3), "routing": "default"},
    "shared expert, one tap, routing": OURS
    | {"commons": (0, 2), "taps": (3,), "routing": "default"},
    "draft model": {
        "kind": "draft_model", "layers": 2, "hidden_size": 72, "intermediate_size": 144, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32,
    },
}  # fmt: skip
LOSSES: dict[str, dict[str, Any]] = {
    "EAGLE-1": {"feature": 1.0, "token": 0.1, "noise": 0.2, "rounds": 1},
    "P-EAGLE": {"rounds": 5},
}


def settings_of(name: str, args: argparse.Namespace) -> RunSettings:
    """One head's run."""
    head = HEADS[name]
    values = {
        "target": "demo", "out": str(args.out), "head": head, "seed": args.seed,
        "data": {"train": [args.train], "held_out": [args.held_out], "length": 512},
        "train": {"steps": args.steps, "rows": 4, "compute_dtype": "float32", "target_dtype": "float32"},
        "optimizer": {"learning_rate": args.rate, "schedule": "wsd", "warmup": args.steps // 10},
        "loss": {"rounds": ROUNDS, "routing": 0.5 if head.get("routing") else 0.0} | LOSSES.get(name, {}),
        "evaluation": {"prompts": args.prompts, "prompt_tokens": 128, "new_tokens": 64, "lengths": [3, 5]},
    }  # fmt: skip
    return to_record(values, RunSettings, name)


def read_by(objective: HeadObjective, teacher: TeacherOutput, every: CaptureSpec) -> TeacherOutput:
    """The part of a teacher that one head asks for."""
    reads = objective.reads
    features = replace(
        teacher.features,
        taps=tuple(teacher.features.taps[every.taps.index(b)] for b in reads.taps),
        shared_outputs=tuple(
            teacher.features.shared_outputs[every.shared_outputs.index(y)] for y in reads.shared_outputs
        ),
    )
    return replace(teacher, features=features, expert_YBTA=teacher.expert_YBTA if objective.routing else ())


def train(names: Sequence[str], args: argparse.Namespace, corpus: Corpus) -> dict[str, Params]:
    """Trains all heads on the same batches; the target runs once per batch for all of them."""
    directory = demo_model_dir("target")
    target = read_headers(settings_of(names[0], args), directory).load()
    runs = {name: make_run(settings_of(name, args), target, corpus) for name in names}
    nets = [run.frozen.net for run in runs.values() if isinstance(run.frozen.net, DraftHead)]
    every = CaptureSpec(
        tuple(sorted({b for net in nets for b in net.spec.reads.taps})),
        tuple(sorted({y for net in nets for y in net.spec.reads.shared_outputs})),
    )
    routing = next((net.spec.routing for net in nets if net.spec.routing), ())
    teacher_output_of = jax.jit(lambda params, batch: run_teacher(target.net, params, batch, every, routing))
    optimizer = {name: adamw(settings_of(name, args).optimizer, args.steps) for name in names}

    @partial(jax.jit, static_argnums=0, donate_argnums=(2, 3))
    def update(
        name: str,
        objective: HeadObjective,
        params: Params,
        state: Any,
        teacher: TeacherOutput,
        batch: Batch,
        key: Array,
    ):
        def loss_of(params: Params) -> tuple[Array, dict[str, Array]]:
            return head_loss(objective, params, read_by(objective, teacher, every), batch, key)

        (loss, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        changes, state = optimizer[name].update(grads, state, params)
        return jax.tree.map(lambda p, c: p + c, params, changes), state, metrics | {"loss": loss}

    params = {name: run.init() for name, run in runs.items()}
    states = {name: optimizer[name].init(params[name]) for name in names}
    spent = dict.fromkeys(names, 0.0)
    identity = {"heads": {name: HEADS[name] for name in names}, "steps": args.steps, "rate": args.rate}
    store = Checkpoints(args.out / f"seed{args.seed}" / "run", identity | {"data": corpus.digest()})
    if store.step:
        (params, states), about = store.restore((params, states))
        spent |= about["spent"]
    rows = batches(corpus.rows, seed=args.seed, size=4, first=store.step)
    for step in range(store.step, args.steps):
        batch = jax.tree.map(lambda x: jnp.asarray(x[0]), next(rows))
        teacher = teacher_output_of(target.params, batch)
        for number, name in enumerate(names):
            began = time.process_time()
            key = jax.random.fold_in(jax.random.key(args.seed), step * len(names) + number)
            objective = runs[name].frozen
            params[name], states[name], metrics = update(
                name, objective, params[name], states[name], teacher, batch, key
            )
            shown = {k: round(float(v), 3) for k, v in metrics.items()}
            spent[name] += time.process_time() - began
            if step % 10 == 9:
                print(json.dumps({"step": step + 1, "head": name, **shown, "cpu_s": round(spent[name], 1)}), flush=True)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == args.steps:
            store.save(step + 1, (params, states), {"spent": spent})
    store.close()
    return params


def routing_recall(objective: HeadObjective, params: Params, corpus: Corpus, length: int) -> dict[str, float]:
    """Share of the target's experts that a head predicts 1 and 4 tokens ahead, and that the last known token had."""
    net = objective.net
    if not isinstance(net, DraftHead) or not net.spec.routing:
        return {}
    some = PackedRows(corpus.held_out[:16], length, 64)
    arrays: dict[str, Any] = {name: jnp.stack([jnp.asarray(row[name]) for row in some]) for name in some[0]}
    batch = Batch(**arrays)
    reads, routing = net.spec.reads, net.spec.routing

    @jax.jit
    def run(objective: HeadObjective, params: Params) -> dict[str, Array]:
        teacher = run_teacher(objective.target, objective.target_params, batch, reads, routing)
        chosen = jnp.stack(teacher.expert_YBTA, axis=2)
        rounds = unroll(net, params, (objective.target, objective.target_params), teacher.features, batch, 4)
        figures = {}
        for distance in (1, 4):
            j, weight = distance - 1, weights(batch, distance - 1)
            wanted = shift_left(chosen, 2 + j)
            guess = recall(apply(net, params, rounds[j].last_BXD, method="routes"), wanted, wanted.shape[-1])
            same = jnp.any(wanted[..., :, None] == chosen[..., None, :], axis=-1).mean(axis=(-1, -2))
            for name, hit in (("routing_recall", guess), ("previous_recall", same)):
                figures[f"{name}_{distance}"] = jnp.sum(hit * weight) / jnp.sum(weight)
        return figures

    return {name: float(value) for name, value in run(objective, params).items()}


def measure(names: Sequence[str], params: dict[str, Params], args: argparse.Namespace, corpus: Corpus) -> None:
    """Writes every head's held-out acceptance and size."""
    file = args.out / f"seed{args.seed}.json"
    heads: dict[str, Any] = json.loads(file.read_text())["heads"] if file.exists() else {}
    for name in (name for name in names if name not in heads):
        settings = settings_of(name, args)
        run = make_run(settings, read_headers(settings, demo_model_dir("target")).load(), corpus)
        assert run.evaluate is not None, "held-out documents are given"
        assert run.save is not None, "heads are saved"
        figures = dict(run.evaluate(params[name])) | routing_recall(run.frozen, params[name], corpus, 512)
        size = sum(x.size for x in jax.tree.leaves(params[name]))
        heads[name] = {"parameters": int(size), **figures}
        print(name, json.dumps(heads[name]), flush=True)
        place = args.out / f"seed{args.seed}" / name.replace(" ", "-").replace(",", "")
        replace_directory(place, partial(run.save, params[name]))
        record = {"steps": args.steps, "tokens_per_step": 4 * 512, "seed": args.seed, "heads": heads}
        file.write_text(json.dumps(record, indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("--train", help="JSONL of text that the demo target wrote")
    parser.add_argument("--held-out", help="JSONL whose prompts are held out")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--heads", nargs="*", default=list(HEADS), help="some of them")
    parser.add_argument("--table", action="store_true", help="only print what the seeds found")
    args = parser.parse_args(argv)
    if args.table:
        print(table(args.out))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    directory = demo_model_dir("target")
    config = json.loads((directory / "config.json").read_text())
    corpus = load_corpus(settings_of("EAGLE-3", args).data, Text.load(directory), arch_of(config).vocab_size)
    measure(args.heads, train(args.heads, args, corpus), args, corpus)


if __name__ == "__main__":
    main()
