"""What is handed out of a growing request: all, what is new, or the end."""

from jaxspec.serve.output_news import unseen_output
from jaxspec.serve.parameters import RequestOutputKind
from jaxspec.serve.request import UNSEEN, CompletionOutput, Logprob, RequestOutput


def growing(kind: RequestOutputKind, n: int = 2) -> RequestOutput:
    outputs = [CompletionOutput(i, logprobs=[]) for i in range(n)]
    return RequestOutput("r", None, [1], outputs, kind=kind, shown=[UNSEEN] * n, prompt_logprobs=[None])


def grow(completion: CompletionOutput, text: str, *tokens: int, reason: str | None = None) -> None:
    completion.text += text
    completion.token_ids += tokens
    completion.drafted += [False] * len(tokens)
    completion.logprobs = [*(completion.logprobs or []), *({t: Logprob(-1.0, 1)} for t in tokens)]
    completion.finish_reason = reason


def test_news_add_up_to_the_whole():
    output = growing(RequestOutputKind.DELTA)
    assert unseen_output(output) is None, "nothing is new yet"
    first, second = output.outputs
    grow(first, "ab", 1, 2)
    news = unseen_output(output)
    assert news is not None
    assert [(c.index, c.text, c.token_ids) for c in news.outputs] == [(0, "ab", [1, 2])]
    assert news.prompt_logprobs == [None]
    assert unseen_output(output) is None
    grow(first, "", 3)  # its text is held back
    grow(second, "x", 9, reason="stop")
    news = unseen_output(output)
    assert news is not None
    assert [(c.index, c.text, c.token_ids, c.finish_reason) for c in news.outputs] == [
        (0, "", [3], None), (1, "x", [9], "stop"),
    ]  # fmt: skip
    assert [list(p) for p in news.outputs[0].logprobs or []] == [[3]]
    assert news.prompt_logprobs is None, "they came with the first"
    grow(first, "cd", 4, reason="length")
    output.finished = True
    news = unseen_output(output)
    assert news is not None
    assert [(c.index, c.text, c.token_ids) for c in news.outputs] == [(0, "cd", [4])]
    assert news.finished
    assert (first.text, first.token_ids) == ("abcd", [1, 2, 3, 4]), "the request itself keeps all"


def test_an_end_without_tokens_is_news():
    output = growing(RequestOutputKind.DELTA, 1)
    grow(output.outputs[0], "a", 1)
    assert unseen_output(output) is not None
    output.outputs[0].finish_reason, output.outputs[0].error, output.finished = "error", "why", True
    news = unseen_output(output)
    assert news is not None
    assert [(c.token_ids, c.error) for c in news.outputs] == [([], "why")]


def test_the_end_only_and_all_of_it():
    output = growing(RequestOutputKind.FINAL_ONLY)
    grow(output.outputs[0], "a", 1)
    assert unseen_output(output) is None
    output.finished = True
    assert unseen_output(output) is output
    other = growing(RequestOutputKind.CUMULATIVE)
    assert unseen_output(other) is other
