"""Checkpoints of a run: written aside and renamed, so there always is a whole one to go on from."""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from jaxspec.config import differences
from jaxspec.errors import ConfigError, JaxspecError
from jaxspec.sharding import hosts
from jaxspec.whole_file import write_whole

State = TypeVar("State")
KEPT = 2
FULL = ("No space left on device", "Disk quota exceeded", "RESOURCE_EXHAUSTED", "File too large")


class Checkpoints:
    """The checkpoints of one directory, which one group of processes at a time may write.

    Saving goes on in the background; the newest two are kept, so there always is a whole one.

    Raises:
      ConfigError: another process writes there, or the directory was begun with another ``identity`` (nested JSON).
      JaxspecError: the directory cannot be written.
    """

    def __init__(self, run: Path, identity: Mapping[str, Any]):
        self.run = run
        try:
            run.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(run / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise JaxspecError(f"{run}: cannot be written ({error.strerror})") from error
        try:
            hosts.check_shared(run)
            hosts.run_on_leader(lambda: _take(self._lock, run, identity))
            with self._explained("opened", 0):
                self._manager = ocp.CheckpointManager(
                    (run / "checkpoints").absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=KEPT)
                )
        except BaseException:
            os.close(self._lock)
            raise

    @property
    def step(self) -> int:
        """The update of the newest checkpoint, 0 where there is none."""
        return self._manager.latest_step() or 0

    def save(self, step: int, state: Any, about: Mapping[str, Any]) -> None:
        """Copies a state and the JSON that goes with it, and writes them in the background.

        Raises:
          JaxspecError: the disk is full or the directory cannot be written, now or for the checkpoint before.
        """
        with self._explained("saved", step):
            self._manager.wait_until_finished()
            needed, free = _bytes(state), shutil.disk_usage(self.run).free
            if free < needed:
                raise OSError(errno.ENOSPC, f"{needed / 1e6:.0f} MB are needed and {free / 1e6:.0f} MB are free")
            # It is written in the background, while what it is made of goes on.
            items = ocp.args.Composite(
                state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(deepcopy(dict(about)))
            )
            self._manager.save(step, args=items)

    def check_room(self, state: Any, params: Any, *, heads_kept: bool) -> None:
        """Refuses a disk that cannot hold the checkpoints of a run, and its two heads if they are kept."""

        def look() -> dict[str, Any]:
            each, heads = _bytes(state), 2 * _bytes(params) if heads_kept else 0
            # One more than are kept is there while it is written.
            needed = each * (KEPT + 1 - min(len(self._manager.all_steps()), KEPT)) + heads
            free = shutil.disk_usage(self.run).free
            if free < needed:
                raise JaxspecError(
                    f"{self.run}: the run needs {needed / 1e6:,.0f} MB for {KEPT + 1} checkpoints of "
                    f"{each / 1e6:,.0f} MB{' and two heads' if heads_kept else ''}, and {free / 1e6:,.0f} MB are free; "
                    "make room or choose another --out"
                )
            return {}

        hosts.run_on_leader(look)

    def restore(self, like: State) -> tuple[State, dict[str, Any]]:
        """Reads the newest state, with the dtypes and shardings of ``like``, and what goes with it.

        Raises:
          JaxspecError: it cannot be read, or has another structure.
        """
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(shapes), about=ocp.args.JsonRestore())
        with self._explained("read", self.step):
            restored: Any = self._manager.restore(self.step, args=items)
        return restored["state"], restored["about"]

    def close(self) -> None:
        """Waits for what is being written; raises JaxspecError if it could not be."""
        try:
            with self._explained("saved", self.step):
                self._manager.wait_until_finished()
                self._manager.check_for_errors()
        finally:
            self._manager.close()
            os.close(self._lock)

    @contextmanager
    def _explained(self, done: str, step: int) -> Iterator[None]:
        """Makes one clear error of whatever the checkpoint library raises."""
        try:
            with hosts.explain_lost_process():
                yield
        except JaxspecError:
            raise
        except Exception as error:
            steps = sorted(int(p.name) for p in (self.run / "checkpoints").glob("*") if p.name.isdigit())
            whole = f"the checkpoint of step {steps[-1]} is whole" if steps else "there is no earlier checkpoint"
            if _is_full(error):
                room = f" ({error.strerror})" if isinstance(error, OSError) else ""
                raise JaxspecError(
                    f"{self.run}: the disk is full{room}, step {step} could not be {done}; {whole}; make room and "
                    "run the same command again to go on"
                ) from error
            reason = " ".join(str(error).split())[:300]
            raise JaxspecError(
                f"{self.run}: the checkpoint of step {step} could not be {done} ({reason}); {whole}"
            ) from error


def _bytes(state: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def _is_full(error: BaseException | None) -> bool:
    while error is not None:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if full or any(words in str(error) for words in FULL):
            return True
        error = error.__cause__ or error.__context__
    return False


def _take(lock: int, run: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    _lock(lock, run)
    _bind(run, identity)
    return {}


def _lock(file: int, run: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{run}: another process trains there; wait for its end or choose another --out") from None
    except OSError as error:
        raise ConfigError(f"{run}: cannot be locked ({error.strerror}); choose a file system with locks") from error


def _bind(run: Path, identity: Mapping[str, Any]) -> None:
    """Writes the identity of a fresh directory, or compares it with that of a run that was begun."""
    file, now = run / "run.json", json.loads(json.dumps(identity))
    if not file.exists():
        if (run / "checkpoints").exists():
            raise ConfigError(f"{run}: has checkpoints but no {file.name}; choose another --out")
        _write_identity(file, now)
        return
    try:
        was = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: not readable ({error}); choose another --out") from None
    if _is_longer(was, now):
        _write_identity(file, now)
    elif changed := differences(was, now):
        raise ConfigError(
            f"{run}: begun with other settings: {'; '.join(changed)}; give what was given then to go on, choose "
            "another --out, or remove the directory to start anew"
        )


def _write_identity(file: Path, now: Any) -> None:
    try:
        write_whole(file, json.dumps(now, indent=2) + "\n")
    except OSError as error:
        raise JaxspecError(f"{file.parent}: cannot be written ({error.strerror})") from error


def _is_longer(was: Any, now: Any) -> bool:
    """Whether nothing but the number of updates differs, of which there are more now."""
    try:
        earlier, later = was["settings"]["train"], now["settings"]["train"]
        longer = later["steps"] > earlier["steps"]
    except (KeyError, TypeError):
        return False
    same = now | {"settings": now["settings"] | {"train": later | {"steps": earlier["steps"]}}}
    return longer and not differences(was, same)


def replace_directory(directory: Path, write: Callable[[Path], None]) -> None:
    """Writes a directory aside, and puts it in its place when it is whole; raises JaxspecError if the disk is full.

    After a crash in between, the same call made again writes it.
    """
    part, old = (directory.with_name(f"{directory.name}.{end}") for end in ("part", "old"))
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        write(part)
        if directory.exists():
            shutil.rmtree(old, ignore_errors=True)
            directory.rename(old)
        part.rename(directory)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise JaxspecError(f"{directory}: cannot be written ({error.strerror}); make room and go on") from error
