"""Chooses how rows reach the devices that hold their experts: the cheapest way by the performance model."""

import math
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxspec.checkpoint.load.places import abstract_params, flatten
from jaxspec.config import shipped
from jaxspec.models.arch import ArchSpec
from jaxspec.models.transformer import Transformer
from jaxspec.nn.moe import MoeSpec
from jaxspec.nn.param import declared
from jaxspec.nn.policy import Policy
from jaxspec.perf import cost
from jaxspec.perf.hardware import CPU_RATES, known_hardware, load_hardware
from jaxspec.perf.transport_cost import TRANSPORTS, Pass, Transport, choose

CONTEXT = 1024  # of a row, as `jaxspec plan` assumes
UNKNOWN_GPU = "h100"


def transport_for(arch: ArchSpec, policy: Policy, mesh: Mesh, rows: int, device: Any) -> Transport:
    """Returns the cheapest transport for a plain step of ``rows`` rows.

    XLA has no ragged exchange on a CPU. With kernels it is ``sum`` unless somebody asks for another: where rows are
    exchanged layers are not stacked, and a prompt's attention is XLA's, for which the host waits block by block.
    """
    if not arch.is_moe:
        return "sum"
    on_gpu = device.platform in ("gpu", "cuda")
    supported = ("sum",) if policy.compute.kernels != "xla" else TRANSPORTS if on_gpu else ("sum", "padded")
    sizes = {axis: int(size) for axis, size in mesh.shape.items()}
    return choose(pass_of(arch, policy, rows), cost.Mesh(**sizes), rates_of(device), supported)[0]


def rates_of(device: Any) -> cost.Rates:
    """Returns a device's rates of ``configs/hardware``; an H100's for unknown GPUs, ``CPU_RATES`` elsewhere."""
    if device.platform not in ("gpu", "cuda"):
        return CPU_RATES
    known, kind = known_hardware(shipped("hardware")), device.device_kind.lower().replace(" ", "-")
    fitting = [name for name in known if name in kind]
    return load_hardware(max(fitting, key=len, default=UNKNOWN_GPU), shipped("hardware"))[0].rates()


def pass_of(arch: ArchSpec, policy: Policy, rows: int) -> Pass:
    """Describes a plain step of B rows of ``CONTEXT`` tokens; weights as if they were not quantized."""
    plain = policy.update(formats=(), depth="stacked", mesh=None)
    net: Any = Transformer(arch, plain)
    leaves = flatten(abstract_params(net))
    dense = sum(
        math.prod(x.shape) for path, x in leaves.items() if declared(path).part not in ("routed experts", "embedding")
    )
    moe = [layer.ffn for layer in arch.layers if isinstance(layer.ffn, MoeSpec)]
    streams = [s for layer in arch.layers for s in layer.streams.values()]
    return Pass(
        rows=rows,
        positions=1,
        model_dim=arch.model_dim,
        top_k=max(x.top_k for x in moe),
        routed_layers=len(moe),
        dense_flops=2.0 * dense,
        dense_bytes=float(dense * policy.storage.param.itemsize),
        row_bytes=sum(
            s.heads
            * s.width
            * np.dtype(s.dtype or policy.compute.dtype).itemsize
            * (min(CONTEXT, s.reach or CONTEXT) / s.stride if s.fixed is None else 2 * max(s.fixed, 1))
            for s in streams
        ),
    )
