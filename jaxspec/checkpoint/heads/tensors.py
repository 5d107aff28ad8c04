"""The tensors of a draft head under one set of names, whoever wrote them."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from jaxspec.checkpoint.files.header import Tensor
from jaxspec.checkpoint.files.model_files import file_in
from jaxspec.checkpoint.files.pickled import pickled_tensors
from jaxspec.checkpoint.files.shards import tensors_of
from jaxspec.checkpoint.files.stream import TensorFiles
from jaxspec.checkpoint.heads.deepseek_stages import STAGES, is_staged
from jaxspec.checkpoint.names.table import ROTATION
from jaxspec.errors import CheckpointError

ARCHIVES = ("pytorch_model.bin", "medusa_lm_head.pt", "model.pt")
PARTS = {"low": "0", "mid": "1", "high": "2"}
RENAMED = (
    (r"^(?:model|draft_model|eagle_module|medusa_heads?)\.", ""),
    (r"^midlayer\.", "layers.0."),
    (r"^aux_norm_(low|mid|high)\.", lambda m: f"fc_norm.{PARTS[m[1]]}."),
    (r"^draft_id_to_target_id$", "d2t"),
    (r"^encoder\.fc\.", "fc."),
    (r"^encoder\.output_norm_enc\.", "hidden_norm."),
    (r"^logit_head\.", ""),
    (r"^(markov_w[12]|gate_proj|joint_proj)\b", r"markov_head.\1"),
    (r"^confidence_proj\b", "confidence_head.proj"),
    (r"^(markov_head\.(?:markov_w[12]|gate_proj|joint_proj)|confidence_head\.proj)$", r"\1.weight"),
    (r"^(candidate_selector\.\w+_codebook)\.weight$", r"\1"),
)
MASK_FILE, MASK_EMBEDDING = "mask_embedding.pt", "mask_embedding"
LATER_NORM = re.compile(r"^(layers\.[1-9]\d*\.)hidden_norm\.weight$")
NOT_READ = re.compile(rf"({'|'.join(map(re.escape, ROTATION))})$|^verifier_(norm|lm_head)\.weight$")


class HeadFiles(TensorFiles):
    """Tensors of a head's directory by the names that EAGLE-3 and speculators share.

    ``midlayer`` is layer 0, a leading ``model.`` falls away, and later layers have ``input_layernorm`` alone, which
    SGLang reads as ``hidden_norm``.

    Attributes:
      given: the names in the files.
    """

    def __init__(self, directory: Path):
        tensors = _tensors_in(directory)
        if is_staged(tensors):  # in the target's own files
            tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(STAGES)}
        self.given = tuple(sorted(tensors))
        named: dict[str, str] = {}
        for given in self.given:
            name = canonical(given)
            if name in named:
                raise CheckpointError(f"head: {given} and {named[name]} are two tensors for one parameter, {name}")
            named[name] = given
        super().__init__({name: tensors[given] for name, given in named.items() if not NOT_READ.search(name)})
        self._merge_later_norms()

    def _merge_later_norms(self) -> None:
        for name in list(self.tensors):
            later = LATER_NORM.match(name)
            if later is None:
                continue
            twin = f"{later[1]}input_layernorm.weight"
            if twin in self.tensors and not np.array_equal(self[name], self[twin]):
                raise CheckpointError(
                    f"head: {name} (read by SGLang) and {twin} (read by vLLM) differ, but are one parameter"
                )
            tensor = self.tensors.pop(name)
            self.tensors.setdefault(twin, tensor)


def _tensors_in(directory: Path) -> dict[str, Tensor]:
    tensors = _weights_in(directory)
    if not os.path.lexists(directory / MASK_FILE):
        return tensors
    (mask,) = pickled_tensors(file_in(directory, MASK_FILE)).values()
    return tensors | {MASK_EMBEDDING: mask}


def _weights_in(directory: Path) -> dict[str, Tensor]:
    archive = next((name for name in ARCHIVES if os.path.lexists(directory / name)), None)
    if archive is None or any(directory.glob("*.safetensors*")):
        return tensors_of(directory)
    return pickled_tensors(file_in(directory, archive))


def canonical(name: str) -> str:
    """Returns a tensor's name among those that EAGLE-3 and speculators share."""
    for pattern, new in RENAMED:
        name = re.sub(pattern, new, name)
    return name


def layers_in(names: Iterable[str]) -> int:
    """Counts the decoder layers that tensors of these names make up."""
    numbers = [int(layer[1]) for name in names if (layer := re.match(r"layers\.(\d+)\.", name))]
    return max(numbers, default=-1) + 1
