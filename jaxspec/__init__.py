"""jaxspec: lossless speculative decoding of Mixture-of-Experts language models."""

from jaxspec.errors import CapacityError, CheckpointError, ConfigError, JaxspecError, RequestError, UnsupportedKernel
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import CompletionOutput, RequestOutput, SamplingParams

__all__ = [
    "LLM",
    "CapacityError",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "JaxspecError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "UnsupportedKernel",
]
