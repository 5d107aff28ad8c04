"""Draft heads to and from directories: any published format in, ours or a published one out, bit for bit."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import save_file

from jaxspec.checkpoint.heads.formats import ExportFormat, Verifier, config_for, names_in
from jaxspec.checkpoint.heads.identify import AnySpec, is_head, is_prediction, spec_of
from jaxspec.checkpoint.heads.prediction import MTP_WEIGHTS, plan_prediction, prediction_config, prediction_tensors
from jaxspec.checkpoint.heads.tensor_names import head_rules
from jaxspec.checkpoint.heads.tensors import HeadFiles
from jaxspec.checkpoint.load.fill import fill
from jaxspec.checkpoint.load.load_plan import LoadPlan, make_plan
from jaxspec.checkpoint.load.model import policy_on_mesh, read_config, shardings_on
from jaxspec.checkpoint.load.places import flatten, resolve_rules
from jaxspec.checkpoint.load.stored import check_method
from jaxspec.checkpoint.names.packs import PACKS
from jaxspec.checkpoint.names.table import Unread
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.arch import ArchSpec
from jaxspec.models.block_head import BlockHead, BlockSpec
from jaxspec.models.draft_head import DraftHead, HeadSpec
from jaxspec.models.medusa import Medusa, MedusaSpec
from jaxspec.models.mtp import Mtp
from jaxspec.models.trained_head import Head
from jaxspec.models.vocab import from_d2t, to_d2t, to_t2d
from jaxspec.nn.policy import Policy, make_policy

VOCABULARY = ("d2t", "t2d")
WEIGHTS = {"medusa": "medusa_lm_head.safetensors"}


def load_head(
    directory: str | Path,
    target: ArchSpec | None,
    policy: Policy,
    *,
    mesh: Mesh | None = None,
    quantization: str = "none",
) -> Head:
    """Loads a draft head of any known format; see ``heads.identify.KNOWN``.

    Args:
      directory: ``config.json`` with safetensors files or a PyTorch archive.
      target: of the model that it drafts for; None only for our own format, which states everything.
      policy: dtypes of its parameters and products, and what computes.
      mesh: devices that the parameters are split over, None for the default device; what their axes do not divide is
        whole on each.
      quantization: ``none``, or ``fp8`` or ``int8`` for its matrices, its vocabulary product too.

    Raises:
      ConfigError: the config is of no known format, wrong, ambiguous, or not for this target.
      CheckpointError: tensors are missing, not known or misshaped, all named, or the draft vocabulary is damaged.
    """
    plan = plan_head(directory, target, policy_on_mesh(policy, mesh), quantization)
    plan.check()
    ids_W = ids_of(plan)
    config = read_config(Path(directory)) if isinstance(plan.net, Mtp) else None
    return Head(plan.net, fill(plan, shardings_on(mesh, allow_replication=True)), ids_W, config)


def ids_of(plan: LoadPlan) -> np.ndarray | None:
    """Returns the target's ids of a planned head's draft vocabulary; see ``vocabulary``."""
    return vocabulary(plan.files, plan.net.spec) if isinstance(plan.files, HeadFiles) else None


def plan_head(directory: str | Path, target: ArchSpec | None, policy: Policy, quantization: str = "none") -> LoadPlan:
    """Plans how a head is loaded and lists what is wrong with its tensors; reads headers alone.

    Raises:
      ConfigError: see ``load_head``.
      CheckpointError: files are unreadable.
    """
    directory = Path(directory)
    config = read_config(directory)
    if is_prediction(config):
        return plan_prediction(directory, target, policy, quantization)
    files = HeadFiles(directory)
    spec = spec_of(config, files, target)
    # Heads whose feature needs no product are published with one all the same.
    bare = isinstance(spec, HeadSpec) and spec.join == "attention" and spec.feature_dim == spec.arch.model_dim
    return make_plan(
        directory, _net(spec, policy.update(formats=(), slots=None)), head_rules(spec),
        unread=Unread(names=frozenset((*VOCABULARY, *(["fc.weight"] if bare else [])))),
        block=check_method(config), quantization=quantization, files=files,
    )  # fmt: skip


def stored_policy(directory: str | Path) -> Policy:
    """Returns the policy that keeps a head's numbers as they are: its files' dtype, or float32 if they have several.

    Raises:
      CheckpointError: files are unreadable.
    """
    dtypes = {tensor.dtype for name, tensor in HeadFiles(Path(directory)).tensors.items() if name not in VOCABULARY}
    kind = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)
    return make_policy(kind)


def _net(spec: AnySpec, policy: Policy) -> DraftHead | BlockHead | Medusa:
    if isinstance(spec, BlockSpec):
        return BlockHead(spec, policy)
    return Medusa(spec, policy) if isinstance(spec, MedusaSpec) else DraftHead(spec, policy)


def vocabulary(files: HeadFiles, spec: AnySpec) -> np.ndarray | None:
    """Returns the target's ids of the draft vocabulary, None if it is the whole one.

    Raises:
      CheckpointError: there are none though they are needed, they are ids where offsets are due, or they are wrong.
    """
    total = spec.vocab_size if isinstance(spec, MedusaSpec) else spec.arch.vocab_size
    size = spec.draft_vocab or total
    if "d2t" not in files:
        if size == total:
            return None
        raise CheckpointError(
            f"head: it knows {size} of the target's {total} tokens, but its files have no d2t that says which; "
            "add the offsets from draft ids to the target's, int64"
        )
    d2t_W, t2d_V = files["d2t"], files["t2d"].astype(bool) if "t2d" in files else None
    if d2t_W.shape != (size,):
        raise CheckpointError(f"head: d2t has the shape {list(d2t_W.shape)}, the draft vocabulary has {size} tokens")
    if holds_ids(d2t_W, t2d_V):
        raise CheckpointError(
            "head: d2t holds ids of the target instead of offsets, so every drafted token would be a wrong one; "
            "subtract 0, 1, 2, ... from it"
        )
    try:
        ids_W = from_d2t(d2t_W, total, t2d_V)
    except ConfigError as error:
        raise CheckpointError(f"head: {error}") from None
    return None if size == total else ids_W


def holds_ids(d2t_W: np.ndarray, t2d_V: np.ndarray | None) -> bool:
    """Whether ``d2t`` holds the target's ids themselves.

    Offsets repeat wherever two neighbors are both in the vocabulary, ids never do.
    """
    if t2d_V is not None:
        return bool(d2t_W.any()) and np.array_equal(np.flatnonzero(t2d_V), d2t_W)
    return len(d2t_W) > 1 and bool((np.diff(d2t_W) > 0).all())


def save_head(
    head: Head, directory: str | Path, form: ExportFormat = "native", *, verifier: Verifier | None = None
) -> None:
    """Writes a head; the directory appears, or replaces an older head, only when it is complete.

    Args:
      head: with its parameters in any dtype, which the files keep.
      directory: made, or replaced where it holds a head.
      form: ``native``, or what other engines read: ``eagle3`` (vLLM, SGLang, SpecForge), ``dflash`` (the same, of heads
        that draft blocks), ``speculators`` (vLLM) or ``medusa``.
      verifier: the target, which ``speculators`` configs name.

    Raises:
      ConfigError: the format cannot express the head, or the directory holds something else.
    """
    directory = Path(directory)
    if isinstance(head.net, Mtp):
        config, name = prediction_config(head, form), MTP_WEIGHTS
    else:
        config = config_for(head.net.spec, form, _dtype_of(head), reduced=head.ids_W is not None, verifier=verifier)
        name = WEIGHTS.get(form, "model.safetensors")
    if directory.exists() and not _may_replace(directory):
        raise ConfigError(f"{directory}: it is there already and holds no draft head; choose another directory")
    part = directory.with_name(f".{directory.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        weights = part / name
        save_file(head_tensors(head, form), weights, metadata={"format": "pt"})
        weights.chmod((part / "config.json").stat().st_mode)  # safetensors writes for the owner alone
        _swap(part, directory)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def in_dtype(head: Head, dtype: str) -> Head:
    """Converts all numbers of a head to one dtype, but for those that its family publishes in float32."""
    if isinstance(head.net, Mtp):
        return replace(head, net=head.net.clone(policy=head.net.policy.update(param=jnp.dtype(dtype))))
    params: Any = jax.tree.map(lambda x: np.asarray(x).astype(jnp.dtype(dtype)), head.params)
    return replace(head, params=params)


def head_tensors(head: Head, form: ExportFormat) -> dict[str, np.ndarray]:
    """Returns every parameter under its name in a format, and the draft vocabulary."""
    if isinstance(head.net, Mtp):
        return prediction_tensors(head)
    spec, leaves = head.net.spec, flatten(head.params["params"])
    out: dict[str, np.ndarray] = {}
    for path, target in resolve_rules(head_rules(spec), leaves).items():
        for index, rule in target.rules.items():
            parts = PACKS[rule.pack].split(np.asarray(leaves[path])[index])
            for name, part in zip(rule.hub, parts, strict=True):
                out |= dict.fromkeys(names_in(name, spec, form), np.ascontiguousarray(part))
    if head.ids_W is not None:
        total = spec.vocab_size if isinstance(spec, MedusaSpec) else spec.arch.vocab_size
        out |= {"d2t": to_d2t(head.ids_W), "t2d": to_t2d(head.ids_W, total)}
    return out


def _dtype_of(head: Head) -> str:
    """Returns the commonest dtype of its numbers."""
    names = [str(leaf.dtype) for leaf in flatten(head.params["params"]).values()]
    return max(set(names), key=names.count)


def _may_replace(directory: Path) -> bool:
    return directory.is_dir() and (not any(directory.iterdir()) or is_head(read_config(directory)))


def _swap(part: Path, directory: Path) -> None:
    if not directory.exists():
        part.rename(directory)
        return
    old = part.with_name(f"{part.name}.old")
    directory.rename(old)
    part.rename(directory)
    shutil.rmtree(old)
