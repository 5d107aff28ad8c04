"""What a caller gets of a request that has moved: all there is, what is new, or only the end."""

from __future__ import annotations

from dataclasses import replace

from jaxspec.serve.parameters import RequestOutputKind
from jaxspec.serve.request import UNSEEN, CompletionOutput, RequestOutput


def handed_out(output: RequestOutput) -> RequestOutput | None:
    """The output itself, a copy with what was not handed out before, or None where there is nothing to hand out.

    A copy has the samples that have something new; the prompt's log-probabilities come with the first.
    """
    if output.kind is RequestOutputKind.CUMULATIVE:
        return output
    if output.kind is RequestOutputKind.FINAL_ONLY:
        return output if output.finished else None
    first = all(shown == UNSEEN for shown in output.shown)
    news = [_news(completion, *output.shown[completion.index]) for completion in output.outputs]
    if not any(news) and not output.finished:
        return None
    output.shown = [(len(c.text), len(c.token_ids), c.finish_reason is not None) for c in output.outputs]
    return replace(
        output, outputs=[c for c in news if c is not None], kind=RequestOutputKind.CUMULATIVE,
        prompt_logprobs=output.prompt_logprobs if first else None,
    )  # fmt: skip


def _news(completion: CompletionOutput, characters: int, tokens: int, ended: bool) -> CompletionOutput | None:
    """What came after so many characters and tokens; None for nothing."""
    c = completion
    if len(c.token_ids) == tokens and (c.finish_reason is not None) == ended:
        return None
    return replace(
        c, text=c.text[characters:], token_ids=c.token_ids[tokens:], drafted=c.drafted[tokens:],
        logprobs=None if c.logprobs is None else c.logprobs[tokens:],
    )  # fmt: skip
