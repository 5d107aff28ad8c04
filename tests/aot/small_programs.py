"""Small programs compiled for an H100, to see what XLA makes of them."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.aot import mosaic, process
from jaxspec.aot.program_report import compile_for
from jaxspec.nn.activations import ACTIVATIONS
from jaxspec.nn.ffn import Activation
from jaxspec.sharding.targets import target_devices
from pallas_kernels.routed_experts.api import routed_experts
from pallas_kernels.routed_experts.cases import Shape


def compile_activations() -> dict[str, int]:
    """Compiles Mosaic's experts with every activation; returns the bytes of registers that each spills."""
    every = [*map(Activation, ACTIVATIONS), Activation("silu", 10.0), Activation("swigluoai", 7.0)]
    devices, spilled = target_devices(process.target_text("h100")), {}
    *arguments, _ = Shape(4, 4, 2, 128, 128, "bfloat16").abstract()
    how: dict[str, Any] = {"dtype": jnp.dtype("bfloat16"), "implementation": "mosaic"}
    for activation in every:
        call = partial(routed_experts, activation=activation, **how)
        compile_for(call, tuple(arguments), devices, name="activation")
        spilled[str(activation)] = mosaic.reports()["experts_gate_up"]["spilled_bytes"]
    return spilled


def compile_softmax(rows: int, width: int) -> dict[str, str]:
    """Compiles a softmax; returns the program and the options that XLA compiled it with."""
    shape = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    compiled = compile_for(jax.nn.softmax, (shape,), target_devices(process.target_text("h100")), name="softmax")
    return {"program": compiled.as_text(), "options": process.dump_file("softmax", "debug_options")}
