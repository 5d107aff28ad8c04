"""Drafters of heads that no file holds: networks as they would be trained for a target, as shapes alone."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxspec.config import find_config, read_toml, to_record
from jaxspec.decode.state import Target
from jaxspec.draft import methods
from jaxspec.models.mtp import Mtp
from jaxspec.models.trained_head import Head
from jaxspec.models.transformer import Transformer
from jaxspec.protocol import Drafter
from jaxspec.train.head_nets import net_of
from jaxspec.train.head_start import init_params
from jaxspec.train.settings import HeadSettings

KINDS = ("draft_model", *methods.HEADS)


def drafter_of(kind: str, target: Target, config: Mapping[str, Any], drafts: int) -> Drafter:
    """Returns the drafter of the head that ``configs/heads`` has under this name.

    Args:
      kind: one of ``KINDS``.
      target: its network, and shapes of its parameters.
      config: published config of the target.
      drafts: K.

    Raises:
      ConfigError: the target has not what the head reads, or the head does not draft so many tokens.
    """
    record = find_config(kind, "heads")
    settings = to_record(read_toml(record), HeadSettings, str(record))
    base: Any = target.net
    net = net_of(settings, base.arch, config, base.policy.update(formats=(), slots=None))
    assert not isinstance(net, Mtp), "not among KINDS"
    width = 0 if isinstance(net, Transformer) else net.spec.draft_vocab
    ids_W = np.arange(width, dtype=np.int32) if 0 < width < base.arch.vocab_size else None
    asked = methods.parse({"method": kind, "model": str(record), "num_speculative_tokens": drafts})

    def make(params: Any, of_target: Any) -> Drafter:
        model = (net, params) if isinstance(net, Transformer) else Head(net, params, ids_W)
        return methods.build(asked, (base, of_target), target.block, model)

    return jax.eval_shape(make, jax.eval_shape(lambda: init_params(net, jax.random.key(0))), target.params)
