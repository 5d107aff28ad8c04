"""Cuts prompts out of the demo's corpus, so that the demo target writes the text that its heads are trained on.

Run ``python lab/make_head_prompts.py --work DIR``, then for both splits ``jaxspec generate --model
jaxspec/demo_model/target --input DIR/train_prompts.jsonl --output DIR/train.jsonl --max-num-seqs 16``: what that
writes is data for ``jaxspec train`` and ``lab/compare_heads.py``.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import demo_corpus
import numpy as np
from demo_models import DEMO
from demo_text import TEMPERATURE, prompts

from jaxspec.serve.demo_pair import demo_model_dir


def lines(tokens: np.ndarray, count: int, new: int) -> list[str]:
    """Requests of one split, half of them greedy and half sampled, a pure function of the arguments."""
    cut = np.concatenate([prompts(tokens, DEMO, index) for index in range(-(-count // DEMO.rows))])[:count]
    return [
        json.dumps({
            "prompt_token_ids": prompt.tolist(), "temperature": TEMPERATURE * (number % 2), "seed": number,
            "max_tokens": new, "ignore_eos": True,
        })
        for number, prompt in enumerate(cut)
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("--work", type=Path, required=True, help="directory for token streams and prompts")
    parser.add_argument("--train", type=int, default=832, help="prompts to train on")
    parser.add_argument("--held-out", type=int, default=64, help="prompts cut out of modules held out from training")
    parser.add_argument("--new-tokens", type=int, default=384, help="tokens that the target writes after each")
    parser.add_argument("--root", type=Path, help="a standard library other than the running Python's")
    args = parser.parse_args(argv)
    if not (args.work / "corpus.json").exists():
        demo_corpus.encode(demo_corpus.collect(args.root), demo_model_dir("target"), args.work)
    for split, count in (("train", args.train), ("held_out", args.held_out)):
        made = lines(np.load(args.work / f"{split}.npy"), count, args.new_tokens)
        (args.work / f"{split}_prompts.jsonl").write_text("\n".join(made) + "\n", encoding="utf-8")
        print(f"{args.work / f'{split}_prompts.jsonl'}: {count} prompts of {DEMO.prompt} tokens")


if __name__ == "__main__":
    main()
