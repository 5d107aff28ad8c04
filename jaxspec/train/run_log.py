"""The log of a run: metrics.jsonl, in step with the checkpoint, and TensorBoard or Weights & Biases."""

import os
import uuid
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from jaxspec.errors import ConfigError, JaxspecError
from jaxspec.train.settings import LoggingSettings
from jaxspec.whole_file import write_whole

FILE = "metrics.jsonl"
Entry = dict[str, int | float]
Watcher = Callable[[Entry], None]  # receives what is logged, as soon as it is
Notify = Callable[[Mapping[str, object]], None]  # receives what is known before training begins, in words
FILE_ONLY = LoggingSettings(tensorboard=False)
TIMES = ("time_s", "tokens_per_s", "mfu", "left_s")  # the only figures that differ between two runs of the same
SUMS = ("trained_tokens", "tokens")  # figures that are counts; the others are means
WEIGHT = SUMS[0]


def without_times(entry: Entry) -> Entry:
    """Returns the figures that an interrupted and resumed run logs like one that was left alone."""
    return {name: value for name, value in entry.items() if name not in TIMES}


class Interval:
    """Means of the metrics over the updates since the last entry; ``total`` are the sums of an earlier process."""

    def __init__(self, total: Mapping[str, float] | None = None):
        self.total: dict[str, float] = dict(total or {})

    def add(self, metrics: Mapping[str, float]) -> None:
        """Counts one update in: means by their trained tokens, counts as they are."""
        weight = metrics.get(WEIGHT, 1.0)
        for name, value in {**metrics, "": 1.0}.items():
            self.total[name] = self.total.get(name, 0.0) + (value if name in SUMS else weight * value)

    def take(self) -> Entry:
        """Returns the figures of the interval; the next begins."""
        weight = max(self.total.pop("", 0.0), 1e-20)
        entry: Entry = {name: value if name in SUMS else value / weight for name, value in self.total.items()}
        self.total = {}
        return entry


def read_metrics(run: Path) -> list[Entry]:
    """Reads the complete entries of a run, in their order; raises ConfigError if there is no such run."""
    try:
        lines = (run / FILE).read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise ConfigError(f"{run / FILE}: cannot be read ({error.strerror}); name the directory of a run") from None
    try:
        return [msgspec.json.decode(line, type=Entry) for line in lines if line.endswith(b"\n")]
    except msgspec.DecodeError as error:
        raise ConfigError(f"{run / FILE}: not the log of a run ({error})") from None


class MetricsLog:
    """Writes entries; those after the ``step`` of the checkpoint that a run goes on from are cut off first.

    Raises:
      ConfigError: what is asked for is not installed.
      JaxspecError: the file cannot be written.
    """

    def __init__(
        self,
        run: Path,
        step: int,
        logging: LoggingSettings = FILE_ONLY,
        settings: Mapping[str, Any] | None = None,
    ):
        self._path = run / FILE
        self._board = _tensorboard(run, step) if logging.tensorboard else None
        self._wandb = None if logging.wandb is None else _wandb(run, logging.wandb, settings or {})
        entries = [entry for entry in read_metrics(run) if entry["step"] <= step] if self._path.exists() else []
        try:
            # Entries after the checkpoint are written again.
            write_whole(self._path, b"".join(_line(entry) for entry in entries))
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise JaxspecError(f"{self._path}: cannot be written ({error.strerror})") from error

    def write(self, entry: Entry) -> None:
        """Appends one entry, which has a ``step``; raises JaxspecError if the disk is full."""
        try:
            self._file.write(_line(entry))
            if self._board is not None:
                for name, value in entry.items():
                    if name != "step":
                        self._board.add_scalar(name, value, int(entry["step"]))
        except OSError as error:
            raise JaxspecError(
                f"{self._path}: cannot be written ({error.strerror}); make room and run the same command again to go on"
            ) from error
        if self._wandb is not None:
            self._wandb.log({k: v for k, v in entry.items() if k != "step"}, step=int(entry["step"]))

    def sync(self) -> None:
        """Hands everything to the disk, which a checkpoint relies on; raises JaxspecError if it is full."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise JaxspecError(f"{self._path}: cannot be written ({error.strerror})") from error

    def close(self) -> None:
        """Closes all files."""
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def _line(entry: Entry) -> bytes:
    return msgspec.json.encode(entry) + b"\n"


def _tensorboard(run: Path, step: int) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise ConfigError(
            "logging: tensorboardX is not installed; pip install 'jaxspec[train]', or set logging.tensorboard=false"
        ) from None
    return SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)


def _wandb(run: Path, project: str, settings: Mapping[str, Any]) -> Any:
    try:
        module = import_module("wandb")
    except ImportError:
        raise ConfigError("logging: wandb is not installed; pip install wandb, or leave logging.wandb out") from None
    # A resumed run needs the name that it had, which dies with its directory.
    file = run / "wandb_id"
    if not file.exists():
        file.write_text(uuid.uuid4().hex)
    values = {"project": project, "dir": str(run), "name": run.name, "id": file.read_text(), "resume": "allow"}
    return module.init(**values, config=dict(settings))
