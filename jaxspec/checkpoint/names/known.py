"""The name tables that are known, found by looking into the folder."""

import importlib
import pkgutil
from functools import cache

from jaxspec.checkpoint.names import tables
from jaxspec.checkpoint.names.table import Table


@cache
def known_tables() -> dict[str, Table]:
    """Every name table by ``model_type``."""
    found: dict[str, Table] = {}
    for module in pkgutil.iter_modules(tables.__path__):
        found |= getattr(importlib.import_module(f"{tables.__name__}.{module.name}"), "TABLES", {})
    return found
