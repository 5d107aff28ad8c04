"""``jaxspec chat``: a conversation in the terminal, accepted drafts in color."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from jaxspec.cli.colored_stream import ColoredStream
from jaxspec.cli.drafters import default_speculation
from jaxspec.cli.engine_flags import load_llm, speculation
from jaxspec.cli.progress import acceptance_words
from jaxspec.cli.screen import Screen
from jaxspec.errors import CapacityError, RequestError
from jaxspec.serve.request import SamplingParams

if TYPE_CHECKING:
    from jaxspec.serve.llm import LLM

ASKING = "> "
PASTE_S = 0.05  # lines that come within it belong together
HELP = (
    "/plain  switches speculation off and on; the text is the same, only slower",
    "/reset  begins a new conversation",
    "/quit   ends, as Ctrl-D does; Ctrl-C stops an answer",
)


@dataclass(frozen=True)
class ChatArgs:
    """Flags of ``jaxspec chat``.

    Attributes:
      model: Model directory, GGUF file or hub id of a model with a chat template; or smollm2-moe, a small mixture of
        experts that is made once of a wheel of PyPI, or smollm2, the dense model in that wheel.
      speculative_config: JSON with vLLM's keys, as for jaxspec generate; by default the head that comes with
        smollm2-moe, else n-gram lookup of four tokens.
      system: What the model is told before the conversation.
      max_tokens: Most tokens of an answer.
      temperature: 0 always takes the most likely token.
      seed: Of answers that are sampled.
      max_model_len: Longest conversation in tokens; by default the model's, at most 4096.
      dtype: Of weights and activations; auto takes the checkpoint's.
      quantization: As for jaxspec generate.
      color: Color on a terminal.
    """

    GROUPS: ClassVar = {
        "answer": ("system", "max_tokens", "temperature", "seed"),
        "engine": ("speculative_config", "max_model_len", "dtype", "quantization"),
    }

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = "smollm2-moe"
    speculative_config: Annotated[str | None, tyro.conf.arg(metavar="JSON")] = None
    system: str | None = None
    max_tokens: int = 512
    temperature: float = 0.0
    seed: int = 0
    max_model_len: int | None = None
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    quantization: Literal["auto", "none", "fp8", "int8"] = "auto"
    color: bool = True


def run(args: ChatArgs) -> None:
    """Talks until the end of the input.

    Raises:
      JaxspecError: the arguments or the model are not usable.
    """
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, seed=args.seed)
    llm = load(args)
    Conversation(llm, params, args.system, color=args.color).hold()


def load(args: ChatArgs) -> LLM:
    """Loads an engine of one row.

    Raises:
      JaxspecError: the model is not usable.
    """
    from jaxspec.checkpoint.load.model import read_config
    from jaxspec.models.catalog import arch_of
    from jaxspec.serve.demo_pair import resolve_model, resolve_speculation

    speculative = resolve_speculation(speculation(args.speculative_config)) or default_speculation(args.model)
    model = resolve_model(args.model)
    longest = args.max_model_len or min(arch_of(read_config(model)).max_position, 4096)
    return load_llm(
        model, speculative_config=speculative, dtype=args.dtype, max_model_len=longest, max_num_seqs=1, max_logprobs=0,
        quantization=args.quantization,
    )  # fmt: skip


class Conversation:
    """A conversation on standard input and output.

    Where the input is a file or pipe, standard output gets the answers alone, and standard error the rest.

    Attributes:
      messages: so far.
      speculates: whether drafts are made.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None, *, color: bool = True):
        self._llm, self._params = llm, params
        self._system = [{"role": "system", "content": system}] if system else []
        self._screen, self._asks = Screen(color=color), sys.stdin.isatty()
        self.messages: list[dict[str, Any]] = [*self._system]
        self.speculates = True

    def hold(self) -> None:
        """Answers one line after another, to /quit or the end of the input.

        Raises:
          RequestError: the model has no chat template.
        """
        if self._llm.text is None:
            raise RequestError("chat: the model has no tokenizer that can be read; give another model")
        self._llm.text.write_chat([*self._system, {"role": "user", "content": "?"}])
        if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):
            signal.signal(signal.SIGINT, signal.default_int_handler)  # which ends an answer, not the program
        if self._screen.color:
            self._note("Accepted drafts are green. /help shows what there is besides talking.")
        for line in self._lines():
            if line == "/quit":
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._answer(line)

    def _lines(self) -> Iterator[str]:
        """Yields what is typed; Ctrl-C drops a line."""
        if not self._asks:
            yield from (line.strip() for line in sys.stdin)
            return
        with_history()
        more = True
        while True:
            try:
                if not more:
                    raise EOFError
                line, more = typed()
                yield line.strip()
            except EOFError:
                self._screen.line()
                return
            except KeyboardInterrupt:
                self._screen.line()
                self._note("/quit or Ctrl-D ends")

    def _command(self, line: str) -> None:
        if line == "/plain":
            self.speculates = not self.speculates
            self._note(f"speculation is {'on' if self.speculates else 'off'}")
        elif line == "/reset":
            self.messages = [*self._system]
            self._note("a new conversation")
        else:
            for words in HELP if line == "/help" else (f"{line} is not known", *HELP):
                self._note(words)

    def _answer(self, line: str) -> None:
        """Prints an answer and what it took; a stopped one stays in the conversation."""
        asked = self._fitting([*self.messages, {"role": "user", "content": line}])
        stream, stopped = ColoredStream(self._screen, self._llm), ""
        speculative = None if self.speculates else False
        try:
            stream.run({"messages": asked}, replace(self._params, speculative=speculative))
        except KeyboardInterrupt:
            stopped = "stopped; "
        except (RequestError, CapacityError) as error:
            self._note(f"{error}; /reset begins a new conversation")
            return
        self._screen.line()
        output = stream.output
        if output is None:
            self._note("[stopped before the first token; the question is dropped]")
            return
        self.messages = [*asked, {"role": "assistant", "content": output.outputs[0].text}]
        if output.outputs[0].finish_reason == "length":
            stopped = "cut; "
        m, count = output.metrics, len(output.outputs[0].token_ids)
        words = acceptance_words(m.mean_acceptance_length, m.drafted_acceptance_length)
        how = words if self.speculates else "without speculation"
        self._note(f"[{stopped}{count} tokens, {stream.tokens_per_s:.0f} tokens/s, {how}]")

    def _fitting(self, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Drops the oldest turns where a conversation leaves no room for an answer, and says so."""
        text, capacity, begin, dropped = self._llm.text, self._llm.capacity, len(self._system), 0
        room = min(self._params.max_tokens or capacity, capacity // 2)
        while text and len(asked) > begin + 2 and len(text.encode_chat(asked)) + room > capacity:
            asked, dropped = [*self._system, *asked[begin + 2 :]], dropped + 1
        if dropped:
            what = "turn is" if dropped == 1 else f"{dropped} turns are"
            self._note(f"[the oldest {what} dropped: {capacity} tokens hold no more (--max-model-len)]")
        return asked

    def _note(self, words: str) -> None:
        if self._asks:
            self._screen.line(words, "dim")
        else:
            sys.stderr.write(f"{words}\n")


def typed() -> tuple[str, bool]:
    """Returns a line as it is typed, or all lines of a paste, and whether more can come."""
    lines = [input(ASKING)]
    while select.select([sys.stdin], [], [], PASTE_S)[0]:
        try:
            lines.append(input())
        except EOFError:
            return "\n".join(lines), False
    return "\n".join(lines), True


def with_history() -> None:
    """Lets ``input`` edit lines and recall earlier ones, where this Python can."""
    if os.environ.get("TERM") != "dumb":
        try:
            import readline

            readline.set_auto_history(True)
        except ImportError:
            return
