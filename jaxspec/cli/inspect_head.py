"""What ``jaxspec inspect HEAD --target DIR`` shows: the traps between engines, before anything is served."""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxspec.cli.screen import Screen
from jaxspec.errors import ConfigError

STYLES = {"ok": "green", "warning": "yellow", "error": "red"}


def inspect_head(path: Path, target: Path | None, *, as_json: bool, color: bool) -> int:
    """Prints the findings about a draft head; returns 1 where it is wrong.

    Raises:
      ConfigError: the target is not named.
    """
    if target is None:
        raise ConfigError(f"{path}: it is a draft head; name the model that it drafts for with --target DIR")
    from jaxspec.checkpoint.heads.traps import check_head
    from jaxspec.checkpoint.heads.verifier import provenance
    from jaxspec.checkpoint.load.model import read_config
    from jaxspec.inspect.head_cost import experts_in_words

    traps, refusal = check_head(path, target)
    trained, experts = provenance(path), "" if refusal else experts_in_words(path, read_config(target))
    wrong = bool(refusal) or any(finding.verdict == "error" for finding in traps)
    if as_json:
        report = {"path": str(path), "target": str(target), "refused": refusal, "traps": [asdict(f) for f in traps]}
        sys.stdout.write(
            json.dumps(
                report | ({"experts": experts} if experts else {}) | ({"training": trained} if trained else {}),
                indent=2,
            )
            + "\n"
        )
        return int(wrong)

    screen = Screen(color=color)
    screen.line(f"draft head {path} for {target}", "bold")
    for words in (_training(trained) if trained else "", experts):
        if words:
            screen.line(words)
    for finding in traps:
        screen.line(f"{finding.trap:>3} {finding.verdict:<7} {finding.title}: {finding.found}", STYLES[finding.verdict])
        if finding.verdict != "ok":
            for who, words in (("vLLM", finding.vllm), ("SGLang", finding.sglang), ("cure", finding.cure)):
                screen.line(f"            {who}: {words}")
    screen.line(f"jaxspec refuses it: {refusal}" if refusal else "jaxspec loads it", "red" if refusal else "bold")
    return int(wrong)


def _training(trained: Mapping[str, Any]) -> str:
    """Returns in one line what training with jaxspec recorded next to the head."""
    target, data = trained.get("target") or {}, (trained.get("data") or {}).get("train") or []
    words = [
        f"trained for {target.get('name', 'a model without a name')} by jaxspec {trained.get('jaxspec', 'unknown')}"
    ]
    words.append(f"{trained.get('step', 'unknown')} updates on {', '.join(str(file.get('name')) for file in data)}")
    lengths = (trained.get("held_out") or {}).items()
    named = [f"{name.removesuffix('/acceptance_length')} {x:.2f}" for name, x in lengths if name.endswith("_length")]
    return ", ".join([*words, *([f"acceptance length {', '.join(named)}"] if named else [])])
