"""The demo prints a growing text token by token, to its end."""

from collections.abc import Iterator
from typing import Any

from jaxspec.cli.colored_stream import ColoredStream, WordWrap
from jaxspec.serve.request import RequestOutput, SamplingParams
from jaxspec.serve.sample import new_samples
from jaxspec.serve.text import IncrementalText
from tests.unit.serve.layouts import KNOWN


class Model:
    """Says given ids, three at a time."""

    def __init__(self, layout: str, prompt: list[int], ids: list[int]):
        self.text, self.prompt, self.ids = KNOWN[layout](), prompt, ids

    def stream(self, prompt: str, params: SamplingParams) -> Iterator[RequestOutput]:
        (sample,) = new_samples(
            "0", prompt, self.prompt, params, lambda p: IncrementalText(self.text, p, self.prompt),
            seeds=(0, 0), capacity=10**6, draft_length=2,
        )  # fmt: skip
        for first in range(0, len(self.ids), 3):
            sample.take(self.ids[first : first + 3], 2, None, set())
            sample.show()
            yield sample.output


class Pieces(list):
    """A screen that keeps what is printed, and is no terminal."""

    live = False

    def piece(self, text: str, style: str = "") -> None:
        self.append(text)


def printed(layout: str, prompt: list[int], ids: list[int]) -> str:
    screen: Any = Pieces()
    llm: Any = Model(layout, prompt, ids)
    stream = ColoredStream(screen, llm)
    stream.run("", SamplingParams(max_tokens=len(ids)))
    assert stream.token_ids == ids
    return "".join(screen)


def test_the_demo_prints_the_whole_text():
    text = KNOWN["byte_level"]()
    words = "  the cat 🙃 isn't\n漢"
    ids = text.tokenizer(words)["input_ids"]
    assert printed("byte_level", [5], ids) == words
    assert printed("byte_level", [5], ids[:-1]).endswith("\n\ufffd"), "cut within a character, as decode shows it"
    fallback = KNOWN["byte_fallback"]().tokenizer
    ids = fallback.convert_tokens_to_ids(["▁Paris", "<0x0A>", "<0xE2>", "a", "<0x0A>"])
    assert printed("byte_fallback", fallback.convert_tokens_to_ids(["▁the"]), ids) == " Paris\ufffd\ufffda\n"


def test_words_stay_whole_at_the_edge():
    line = WordWrap(20, column=4)
    pieces = [" one", " two", " three", "fold", "\n", "    four", " fives\nsix", " seven", " 漢字漢字"]
    shown = "".join(line.fit(piece) for piece in pieces)
    assert shown == " one two\nthreefold\n    four\nfives\nsix seven\n漢字漢字"
    assert WordWrap(200).fit("a  b ") == "a  b "
