"""Packed weights of a release by its config alone, as compressed-tensors, ModelOpt, AWQ and GPTQ publish them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxspec.checkpoint.load.block_scales import E4M3
from jaxspec.errors import ConfigError

HALF, FLOAT32, INT8, INT32, UINT8 = (np.dtype(x) for x in (np.float16, np.float32, np.int8, np.int32, np.uint8))
WORD = 32
Parts = dict[str, tuple[tuple[int, ...], np.dtype]]


@dataclass(frozen=True)
class PackedLayout:
    """How a release packs its matrices.

    Attributes:
      kind: ``words`` or ``awq`` or ``gptq`` of integers, ``nvfp4``, ``modelopt nvfp4``, ``int8`` or ``fp8``.
      bits: of an integer.
      group: inputs that share a scale, 0 for all of them.
      skipped: names or patterns (``re:...``) of modules that are left as they are.
    """

    kind: str
    bits: int
    group: int
    skipped: tuple[str, ...]

    def parts(self, shape: tuple[int, int]) -> Parts:
        """Returns shapes and dtypes of what is published of a matrix [out, in], by the endings of their names."""
        rows, columns = shape
        groups = -(-columns // self.group) if self.group else 1
        words, row_words = columns * self.bits // WORD, rows * self.bits // WORD
        scale = (rows, groups), HALF
        if self.kind in ("awq", "gptq"):
            numbers = (columns, row_words) if self.kind == "awq" else (words, rows)
            zeros = (groups, row_words), INT32
            return {"qweight": (numbers, INT32), "qzeros": zeros, "scales": ((groups, rows), HALF)}
        if self.kind == "words":
            return {"weight_packed": ((rows, words), INT32), "weight_scale": scale}
        if "nvfp4" in self.kind:
            plain = self.kind == "nvfp4"
            return {
                "weight_packed" if plain else "weight": ((rows, columns // 2), UINT8),
                "weight_scale": ((rows, groups), E4M3),
                "weight_global_scale" if plain else "weight_scale_2": ((1,), FLOAT32),
            }
        return {"weight": (shape, INT8 if self.kind == "int8" else E4M3), "weight_scale": scale}

    def skips(self, name: str) -> bool:
        """Whether a tensor is of a module that is left as it is."""
        module = name.removesuffix(".weight")
        patterns = (s.removeprefix("re:") for s in self.skipped if s.startswith("re:"))
        plain = [s.rstrip("*") for s in self.skipped if not s.startswith("re:")]
        return any(re.match(p, module) for p in patterns) or any(module.startswith(s) for s in plain)


def packed_layout(settings: Mapping[str, Any]) -> PackedLayout | None:
    """Returns how matrices are packed by a ``quantization_config``; None if fp8 in blocks, mxfp4 or nothing is.

    Raises:
      ConfigError: the config does not say enough.
    """
    method = settings.get("quant_method")
    skipped = tuple(
        settings.get("ignore") or settings.get("modules_to_not_convert") or settings.get("exclude_modules") or ()
    )
    if method in ("awq", "gptq"):
        return PackedLayout(method, int(settings["bits"]), max(int(settings.get("group_size") or 128), 0), skipped)
    if method in ("modelopt", "modelopt_fp4"):
        nvfp4 = settings.get("quant_algo", "NVFP4") == "NVFP4"
        return PackedLayout("modelopt nvfp4", 4, 16, skipped) if nvfp4 else PackedLayout("fp8", 8, 0, skipped)
    if method == "fbgemm_fp8":
        return PackedLayout("fp8", 8, 0, skipped)
    if method != "compressed-tensors":
        return None
    return _of_groups(settings, skipped)


def _of_groups(settings: Mapping[str, Any], skipped: tuple[str, ...]) -> PackedLayout | None:
    """compressed-tensors: the weights of its first group, which stand for all matrices that are not ignored."""
    try:
        weights = next(iter(settings["config_groups"].values()))["weights"]
        bits, kind, strategy = int(weights["num_bits"]), weights["type"], weights["strategy"]
    except (KeyError, StopIteration, TypeError, AttributeError) as error:
        raise ConfigError(
            "config: compressed-tensors needs config_groups with weights of num_bits, type and strategy to say what is "
            "in the files; give the model's directory with its files instead"
        ) from error
    group = int(weights.get("group_size") or 0) if strategy in ("group", "tensor_group") else 0
    if strategy == "block":
        return None
    if kind == "float":
        return PackedLayout("nvfp4", 4, group or 16, skipped) if bits == 4 else PackedLayout("fp8", 8, group, skipped)
    words = settings.get("format", "pack-quantized") == "pack-quantized" and bits == 4
    return PackedLayout("words" if words else "int8", bits, group, skipped)
