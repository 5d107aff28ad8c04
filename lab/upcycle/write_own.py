"""Lets the mixture that ships answer questions and go on with code: what its draft head learns from.

Run ``python -m lab.upcycle.write_own OUT``: OUT is an ``own.npz`` that grows with every batch; a run that was cut off
goes on. With ``--prompts FILE`` prompts come from a file, which is made where it is not there, so that the machine that
answers need not be the one that holds the code.
"""

import argparse
import json
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from jaxspec import LLM, SamplingParams
from jaxspec.serve.upcycled_model import NAME, upcycled_model_dir
from lab.upcycle.chats import asking
from lab.upcycle.documents import number, python
from lab.upcycle.measure_head import HELD_OUT
from lab.upcycle.questions import FRAMES, about_code, ours

LONGEST = 224
"""Most tokens of a prompt."""
CODE = 160
"""Tokens of a file that the mixture goes on with."""
HEATS = (0.0, 0.7, 1.0, 0.7)
TOPICS = (
    "solar panels", "honey bees", "the printing press", "sleep and memory", "knots", "the silk road", "earthquakes",
    "how planes fly", "the water supply of a city", "yoga", "tea", "cheese", "bicycles", "trains", "lighthouses",
    "the periodic table", "acids and bases", "light and color", "sound", "magnets", "batteries", "engines", "bridges",
    "the Great Wall of China", "ancient Egypt", "the Renaissance", "the Industrial Revolution", "the Cold War",
    "the United Nations", "elections", "taxes", "banks", "the stock market", "insurance", "starting a company",
    "job interviews", "writing a resume", "teamwork", "leadership", "giving feedback", "saying no", "stress",
    "habits", "learning a language", "reading more books", "drawing", "photography", "the piano", "the guitar",
    "opera", "ballet", "theater", "Shakespeare", "science fiction", "fairy tales", "myths of Greece", "haiku",
    "football", "tennis", "swimming", "running a marathon", "hiking", "camping", "sailing", "fishing", "skiing",
    "cats", "dogs", "horses", "whales", "owls", "ants", "trees", "mushrooms", "the rain forest", "deserts", "rivers",
    "coral reefs", "glaciers", "clouds", "rainbows", "thunderstorms", "the seasons", "tides", "comets", "Mars",
    "the sun", "galaxies", "time zones", "calendars", "maps", "compasses", "numbers", "zero", "percentages",
    "averages", "graphs", "logic", "puzzles", "algorithms", "sorting a list", "linked lists", "stacks and queues",
    "binary trees", "dictionaries in Python", "Python classes", "exceptions", "list comprehensions", "generators",
    "decorators", "files in Python", "JSON", "SQL", "HTTP", "web browsers", "search engines", "e-mail", "passwords",
    "computer viruses", "robots", "video games", "smartphones", "the cloud", "open source", "Linux", "compilers",
    "debugging", "code review", "teeth", "the brain", "the eyes", "blood", "bones", "vitamins", "sugar", "breakfast",
    "soup", "rice", "pasta", "chocolate", "spices", "a vegetable garden", "houseplants", "cleaning the kitchen",
    "moving to a new city", "travel on a budget", "Paris", "Tokyo", "New York", "Brazil", "India", "Kenya", "Iceland",
)  # fmt: skip
MORE_FRAMES = (
    "What is the history of {}?", "Compare {} with something similar.", "I know nothing about {}. Where do I begin?",
    "Write a dialogue between two people about {}.", "What are the pros and cons of {}?", "Tell me a joke about {}.",
    "Describe {} step by step.", "Which words should I know to talk about {}?", "Write a product review about {}.",
    "What will {} be like in fifty years?", "Write a quiz with answers about {}.", "Whom do I ask about {}?",
)  # fmt: skip


def chat_prompts(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Returns questions to learn from; three of four are ours, the others are about functions."""
    mine = [*ours(), *(frame.format(topic) for topic in TOPICS for frame in (*FRAMES, *MORE_FRAMES))]
    own = sorted((question for question in mine if number(question) % HELD_OUT), key=number)
    code = [question for question in about_code(python()["train"]) if number(question) % HELD_OUT]
    return asking(tokenizer, sorted([*own[: count * 3 // 4], *code[: count - count * 3 // 4]], key=number))


def code_prompts(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Returns pieces of files that begin with a line, longer files more often."""
    texts = [document.text for document in sorted(python()["train"], key=lambda document: number(document.name))]
    rng, sizes = np.random.default_rng(1), np.array([len(text) for text in texts], float)
    prompts = []
    for index in rng.choice(len(texts), 2 * count, p=sizes / sizes.sum()):
        text = texts[index]
        begin = text.find("\n", int(rng.integers(len(text)))) + 1
        ids = tokenizer.encode(text[begin : begin + 8 * CODE], add_special_tokens=False).ids[:CODE]
        if len(ids) == CODE:
            prompts.append(ids)
    return prompts[:count]


def read_prompts(file: Path | None, chats: int, code: int) -> dict[str, list[list[int]]]:
    """Returns prompts by kind, from a file if there is one."""
    if file and file.exists():
        return json.loads(file.read_text())
    tokenizer = Tokenizer.from_file(str(upcycled_model_dir() / "tokenizer.json"))
    prompts = {"chats": chat_prompts(tokenizer, chats), "code": code_prompts(tokenizer, code)}
    if file:
        file.write_text(json.dumps(prompts))
    return prompts


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--chats", type=int, default=1536)
    parser.add_argument("--code", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=320, help="most that follow a prompt")
    parser.add_argument("--prompts", type=Path, help="file of prompts, made if there is none")
    args = parser.parse_args()
    waiting = read_prompts(args.prompts, args.chats, args.code)
    llm = LLM(NAME, max_model_len=LONGEST + args.tokens, max_num_seqs=args.rows, max_logprobs=0)
    arrays: dict[str, Any] = dict(np.load(args.out)) if args.out.exists() else {}
    for batch, (kind, prompts) in product(range(-(-max(args.chats, args.code) // args.batch)), waiting.items()):
        done = len(arrays.get(kind + "_lengths", ()))
        some = [ids for ids in prompts if len(ids) <= LONGEST][done:][: args.batch]
        if done > batch * args.batch or not some:
            continue
        began, heats = time.monotonic(), np.resize(HEATS, len(some))
        params = [
            SamplingParams(temperature=float(heat), seed=done + n, max_tokens=args.tokens)
            for n, heat in enumerate(heats)
        ]
        outputs = llm.generate(some, params, use_tqdm=False)
        texts = [ids + list(output.outputs[0].token_ids) for ids, output in zip(some, outputs, strict=True)]
        more = {
            kind: np.concatenate(texts).astype(np.uint16),
            kind + "_prompts": np.asarray([len(ids) for ids in some], np.uint16),
            kind + "_lengths": np.asarray([len(text) for text in texts], np.uint16),
        }
        arrays |= {name: np.concatenate([arrays.get(name, x[:0]), x]) for name, x in more.items()}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(args.out, **arrays)
        written = more[kind].size - int(more[kind + "_prompts"].sum())
        a_second = written / (time.monotonic() - began)
        print(kind, done + len(some), f"{written} tokens, {a_second:.0f} a second", flush=True)


if __name__ == "__main__":
    main()
