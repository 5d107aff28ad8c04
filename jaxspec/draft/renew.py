"""New parameters for a drafter that is in use: the same program, other weights."""

import jax

from jaxspec.draft.hybrid import Hybrid
from jaxspec.draft.lazy_observer import LazyObserver
from jaxspec.errors import ConfigError
from jaxspec.protocol import Drafter
from jaxspec.pytree import replace
from jaxspec.shapes import Array, Params


def renew(drafter: Drafter, params: Params) -> Drafter:
    """The drafter with other parameters, cast to the dtypes that it has.

    Args:
      drafter: a draft model or head, or a hybrid of one.
      params: of the same structure and shapes.

    Raises:
      ConfigError: it drafts without parameters of its own, or structure or shapes differ.
    """
    if isinstance(drafter, LazyObserver):
        return replace(drafter, drafter=renew(drafter.drafter, params))
    if isinstance(drafter, Hybrid):
        return replace(drafter, other=renew(drafter.other, params))
    own = getattr(drafter, "params", None)
    if own is None:
        raise ConfigError(f"update_draft: {type(drafter).__name__} has no parameters; only draft models and heads do")
    before, after = (jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (own, params))
    had, got = ({jax.tree_util.keystr(path): leaf.shape for path, leaf in tree} for tree in (before, after))
    if had != got:
        wrong = sorted(name for name in had.keys() | got.keys() if had.get(name) != got.get(name))
        raise ConfigError(
            f"update_draft: parameters must have the structure and shapes of those in use; these differ: {wrong[:5]}"
        )
    return replace(drafter, params=jax.tree.map(_in_place_of, own, params))


def _in_place_of(old: Array, new: Array) -> Array:
    """The new numbers in the old one's dtype, on the devices where it lies."""
    array = jax.numpy.asarray(new, old.dtype)
    # A move would also commit the array to its device, and that alone makes another signature of the program.
    return array if array.sharding == old.sharding else jax.device_put(array, old.sharding)
