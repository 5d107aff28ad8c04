"""Runs networks on plain dictionaries of parameters."""

from typing import Any, cast

import flax.linen as nn

from jaxspec.shapes import Params


def apply(net: nn.Module, params: Params, *args: Any, method: str | None = None) -> Any:
    """Runs a method of a network, ``__call__`` if none is named: ``net.apply``, typed for such dictionaries."""
    return net.apply(cast(Any, params), *args, method=method)
