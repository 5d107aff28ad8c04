"""jaxspec: lossless speculative decoding of Mixture-of-Experts language models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxspec.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    JaxspecError,
    QueueFullError,
    RequestError,
    UnsupportedKernel,
)

if TYPE_CHECKING:
    from jaxspec.serve.async_llm import AsyncLLM
    from jaxspec.serve.llm import LLM
    from jaxspec.serve.parameters import RequestOutputKind
    from jaxspec.serve.request import CompletionOutput, RequestOutput, SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CapacityError",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "JaxspecError",
    "QueueFullError",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "UnsupportedKernel",
]

# Loaded on first use: these import JAX, which `jaxspec --help` has no need of.
_LATER = {"LLM": "jaxspec.serve.llm", "AsyncLLM": "jaxspec.serve.async_llm"} | dict.fromkeys(
    ("CompletionOutput", "RequestOutput", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"),
    "jaxspec.serve.request",
)


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'jaxspec' has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)
