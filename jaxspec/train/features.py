"""A cache of what the target computes for every row of the data, so training need not run it again."""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxspec.cache.addressing import FLOAT8
from jaxspec.cache.float8 import quantize
from jaxspec.config import differences
from jaxspec.errors import ConfigError, JaxspecError
from jaxspec.models.transformer import Transformer
from jaxspec.protocol import CaptureSpec, Features
from jaxspec.shapes import Array, Params
from jaxspec.sharding.compiler_options import LazyJit
from jaxspec.train.batch import Batch, TeacherOutput
from jaxspec.train.packed_rows import PackedRows, Row
from jaxspec.train.run_log import Notify
from jaxspec.train.teacher import run_teacher
from jaxspec.whole_file import write_whole

ABOUT = "features.json"
SHARD_BYTES = 1 << 28
NOTIFY_EVERY_S = 10.0
NAMES = {"float32": "F32", "bfloat16": "BF16", "uint16": "U16", "uint8": "U8"}
E4M3 = np.dtype(FLOAT8)
SCALE = ".scale"
BEGINS = "last.begins"  # of a row's vectors among a file's, where prompts are left out
UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")
RUN_TEACHER = LazyJit(run_teacher, static_argnums=(0, 3, 4))


@dataclass(frozen=True)
class Teacher:
    """The target as it fills a cache: what is read of it, the cached dtype, and B rows at a time.

    Where nothing is to be filled in, shapes and dtypes of its parameters are enough. Without ``whole_last`` its last
    hidden states are kept where they predict trained tokens alone, the only ones whose logits count.
    """

    net: Transformer
    params: Params
    reads: CaptureSpec
    routing: tuple[int, ...]
    dtype: str
    rows: int
    mesh: Mesh | None = None
    whole_last: bool = True

    def __call__(self, rows: PackedRows, numbers: range) -> dict[str, Array]:
        """Computes the features of some rows, [B, T, ...] each; fewer than B rows are padded with the last one."""
        asked = [rows[min(n, numbers[-1])] for n in range(numbers[0], numbers[0] + self.rows)]
        arrays: dict[str, Any] = {name: np.stack([row[name] for row in asked]) for name in asked[0]}
        batch = Batch(**arrays)
        if self.mesh is not None:
            batch = jax.device_put(batch, NamedSharding(self.mesh, PartitionSpec("data")))
        output = RUN_TEACHER(self.net, self.params, batch, self.reads, self.routing)
        features = {"last": output.features.last_BTD}
        features |= {f"tap_{b}": x for b, x in zip(self.reads.taps, output.features.taps, strict=True)}
        shared = zip(self.reads.shared_outputs, output.features.shared_outputs, strict=True)
        features |= {f"common_{y}": x for y, x in shared}
        experts = zip(self.routing, output.expert_YBTA, strict=True)
        stored = {f"expert_{y}": x.astype(jnp.uint16) for y, x in experts}
        for name, x in features.items():
            stored |= self._stored(name, x)
        return stored

    def _stored(self, name: str, x_BTD: Array) -> dict[str, Array]:
        """Returns the arrays of one stream; e4m3 has a scale per position, and leaves what gives the logits alone."""
        if self.dtype != FLOAT8:
            return {name: x_BTD.astype(jnp.dtype(self.dtype))}
        if name == "last":
            return {name: x_BTD.astype(jnp.bfloat16)}
        values_BTD, scale_BT1 = quantize(x_BTD)
        bits_BTD = jax.lax.bitcast_convert_type(values_BTD, jnp.uint8)
        return {name: bits_BTD, f"{name}{SCALE}": scale_BT1}


