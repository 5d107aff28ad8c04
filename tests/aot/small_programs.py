"""Small programs compiled for an H100, to see what XLA makes of them."""

import jax
import jax.numpy as jnp

from jaxspec.aot import process
from jaxspec.aot.program_report import compile_for
from jaxspec.sharding.targets import target_devices


def compile_softmax(rows: int, width: int) -> dict[str, str]:
    """Compiles a softmax; returns the program and the options that XLA compiled it with."""
    shape = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    compiled = compile_for(jax.nn.softmax, (shape,), target_devices(process.target_text("h100")), name="softmax")
    return {"program": compiled.as_text(), "options": process.dump_file("softmax", "debug_options")}
