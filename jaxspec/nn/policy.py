"""How parameters are stored, laid out and computed with: a frozen record in three parts."""

import functools
import warnings
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, cast, get_args

import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxspec.errors import ConfigError
from jaxspec.native.product import kernels as native_kernels
from jaxspec.shapes import Array
from pallas_kernels.quantized import Format, Quantized
from pallas_kernels.select import SlowKernelWarning

BFLOAT16 = jnp.dtype("bfloat16")
Kernels = Literal["triton", "native", "interpret", "xla"]
KERNELS = ("auto", "mosaic", *get_args(Kernels))
Weight = Array | Quantized


@dataclass(frozen=True)
class Slots:
    """The static part of a placement of experts; which expert is where is a parameter, ``slots_EX``.

    Attributes:
      redundant: slots of each layer beyond its experts.
      replicas: most slots that an expert has.
    """

    redundant: int = 0
    replicas: int = 1


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How parameters are stored.

    Attributes:
      param: dtype of plain weights; a few small ones are float32 always.
      formats: parameters that stay quantized, as pairs of a path without layer number (``ffn/down_EFD``) and format.
    """

    param: jnp.dtype = BFLOAT16
    formats: tuple[tuple[str, Format], ...] = ()

    def format_of(self, kind: str) -> Format | None:
        """Returns the format of a kind of parameter, None if it is stored plainly."""
        return dict(self.formats).get(kind)


@dataclass(frozen=True, kw_only=True)
class WeightLayout:
    """Which arrays hold the parameters.

    Attributes:
      depth: ``stacked`` puts equal layers into one array and runs them in a loop, so compile time does not grow with
        depth; ``unrolled`` gives every layer arrays of its own, for what is trained and for rows that a mesh splits.
      own_head: whether a tied head is kept as an array of its own.
      slots: how experts lie in the slots of a placement, None where they lie in their own order.
    """

    depth: Literal["unrolled", "stacked"] = "unrolled"
    own_head: bool = False
    slots: Slots | None = None


@dataclass(frozen=True, kw_only=True)
class Compute:
    """What computes, in which dtype and on which devices.

    Attributes:
      dtype: of both factors of every product; sums and the residual stream are float32 always.
      kernels: what computes the operations that have kernels: ``triton`` on a GPU, ``native`` kernels in C on one CPU,
        ``interpret`` those of the GPU as plain JAX anywhere, ``xla`` none; a case that a kernel does not cover falls
        back with a warning.
      mosaic: whether Mosaic GPU's kernels take the place of Triton's where there are some; None for where a measurement
        of the card says that they are faster.
      grouped: what computes routed experts where gradients are taken through them: ``triton`` or ``interpret`` in
        groups of rows with one expert, whatever ``kernels`` says; ``xla`` as ``kernels`` says.
      mesh: devices that parameters are split over, None for one device. Kernels compute each device's part, see
        ``jaxspec.nn.devices``; those of recurrent layers only where every device has all rows and all heads.
      transport: how rows reach the devices along ``expert`` that hold their experts: ``sum`` (all rows are everywhere,
        outputs are summed), ``padded`` or ``ragged`` (devices have rows of their own, and exchange them twice per
        layer); see ``jaxspec.nn.expert_transport`` and ``jaxspec.serve.transport``.
      recurrence: how recurrent layers run prompts and whole texts: in ``steps``, in the bits of decoding, or in
        ``chunks`` of positions, see ``jaxspec.nn.recurrent_chunks``.
    """

    dtype: jnp.dtype = BFLOAT16
    kernels: Kernels = "xla"
    mosaic: bool | None = None
    grouped: Literal["triton", "interpret", "xla"] = "xla"
    mesh: AbstractMesh | None = None
    transport: Literal["sum", "padded", "ragged"] = "sum"
    recurrence: Literal["steps", "chunks"] = "steps"

    @property
    def wanted_kernels(self) -> str:
        """Returns what operations ask for that Mosaic GPU computes, too."""
        if self.mosaic:
            return {"triton": "mosaic", "interpret": "mosaic_interpret"}.get(self.kernels, self.kernels)
        return "auto" if self.kernels == "triton" and self.mosaic is None else self.kernels

    @property
    def row_axes(self) -> tuple[str, ...]:
        """Returns the mesh axes of several devices that rows are split over, where these divide them."""
        wanted = ("data",) if self.transport == "sum" else ("data", "expert")
        return () if self.mesh is None else tuple(axis for axis in wanted if self.mesh.shape.get(axis, 1) > 1)

    @property
    def splits_operands(self) -> bool:
        """Whether devices have rows, heads or columns of their own, besides experts."""
        return bool(self.row_axes) or (self.mesh is not None and self.mesh.shape.get("tensor", 1) > 1)

    @property
    def whole_kernels(self) -> Kernels:
        """Returns what computes operations whose kernels are not run on parts of their operands."""
        return "xla" if self.splits_operands else self.kernels

    @property
    def splits_rows(self) -> bool:
        """Whether rows may lie on several devices; caches are then written where they lie."""
        return self.mesh is not None and (self.transport != "sum" or self.mesh.shape.get("data", 1) > 1)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How parameters are stored, laid out and computed with."""

    storage: Storage = Storage()
    layout: WeightLayout = WeightLayout()
    compute: Compute = Compute()

    def update(self, **changes: Any) -> "Policy":
        """Returns the policy with other values for fields of its parts, whichever part each belongs to."""
        parts = {part.name: getattr(self, part.name) for part in fields(self)}
        for name, value in changes.items():
            part = next(key for key, old in parts.items() if name in type(old).__dataclass_fields__)
            parts[part] = replace(parts[part], **{name: value})
        return Policy(**parts)


