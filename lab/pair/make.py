"""Makes the embedded demo pair and its head, from the installed packages to the files in ``jaxspec/demo_model``.

Run ``python -m lab.pair.make --work DIR``; started again, it goes on where it stopped. ``taskset -c 1`` and
``XLA_FLAGS=--xla_cpu_multi_thread_eigen=false`` keep it on one core.
"""

import argparse
import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint.heads.directory import in_dtype, load_head, save_head
from jaxspec.checkpoint.heads.verifier import PROVENANCE
from jaxspec.checkpoint.load.model import load_model, read_config
from jaxspec.checkpoint.load.save import save_model
from jaxspec.models.catalog import arch_of
from jaxspec.nn.policy import make_policy
from jaxspec.shapes import Params
from jaxspec.train.run import train as train_head
from jaxspec.train.settings import load_run_settings
from lab.pair import corpus, draft, excerpts, record, target, texts
from lab.pair.recipe import PAIR, TINY, Recipe
from lab.pair.training import show

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
GENERATION = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "do_sample": False}
EXACT = make_policy("float32")


def export(out: Path, params: Params, config: dict[str, Any], data: Path) -> None:
    """Writes one model in bfloat16 with the tokenizer beside it."""
    out.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER:
        shutil.copyfile(data / name, out / name)
    corpus.write_json(out / "generation_config.json", GENERATION)
    save_model(out, params, arch_of(config), config, np.dtype("bfloat16"))


def digest(model: Path) -> str:
    """Returns the sha256 of a model's weights."""
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()


def make_head(out: Path, directory: Path, files: dict[str, Path], changes: Sequence[str]) -> None:
    """Trains the head by ``configs/train/demo_head.toml`` and puts the best one, in bfloat16, beside the pair."""
    paths = [f'data.{name}=["{file}"]' for name, file in files.items()]
    cache = f'features.cache="{directory / "features"}"'
    settings = load_run_settings("demo_head", [*paths, cache, *changes], str(directory / "run"))
    train_head(settings, out / "target", show, print)
    best = directory / "run" / "best"
    head = load_head(best, arch_of(read_config(out / "target")), EXACT)
    save_head(in_dtype(head, "bfloat16"), out / "head")
    shutil.copyfile(best / PROVENANCE, out / "head" / PROVENANCE)


def make(work: Path, out: Path, recipe: Recipe, head: Sequence[str] = ()) -> None:
    """Runs every stage in order; what an earlier call finished is not done again."""
    data, runs = work / "data", work / "runs"
    corpus.prepare(data, recipe.target["vocab_size"])
    export(out / "target", target.train(data, runs / "target", recipe), recipe.target, data)
    excerpts.write(data, out / "held_out_prompts.json")

    # Draft and head belong to one target: other weights get directories of their own.
    own = runs / digest(out / "target")[:12]
    files = texts.write(out / "target", data, own / "texts", recipe)
    rows = {name: texts.read(file) for name, file in files.items()}
    teacher = jax.tree.map(lambda x: x.astype(jnp.float32), load_model(out / "target", EXACT).params)
    export(out / "draft", draft.train(data, own / "draft", teacher, rows, recipe), recipe.draft, data)
    make_head(out, own / "head", files, head)
    record.write(out, data, {"target": runs / "target", "draft": own / "draft", "head": own / "head/run"}, recipe, rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="directory for data and runs")
    parser.add_argument("--out", type=Path, default=Path("jaxspec/demo_model"), help="directory for the pair")
    parser.add_argument("--target-steps", type=int, help="updates of the target, fewer for a preview")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    recipe = TINY if args.tiny else PAIR
    if args.target_steps:
        recipe = replace(recipe, of_target=replace(recipe.of_target, steps=args.target_steps))
    make(args.work, args.out, recipe, TINY_HEAD if args.tiny else ())


TINY_HEAD = (
    "train.steps=2", "train.rows=2", "data.length=32", "head.draft_vocab_size=64", "head.intermediate_size=16",
    "head.commons=[0]", "head.taps=[]", "evaluation.every=2", "evaluation.prompts=2", "evaluation.prompt_tokens=8",
    "evaluation.new_tokens=8",
)  # fmt: skip

if __name__ == "__main__":
    main()
