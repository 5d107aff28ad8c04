"""Makes the streams of tokens that training reads.

Run ``python -m lab.upcycle.prepare TEXTS OUT``: TEXTS holds tokenizer.xz, prose.xz and questions.xz.
"""

import argparse
import json
import lzma
import time
from pathlib import Path

import numpy as np

from lab.upcycle.documents import Document, carried, number, python
from lab.upcycle.tokens import held_out, load_tokenizer, said, stream


def ask(path: Path) -> tuple[list[str], list[str], list[list[str]]]:
    """Returns questions for training, held-out ones, and what people said."""
    data = json.loads(lzma.decompress(path.read_bytes()))
    taken = {talk[0] for talk in data["said"]}
    free = [question for question in data["asked"] if question not in taken]
    held = [question for question in free if number(question) % 12 == 0]
    train = [question for question in free if number(question) % 12]
    return train, held, data["said"]


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("texts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--most", type=int, default=45_000_000, help="tokens of each kind")
    parser.add_argument("--few", type=int, help="read so many documents only, to try it")
    args = parser.parse_args()
    began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(args.texts)
    code, prose = python(), carried(args.texts / "prose.xz")
    people = [Document(talk[0], said(talk)) for talk in ask(args.texts / "questions.xz")[2]]
    few = slice(args.few)
    for name, documents in {"python": code["train"], "prose": prose["train"]}.items():
        tokens = stream(tokenizer, documents[few], args.most)
        np.save(args.out / f"{name}.npy", tokens)
        print(f"{name}: {len(documents)} documents, {len(tokens)} tokens, {time.monotonic() - began:.0f} s", flush=True)
    held = {
        "python_packages": code["packages"],
        "python_files": code["files"],
        "prose": prose["prose"],
        "people": people,
    }
    for name, documents in held.items():
        cut = held_out(tokenizer, documents, args.length)
        np.save(args.out / f"held_{name}.npy", cut)
        print(f"held out, {name}: {len(documents)} documents, {cut.size} tokens", flush=True)
    read = [document.name.split("/")[0] for document in code["train"]]
    record = {
        "packages_held_out": sorted({document.name.split("/")[0] for document in code["packages"]}),
        "packages": {name: read.count(name) for name in sorted(set(read))},
        "seconds": time.monotonic() - began,
    }
    (args.out / "record.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