def make_policy(dtype: Any = BFLOAT16, **changes: Any) -> Policy:
    """Returns a policy that stores and computes in one dtype, with ``changes`` to fields of its parts."""
    return Policy().update(param=jnp.dtype(dtype), dtype=jnp.dtype(dtype)).update(**changes)


def policy_for(dtype: str, platform: str, kernels: str = "auto") -> Policy:
    """Returns how a platform wants parameters stored and computed.

    Args:
      dtype: of plain weights and of products.
      platform: ``cpu``, or ``gpu`` or ``cuda``.
      kernels: ``auto`` takes ``triton`` on a GPU, ``native`` on a CPU for which they could be compiled, and ``xla``
        elsewhere; ``mosaic`` and ``triton`` say whether ``Compute.mosaic``; see ``Compute.kernels`` for the others.

    Raises:
      ConfigError: kernels is none of these, ``native`` and not to be had, or ``mosaic`` and not for a GPU.
    """
    chosen, _ = kernels_for(platform, kernels)
    kind = jnp.dtype(dtype)
    # A tied head by itself is 4 times faster on CPU, and on a GPU its products have a kernel.
    own_head = platform == "cpu" or chosen != "xla"
    mosaic = {"mosaic": True, "triton": False}.get(kernels)
    return make_policy(kind, depth="stacked", kernels=chosen, mosaic=mosaic, own_head=own_head)


def kernels_for(platform: str, wanted: str = "auto") -> tuple[Kernels, str]:
    """Returns what computes on a platform, and why; see ``policy_for``."""
    if wanted not in KERNELS:
        raise ConfigError(f"kernels {wanted!r} is not known; known are {', '.join(KERNELS)}")
    on_cpu, asked_for = platform == "cpu", cast(Kernels, wanted)
    if wanted == "native" and not on_cpu:
        raise ConfigError(f"kernels 'native' are for a CPU, this is {platform}; take 'auto'")
    if wanted == "mosaic":
        if on_cpu:
            raise ConfigError("kernels 'mosaic' are for a GPU, this is cpu; take 'auto'")
        return "triton", "asked for, Mosaic's where there are some"
    if wanted == "native" or (on_cpu and wanted == "auto"):
        library = native_kernels()
        if library.handle is not None:
            return "native", library.reason
        if wanted == "native":
            raise ConfigError(f"kernels 'native': {library.reason}; or take 'xla'")
        _warn_once(library.reason)
        return "xla", library.reason
    if wanted == "auto":
        return (
            ("triton", "a GPU")
            if platform in ("gpu", "cuda")
            else ("xla", f"kernels are for GPUs and CPUs, this is {platform}")
        )
    return asked_for, "asked for"


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"XLA computes instead of the CPU's own kernels, which are several times faster: {reason}", SlowKernelWarning, 3
    )
