"""Trained layers of multi-token prediction to and from directories, under the names that their family publishes."""

from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoint.files.stream import TensorFiles
from jaxspec.checkpoint.heads.identify import PREDICTION
from jaxspec.checkpoint.load.load_plan import LoadPlan, make_plan
from jaxspec.checkpoint.load.model import read_config
from jaxspec.checkpoint.load.save import named_tensors
from jaxspec.checkpoint.names.known import known_tables
from jaxspec.checkpoint.names.table import Unread
from jaxspec.errors import ConfigError
from jaxspec.models.arch import ArchSpec
from jaxspec.models.mtp import Mtp
from jaxspec.models.prediction import one_layer_arch, with_one_layer
from jaxspec.models.trained_head import Head
from jaxspec.nn.policy import Policy

MTP_WEIGHTS = "mtp.safetensors"
LEFT_OUT = ("quantization_config", "compression_config")


def plan_prediction(directory: Path, target: ArchSpec | None, policy: Policy, quantization: str) -> LoadPlan:
    """Plans how a trained layer is loaded; see ``plan_head``."""
    arch = one_layer_arch(read_config(directory))
    if target is not None:
        _check_target(arch, target)
    rules = list(known_tables()[arch.family].mtp_rules(arch))
    files, net = TensorFiles.of(directory), Mtp(arch, policy.update(formats=(), slots=None))
    return make_plan(directory, net, rules, unread=Unread(), quantization=quantization, files=files)


def _check_target(arch: ArchSpec, target: ArchSpec) -> None:
    """Raises ConfigError where a layer was trained for a model of other sizes."""
    sizes = {
        "family": (arch.family, target.family), "hidden size": (arch.model_dim, target.model_dim),
        "vocabulary": (arch.vocab_size, target.vocab_size), "layers": (len(arch.layers), len(target.layers)),
    }  # fmt: skip
    wrong = [f"{what} {own}, the target's is {other}" for what, (own, other) in sizes.items() if own != other]
    if wrong:
        raise ConfigError(f"head: it does not fit its target ({target.family}): {'; '.join(wrong)}")


def prediction_config(head: Head, form: str) -> dict[str, Any]:
    """Returns the config of a trained layer: its model's, with one such layer and without quantized weights.

    Raises:
      ConfigError: another engine's format of heads is asked for.
    """
    if form != "native":
        raise ConfigError(
            f"head: the {form} format has no layers of multi-token prediction; native writes them under the names that "
            "other engines read in the model's own directory, see docs/draft-heads.md"
        )
    assert head.config is not None, "such a head is loaded and trained with it"
    stated = {key: value for key, value in with_one_layer(head.config).items() if key not in LEFT_OUT}
    return stated | {"architectures": [PREDICTION], "torch_dtype": str(np.dtype(head.net.policy.storage.param))}


def prediction_tensors(head: Head) -> dict[str, np.ndarray]:
    """Returns the parameters of a trained layer under their published names, in the dtype of its policy."""
    net: Any = head.net
    table = known_tables()[net.arch.family]
    return named_tensors(head.params, net, table.mtp_rules(net.arch), table, np.dtype(net.policy.storage.param))
