"""A head before its first update: network, draft vocabulary and parameters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.checkpoint.heads.directory import load_head
from jaxspec.checkpoint.heads.identify import is_head
from jaxspec.checkpoint.load.model import Model, load_model, load_mtp, policy_on_mesh, read_config
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.mtp import Mtp
from jaxspec.models.prediction import one_layer_arch
from jaxspec.models.transformer import Transformer
from jaxspec.models.vocab import choose_ids
from jaxspec.nn.policy import Policy, make_policy
from jaxspec.shapes import Array, Params
from jaxspec.train.head_nets import check_given, draft_vocab, ends_of, net_of, start_from_target
from jaxspec.train.objective import Net
from jaxspec.train.settings import HeadSettings, TrainSettings


@dataclass(frozen=True)
class InitialHead:
    """A head before its first update.

    Attributes:
      net: its network.
      ids_W: the target's id of each token that it can draft, None where it knows all.
      init: a key to parameters.
      config: published with a draft model that is trained further.
    """

    net: Net
    ids_W: np.ndarray | None
    init: Callable[[Array], Params]
    config: Mapping[str, Any] | None = None


def head_policy(settings: TrainSettings, platform: str | None = None) -> Policy:
    """Returns how the trained head is stored and computed with on a platform, by default this machine's."""
    on_gpu = (platform or jax.default_backend()) in ("gpu", "cuda")
    grouped = "triton" if on_gpu else "xla"
    return make_policy(settings.compute_dtype, param=jnp.dtype(settings.param_dtype), grouped=grouped)


def make_initial_head(
    settings: HeadSettings, target: Model, policy: Policy, count_V: np.ndarray, mesh: Mesh | None = None
) -> InitialHead:
    """Makes a new head, whose draft vocabulary are the most frequent tokens, or loads one that is trained further.

    Its network computes on the mesh, where each device has some of its experts; its first parameters are made by one.

    Raises:
      ConfigError: the settings contradict each other or the target.
      CheckpointError: the head that it starts from cannot be read.
    """
    arch = target.net.arch
    if settings.start is not None:
        return _on_mesh(_further(settings, target, policy), mesh)
    net, size = net_of(settings, arch, target.config, policy), draft_vocab(settings, arch)
    if isinstance(net, Mtp):
        own = settings.from_target and bool(arch.mtp)
        made = _published(net, target.directory) if own else InitialHead(net, None, partial(init_params, net))
        return _on_mesh(made, mesh)
    small = 0 < size < arch.vocab_size and not isinstance(net, Transformer)
    ids_W = choose_ids(count_V, size) if small else None

    copies = settings.from_target and not isinstance(net, Transformer)
    ends = ends_of(target.params, ids_W) if copies else {}  # not the target, which need not outlive its loading

    def init(key: Array) -> Params:
        return start_from_target(jax.jit(lambda key: init_params(net, key))(key), ends)

    return _on_mesh(InitialHead(net, ids_W, init), mesh)


def _on_mesh(head: InitialHead, mesh: Mesh | None) -> InitialHead:
    return replace(head, net=head.net.clone(policy=policy_on_mesh(head.net.policy, mesh)))


def init_params(net: Net, key: Array) -> Params:
    """Initializes parameters at random."""
    return net.initial(key)


def _published(net: Mtp, directory: Path) -> InitialHead:
    """Returns the first layer of multi-token prediction that a model was published with."""
    try:
        _, params = load_mtp(directory, Transformer(net.arch, net.policy), quantization="none")
    except CheckpointError as error:
        raise CheckpointError(f"{error}; head.from_target = false starts the layer at random") from None
    return _start(net, params)


def _start(
    net: Net, params: Params, ids_W: np.ndarray | None = None, config: Mapping[str, Any] | None = None
) -> InitialHead:
    # The loop donates what it updates: every run needs arrays of its own.
    return InitialHead(net, ids_W, lambda key: jax.tree.map(jnp.array, params), config)


def _further(settings: HeadSettings, target: Model, policy: Policy) -> InitialHead:
    directory = Path(settings.start or "")
    check_given(settings, f"start = {directory} says everything about the head")
    published = not is_head(read_config(directory))
    if published and settings.kind == "mtp":
        return _published(Mtp(one_layer_arch(target.config), policy), directory)
    if published:
        model = load_model(directory, policy)
        kind, net, params, ids_W, config = "draft_model", model.net, model.params, None, model.config
    else:
        head = load_head(directory, target.net.arch, policy)
        kind, net, params, ids_W, config = head.kind, head.net, head.params, head.ids_W, None
    if kind != settings.kind:
        raise ConfigError(f'head: start = {directory} holds kind "{kind}", not "{settings.kind}"; set head.kind to it')
    return _start(net, params, ids_W, config)
