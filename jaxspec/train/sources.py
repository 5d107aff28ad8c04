"""Reads files of conversations, pairs, texts and token ids: token ids, and which of them are trained on."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jaxspec.checkpoint.text.codec import Text
from jaxspec.errors import ConfigError, RequestError

ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "system": "system", "tool": "tool", "function": "tool",
    "observation": "tool",
}  # fmt: skip
FORMS = (
    '{"messages": [...]}, {"conversations": [...]}, {"prompt": ..., "response": ...}, {"text": ...}, '
    '{"token_ids": [...], "prompt_length": n}, or lines of the output of jaxspec generate'
)
SIDECAR = "{}.job.json"  # in which jaxspec generate names the model
Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Document:
    """One text.

    Attributes:
      token_T: int32 ids.
      loss_T: which of them are trained on.
      source: file and line.
      plain: whether it is text without turns, which may be cut anywhere.
    """

    token_T: np.ndarray
    loss_T: np.ndarray
    source: str
    plain: bool = False

    @property
    def prompt_length(self) -> int:
        """Tokens before the first that is trained on."""
        return int(np.argmax(self.loss_T)) if self.loss_T.any() else len(self.token_T)


@dataclass
class DocumentReader:
    """Reads files for one model.

    Attributes:
      text: the target's tokenizer, None if it has none.
      vocab_size: V; ids must be below it.
      template: settings of the chat template.
      target: fingerprint of the model, None if it is not known.
      skipped: records that hold nothing to train on, by reason.
    """

    text: Text | None
    vocab_size: int
    template: Mapping[str, Any] = field(default_factory=dict)
    target: str | None = None
    skipped: Counter[str] = field(default_factory=Counter)

    def read(self, file: Path) -> Iterator[Document]:
        """Yields the documents of a file, in its order; raises ConfigError with file and line of what is malformed."""
        if file.suffix not in (".jsonl", ".txt"):
            raise ConfigError(f"data: {file} must end in .jsonl (one record per line) or .txt (plain text)")
        foreign = self.target is not None and _writer(file) not in (None, self.target)
        try:
            if file.suffix == ".txt":
                yield from self._made(str(file), {"text": file.read_text(encoding="utf-8")})
                return
            with file.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield from self._made(f"{file}:{number}", line, foreign=foreign)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"data: {file} cannot be read ({error})") from None

    def _made(self, source: str, line: bytes | dict[str, Any], *, foreign: bool = False) -> Iterator[Document]:
        try:
            record = msgspec.json.decode(line.removeprefix(b"\xef\xbb\xbf")) if isinstance(line, bytes) else line
            if not isinstance(record, dict):
                raise RequestError(f"a JSON object is needed, got {type(record).__name__}")
            if foreign and ("outputs" in record or "token_ids" in record):
                raise RequestError(
                    "its token ids are another model's, as the .job.json beside it says, and mean other text to "
                    "this target; let this target answer the same prompts (jaxspec generate), or give texts "
                    '({"prompt": ..., "response": ...}); move that .job.json away if both share one tokenizer'
                )
            for ids, spans in self._documents(record):
                yield self._document(ids, spans, source, plain="text" in record and "token_ids" not in record)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"data: {source}: not valid JSON ({error})") from None
        except RequestError as error:
            raise ConfigError(f"data: {source}: {error}") from None

    def _document(self, ids: Any, spans: Spans, source: str, *, plain: bool) -> Document:
        token_T = np.asarray(_ids("token ids", ids), np.int64)
        if len(token_T) and not 0 <= token_T.min() <= token_T.max() < self.vocab_size:
            raise RequestError(
                f"token ids must be from 0 to {self.vocab_size - 1}, got {token_T.min()} to {token_T.max()}"
            )
        loss_T = np.zeros(len(token_T), bool)
        for first, end in spans:
            loss_T[first:end] = True
        return Document(token_T.astype(np.int32), loss_T, source, plain)

    def _documents(self, record: Mapping[str, Any]) -> Iterator[tuple[Any, Spans]]:
        """Yields the ids of each document of a record, and the spans that are trained on."""
        if record.get("error") is not None:
            self.skipped["failed requests"] += 1
        elif "response" in record and "body" not in record and isinstance(record["response"], Mapping):
            raise RequestError("lines of the Batch API hold no prompts; run jaxspec generate on its own form of lines")
        elif "outputs" in record or "token_ids" in record:
            yield from self._token_ids(record)
        elif "messages" in record or "conversations" in record:
            yield from self._conversation(_messages(record))
        elif "response" in record:
            yield self._pair(_string(record, "prompt"), _string(record, "response"))
        elif "text" in record:
            ids = self._needed().encode(_string(record, "text"))
            yield ids, [(0, len(ids))]
        else:
            raise RequestError(f"none of the known forms, which are {FORMS}; got keys {sorted(record)}")

    def _needed(self) -> Text:
        if self.text is None:
            raise RequestError("the target's directory has no tokenizer; give token_ids and prompt_length")
        return self.text

    def _token_ids(self, record: Mapping[str, Any]) -> Iterator[tuple[Any, Spans]]:
        """Yields token ids that are trained on in whole, or those that the target wrote after a prompt."""
        if "prompt_length" in record:
            ids, given = _ids("token_ids", record["token_ids"]), record["prompt_length"]
            if not isinstance(given, int) or isinstance(given, bool) or not 0 <= given <= len(ids):
                raise RequestError(f"prompt_length must be from 0 to the {len(ids)} token ids, got {given!r}")
            yield ids, [(given, len(ids))]
            return
        if "prompt_token_ids" in record:
            prompt = _ids("prompt_token_ids", record["prompt_token_ids"])
        elif "prompt" in record:
            prompt = self._needed().encode(_string(record, "prompt"))
        else:
            raise RequestError("token_ids need prompt_length, prompt_token_ids or prompt beside them")
        for sample in record.get("outputs", [record]):
            if not isinstance(sample, Mapping) or "token_ids" not in sample:
                raise RequestError("outputs: each needs token_ids")
            ids = [*prompt, *_ids("token_ids", sample["token_ids"])]
            yield ids, [(len(prompt), len(ids))]

    def _pair(self, prompt: str, response: str) -> tuple[list[int], Spans]:
        """Returns a prompt with its response, which ends with the tokenizer's end of text."""
        text = self._needed()
        ids, end = text.encode(prompt + response), text.tokenizer.eos_token_id
        if end is not None and ids[-1:] != [end]:
            ids = [*ids, end]
        return ids, [(_shared(text.encode(prompt), ids), len(ids))] if response else []

    def _conversation(self, messages: list[dict[str, Any]]) -> Iterator[tuple[list[int], Spans]]:
        """Yields the turns of the assistant, each after what it saw when it answered.

        Where the template repeats earlier turns unchanged, that is one document with several spans; where it rewrites
        them (it leaves out earlier reasoning, say), each answer gets a document of its own.
        """
        text, known, spans = self._needed(), [], []
        for index in (i for i, message in enumerate(messages) if message["role"] == "assistant"):
            if index == 0:
                continue
            ids = text.encode_chat(messages[: index + 1], self.template, add_generation_prompt=False)
            first = _shared(text.encode_chat(messages[:index], self.template), ids)
            span = (first, _answer_end(ids, first, text.tokenizer.eos_token_id))
            if known and ids[: len(known)] != known:
                yield known, spans
                spans = []
            known, spans = ids, [*spans, span]
        if known:
            yield known, spans
        else:
            self.skipped["conversations without an answer"] += 1


