"""The text side of a published directory: what ends a text, how to sample, and how a conversation is written."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jaxspec.checkpoint.text import deepseek_v4_chat
from jaxspec.checkpoint.text.codec import Text
from jaxspec.errors import ConfigError, RequestError
from jaxspec.serve.defaults import end_ids, sampling_defaults
from jaxspec.serve.request import SamplingParams

LETTERS = [chr(i) for i in range(32, 127)] + ["\n"]
MARKS = [
    deepseek_v4_chat.START,
    deepseek_v4_chat.END,
    deepseek_v4_chat.USER,
    deepseek_v4_chat.ASSISTANT,
    deepseek_v4_chat.THINK,
    deepseek_v4_chat.ANSWER,
]
SHORT = str.maketrans(dict(zip("^$UA+-", MARKS, strict=True)))
TALK = [{"role": "user", "content": "hi"}]
SIMPLE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[answer]{% endif %}"
)
SWITCHED = SIMPLE + "{% if enable_thinking %}<think>{% endif %}"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A tokenizer of one token per character, and one per mark of DeepSeek-V4."""
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(LETTERS)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    configure(tmp_path)
    return tmp_path


def configure(directory: Path, model_type: str = "llama", **settings: object) -> None:
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": " ", **settings})
    )
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))


def text_of(directory: Path) -> Text:
    text = Text.load(directory)
    assert text is not None
    return text


def written(directory: Path, messages: list, options: dict | None = None) -> str:
    text = text_of(directory)
    return text.decode(text.encode_chat(messages, options), skip_special_tokens=False)


def test_no_tokenizer_is_no_text(tmp_path: Path):
    assert Text.load(tmp_path) is None


def test_template_in_the_tokenizer_config(directory: Path):
    configure(directory, chat_template=SIMPLE)
    assert written(directory, [{"role": "system", "content": "be"}, *TALK]) == "[system]be[user]hi[answer]"


def test_template_in_a_file_of_its_own(directory: Path):
    (directory / "chat_template.jinja").write_text(SIMPLE.replace("[", "("))
    assert written(directory, TALK) == "(user]hi(answer]"


def test_named_templates_take_the_default(directory: Path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": SIMPLE}]
    configure(directory, chat_template=named)
    assert written(directory, TALK) == "[user]hi[answer]"
    configure(directory, chat_template=named[:1])
    with pytest.raises(RequestError, match=r"no default chat template; name one of \['tool_use'\]"):
        written(directory, TALK)


def test_templates_take_settings(directory: Path):
    configure(directory, chat_template=SWITCHED)
    assert written(directory, TALK).endswith("[answer]")
    assert written(directory, TALK, {"enable_thinking": True}).endswith("[answer]<think>")
    with pytest.raises(RequestError, match=r"\['tokenize'\] are set already"):
        written(directory, TALK, {"tokenize": True})
    with pytest.raises(RequestError, match="a mapping is needed, got 3"):
        text_of(directory).encode_chat(TALK, 3)


def test_templates_may_refuse(directory: Path):
    configure(directory, chat_template="{{ raise_exception('only one turn') }}")
    with pytest.raises(RequestError, match=r"the chat template refuses them .*only one turn"):
        written(directory, TALK)


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v32"])
def test_no_template_says_what_to_do(directory: Path, model_type: str):
    configure(directory, model_type)
    with pytest.raises(RequestError, match=r"no chat template; give a plain prompt.*chat_template\.jinja"):
        written(directory, TALK)


MALFORMED = [[], "hi", {"role": "user", "content": "hi"}, [{"role": "user"}], [{"content": "x"}], ["hi"]]


@pytest.mark.parametrize("messages", MALFORMED)
def test_malformed_messages(directory: Path, messages: object):
    configure(directory, chat_template=SIMPLE)
    with pytest.raises(RequestError, match="messages: "):
        text_of(directory).encode_chat(messages)


def roles(text: str) -> list[dict[str, str]]:
    """``s:be u:hi a:yo`` as messages."""
    names = {"s": "system", "u": "user", "a": "assistant", "d": "developer", "t": "tool"}
    return [{"role": names[word[0]], "content": word[2:]} for word in text.split()]


# The layouts of the format's README and what they imply; ^ $ U A + - stand for the six marks.
@pytest.mark.parametrize(
    ("talk", "thinking", "wanted"),
    [
        ("u:hi", False, "^UhiA-"),
        ("u:hi", True, "^UhiA+"),
        ("s:be u:hi", True, "^beUhiA+"),
        ("s:a s:b u:hi", False, "^abUhiA-"),
        ("u:hi a:yo u:and", False, "^UhiA-yo$UandA-"),
        ("u:hi a:yo u:and", True, "^UhiA-yo$UandA+"),
        ("u:hi u:you", False, "^Uhi\n\nyouA-"),
        ("u:hi a:yo a:ya u:and", False, "^UhiA-yo$ya$UandA-"),
        ("u:hi s:now u:you", True, "^UhinowUyouA+"),
        ("u:hi a:yo s:now u:you", False, "^UhiA-yo$nowUyouA-"),
    ],
)
def test_deepseek_v4_without_a_template(directory: Path, talk: str, thinking: bool, wanted: str):
    configure(directory, "deepseek_v4")
    text = text_of(directory)
    ids = text.encode_chat(roles(talk), {"thinking": thinking})
    assert text.decode(ids, skip_special_tokens=False) == wanted.translate(SHORT)
    assert ids[0] == len(LETTERS), "each mark is one token"
    assert text.encode_chat(roles(talk), {"enable_thinking": thinking}) == ids
    if not thinking:
        assert text.encode_chat(roles(talk)) == ids


def test_deepseek_v4_readme_example():
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What is 2+2?"},
    ]
    wanted = "<|begin_of_sentence|>You are a helpful assistant.<|User|>What is 2+2?<|Assistant|><think>"
    wanted = wanted.replace("|", "\uff5c").replace("_", "\u2581")
    assert deepseek_v4_chat.encode(messages, {"thinking": True}) == wanted


