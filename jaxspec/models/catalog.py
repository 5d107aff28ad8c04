"""The families that are known: ``FAMILY``, or several ``FAMILIES``, of each module in the folder of families."""

import importlib
import pkgutil
from difflib import get_close_matches
from functools import cache

from jaxspec.errors import ConfigError
from jaxspec.models import families, mechanisms
from jaxspec.models.arch import ArchSpec
from jaxspec.models.family import Family, read_arch, reader_of
from jaxspec.models.read import Config, Reader, short

NEAREST = 6  # names in the message about an unknown one


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
      ConfigError: the ``model_type`` is missing or unknown (the nearest known ones are named), the config is wrong, or
        it switches on a mechanism that its family does not have.
    """
    return _read(config)[0]


def ignored_keys(config: Config) -> tuple[str, ...]:
    """Keys of a published config that say nothing here, and are not known to be harmless.

    Raises:
      ConfigError: see ``arch_of``.
    """
    return mechanisms.ignored_keys(*_read(config)[1:])


def _read(config: Config) -> tuple[ArchSpec, Reader, Family]:
    kind = config.get("model_type")
    family = known_families().get(kind) if isinstance(kind, str) else None
    if family is None:
        near = get_close_matches(str(kind), known_families(), NEAREST, cutoff=0.0)
        raise ConfigError(
            f"config: model_type {short(kind)} is not known; the nearest of the {len(known_families())} known ones are "
            f"{' '.join(near)}, and docs/models.md lists them all"
        )
    read = reader_of(config, family)
    arch = read_arch(read, family)
    read.mapping("quantization_config")
    mechanisms.check_mechanisms(read, family)
    return arch, read, family
