"""A sample whose prompt is being read, chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from jaxspec.decode.chunks import UnreadPrompt
from jaxspec.decode.scores import Scores
from jaxspec.decode.state import DecodeState
from jaxspec.protocol import Sampling
from jaxspec.serve.prompt_logprobs import BROKEN, is_broken, prompt_logprobs
from jaxspec.serve.sample import Sample

if TYPE_CHECKING:
    from jaxspec.serve.compiled import Programs


@dataclass
class Reading:
    """A sample on its way into its row.

    Attributes:
      sample: whose text is read.
      prompt: what is left of it.
      sampling, bias_V: settings that its row will get.
      logprobs: most likely tokens per position that any request may want.
      scores: of its chunks, and how many positions of each count.
    """

    sample: Sample
    prompt: UnreadPrompt
    sampling: Sampling
    bias_V: np.ndarray | None
    logprobs: int
    scores: list[tuple[int, Scores]] = field(default_factory=list)

    @property
    def scored(self) -> bool:
        """Whether the prompt's log-probabilities are wanted, and no other sample of its request has reported them."""
        return self.sample.params.prompt_logprobs is not None and self.sample.output.prompt_logprobs is None

    def read_scored(self, programs: Programs, state: DecodeState) -> DecodeState:
        """Reads a chunk, and keeps its scores; the state is donated."""
        most, drafts = self.logprobs if self.sample.params.prompt_logprobs else 0, not self.sample.reads_only
        state, scores = programs.read_scored(state, self.prompt, most=most, drafts=drafts)
        self.scores.append(scores)
        return state

    def finish(self, programs: Programs, state: DecodeState) -> DecodeState:
        """Starts the row, or ends a sample that is only read; the state is donated."""
        sample, prompt = self.sample, self.prompt
        if self.scored:
            wanted = sample.params.prompt_logprobs or 0
            sample.output.prompt_logprobs = prompt_logprobs(sample.prompt, self.scores, wanted)
        if not sample.reads_only:
            sample.observed = sample.length
            return programs.admit(state, prompt.row, prompt.token_X, self.sampling, prompt.table_J, self.bias_V)
        sample.completion.finish_reason = "length"
        if is_broken(self.scores):
            sample.fail(BROKEN)
            return programs.scrub(state)
        return state
