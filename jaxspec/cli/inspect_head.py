"""What ``jaxspec inspect HEAD --target DIR`` shows: the traps between engines, before anything is served."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from jaxspec.errors import ConfigError

STYLES = {"ok": "green", "warning": "yellow", "error": "red"}


def inspect_head(path: Path, target: Path | None, *, as_json: bool, color: bool) -> int:
    """Prints the findings about a draft head; returns 1 where it is wrong.

    Raises:
      ConfigError: the target is not named.
    """
    if target is None:
        raise ConfigError(f"{path}: it is a draft head; name the model that it drafts for with --target DIR")
    from jaxspec.checkpoint.head_traps import look_at

    found, refusal = look_at(path, target)
    wrong = bool(refusal) or any(finding.verdict == "error" for finding in found)
    if as_json:
        report = {"path": str(path), "target": str(target), "refused": refusal, "traps": [asdict(f) for f in found]}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return int(wrong)
    from jaxspec.cli.screen import Screen

    screen = Screen(color)
    screen.line(f"draft head {path} for {target}", "bold")
    for finding in found:
        screen.line(f"{finding.trap:>3} {finding.verdict:<7} {finding.title}: {finding.found}", STYLES[finding.verdict])
        if finding.verdict != "ok":
            for who, words in (("vLLM", finding.vllm), ("SGLang", finding.sglang), ("cure", finding.cure)):
                screen.line(f"            {who}: {words}")
    screen.line(f"jaxspec refuses it: {refusal}" if refusal else "jaxspec loads it", "red" if refusal else "bold")
    return int(wrong)