def _writer(file: Path) -> str | None:
    """Returns the fingerprint of the model that wrote a file of answers, None where nothing says so."""
    try:
        sidecar = msgspec.json.decode(Path(SIDECAR.format(file)).read_bytes())
    except (OSError, msgspec.DecodeError):
        return None
    model = sidecar.get("model") if isinstance(sidecar, dict) else None
    return model if isinstance(model, str) else None


def _messages(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns OpenAI's messages, or ShareGPT's under their names."""
    key = "messages" if "messages" in record else "conversations"
    role, content = ("role", "content") if key == "messages" else ("from", "value")
    turns = record[key]
    if not isinstance(turns, list) or not turns:
        raise RequestError(f"{key}: a list of at least one turn is needed, got {turns!r}")
    for turn in turns:
        if not isinstance(turn, Mapping) or not isinstance(turn.get(role), str) or content not in turn:
            raise RequestError(f'{key}: each turn needs "{role}" and "{content}", got {turn!r}')
    if key == "messages":
        return [dict(turn) for turn in turns]
    if unknown := sorted({turn[role] for turn in turns} - set(ROLES)):
        raise RequestError(f"conversations: unknown speakers {unknown}; known are {sorted(ROLES)}")
    return [{"role": ROLES[turn[role]], "content": turn[content]} for turn in turns]


def _string(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise RequestError(f"{key}: a text is needed, got {value!r}")
    return value


def _ids(key: str, value: Any) -> list[int]:
    if not isinstance(value, list) or any(type(i) is not int for i in value):
        raise RequestError(f"{key}: a list of integers is needed")
    return value


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Counts the ids that two lists begin with together; a token across prompt and answer is not shared."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _answer_end(ids: Sequence[int], first: int, end: int | None) -> int:
    """Returns where the answer that starts at ``first`` ends: the model writes nothing after its end of text."""
    ends = [i for i in range(first, len(ids)) if ids[i] == end]
    return ends[-1] + 1 if ends else len(ids)