class FeatureRows:
    """Packed rows with what the target computed for them, read from files when they are asked for.

    Each file of about ``shard_bytes`` is whole or absent: an interrupted pass over the data goes on where it was.
    ``identity`` (nested JSON) is what the features depend on besides the teacher's settings.

    Raises:
      ConfigError: the directory holds features of something else or a damaged file.
      JaxspecError: they do not fit on the disk, or it cannot be written.
    """

    def __init__(
        self,
        rows: PackedRows,
        teacher: Teacher,
        directory: Path,
        identity: Mapping[str, Any],
        notify: Notify = lambda facts: None,
        shard_bytes: int = SHARD_BYTES,
    ):
        self.rows, self.directory, self._reads, self._routing = rows, directory, teacher.reads, teacher.routing
        shapes = jax.eval_shape(lambda params: replace(teacher, params=params)(rows, range(1)), teacher.params)
        self._shapes = {name: (x.shape[1:], NAMES[x.dtype.name]) for name, x in shapes.items()}
        self._row_bytes = sum(int(np.prod(x.shape[1:])) * x.dtype.itemsize for x in shapes.values())
        self._vector_bytes = shapes["last"].dtype.itemsize * shapes["last"].shape[-1]
        self._whole_last = teacher.whole_last
        identity = {**identity, "dtype": teacher.dtype, "routing": list(teacher.routing)}
        identity["last"] = "everywhere" if teacher.whole_last else "before trained tokens"
        identity |= {"taps": list(teacher.reads.taps), "commons": list(teacher.reads.shared_outputs)}
        batches = max(shard_bytes // (self._row_bytes * teacher.rows), 1)
        with _written(directory), _locked(directory, notify):
            begun = _rows_per_file(directory, identity)
            self._per_shard = begun or batches * teacher.rows
            missing = self._missing()
            self._estimate(missing, notify)
            if not begun:
                about = json.dumps({"of": identity, "rows_per_file": self._per_shard}, indent=2)
                write_whole(directory / ABOUT, about + "\n")
            if missing:
                self._write(teacher, missing, notify)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        """Returns the arrays of a row, [T, ...] each; raises JaxspecError if its file cannot be read any more."""
        shard, place = divmod(index, self._per_shard)
        file, row = self._file(shard), self.rows[index]
        try:
            with safe_open(file, "np") as stored:
                arrays = {name: stored.get_slice(name)[place] for name in self._streams}
                if not self._whole_last:
                    begin, end = stored.get_slice(BEGINS)[place : place + 2].tolist()
                    arrays["last"] = self._spread(stored.get_slice("last")[begin:end], row)
        except (OSError, SafetensorError) as error:
            raise JaxspecError(f"{file}: cannot be read ({error}); run the same command again to write it") from error
        # No head reads the stream before the final norm, so none is cached.
        arrays = {name: _widened(x, arrays.get(name + SCALE)) for name, x in arrays.items()}
        features = Features(
            arrays["last"], arrays["last"][..., :0],
            tuple(arrays[f"tap_{b}"] for b in self._reads.taps),
            tuple(arrays[f"common_{y}"] for y in self._reads.shared_outputs),
        )  # fmt: skip
        experts = tuple(arrays[f"expert_{y}"] for y in self._routing)
        return {**row, "cached": TeacherOutput(features, experts)}

    @property
    def _streams(self) -> list[str]:
        """The arrays of which every row has as many numbers."""
        return [name for name in self._shapes if self._whole_last or name != "last"]

    def _spread(self, last_XD: np.ndarray, row: Row) -> np.ndarray:
        """Puts vectors to the positions that they are of, [T, D]; the others are zeros."""
        last_TD = np.zeros(self._shapes["last"][0], last_XD.dtype)
        last_TD[predicts(row)] = last_XD
        return last_TD

    def _file(self, shard: int) -> Path:
        return self.directory / file_name(shard)

    def _numbers(self, shard: int) -> range:
        """The rows of a file."""
        return range(shard * self._per_shard, min((shard + 1) * self._per_shard, len(self.rows)))

    def _missing(self) -> list[int]:
        """Returns the files that are absent; raises ConfigError if one of the others is damaged."""
        shards = range(-(-len(self.rows) // self._per_shard))
        missing = [shard for shard in shards if not self._file(shard).exists()]
        for shard in sorted({*shards} - {*missing}):
            count = len(self._numbers(shard))
            expected = {name: ([count, *shape], kind) for name, (shape, kind) in self._shapes.items()}
            if not self._whole_last:
                (_, width), kind = self._shapes["last"]
                expected |= {"last": ([self._vectors(shard), width], kind), BEGINS: ([count + 1], "I64")}
            try:
                with safe_open(self._file(shard), "np") as file:
                    slices = {name: file.get_slice(name) for name in expected}
                    stored = {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}
                why = "it has other arrays"
            except (OSError, SafetensorError) as error:
                stored, why = {}, error
            if stored != expected:
                raise ConfigError(f"{self._file(shard)}: damaged ({why}); remove it and run the same command again")
        return missing

    def _vectors(self, shard: int) -> int:
        """Returns how many last hidden states a file has without those of prompts."""
        return sum(int(predicts(self.rows[n]).sum()) for n in self._numbers(shard))

    def _bytes(self, shards: Iterable[int]) -> int:
        """Returns the size of files."""
        rows = sum(len(self._numbers(shard)) for shard in shards)
        left_out = 0 if self._whole_last else rows * self.rows.length - sum(map(self._vectors, shards))
        return rows * self._row_bytes - left_out * self._vector_bytes

    def _estimate(self, missing: list[int], notify: Notify) -> None:
        """Reports the size, and refuses what does not fit on the disk."""
        whole, needed = self._bytes(range(-(-len(self) // self._per_shard))), self._bytes(missing)
        free = shutil.disk_usage(self.directory).free
        positions = len(self) * self.rows.length
        size = f"{len(self)} rows x {self.rows.length} tokens x {whole // positions:,} bytes = {_size(whole)}"
        notify({"feature cache": f"{size} in {self.directory}, {_size(needed)} to write, {_size(free)} free"})
        if needed > free:
            raise JaxspecError(
                f"{self.directory}: the feature cache is {size}, {_size(needed)} of it to write, and "
                f"{_size(free)} are free; make room, choose another features.cache, bfloat16 as features.dtype or "
                "less data, or leave features.cache out to run the target in every update"
            )

    def _write(self, teacher: Teacher, missing: list[int], notify: Notify) -> None:
        """Computes and writes files."""
        if jax.process_count() > 1:
            raise ConfigError(
                f"{self.directory}: one process writes the feature cache; run jaxspec train --features-only on one "
                "host before training on several"
            )
        total, done, notified = sum(len(self._numbers(shard)) for shard in missing), 0, time.monotonic()
        for shard in missing:
            numbers = self._numbers(shard)
            parts, counts = list[dict[str, np.ndarray]](), [np.zeros(1, np.int64)]
            for first in range(0, len(numbers), teacher.rows):
                some = numbers[first : first + teacher.rows]
                arrays = jax.device_get(teacher(self.rows, some))
                parts.append({name: x[: len(some)] for name, x in arrays.items()})
                if not self._whole_last:
                    predicts_BT = np.stack([predicts(self.rows[n]) for n in some])
                    counts.append(predicts_BT.sum(1))
                    parts[-1]["last"] = parts[-1]["last"][predicts_BT]
                done += len(some)
                if time.monotonic() - notified >= NOTIFY_EVERY_S:
                    notified = time.monotonic()
                    notify({"features": f"{done}/{total} rows"})
            begins = {} if self._whole_last else {BEGINS: np.cumsum(np.concatenate(counts))}
            together = {name: np.concatenate([part[name] for part in parts]) for name in self._shapes}
            _save(together | begins, self._file(shard))


def predicts(row: Row) -> np.ndarray:
    """Returns the positions before trained tokens, bool [T]."""
    return np.append(row["loss_BT"][1:], False)


def is_complete(directory: Path, rows: PackedRows) -> bool:
    """Whether a directory has all files of a cache that was begun for so many rows; of what, is not looked at."""
    try:
        each = int(json.loads((directory / ABOUT).read_text(encoding="utf-8"))["rows_per_file"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return each > 0 and all((directory / file_name(shard)).exists() for shard in range(-(-len(rows) // each)))


def file_name(shard: int) -> str:
    """Returns the name of a file of a cache."""
    return f"features-{shard:06}.safetensors"


def _widened(x: np.ndarray, scale: np.ndarray | None) -> Any:
    """Returns a stream as stored; one of e4m3 numbers times its scales, bfloat16."""
    return x if scale is None else (x.view(E4M3).astype(np.float32) * scale).astype(ml_dtypes.bfloat16)


def _save(arrays: dict[str, np.ndarray], file: Path) -> None:
    """Writes a file that is whole or not there."""
    part = file.with_suffix(".part")
    save_file(arrays, part)
    with part.open("rb") as written:
        os.fsync(written.fileno())
    part.replace(file)


def _rows_per_file(directory: Path, identity: Mapping[str, Any]) -> int | None:
    """Reads the rows of each file of a directory that was begun for the same, None for a fresh one."""
    file = directory / ABOUT
    if not file.exists():
        return None
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
        was, rows = about["of"], int(about["rows_per_file"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: not readable ({error!r}); choose another features.cache") from None
    if changed := differences(was, json.loads(json.dumps(identity))):
        raise ConfigError(
            f"{directory}: holds features of something else: {'; '.join(changed)}; choose another features.cache, or "
            "remove the directory to write it anew"
        )
    return rows


@contextmanager
def _locked(directory: Path, notify: Notify) -> Iterator[None]:
    """Waits until no other process writes there; what it wrote is read then."""
    with (directory / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            notify({"feature cache": f"waiting for another process that writes {directory}"})
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _written(directory: Path) -> Iterator[None]:
    """Makes the directory, and one clear error of a disk that refuses."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise JaxspecError(
            f"{directory}: the feature cache cannot be written ({reason}); files that are there are whole, so make "
            "room and run the same command again to go on"
        ) from error


def _size(count: int) -> str:
    """Formats a number of bytes."""
    unit = min((len(str(count)) - 1) // 3, len(UNITS) - 1)
    return f"{count / 1000**unit:.3g} {UNITS[unit]}"
