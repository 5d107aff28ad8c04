"""Collects what a chat is asked, and chats that people wrote, out of two packages and a list of ours.

Run ``python -m lab.upcycle.questions CHATTERBOT_DATA LM_EVAL_TASKS PROSE OUT``, the first being ``data/english`` of
``chatterbot-corpus``, the second ``lm_eval/tasks`` of ``lm-eval``, the third what ``lab.upcycle.prose`` wrote.
"""

import argparse
import ast
import json
import lzma
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import yaml

from lab.upcycle.documents import Document, carried, number, python

TOPICS = (
    "photosynthesis", "the water cycle", "gravity", "inflation", "the French Revolution", "black holes", "vaccines",
    "recursion", "binary search", "the Python GIL", "hash tables", "public-key cryptography", "DNS", "version control",
    "supply and demand", "plate tectonics", "the human heart", "climate change", "democracy", "jazz", "impressionism",
    "compound interest", "the immune system", "electricity", "machine learning", "neural networks",
    "regular expressions", "the Roman Empire", "the moon's phases", "bread baking", "chess openings",
    "healthy sleep", "time management", "remote work", "electric cars", "coffee", "volcanoes", "dinosaurs",
    "the Internet", "databases", "unit testing",
    "probability", "prime numbers", "the Pythagorean theorem", "fractions", "antibiotics", "recycling", "poetry",
    "the scientific method", "evolution", "friendship", "public speaking", "budgeting", "meditation", "gardening",
)  # fmt: skip
FRAMES = (
    "Explain {} to a beginner.", "What are three important facts about {}?", "Write a short paragraph about {}.",
    "Why does {} matter?", "Give me a list of five tips or ideas about {}.", "Write a short story that involves {}.",
    "What is a common misunderstanding about {}?", "Write an email to a friend about {}.",
    "Summarize {} in two sentences.",
    "Ask me three questions about {} and answer them.", "Write a poem about {}.", "How would you teach {} to a child?",
)  # fmt: skip


def ours() -> Iterator[str]:
    """Yields every topic in every frame."""
    for topic in TOPICS:
        for frame in FRAMES:
            yield frame.format(topic)


def chatterbot(data: Path) -> Iterator[list[str]]:
    """Yields the conversations of the corpus."""
    for file in sorted(data.glob("*.yml")):
        for said in yaml.safe_load(file.read_text())["conversations"]:
            if len(said) > 1:
                yield [str(line).strip() for line in said]


class _Loader(yaml.SafeLoader):
    """Reads the tasks' files, whose functions do not matter here."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: None)


def exemplars(tasks: Path) -> Iterator[list[str]]:
    """Yields worked examples: a question and its answer."""
    for file in sorted([*tasks.glob("bbh/cot_fewshot/*.yaml"), tasks / "gsm8k/gsm8k-cot.yaml"]):
        if file.name.startswith("_"):
            continue
        for sample in (yaml.load(file.read_text(), _Loader).get("fewshot_config") or {}).get("samples", ()):
            asked = sample.get("input") or sample.get("question")
            if asked and sample.get("target"):
                yield [asked.strip(), sample["target"].strip()]


def functions(documents: Iterable[Document]) -> Iterator[tuple[str, str, str]]:
    """Yields name, first sentence of the docstring and source of a short function of each document."""
    for document in documents:
        try:
            tree = ast.parse(document.text)
        except (SyntaxError, ValueError):
            continue
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith(("_", "test")):
                said = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ").strip()
                source = ast.get_source_segment(document.text, node) or ""
                if 30 < len(said) < 160 and said.isascii() and len(source) < 600:
                    yield node.name, said, source


def about_code(documents: list[Document]) -> Iterator[str]:
    """Yields requests to write or to explain a function."""
    for name, said, source in functions(sorted(documents, key=lambda document: number(document.name))):
        if number(name + said) % 3:
            yield f"Write a Python function `{name}`: {said}"
        else:
            yield f"What does this function do?\n\n```python\n{source}\n```"


def about_prose(documents: list[Document]) -> Iterator[str]:
    """Yields requests about passages."""
    frames = (
        "Summarize this in one or two sentences", "Explain this in simple words",
        "Write a question about this text and answer it",
    )  # fmt: skip
    for document in sorted(documents, key=lambda document: number(document.name)):
        passages = [p.strip() for p in document.text.split("\n\n") if 250 < len(p) < 600 and p.count("\n") < 12]
        for passage in passages[:2]:
            yield f"{frames[number(passage) % 3]}:\n\n{passage}"


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("chatterbot", type=Path)
    parser.add_argument("tasks", type=Path)
    parser.add_argument("prose", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=2600, help="requests of each of the two kinds that texts give")
    args = parser.parse_args()
    said = [*chatterbot(args.chatterbot), *exemplars(args.tasks)]
    code = islice(dict.fromkeys(about_code(python()["train"])), args.count)
    prose = islice(dict.fromkeys(about_prose(carried(args.prose)["train"])), args.count)
    asked = sorted({*ours(), *(talk[0] for talk in said), *code, *prose}, key=number)
    args.out.write_bytes(lzma.compress(json.dumps({"asked": asked, "said": said}).encode()))
    print(len(asked), "questions", len(said), "chats", args.out.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
