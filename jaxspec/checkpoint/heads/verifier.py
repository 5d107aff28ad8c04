"""The target of a head as other engines name it, and what a training wrote about it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROVENANCE = "training.json"


def verifier_name(head: Path, target: Path | None, config: Mapping[str, Any] | None) -> str | None:
    """Returns a model's name that means something on another machine too; None if nothing states one.

    Args:
      head: directory of the head; one that was trained here says what for.
      target: directory of the model, None if it is not given.
      config: its published config.
    """
    published = (config or {}).get("_name_or_path")
    if isinstance(published, str) and published and not Path(published).is_absolute():
        return published
    if target is not None:
        return target.resolve().name
    name = trained_for(head).get("name")
    return name if isinstance(name, str) and name else None


def trained_for(head: Path) -> Mapping[str, Any]:
    """Returns name and fingerprint of the model that a head was trained for here, empty if nothing states it."""
    target = provenance(head).get("target")
    return target if isinstance(target, dict) else {}


def provenance(head: Path) -> Mapping[str, Any]:
    """Reads what a training here wrote next to a head, empty for other heads."""
    try:
        record = json.loads((head / PROVENANCE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
