"""Frozen dataclasses as JAX pytrees, with fields that are either arrays or static."""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")


def static(**kwargs: Any) -> Any:
    """Marks a field as part of the program (hashed at trace time) instead of as data."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, static))
def pytree(cls: type[T]) -> type[T]:
    """Makes a class a frozen dataclass whose non-static fields are pytree children."""
    frozen = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(frozen)  # pyright: ignore[reportArgumentType]
    meta = [f.name for f in fields if f.metadata.get("static")]
    data = [f.name for f in fields if not f.metadata.get("static")]
    return jax.tree_util.register_dataclass(frozen, data_fields=data, meta_fields=meta)


def replace(node: T, **changes: Any) -> T:
    """A copy of a pytree node with some fields changed."""
    return dataclasses.replace(node, **changes)  # pyright: ignore[reportArgumentType, reportType]
