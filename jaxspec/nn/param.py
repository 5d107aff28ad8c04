"""One declaration of a parameter, from which shardings, quantization, loading, optimizers and sizes read."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.errors import ConfigError
from jaxspec.native.packing import Packed, abstract_packed
from jaxspec.nn.devices import ONE, devices_of
from jaxspec.nn.matrix import Matrix
from jaxspec.nn.policy import Policy
from jaxspec.shapes import Array
from pallas_kernels.quantized import abstract_quantized

LAYERS = "layers"
ONES, ZEROS, NORMAL = nn.initializers.ones, nn.initializers.zeros, nn.initializers.normal(0.02)
INITS = {"norm": ONES, "bias": ZEROS}


@dataclass(frozen=True)
class Param:
    """A parameter as a module declares it; its shape follows from the module's spec.

    Attributes:
      name: in the module; ``{}`` stands for a number where there are several.
      axes: logical name of each axis, see ``jaxspec.sharding.axis_rules``.
      kind: ``matrix`` is read by ``dense`` and ``exact_dense`` alone, so with kernels it stays in its stack of layers;
        ``table`` holds whole numbers; ``weight`` is any other.
      init: initializer, None for that of the kind: ones of norms, zeros of biases, else a normal distribution of
        deviation 0.02.
      dtype: where it is not the policy's.
      part: of the model, where the module's path does not say it.
      inputs: how many leading axes a product contracts, those of layers and experts aside.
    """

    name: str
    axes: tuple[str, ...]
    kind: Literal["matrix", "weight", "norm", "bias", "table"] = "matrix"
    init: Any = None
    dtype: Any = None
    part: Literal["", "embedding", "head", "router", "shared experts", "routed experts"] = ""
    inputs: int = 1

    def __post_init__(self) -> None:
        known = DECLARED.setdefault(self.name, self)
        assert (known.axes, known.kind) == (self.axes, self.kind), f"{self.name} is declared twice, unlike"

    def axes_of(self, rank: int) -> tuple[str, ...]:
        """Returns the axes of an array of it, ``layers`` first where equal layers are stacked.

        Raises:
          ConfigError: the array has another number of dimensions.
        """
        if rank not in (len(self.axes), len(self.axes) + 1):
            raise ConfigError(f"sharding: parameter {self.name} has {rank} dimensions; declared are {self.axes}")
        return self.axes if rank == len(self.axes) else (LAYERS, *self.axes)

    def packed(self, leaf: Any, policy: Policy) -> Packed | None:
        """Returns shapes and dtypes of an array of it as native kernels read it, None where they do not."""
        compute, lead = policy.compute, len(leaf.shape) - len(self.axes) + (self.axes[0] == "expert")
        if compute.kernels != "native" or not (self.kind == "matrix" or self.axes[0] == "expert"):
            return None
        return None if self.kind == "bias" else abstract_packed(leaf, lead=lead, axes=self.inputs)


DECLARED: dict[str, Param] = {}


def declared(path: str | Sequence[Any]) -> Param:
    """Returns the declaration of a parameter.

    Args:
      path: of a leaf in the tree of parameters, as JAX gives it or joined with slashes.

    Raises:
      ConfigError: no module has declared it.
    """
    parts = path.split("/") if isinstance(path, str) else path
    keys = (part if isinstance(part, str) else getattr(part, "key", None) for part in reversed(parts))
    name = next(key for key in keys if key is not None)  # the fields of a quantized weight have no keys
    name = name.rpartition("/")[2]  # a flat tree's keys are whole paths
    param = DECLARED.get(re.sub(r"_\d+(?=_|$)", "_{}", name))
    if param is None:
        raise ConfigError(f"sharding: no module has declared a parameter {name}")
    return param


def kind_of(path: Sequence[str]) -> str:
    """Returns a parameter's path without its layer's name: ``layers_3/ffn/down_FD`` is of the kind ``ffn/down_FD``."""
    *folders, name = path
    folders = [folder for folder in folders if not re.fullmatch(r"\w+_\d+|block", folder)]
    return "/".join([*folders, name])


def declare(
    module: nn.Module, policy: Policy, param: Param, shape: tuple[int, ...], number: int | None = None, *,
    by_kernel: bool = False,
) -> Any:  # fmt: skip
    """Makes or reads one parameter of a module, as Flax partitioning metadata where it is made.

    Args:
      module: declares it.
      policy: knows its format and dtype, and what computes.
      param: what it is.
      shape: of the weight itself, whatever its format.
      number: of several, see ``Param.name``.
      by_kernel: whether a kernel may read it, so that it stays in its stack of layers whatever its kind.

    Returns:
      An array or a ``Quantized``; with kernels a ``Matrix`` where ``dense`` and ``exact_dense`` alone read it, or
      ``by_kernel``; packed experts.
    """
    name = param.name.format(number)
    in_stack = (param.kind == "matrix" or by_kernel) and policy.compute.kernels != "xla"
    if module.has_variable("params", name):
        value = module.get_variable("params", name)
        if isinstance(value, Matrix):
            return value if in_stack else value.own()
        if isinstance(value, Packed):
            own = as_matrix(value, param, policy)
            return own if in_stack else value if param.axes[0] == "expert" else own.own()
    form = policy.storage.format_of(kind_of((*module.path, name)))

    def init(key: Array) -> Any:
        if form is not None:  # the loader fills it
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract_quantized(shape, form))
        return (param.init or INITS.get(param.kind, NORMAL))(key, shape, param.dtype or policy.storage.param)

    value: Any = module.param(name, nn.with_logical_partitioning(init, param.axes_of(len(shape))))
    return as_matrix(value, param, policy) if in_stack else value


def as_matrix(value: Any, param: Param, policy: Policy, layer: Array | None = None) -> Matrix:
    """Returns a parameter, or a stack of it and the layer's index, for kernels to read."""
    devices = devices_of(policy.compute)
    axes = () if devices is ONE else devices.over_weight(param.axes, value.shape[len(value.shape) - len(param.axes) :])
    return Matrix(value, layer, policy.compute.kernels, devices, axes)
