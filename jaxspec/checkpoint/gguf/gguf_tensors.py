"""Tensors of a GGUF file under the hub's names and in its layout; reading one decodes it."""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoint.files.header import Tensor
from jaxspec.checkpoint.files.packed_weights import with_packed_weights
from jaxspec.checkpoint.files.stream import TensorFiles, TensorName
from jaxspec.checkpoint.gguf import blocks
from jaxspec.checkpoint.gguf.config import architecture_of, heads_of
from jaxspec.checkpoint.gguf.gguf_header import GgufHeader, GgufTensor, is_gguf, read_gguf
from jaxspec.checkpoint.gguf.names import NAMES, ROTATION, Names

STACK = re.compile(r"blk\.(\d+)\.(ffn_(?:gate|up|down))_exps\.weight$")
LATENT_PARTS = re.compile(r"blk\.(\d+)\.attn_([kv])_b\.weight$")
OSS_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.(weight|bias)$")
MATRICES = re.compile(r"\.(?:self_attn|mlp|block_sparse_moe)\..*(?:_proj|_with_mqa|\.w[123])\.weight$")
SCALES, EXPONENTS = "group_scale", "scale"  # names of the scales of kept matrices, see ``storage_of``
Change = Callable[..., np.ndarray]


def open_tensors(path: Path) -> TensorFiles:
    """Returns the tensors of a model: of a GGUF file, or of a directory of safetensors files.

    Raises:
      CheckpointError: they cannot be read.
      ConfigError: the file's architecture is not known, or the ``gguf`` library is not installed.
    """
    return GgufFiles(read_gguf(path)) if is_gguf(path) else with_packed_weights(TensorFiles.of(path))


@dataclass(frozen=True)
class DecodedTensor:
    """An array under its hub name.

    Attributes:
      tensors: of the file that it is made of.
      entry: which entry of their first axis, None for all of it.
      decode: bytes of rows and a type to numbers.
      change: their layout to the hub's.
      shape: that it has, with the first axis of what is stacked on the hub, too.
      dtype: of what it is decoded to.
      stacked: whether it has an entry for each of the tensors' first axis.
    """

    tensors: tuple[GgufTensor, ...]
    decode: Callable[[np.ndarray, str], np.ndarray]
    change: Change
    shape: tuple[int, ...]
    dtype: np.dtype
    entry: int | None = None
    stacked: bool = False

    @property
    def place(self) -> Tensor:
        """Describes its bytes, as far as sizes on disk go."""
        first, size = self.tensors[0], sum(_size(t, self.entry) for t in self.tensors)
        return Tensor(first.file, self.dtype, self.shape, first.begin, first.begin + size)


def _size(tensor: GgufTensor, entry: int | None) -> int:
    size = tensor.end - tensor.begin
    return size if entry is None else size // tensor.shape[0]


