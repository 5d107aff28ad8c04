"""What an engine is fixed to when it compiles."""

from dataclasses import dataclass

from jaxspec.protocol import VerifyRule
from jaxspec.verify.rules import RULES

BUCKETS, JOINT = (32, 64, 256), 4


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is fixed to.

    Attributes:
      rows: batch slots.
      capacity: longest text in tokens, prompt included.
      rule: verification rule.
      steps: most steps before the host looks.
      logprobs: most log-probabilities per token that a request may ask for.
      buckets: prefill chunk sizes, ascending.
      joint: rows whose prompts may share a chunk of the smallest size; below 2 each is read by itself.
      page, pages: page size and count of a shared pool; a size of 0 gives each row one page of its own, a count of 0
        is enough for all rows at full length.
      prefix_tokens: of read prefixes that are kept for texts that begin alike; 0 keeps none.
      prefix_required: whether it is an error where none can be kept.
      routes: whether the experts that the target chooses are reported.
    """

    rows: int
    capacity: int
    rule: VerifyRule = RULES["match"]
    steps: int = 8
    logprobs: int = 20
    buckets: tuple[int, ...] = BUCKETS
    page: int = 0
    pages: int = 0
    joint: int = 0
    prefix_tokens: int = 0
    prefix_required: bool = False
    routes: bool = False
