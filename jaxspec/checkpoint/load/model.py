"""A checkpoint directory to a model on its devices, in the layout that the compute path wants."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxspec.checkpoint.files.model_files import check_text_files, file_in, read_json
from jaxspec.checkpoint.gguf.config import config_of, generation_of
from jaxspec.checkpoint.gguf.gguf_header import is_gguf, read_gguf
from jaxspec.checkpoint.gguf.gguf_tensors import open_tensors
from jaxspec.checkpoint.load.fill import Progress, fill
from jaxspec.checkpoint.load.load_plan import LoadPlan, make_plan
from jaxspec.checkpoint.load.slots import check_placement, slots_for, slots_of_model, slots_of_mtp
from jaxspec.checkpoint.load.stored import check_method
from jaxspec.checkpoint.load.tied import with_own_head
from jaxspec.checkpoint.names.known import known_tables
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.catalog import arch_of, known_families
from jaxspec.models.kv_copies import with_kv_copies
from jaxspec.models.mtp import Mtp
from jaxspec.models.transformer import Transformer
from jaxspec.nn.policy import Policy
from jaxspec.nn.shardings import named_shardings
from jaxspec.perf.expert_placement import Placement
from jaxspec.shapes import Params
from jaxspec.sharding.axis_rules import REPLICABLE

# Keys in which configs promise layers of multi-token prediction.
PROMISES = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules", "mtp_num_hidden_layers")


@dataclass(frozen=True)
class Model:
    """A loaded model.

    Attributes:
      net: the network, hashable; its policy knows what stayed quantized.
      params: its parameters.
      config: the published config.
      generation: the published generation defaults, empty if there are none.
      directory: where it came from.
    """

    net: Transformer
    params: Params
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    directory: Path


def read_config(directory: Path) -> dict[str, Any]:
    """Reads the published ``config.json``, or what a GGUF file says in its place.

    Raises:
      ConfigError: the directory or file is missing, the file is not a JSON object, or it or one of the tokenizer's is
        no regular file in the directory; or a GGUF file is of an architecture that is not known.
      CheckpointError: a GGUF file is not sound.
    """
    if is_gguf(directory):
        return config_of(read_gguf(directory))
    if not directory.is_dir():
        raise no_directory(directory)
    if not os.path.lexists(directory / "config.json"):
        raise ConfigError(f"{directory}: no config.json; a model is a directory in Hugging Face layout")
    check_text_files(directory)
    return read_json(file_in(directory, "config.json", ConfigError))


def no_directory(directory: Path) -> ConfigError:
    """Returns the error for a model directory that is not there, or that is no directory."""
    if directory.is_file():
        return ConfigError(
            f"{directory}: a file, not a model directory; give the directory that it lies in, or a .gguf file"
        )
    return ConfigError(
        f"{directory}: no such directory; a model is a directory with config.json and .safetensors files, a .gguf "
        "file, or the id of one on the Hugging Face hub, such as Qwen/Qwen3-30B-A3B"
    )


def read_generation(directory: Path) -> dict[str, Any]:
    """Reads the published ``generation_config.json``, empty if there is none, or what a GGUF file says in its place.

    Raises:
      ConfigError: it is no JSON object.
    """
    if is_gguf(directory):
        return generation_of(read_gguf(directory))
    name = "generation_config.json"
    return read_json(file_in(directory, name, ConfigError)) if os.path.lexists(directory / name) else {}


def plan_model(
    directory: str | Path,
    policy: Policy,
    quantization: str = "auto",
    placement: Placement | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    copied: bool = False,
) -> LoadPlan:
    """Plans how a directory is loaded and lists what is wrong with it, from its headers and its config alone.

    Where ``copied``, the heads of keys and values lie as ``with_kv_copies`` says, as for serving.

    Raises:
      ConfigError: the config is missing, corrupt, of an unknown family or quantized in a way that is not supported.
      CheckpointError: the files are unreadable.
    """
    directory = Path(directory)
    config = read_config(directory) if config is None else config
    arch = with_kv_copies(arch_of(config), policy.compute) if copied else arch_of(config)
    table, files = known_tables()[arch.family], open_tensors(directory)
    arch = with_own_head(arch, table, files)
    net = Transformer(arch, policy.update(slots=slots_for(placement)))
    return make_plan(
        directory, net, table.rules(arch, files), unread=table.unread(arch), block=check_method(config),
        quantization=quantization, files=files, slots_by_layer=slots_of_model(placement),
    )  # fmt: skip


def load_model(
    directory: str | Path,
    policy: Policy,
    *,
    quantization: str = "auto",
    mesh: Mesh | None = None,
    allow_replication: bool | tuple[str, ...] = REPLICABLE,
    placement: Placement | None = None,
    show: Progress | None = None,
) -> Model:
    """Loads a Hugging Face directory.

    Args:
      directory: checkpoint.
      policy: layout and dtypes of the parameters; formats of what stays quantized are filled in.
      quantization: ``auto`` keeps published quantized weights as they are, ``none`` widens them to the policy's dtype;
        ``fp8`` and ``int8`` quantize the matrices of attention and feed-forward layers of a plain checkpoint.
      mesh: devices that the parameters are split over, None for the default device.
      allow_replication: what is whole on each device where the mesh does not divide it, see ``named_shardings``; heads
        and vocabulary by default, but neither experts nor hidden units.
      placement: which of the devices along ``expert`` hold which experts; by default equally many, in their order.
      show: called with (bytes placed, bytes in all).

    Raises:
      ConfigError: the config is missing, corrupt or of an unknown family, the quantization is not possible, the mesh
        does not divide the model, or the placement is of another model or mesh.
      CheckpointError: the tensors are unreadable or do not match.
    """
    config = read_config(Path(directory))
    if placement is not None:
        check_placement(placement, config, arch_of(config), mesh)
    plan = plan_model(directory, policy_on_mesh(policy, mesh), quantization, placement, config=config, copied=True)
    plan.check()
    generation = read_generation(plan.directory)
    params = fill(plan, shardings_on(mesh, allow_replication=allow_replication), show)
    return Model(plan.net, params, config, generation, plan.directory)


def policy_on_mesh(policy: Policy, mesh: Mesh | None) -> Policy:
    """Returns the policy on a mesh, where no kernel is native, and layers are not stacked if it splits rows."""
    if mesh is None:
        return policy
    kernels = "xla" if policy.compute.kernels == "native" else policy.compute.kernels
    policy = policy.update(mesh=mesh.abstract_mesh, kernels=kernels)
    return policy.update(depth="unrolled") if policy.compute.splits_rows else policy


def shardings_on(mesh: Mesh | None, *, allow_replication: bool | tuple[str, ...] = REPLICABLE) -> Any:
    """Returns the function from shapes of parameters to their shardings, None for one device."""
    return None if mesh is None else partial(named_shardings, mesh=mesh, allow_replication=allow_replication)


def load_mtp(
    directory: str | Path,
    net: Transformer,
    *,
    quantization: str = "auto",
    mesh: Mesh | None = None,
    show: Progress | None = None,
) -> tuple[Mtp, Params]:
    """Loads the layers of multi-token prediction that were published with a model.

    Raises:
      ConfigError: the config promises no such layers.
      CheckpointError: the files lack them, which is common in copies that were saved again, or do not match.
    """
    directory, arch = Path(directory), net.arch
    if not arch.mtp:
        why = _without_prediction(read_config(directory), arch.family)
        raise ConfigError(f"{directory}: config.json ({arch.family}) {why}; speculate with another method")
    block, files = check_method(read_config(directory)), open_tensors(directory)
    rules = known_tables()[arch.family].mtp_rules(arch, files)
    plan = make_plan(
        directory, Mtp(arch, policy_on_mesh(net.policy, mesh)), rules, block=block, quantization=quantization,
        files=files, slots_by_layer=slots_of_mtp(arch, net.policy.layout.slots, mesh),
    )  # fmt: skip
    missing = plan.problems["missing"]
    if missing:
        raise CheckpointError(
            f"{directory}: config.json promises {len(arch.mtp)} layers of multi-token prediction, but {len(missing)} "
            f"of their tensors are missing, as copies that were saved again often lack them: {', '.join(missing)}; "
            "download the published files, or speculate with another method"
        )
    plan.check()
    params = fill(plan, shardings_on(mesh), show)
    return plan.net, params


def _without_prediction(config: Mapping[str, Any], family: str) -> str:
    """Says why no layers of multi-token prediction are read."""
    row, promised = known_families()[family].mtp, next((key for key in PROMISES if config.get(key)), None)
    if row is None and promised:
        return f"promises layers of multi-token prediction ({promised}), but none are read of this family"
    where = "none are read of this family" if row is None else row.count[0]
    where += f", and {row.listed} must name them, too" if row is not None and row.listed else ""
    return f"has no layers of multi-token prediction ({where})"
