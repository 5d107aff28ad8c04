"""One warning where drafts are accepted far less often than the head was measured with."""

import math
import shlex
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxspec.checkpoint.heads.verifier import provenance
from jaxspec.draft.methods import TRAINED, SpeculativeConfig
from jaxspec.serve.demo_pair import demo_part, resolve_model
from jaxspec.serve.request import SpeculationMetrics

ENOUGH = 256  # verifications that had drafts
SIGMAS = 4.0
FAR_BELOW = 1 / 3  # heads that are read wrongly lose nearly everything; other prompts than in training cost less
FIRST = "accepted_at_1"


@dataclass(frozen=True)
class ExpectedAcceptance:
    """The share of first drafts that should be accepted, which does not depend on how many are drafted.

    Attributes:
      first: the share.
      source: who says so, in words.
    """

    first: float
    source: str


def recorded_acceptance(head: Path) -> ExpectedAcceptance | None:
    """Returns the lowest share of first drafts that a training here measured, None where nothing states one."""
    held_out = provenance(head).get("held_out")
    figures: Mapping[str, Any] = held_out if isinstance(held_out, dict) else {}
    shares = [x for name, x in figures.items() if name.endswith(f"/{FIRST}") and isinstance(x, int | float) and x > 0]
    return ExpectedAcceptance(min(shares), "its training measured") if shares else None


def stated_acceptance(length: float, drafts: int) -> ExpectedAcceptance:
    """Returns the share of first drafts that an acceptance length of a model card stands for, if not for more.

    Later drafts are accepted less often than the first, so that the share whose powers add up to it is a lower bound.
    """
    low, high = 0.0, 1.0
    for _ in range(40):
        share = (low + high) / 2
        low, high = (share, high) if sum(share**k for k in range(drafts + 1)) < length else (low, share)
    return ExpectedAcceptance(low, f"expected_acceptance_length {length:g} means at least")


def upper_bound(accepted: int, tried: int) -> float:
    """Returns the upper end of Wilson's interval (1927) of a share, ``SIGMAS`` wide."""
    square, share = SIGMAS**2, accepted / tried
    center = share + square / (2 * tried)
    return (center + SIGMAS * math.sqrt(share * (1 - share) / tried + square / (4 * tried**2))) / (1 + square / tried)


@dataclass
class AcceptanceAlarm:
    """Looks at what was accepted so far, and warns once.

    Attributes:
      expected: of the head.
      head, target: directories, for the command that tells causes apart.
      raised: whether it has warned.
    """

    expected: ExpectedAcceptance
    head: str
    target: str
    raised: bool = False

    def look(self, counts: SpeculationMetrics) -> None:
        """Warns if even the upper end of the measured interval is far below what is expected."""
        tried = counts.num_drafts
        if self.raised or tried < ENOUGH or not counts.num_accepted_tokens_per_pos:
            return
        accepted = counts.num_accepted_tokens_per_pos[0]
        most = upper_bound(accepted, tried)
        if most >= FAR_BELOW * self.expected.first:
            return
        self.raised = True
        if jax.process_index() == 0:
            warnings.warn(self._words(accepted / tried, most, tried), stacklevel=2)

    def _words(self, share: float, most: float, tried: int) -> str:
        inspect = shlex.join(["jaxspec", "inspect", self.head, "--target", self.target])
        return (
            f"speculation: {share:.0%} of the first drafts of {self.head} are accepted (at most {most:.0%}, by {tried} "
            f"verifications), {self.expected.source} {self.expected.first:.0%}. The text is right, and slower than it "
            "could be. Likely causes: the head was made for another checkpoint or another quantization of the target; "
            "its layer ids, anchor, mask or window mean something else than was read; or these prompts are unlike its "
            f"training data. To tell them apart, run: {inspect} (errors and warnings are the first two; if all is ok, "
            "the prompts, for which jaxspec train can go on from this head)"
        )


def alarm_of(config: SpeculativeConfig, target: Path, download_dir: str | Path | None = None) -> AcceptanceAlarm | None:
    """Returns the alarm of a head whose acceptance is known, by ``expected_acceptance_length`` or its training."""
    if config.method not in TRAINED or config.model is None:
        return None
    head = resolve_model(config.model, config.revision, download_dir, part=demo_part(config.method))
    if config.expected_length is None:
        expected = recorded_acceptance(head)
    else:
        expected = stated_acceptance(config.expected_length, config.topology.max_depth)
    return None if expected is None else AcceptanceAlarm(expected, str(config.model), str(target))