class GgufFiles(TensorFiles):
    """The tensors of a GGUF file, or of all files of a split model.

    Matrices of attention and feed-forward layers whose type is a whole number times a scale (``blocks.INT8``) are
    numbers and ``group_scale``, MXFP4 ones bytes and ``scale``; all others are widened when they are read.

    Attributes:
      header: of the file.
      published: whether they are laid out as a release could be: of what is quantized only gpt-oss's experts stay so.
    """

    def __init__(self, header: GgufHeader, *, published: bool = False):
        self.header, self.published = header, published
        self.sources = _Naming(header, keeps=not published).sources()
        super().__init__({name: source.place for name, source in self.sources.items()})

    def __getitem__(self, name: str) -> np.ndarray:
        return self.read(TensorName(name))

    def read(self, name: TensorName) -> np.ndarray:
        source = self.sources[name.whole]
        if source.stacked and name.entry is None:
            return np.stack([self._one(source, e) for e in range(source.shape[0])])
        return self._one(source, name.entry if source.stacked else source.entry, name.entry)

    def _one(self, source: DecodedTensor, entry: int | None, row: int | None = None) -> np.ndarray:
        arrays = [source.decode(self._rows(t, entry), t.type) for t in source.tensors]
        whole = source.change(*arrays)
        return whole if row is None or source.stacked else whole[row]

    def _rows(self, tensor: GgufTensor, entry: int | None) -> np.ndarray:
        if tensor.file not in self._maps:
            with tensor.file.open("rb") as handle:
                self._maps[tensor.file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        size = _size(tensor, entry)
        raw = np.frombuffer(self._maps[tensor.file], np.uint8, size, tensor.begin + size * (entry or 0))
        lead = tensor.shape[:-1] if entry is None else tensor.shape[1:-1]
        return raw.reshape(*lead, -1)

    def size(self, name: TensorName) -> int:
        source = self.sources[name.whole]
        entry = name.entry if source.stacked else source.entry
        return sum(_size(t, entry) for t in source.tensors)

    def release(self, name: TensorName, size: int) -> None:
        self.released[str(name)] += size
        source = self.sources[name.whole]
        entry = name.entry if source.stacked else source.entry
        for tensor in source.tensors:
            if tensor.file in self._maps:
                begin = tensor.begin + _size(tensor, entry) * (entry or 0)
                end, begin = begin + _size(tensor, entry), begin - begin % mmap.PAGESIZE
                self._maps[tensor.file].madvise(mmap.MADV_DONTNEED, begin, end - begin)


class _Naming:
    """Gives the tensors of a header their hub names, those without one their own."""

    def __init__(self, header: GgufHeader, *, keeps: bool):
        self.header, self.keeps = header, keeps
        self.architecture = architecture_of(header)
        self.names: Names = NAMES[self.architecture]
        self.made: dict[str, DecodedTensor] = {}

    def sources(self) -> dict[str, DecodedTensor]:
        tensors = dict(self.header.tensors)
        tensors.pop(ROTATION, None)
        if self.architecture == "gpt-oss":
            self._oss_experts(tensors)
        self._latent_parts(tensors)
        for name, tensor in tensors.items():
            if (match := STACK.match(name)) and self.names.experts and len(tensor.shape) == 3:
                for e in range(tensor.shape[0]):
                    hub = self.names.expert(match[1], match[2], e, "weight")
                    self._matrix(hub or name, tensor, tensor.shape[1:], e)
                continue
            self._matrix(self.names.whole(name) or name, tensor, tensor.shape, None)
        return self.made

    def _matrix(self, hub: str, tensor: GgufTensor, shape: tuple[int, ...], entry: int | None) -> None:
        """Adds a tensor that is one on the hub, too, as numbers and scales where it can be kept so."""
        change = self._change(hub, shape)
        if hub.endswith("shared_expert_gate.weight") and len(shape) == 1:
            shape, change = (1, *shape), partial(np.expand_dims, axis=0)
        keeps = self.keeps and len(shape) == 2 and MATRICES.search(hub) is not None
        stem, add = hub.removesuffix("weight"), partial(self._add, tensor=tensor, change=change, entry=entry)
        if keeps and tensor.type in blocks.INT8:
            groups = (shape[0], shape[1] // blocks.GROUP)
            add(hub, blocks.int8_numbers, shape, np.int8)
            add(stem + SCALES, blocks.int8_scales, groups, np.float32)
        elif keeps and tensor.type == blocks.MXFP4:
            add(hub, _fp4_numbers, (shape[0], shape[1] // 2), np.uint8)
            add(stem + EXPONENTS, _fp4_scales, (shape[0], shape[1] // blocks.GROUP), np.uint8)
        else:
            add(hub, blocks.widened, shape, blocks.PLAIN.get(tensor.type, np.float32))

    def _add(
        self, hub: str, decode: Any, shape: tuple[int, ...], dtype: Any, *, tensor: GgufTensor, change: Change,
        entry: int | None,
    ) -> None:  # fmt: skip
        self.made[hub] = DecodedTensor((tensor,), decode, change, shape, np.dtype(dtype), entry)

    def _change(self, hub: str, shape: tuple[int, ...]) -> Change:
        """Returns what undoes llama.cpp's order of rows, or nothing."""
        for part, heads in zip(("q_proj", "k_proj"), heads_of(self.header), strict=True):
            if self.names.turned and f"self_attn.{part}." in hub and heads and not shape[0] % (2 * heads):
                return partial(unturned, heads=heads)
        return _same

    def _latent_parts(self, tensors: dict[str, GgufTensor]) -> None:
        """Joins the two halves that newer files cut DeepSeek's ``kv_b_proj`` into."""
        for name in [name for name in tensors if LATENT_PARTS.match(name)]:
            layer = name.split(".")[1]
            k, v = (tensors.get(f"blk.{layer}.attn_{part}_b.weight") for part in "kv")
            if k is None or v is None or len(k.shape) != 3 or len(v.shape) != 3:
                continue
            del tensors[k.name], tensors[v.name]
            (heads, rank, width), (_, value, _) = k.shape, v.shape
            shape = (heads * (width + value), rank)
            hub = f"model.layers.{layer}.self_attn.kv_b_proj.weight"
            self.made[hub] = DecodedTensor((k, v), _float32, _joined_latent, shape, np.dtype(np.float32))

    def _oss_experts(self, tensors: dict[str, GgufTensor]) -> None:
        """Makes gpt-oss's stacks of all experts, gate and up by turns."""
        for name in [name for name in tensors if OSS_EXPERTS.match(name)]:
            match = OSS_EXPERTS.match(name)
            if match is None or name not in tensors or match[2] == "up":
                continue
            hub = f"model.layers.{match[1]}.mlp.experts."
            pair = [tensors.pop(name)]
            if match[2] == "gate":
                up = tensors.pop(name.replace("ffn_gate", "ffn_up"), None)
                pair += [up] if up else []
            self._oss(hub + ("gate_up_proj" if match[2] == "gate" else "down_proj"), pair, bias=match[3] == "bias")

    def _oss(self, hub: str, pair: Sequence[GgufTensor], *, bias: bool) -> None:
        experts, *rows = pair[0].shape
        rows[0] *= len(pair)

        def add(name: str, decode: Any, shape: Sequence[int], dtype: Any, *, transpose: bool = False) -> None:
            change = partial(_by_turns, transpose=transpose, blocks_of=shape[-1] if len(shape) == 3 else 0)
            lead = (experts, *shape)
            self.made[name] = DecodedTensor(tuple(pair), decode, change, lead, np.dtype(dtype), stacked=True)

        if bias:
            add(f"{hub}_bias", _float32_row, rows, np.float32)
        elif all(t.type == blocks.MXFP4 for t in pair):
            grid = [rows[0], rows[1] // blocks.GROUP]
            add(f"{hub}_blocks", _fp4_numbers, [*grid, blocks.GROUP // 2], np.uint8)
            add(f"{hub}_scales", _fp4_scales, grid, np.uint8)
        else:
            add(hub, _float32, rows[::-1], np.float32, transpose=True)


def unturned(rows: np.ndarray, heads: int) -> np.ndarray:
    """Returns rows of queries or keys with the first halves of all pairs of a head before the second ones."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _same(array: np.ndarray) -> np.ndarray:
    return array


def _float32(raw: np.ndarray, kind: str) -> np.ndarray:
    return blocks.widened(raw, kind).astype(np.float32, copy=False)


def _float32_row(raw: np.ndarray, kind: str) -> np.ndarray:
    return _float32(raw, kind).reshape(-1)


def _fp4_numbers(raw: np.ndarray, _kind: str) -> np.ndarray:
    return blocks.fp4_numbers(raw)


def _fp4_scales(raw: np.ndarray, _kind: str) -> np.ndarray:
    return blocks.fp4_scales(raw)


def _by_turns(*parts: np.ndarray, transpose: bool, blocks_of: int) -> np.ndarray:
    """Lays rows of gate and up by turns; blocks of bytes get an axis of their own."""
    joined = np.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:])
    if blocks_of:
        return joined.reshape(len(joined), -1, blocks_of)
    return joined.T if transpose else joined


def _joined_latent(k_HRC: np.ndarray, v_HXR: np.ndarray) -> np.ndarray:
    joined = np.concatenate([k_HRC.swapaxes(1, 2), v_HXR], axis=1)
    return joined.reshape(-1, joined.shape[-1])
