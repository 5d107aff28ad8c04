"""What other engines are told to load as the model that a head drafts for."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROVENANCE = "training.json"


def verifier_name(head: Path, target: Path | None, config: Mapping[str, Any] | None) -> str | None:
    """A model's name that means something on another machine too; None where nothing says one.

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
    """Name and fingerprint of the model that a head was trained for here, empty where nothing says it."""
    found = provenance(head).get("target")
    return found if isinstance(found, dict) else {}


def provenance(head: Path) -> Mapping[str, Any]:
    """What a training here wrote beside a head, empty for others."""
    try:
        found = json.loads((head / PROVENANCE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
