"""Prompts of published benchmarks, from the files that a user has."""

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxspec.errors import ConfigError

SPLIT = "qualitative"
UNRESOLVED = "FULL BENCHMARK DATA SHOULD BE FETCHED"
PREPARE = "NeMo-Skills' nemo_skills/dataset/speed-bench/prepare.py"


def speed_bench(path: Path, category: str = "") -> list[dict[str, Any]]:
    """Returns the first turns of SPEED-Bench (Abramovich et al., arXiv 2604.09557), as vLLM's benchmark asks them.

    Args:
      path: directory with ``qualitative.jsonl`` or ``qualitative/*.parquet``; or one such file or directory, of another
        split, say.
      category: ``coding``, ``math`` and so on; by default all.

    Raises:
      ConfigError: nothing such is there, or some of its texts have yet to be fetched from their sources.
    """
    rows = [row for file in _files(path) for row in (_parquet(file) if file.suffix == ".parquet" else _lines(file))]
    try:
        categories = {str(row["category"]) for row in rows}
        chosen = [_first_turn(row) for row in rows if not category or row["category"] == category]
    except (KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{path}: no prompts of SPEED-Bench ({error!r}); rows have category and turns") from error
    if not chosen:
        raise ConfigError(f"{path}: no category {category!r}; there are {sorted(categories)}")
    if any(UNRESOLVED in text for text in chosen):
        raise ConfigError(f"{path}: texts that belong to others are not in it yet; run {PREPARE} once")
    return [{"messages": [{"role": "user", "content": text}]} for text in chosen]


def human_eval(file: Path) -> list[dict[str, Any]]:
    """Returns the prompts of ``HumanEval.jsonl`` or ``HumanEval.jsonl.gz`` (Chen et al., arXiv 2107.03374).

    Raises:
      ConfigError: the file cannot be read, or is another one.
    """
    try:
        return [{"prompt": str(row["prompt"])} for row in _lines(file)]
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{file}: no prompts of HumanEval ({error!r}); each line has task_id and prompt") from error


def _files(path: Path) -> list[Path]:
    """Returns the files of a split: the qualitative one where a directory has several."""
    if path.is_file():
        return [path]
    if (path / f"{SPLIT}.jsonl").is_file():
        return [path / f"{SPLIT}.jsonl"]
    folder = path / SPLIT if (path / SPLIT).is_dir() else path
    if files := sorted(folder.glob("*.parquet")):
        return files
    raise ConfigError(f"{path}: neither {SPLIT}.jsonl nor {SPLIT}/*.parquet is there; {PREPARE} writes them")


def _first_turn(row: Mapping[str, Any]) -> str:
    return str(row["turns"][0] if row.get("turns") else row["messages"][0]["content"])


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    opened = gzip.open if file.suffix == ".gz" else open
    try:
        with opened(file, "rt", encoding="utf-8") as lines:
            yield from (json.loads(line) for line in lines if line.strip())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as lines of JSON ({error})") from error


def _parquet(file: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError(f"{file}: Parquet needs pyarrow (pip install pyarrow); or give a .jsonl") from None
    try:
        return parquet.read_table(file).to_pylist()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as Parquet ({error})") from error
