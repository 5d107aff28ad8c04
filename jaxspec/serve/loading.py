"""Loads what an engine needs, the target and what drafts for it, in the layout that devices and mesh want."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxspec.checkpoint.heads.directory import load_head
from jaxspec.checkpoint.heads.identify import is_head
from jaxspec.checkpoint.load.model import Model, load_model, load_mtp, policy_on_mesh, read_config
from jaxspec.checkpoint.load.padding import check_vocabulary
from jaxspec.checkpoint.text.tokenizer import import_early
from jaxspec.draft import methods
from jaxspec.errors import ConfigError
from jaxspec.models.arch import ArchSpec
from jaxspec.models.cache_dtype import with_cache_dtype
from jaxspec.models.catalog import arch_of
from jaxspec.models.mtp import Mtp
from jaxspec.models.text_length import for_texts
from jaxspec.models.trained_head import Head
from jaxspec.models.transformer import Transformer
from jaxspec.nn.expert_transport import TRANSPORTS
from jaxspec.nn.policy import Policy, policy_for
from jaxspec.nn.recurrence import RecurrentMixer
from jaxspec.perf.expert_placement import load_placement
from jaxspec.serve.arguments import show_value
from jaxspec.serve.demo_pair import demo_part, resolve_model
from jaxspec.serve.transport import transport_for
from jaxspec.shapes import Params
from jaxspec.sharding import hosts
from jaxspec.sharding.mesh import make_mesh
from jaxspec.sharding.placement import mesh_of, row_axes

RECURRENCES = "steps", "chunks"
DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}


@dataclass(frozen=True)
class MeshRequest:
    """The devices that are asked for, and how routed experts use them.

    Attributes:
      axes: sizes by axis, None for one device.
      transport, placement: ``expert_transport`` and ``expert_placement`` of ``LLM``.
    """

    axes: Mapping[str, int] | None = None
    transport: str = "auto"
    placement: str | Path | None = None


@dataclass(frozen=True)
class Form:
    """How a target runs, whatever it was loaded as; fields are arguments of ``LLM``."""

    kv_cache_dtype: str = "auto"
    recurrence: str = "steps"

    def __post_init__(self) -> None:
        if self.recurrence not in RECURRENCES:
            raise ConfigError(
                f"LLM: recurrence {show_value(self.recurrence)} is not known; known are {list(RECURRENCES)}"
            )

    def of(self, model: Model) -> Model:
        """Returns the model as it then runs.

        Raises:
          ConfigError: a cache cannot be of that dtype, or recurrences are asked for that the model does not have.
        """
        arch = with_cache_dtype(model.net.arch, self.kv_cache_dtype)
        if self.recurrence != "steps" and not any(isinstance(layer.attention, RecurrentMixer) for layer in arch.layers):
            raise ConfigError(
                f"LLM: recurrence {self.recurrence!r}, but {arch.family} has no recurrent layers; leave it out"
            )
        policy = model.net.policy.update(recurrence=self.recurrence)
        return replace(model, net=Transformer(arch, policy))


ONE_DEVICE, USUAL = MeshRequest(), Form()


def load_target(
    model: str | Path | Model,
    *,
    dtype: str,
    kernels: str,
    quantization: str,
    rows: int,
    form: Form = USUAL,
    mesh: MeshRequest = ONE_DEVICE,
    on_load: Callable[[int, int], None] | None = None,
) -> Model:
    """Loads the target, or returns the one that another engine has loaded; settings are those of ``LLM``.

    Raises:
      ConfigError, CheckpointError: the directory, the settings or the mesh are not usable.
    """
    transport = mesh.transport
    if transport not in ("auto", *TRANSPORTS):
        raise ConfigError(f"LLM: expert_transport {transport!r} is not known; known are {['auto', *TRANSPORTS]}")
    if isinstance(model, Model):
        if mesh != ONE_DEVICE:
            raise ConfigError(
                "LLM: a model that is loaded already brings its mesh; leave mesh, expert_transport and "
                "expert_placement out"
            )
        return form.of(model)
    if mesh.axes is None and transport != "auto":
        raise ConfigError(
            f"LLM: expert_transport {transport!r} is for several devices; give mesh, too, or leave it out"
        )
    if mesh.axes is not None and kernels == "native":
        raise ConfigError("LLM: kernels 'native' compute on one device, not on a mesh; take 'auto' or 'xla'")
    policy, devices = _policy(dtype, kernels, model), None
    if mesh.axes is not None:
        devices = make_mesh(mesh.axes)
        policy = _spread(policy, devices, rows, transport, arch_of(read_config(Path(model))))
    placement = None if mesh.placement is None else load_placement(Path(mesh.placement))
    hosts.check_same({"expert_placement": placement})
    import_early(Path(model))
    loaded = load_model(model, policy, quantization=quantization, mesh=devices, placement=placement, show=on_load)
    return form.of(loaded)


def fit_to_texts(model: Model, max_model_len: int | None) -> Model:
    """Returns the model as it turns its heads for texts of at most so many tokens."""
    return replace(model, net=Transformer(for_texts(model.net.arch, max_model_len), model.net.policy))


def load_draft(
    config: methods.SpeculativeConfig, target: Model, quantization: str, download_dir: str | Path | None = None
) -> tuple[Transformer | Mtp, Params] | Head | None:
    """Loads what drafts, where the method has a model, on the target's mesh.

    Only the target's own layers are quantized like it, others as the config says. What the mesh does not divide of a
    draft model or head is whole on each device.
    """
    mesh = mesh_of(target.params)
    if config.method == "mtp" and config.model is None:
        return load_mtp(target.directory, target.net, quantization=quantization, mesh=mesh)
    if config.model is None:
        return None
    directory = resolve_model(config.model, config.revision, download_dir, part=demo_part(config.method))
    if config.method == "mtp" and not is_head(read_config(directory)):
        raise ConfigError(
            f"speculative_config: {config.model} holds no trained layer of multi-token prediction; leave model out to "
            "draft with the layers that were published with the target"
        )
    if config.method in methods.TRAINED or (config.method == "hybrid" and is_head(read_config(directory))):
        return load_head(
            directory, target.net.arch, target.net.policy, mesh=mesh, quantization=config.quantization or "none"
        )
    if is_head(read_config(directory)):
        raise ConfigError(
            f"speculative_config: {config.model} holds a draft head, not a model; give its kind as method "
            f"({', '.join(methods.TRAINED)})"
        )
    check_vocabulary(directory, target.directory, target.net.arch.vocab_size)
    model = load_model(
        directory, target.net.policy, quantization=config.quantization or "auto", mesh=mesh, allow_replication=True
    )
    return model.net, model.params


def _policy(dtype: str, kernels: str, directory: str | Path) -> Policy:
    if dtype not in (*DTYPES, "auto"):
        raise ConfigError(f"LLM: dtype {dtype!r} is not known; known are {['auto', *DTYPES]}")
    if dtype == "auto":
        config = read_config(Path(directory))
        dtype = str(config.get("dtype") or config.get("torch_dtype"))
    return policy_for(DTYPES.get(dtype, "bfloat16"), jax.default_backend(), kernels)


def _spread(policy: Policy, mesh: Mesh, rows: int, transport: str, arch: ArchSpec) -> Policy:
    """Returns the policy for rows that are split over a mesh."""
    policy = policy_on_mesh(policy, mesh)
    chosen: Any = transport_for(arch, policy, mesh, rows, jax.devices()[0]) if transport == "auto" else transport
    if chosen == "ragged" and jax.default_backend() == "cpu":
        raise ConfigError('LLM: XLA has no ragged exchange on a CPU; take expert_transport="padded"')
    over = row_axes(mesh, rows, spread=chosen != "sum")
    # Caches of stacked layers lie one after the other, and rows cannot be split off there.
    split = any(mesh.shape[axis] > 1 for axis in over)
    return policy.update(transport=chosen, depth="unrolled" if split else policy.layout.depth)


def report_to_both(
    on_load: Callable[[int, int], None] | None, on_progress: Callable[[str, int, int], None] | None
) -> Callable[[int, int], None]:
    """Returns what reports to both how much of a model is loaded."""

    def report(done: int, total: int) -> None:
        if on_load is not None:
            on_load(done, total)
        if on_progress is not None:
            on_progress("loading", done, total)

    return report