def test_deepseek_v4_leaves_earlier_reasoning_out():
    earlier = {"role": "assistant", "content": "yo", "reasoning_content": "They greet."}
    talk = [*TALK, earlier, {"role": "user", "content": "and"}]
    for thinking in (True, False):
        text = deepseek_v4_chat.encode(talk, {"thinking": thinking})
        assert "greet" not in text
        assert "yo" in text


@pytest.mark.parametrize(
    ("messages", "options", "says"),
    [
        (roles("a:yo u:hi"), {}, "put a user message before it"),
        (roles("s:be a:yo u:hi"), {}, "put a user message before it"),
        (roles("u:hi a:yo"), {}, "the last must be the user's"),
        (roles("u:hi s:be"), {}, "the last must be the user's"),
        (roles("d:hi"), {}, "are covered, got 'developer'.*prompt_token_ids"),
        (roles("u:hi t:3"), {}, "are covered, got 'tool'.*prompt_token_ids"),
        ([{"role": "user", "content": "hi", "tools": [{}]}], {}, r"\['tools'\] are not covered"),
        ([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], {}, "takes texts"),
        (TALK, {"thinking": "max"}, "thinking .* true or false, got"),
        (TALK, {"reasoning_effort": "max"}, "thinking .* true or false, got"),
        (TALK, {"thinking": True, "enable_thinking": False}, "thinking .* true or false, got"),
    ],
)
def test_deepseek_v4_refuses_what_it_does_not_cover(messages: list, options: dict, says: str):
    with pytest.raises(RequestError, match=says):
        deepseek_v4_chat.encode(messages, options)


def test_a_template_next_to_deepseek_v4_wins(directory: Path):
    configure(directory, "deepseek_v4", chat_template=SIMPLE)
    assert written(directory, TALK) == "[user]hi[answer]"


@pytest.mark.parametrize(
    ("config", "generation", "wanted"),
    [
        ({}, {}, set()),
        ({"eos_token_id": 2}, {}, {2}),
        ({"eos_token_id": None}, {"eos_token_id": 0}, {0}),
        ({"eos_token_id": 128001}, {"eos_token_id": [128001, 128008, 128009]}, {128001, 128008, 128009}),
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 9}, {7, 8, 9}),
        ({"text_config": {"eos_token_id": 5}}, {}, {5}),
    ],
)
def test_end_ids_are_those_of_all_files(config: dict, generation: dict, wanted: set):
    assert end_ids(config, generation) == wanted


@pytest.mark.parametrize("value", ["</s>", [1, "x"], True, -1, 2.0])
def test_end_ids_must_be_ids(value: object):
    with pytest.raises(ConfigError, match="eos_token_id must be an id"):
        end_ids({"eos_token_id": value}, {})


@pytest.mark.parametrize(
    ("generation", "wanted"),
    [
        ({}, {}),
        ({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "transformers_version": "4.56"}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95}, {"temperature": 0.6, "top_p": 0.95}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.95}, {"temperature": 0.0, "top_p": 0.95}),
        ({"top_k": 20, "min_p": 0, "repetition_penalty": 1.05}, {"top_k": 20, "repetition_penalty": 1.05}),
        ({"top_k": 0}, {}),
        ({"top_k": -1}, {"top_k": -1}),
        ({"top_k": None, "temperature": None, "top_p": None}, {}),
        ({"max_new_tokens": 2048, "max_length": 20}, {"max_tokens": 2048}),
    ],
)
def test_sampling_defaults(generation: dict, wanted: dict):
    assert sampling_defaults(generation) == SamplingParams(**wanted)


def test_sampling_defaults_out_of_range_name_the_file():
    with pytest.raises(ConfigError, match=r"generation_config\.json: sampling: top_p must be a number above 0"):
        sampling_defaults({"top_p": 1.5})
