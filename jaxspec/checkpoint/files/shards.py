"""Shards of a directory: the index says which file holds a tensor, and without one no name may appear twice."""

import os
from collections.abc import Mapping
from pathlib import Path

from jaxspec.checkpoint.files.header import Tensor, read_header
from jaxspec.checkpoint.files.model_files import file_in, read_json
from jaxspec.errors import CheckpointError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
OTHERS = ("pytorch_model.bin.index.json", "pytorch_model.bin", "*.gguf", "*.bin", "*.pt", "*.pth")
MOST_NAMED = 10


def tensors_of(directory: Path) -> dict[str, Tensor]:
    """Returns where the tensors of a directory lie, by name, from headers alone.

    Raises:
      CheckpointError: there is no safetensors file, one is missing, corrupt or outside of the directory, the index
        names tensors that its files lack, or two files hold tensors of one name and no index says which counts.
    """
    index = _entry(directory, INDEX)
    if index is not None:
        return _by_index(directory, weight_map(index))
    single = _entry(directory, SINGLE)
    files = [single] if single else [file_in(directory, f.name) for f in sorted(directory.glob("*.safetensors"))]
    if not files:
        raise CheckpointError(no_weights(directory))
    return _merged(directory, {file.name: read_header(file) for file in files}, {})


def weight_map(index: Path) -> dict[str, str]:
    """Returns the file name of each tensor by an index.

    Raises:
      CheckpointError: it is not readable as an index.
    """
    places = read_json(index, CheckpointError).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{index}: not a weight index, which has a weight_map of names; download the file again")
    return places


def no_weights(directory: Path) -> str:
    """Returns what to say of a directory without safetensors files, and what else it holds."""
    text = f"{directory}: no .safetensors file; jaxspec reads Hugging Face directories of safetensors"
    other = next((file.name for pattern in OTHERS for file in sorted(directory.glob(pattern))), None)
    if other is None:
        return f"{text}; download the weights into it"
    if other.endswith(".gguf"):
        return f"{text}; it holds {other}: give that file itself as the model"
    return (
        f"{text}; it holds {other}: load that where PyTorch is installed and save it again with "
        "save_pretrained(..., safe_serialization=True), or take a copy that was published as safetensors"
    )


def _entry(directory: Path, name: str) -> Path | None:
    """Returns a file of the directory, None if nothing of that name is there."""
    return file_in(directory, name) if os.path.lexists(directory / name) else None


def _by_index(directory: Path, named: Mapping[str, str]) -> dict[str, Tensor]:
    names, missing = sorted(set(named.values())), []
    for name in names:
        try:
            file_in(directory, name)
        except CheckpointError as error:
            if not _is_absent(directory, name):
                raise CheckpointError(f"{directory / INDEX}: {error}") from None
            missing.append(name)
    if missing:
        raise CheckpointError(f"{directory}: the index names shards that are not there: {missing}; download them again")
    headers = {name: read_header(directory / name) for name in names}
    lacking = [f"{tensor} in {name}" for tensor, name in named.items() if tensor not in headers[name]]
    if lacking:
        rest = f" and {len(lacking) - MOST_NAMED} more" if len(lacking) > MOST_NAMED else ""
        raise CheckpointError(
            f"{directory}: the index names {len(lacking)} tensors that their files lack: "
            f"{', '.join(lacking[:MOST_NAMED])}{rest}; index and files are of different downloads, download them again"
        )
    return _merged(directory, headers, named)


def _is_absent(directory: Path, name: str) -> bool:
    """Whether nothing of a sound name is there; a link to nothing is something else."""
    try:
        (directory / name).lstat()
    except FileNotFoundError:
        return ".." not in Path(name).parts
    except (OSError, ValueError):
        return False
    return False


def _merged(
    directory: Path, headers: Mapping[str, Mapping[str, Tensor]], named: Mapping[str, str]
) -> dict[str, Tensor]:
    """Merges tensors, each from the file that the index names; without an index only one file may hold it."""
    places: dict[str, Tensor] = {}
    for file, header in headers.items():
        for name, tensor in header.items():
            if named.get(name, file) != file:
                continue
            if name in places:
                raise CheckpointError(
                    f"{directory}: {places[name].file.name} and {file} both hold {name}, and no index says which "
                    "counts; remove the file that does not belong to the model"
                )
            places[name] = tensor
    return places
