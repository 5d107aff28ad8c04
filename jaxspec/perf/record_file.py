"""Files of measurements: versioned JSON, checked when it is read."""

from pathlib import Path
from typing import TypeVar

import msgspec

from jaxspec.errors import ConfigError

Record = TypeVar("Record", bound=msgspec.Struct)


def load_record(file: Path, kind: type[Record], what: str, version: int, remedy: str) -> Record:
    """Loads a record of one version.

    Raises:
      ConfigError: the file is missing, of another version, or says anything else.
    """
    try:
        data = file.read_bytes()
        other = msgspec.json.decode(data, type=dict).get("version")
        if other != version:
            raise ConfigError(f"{file}: {what} of version {other!r}, this program reads {version}; {remedy}")
        return msgspec.json.decode(data, type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{file}: not a {what} ({error}); {remedy}") from None
