"""The families that are known: ``FAMILY``, or several ``FAMILIES``, of each module in the folder of families."""

import importlib
import pkgutil
from functools import cache

from jaxspec.errors import ConfigError
from jaxspec.models import families
from jaxspec.models.arch import ArchSpec
from jaxspec.models.family import Config, Family, arch_from_config


@cache
def known_families() -> dict[str, Family]:
    """Every family by its ``model_type``."""
    names = [module.name for module in pkgutil.iter_modules(families.__path__)]
    modules = [importlib.import_module(f"{families.__name__}.{name}") for name in names]
    rows = [row for module in modules for row in getattr(module, "FAMILIES", None) or (module.FAMILY,)]
    return {row.model_type: row for row in rows}


def arch_of(config: Config) -> ArchSpec:
    """The architecture of a published config.

    Raises:
      ConfigError: the ``model_type`` is missing or unknown (the known ones are listed), or the config is wrong.
    """
    family = known_families().get(config.get("model_type", ""))
    if family is None:
        raise ConfigError(
            f"config: model_type {config.get('model_type')!r} is not known; known are {sorted(known_families())}"
        )
    return arch_from_config(config, family)
