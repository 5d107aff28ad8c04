"""The name tables that are known, found by looking into the folder."""

import importlib
import pkgutil
from functools import cache

from jaxspec.checkpoint.names import tables
from jaxspec.checkpoint.names.table import Table


@cache
def known_tables() -> dict[str, Table]:
    """Returns every name table by ``model_type``."""
    known: dict[str, Table] = {}
    for module in pkgutil.iter_modules(tables.__path__):
        known |= getattr(importlib.import_module(f"{tables.__name__}.{module.name}"), "TABLES", {})
    return known
