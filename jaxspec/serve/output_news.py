"""What a caller has not seen yet of an output that grows."""

from __future__ import annotations

from dataclasses import replace

from jaxspec.serve.parameters import RequestOutputKind
from jaxspec.serve.request import UNSEEN, CompletionOutput, RequestOutput


def unseen_output(output: RequestOutput) -> RequestOutput | None:
    """Returns the output itself, a copy with what was not handed out before, or None where there is nothing new.

    A copy has the samples that have something new; the prompt's log-probabilities come with the first.
    """
    if output.kind is RequestOutputKind.CUMULATIVE:
        return output
    if output.kind is RequestOutputKind.FINAL_ONLY:
        return output if output.finished else None
    first = all(shown == UNSEEN for shown in output.shown)
    news = [_news(completion, output.shown[completion.index]) for completion in output.outputs]
    if not any(news) and not output.finished:
        return None
    output.shown = [(len(c.text), len(c.token_ids), c.finish_reason is not None) for c in output.outputs]
    return replace(
        output, outputs=[c for c in news if c is not None], kind=RequestOutputKind.CUMULATIVE,
        prompt_logprobs=output.prompt_logprobs if first else None,
    )  # fmt: skip


def _news(completion: CompletionOutput, shown: tuple[int, int, bool]) -> CompletionOutput | None:
    """Returns what came after what was shown, see ``RequestOutput.shown``; None for nothing."""
    c, (characters, tokens, ended) = completion, shown
    if len(c.token_ids) == tokens and (c.finish_reason is not None) == ended:
        return None
    return replace(
        c, text=c.text[characters:], token_ids=c.token_ids[tokens:], drafted=c.drafted[tokens:],
        logprobs=None if c.logprobs is None else c.logprobs[tokens:],
    )  # fmt: skip


def still_of(output: RequestOutput) -> RequestOutput:
    """Returns a copy that does not grow any more."""
    return replace(
        output,
        outputs=[
            replace(
                c, token_ids=list(c.token_ids), drafted=list(c.drafted),
                logprobs=None if c.logprobs is None else list(c.logprobs),
            )
            for c in output.outputs
        ],
        metrics=replace(
            output.metrics, num_accepted_tokens_per_pos=list(output.metrics.num_accepted_tokens_per_pos)
        ),
        time_s=dict(output.time_s),
    )  # fmt: skip
