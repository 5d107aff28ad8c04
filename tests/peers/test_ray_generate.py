"""A fleet of two replicas under Ray Data; needs JAXSPEC_RAY_PYTHON, an interpreter with jaxspec and its extra ray.

A virtual environment for it: ``pip install -e '.[ray]' -c constraints.txt``.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

PYTHON = os.environ.get("JAXSPEC_RAY_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="JAXSPEC_RAY_PYTHON names no interpreter with ray")
ROOT = Path(__file__).parents[2]
DRAFT = {"method": "draft_model", "model": "jaxspec/demo_model/draft", "num_speculative_tokens": 4}
SETTINGS = (
    "--speculative-config", json.dumps(DRAFT), "--max-tokens", "16", "--dtype", "float32", "--max-num-seqs", "4",
    "--max-model-len", "160",
)  # fmt: skip
FLEET = ("scripts/ray_generate.py", "--replicas", "2", "--replica-cpus", "0.5", "--batch-size", "5")
GENERATE = ("-m", "jaxspec.cli.main", "generate")


def requests() -> list[str]:
    """Greedy, sampled and bad lines."""
    prompts = [found["prompt"] for found in json.loads((ROOT / "jaxspec/demo_model/held_out_prompts.json").read_text())]
    lines: list[dict[str, Any]] = [{"prompt": prompt, "temperature": 0.8 * (n % 2)} for n, prompt in enumerate(prompts)]
    lines[3] |= {"temperature": 1.0, "n": 2}
    return [json.dumps(line) for line in [*lines[:11], {"prompt": "x", "temperature": "hot"}, *lines[11:12]]]


def job(command: tuple[str, ...], source: Path, output: Path) -> dict[int, dict[str, Any]]:
    """Runs a job to its end and returns its records."""
    arguments = [str(PYTHON), *command, "--input", str(source), "--output", str(output), *SETTINGS]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 1, done.stderr[-3000:]  # one request is bad
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted(record["index"] for record in records) == list(range(len(requests())))
    return {record["index"]: record for record in records}


def test_a_fleet_writes_what_one_engine_writes(tmp_path: Path):
    source, one, fleet = (tmp_path / name for name in ("in.jsonl", "one.jsonl", "fleet.jsonl"))
    source.write_text("\n".join(requests()) + "\n")
    plain = job(GENERATE, source, one)
    assert job(FLEET, source, fleet) == plain
    # Half of it is lost, the last line half written: the fleet goes on, and then finds nothing to do.
    kept = fleet.read_bytes().splitlines(keepends=True)
    fleet.write_bytes(b"".join(kept[:6]) + kept[6][:20])
    assert job(FLEET, source, fleet) == plain
    assert job(GENERATE, source, fleet) == plain
    assert fleet.read_bytes().startswith(b"".join(kept[:6]))
