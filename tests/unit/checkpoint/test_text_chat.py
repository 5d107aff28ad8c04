"""Conversations as text: content in parts, answers that are continued, tools, templates of the caller's."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jaxspec.checkpoint.text import deepseek_v4_chat
from jaxspec.checkpoint.text.codec import TAG, Text
from jaxspec.errors import RequestError

BRACKETS = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% if not loop.last %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CLOSED = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
TRIMMED = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
PARTS = "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p.text }};{% endfor %}{% endfor %}"
EITHER = (
    "{% for m in messages %}{% if m.content is string %}S{{ m.content }}{% else %}"
    "{% for p in m.content %}P{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
)
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CLOSED
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer is"}
HI = [{"type": "text", "text": "hi"}]


def text_of(template: Any, model_type: str = "llama") -> Text:
    """A tokenizer of one token per character, with a template."""
    from transformers import PreTrainedTokenizerFast

    letters = {chr(i): i for i in range(32, 127)} | {"\n": 10}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="?")
    wrapped.chat_template = template
    return Text(wrapped, model_type)


def write(template: Any, messages: Any, **options: Any) -> str:
    text = text_of(template)
    written = text.write_chat(messages, **options)
    assert text.decode(text.encode_chat(messages, **options), skip_special_tokens=False) == written
    return written


def test_parts_are_joined_for_a_template_of_texts():
    assert write(BRACKETS, [{"role": "user", "content": HI}]) == "[user]hi[assistant]"
    two = [*HI, {"type": "input_text", "text": "you"}, "there", {"type": "refusal", "refusal": "no"}]
    assert write(BRACKETS, [{"role": "user", "content": two}]) == "[user]hi\nyou\nthere\nno[assistant]"
    assert write(BRACKETS, [{"role": "user", "content": []}]) == "[user][assistant]"
    assert write(BRACKETS, ({"role": "user", "content": tuple(HI)},)) == "[user]hi[assistant]"


def test_a_template_of_parts_gets_parts():
    talk = [USER, {"role": "user", "content": [*HI, {"type": "text", "text": "you"}]}]
    assert write(PARTS, talk) == "[user]hi;[user]hi;you;"
    assert write(EITHER, talk) == "ShiPhiPyou"


def test_a_template_of_parts_for_some_roles_only():
    mixed = "{% for m in messages %}{% if m.role == 'user' %}{% for p in m.content %}{{ p.text }}{% endfor %}"
    mixed += "{% elif m.content is string %}{{ m.content }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    talk = [{"role": "system", "content": HI}, USER]
    assert "type" not in write(mixed, talk)


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([IMAGE], 'only parts {"type": "text", "text": ...} are supported, got .*image_url'),
        ([*HI, {"type": "text"}], "only parts"),
        ([5], "only parts"),
        ([{"type": ["text"], "text": "x"}], "only parts"),
        (5, "content is a text or a list of text parts, got 5"),
        ({"type": "text", "text": "hi"}, "content is a text or a list"),
        (None, "which may be null with tool_calls only"),
    ],
)
def test_other_contents_are_refused(content: Any, says: str):
    with pytest.raises(RequestError, match=f"messages: .*{says}"):
        write(BRACKETS, [{"role": "user", "content": content}])


def test_calls_of_tools():
    shown = "{% for m in messages %}({{ m.content }}{{ m.tool_calls[0].function.arguments.city }}){% endfor %}"
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    for message in ({"content": None}, {}, {"content": ""}):
        talk = [{"role": "assistant", "tool_calls": [call], "audio": None} | message]
        assert write(shown, talk) == "(Oslo)"
    assert call["function"]["arguments"] == '{"city": "Oslo"}', "the caller's messages are not touched"
    for calls in ("x", [1], [{"function": 1}], [{"function": {"name": "f", "arguments": "{"}}],
                  [{"function": {"name": "f", "arguments": "[1]"}}]):  # fmt: skip
        with pytest.raises(RequestError, match=r"messages: (tool_calls|arguments)"):
            write(shown, [{"role": "assistant", "content": None, "tool_calls": calls}])
    with pytest.raises(RequestError, match=r"\['function_call'\] are not supported; calls of tools are tool_calls"):
        write(shown, [{"role": "assistant", "content": "x", "function_call": {"name": "f"}}])


def test_reasoning_goes_by_the_names_that_templates_read():
    shown = "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}"
    for name in ("reasoning_content", "thinking", "reasoning"):
        assert write(shown, [ANSWER | {name: "hm"}]) == "hmhm"


def test_the_last_message_is_continued():
    wanted = "[user]hi[assistant]The answer is"
    assert write(BRACKETS, [USER, ANSWER], continue_final_message=True) == wanted
    assert write(BRACKETS, [USER, ANSWER], continue_final_message=True, add_generation_prompt=False) == wanted
    assert write(CLOSED, [USER, ANSWER], continue_final_message=True) == "<user>hi</user>\n<assistant>The answer is"
    assert write(CLOSED, [USER, ANSWER | {"content": "so "}], continue_final_message=True).endswith("<assistant>so ")
    assert write(TRIMMED, [USER, ANSWER | {"content": "so "}], continue_final_message=True).endswith("<assistant>so")
    assert write(CLOSED, [USER, ANSWER | {"content": ""}], continue_final_message=True).endswith("<assistant>")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert write(PARTS, [USER, ANSWER | {"content": parts}], continue_final_message=True) == "[user]hi;[assistant]a;b"
    assert write(BRACKETS, [USER, ANSWER | {"content": parts}], continue_final_message=True).endswith("]a\nb")


def test_what_cannot_be_continued():
    with pytest.raises(RequestError, match="continue_final_message and add_generation_prompt are not both possible"):
        write(BRACKETS, [USER, ANSWER], continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(RequestError, match="does not write the last message as it is"):
        write("{{ messages[0].content }}", [USER, ANSWER], continue_final_message=True)
    with pytest.raises(RequestError, match="does not write the last message as it is"):
        write("{% for m in messages %}{{ m.content[4:] }}{% endfor %}", [ANSWER], continue_final_message=True)
    with pytest.raises(RequestError, match="has no text to continue"):
        write(PARTS, [USER, {"role": "assistant", "content": []}], continue_final_message=True)


def test_the_generation_prompt_can_be_left_out():
    assert write(BRACKETS, [USER], add_generation_prompt=True) == "[user]hi[assistant]"
    assert write(BRACKETS, [USER], add_generation_prompt=False) == "[user]hi"


@pytest.mark.parametrize("name", ["add_generation_prompt", "continue_final_message"])
@pytest.mark.parametrize("value", ["true", 1, 0.0, []])
def test_switches_are_true_or_false(name: str, value: Any):
    with pytest.raises(RequestError, match=f"{name}: true or false is needed, got"):
        write(BRACKETS, [USER], **{name: value})


def test_tools_are_given_to_the_template():
    assert write(TOOLS, [USER], tools=[WEATHER]).startswith(json.dumps([WEATHER]) + "<user>")
    assert write(TOOLS, [USER], tools=[]) == write(TOOLS, [USER], tools=None) == "<user>hi</user>\n"
    with pytest.raises(RequestError, match="tools: this model's chat template does not use them"):
        write(CLOSED, [USER], tools=[WEATHER])
    for wrong in ("x", [1], WEATHER, 5):
        with pytest.raises(RequestError, match="tools: a list of"):
            write(TOOLS, [USER], tools=wrong)
    named = {"default": CLOSED, "tool_use": TOOLS}
    assert write(named, [USER], tools=[WEATHER]).startswith("[{")
    assert write(named, [USER]) == "<user>hi</user>\n"


def test_a_template_of_the_callers():
    assert write(CLOSED, [USER], chat_template=BRACKETS) == "[user]hi[assistant]"
    assert write(None, [USER], chat_template=BRACKETS) == "[user]hi[assistant]"
    assert write({"default": CLOSED, "other": BRACKETS}, [USER], chat_template="other") == "[user]hi[assistant]"
    assert write(CLOSED, [USER], chat_template="{{ bos_token }}") == "<s>"
    with pytest.raises(RequestError, match="chat_template: a Jinja template is needed, got 5"):
        write(CLOSED, [USER], chat_template=5)


def test_settings_that_nobody_reads_are_said():
    with pytest.warns(RuntimeWarning, match=r"chat_template_kwargs: \['thinks'\] are not read"):
        assert write(BRACKETS, [USER], chat_template_kwargs={"thinks": True}) == "[user]hi[assistant]"
    for name in ("tools", "continue_final_message", "add_generation_prompt", "documents"):
        with pytest.raises(RequestError, match=rf"chat_template_kwargs: \['{name}'\] are set already"):
            write(BRACKETS, [USER], chat_template_kwargs={name: True})


def test_bombs_are_errors_of_their_conversation():
    for template in ("{{ 'a' * 9999999999 }}", "{% for a in range(100000) %}" * 3 + "{% endfor %}" * 3):
        with pytest.raises(RequestError, match="messages: the chat template"):
            write(template, [USER])


def test_deepseek_v4_without_a_template():
    text, talk = text_of(None, "deepseek_v4"), [USER | {"content": HI}, ANSWER | {"reasoning": "hm"}]
    assert text.write_chat(talk[:1]) == text.write_chat([USER])
    begun = deepseek_v4_chat.encode([USER], {}) + "The answer is"
    assert text.write_chat(talk, continue_final_message=True) == begun
    assert text.write_chat(talk, add_generation_prompt=False) == begun + deepseek_v4_chat.END
    with pytest.raises(RequestError, match="tools: this model's chat format has none here"):
        text.write_chat([USER], tools=[WEATHER])
    with pytest.raises(RequestError, match="last message is the assistant's"):
        text.write_chat([USER], add_generation_prompt=False)


def test_whatever_a_conversation_holds_it_is_written_or_refused():
    rng, written = random.Random(4), 0
    values: list[Any] = [None, True, 3, "", "hi", [], HI, [IMAGE], {}, [5], {"a": [1]}, [{"function": {}}], ANSWER, TAG]
    texts = [text_of(template) for template in (BRACKETS, PARTS, EITHER, TOOLS)]
    for _ in range(600):
        extra = rng.sample(["tool_calls", "name", "thinking", "tool_call_id", "audio"], rng.choice([0, 0, 1, 2]))
        talk = [
            {
                "role": rng.choice(["user", "assistant", "tool"] * 4 + [5]),
                "content": rng.choice([*values, *["hi", HI] * 6]),
            }
            | {key: rng.choice(values) for key in extra}
            for _ in range(rng.randint(1, 3))
        ]
        options = {
            "chat_template_kwargs": rng.choice([None] * 4 + [{}, {"documents": 1}, 5]),
            "tools": rng.choice([*[None] * 9, *values]),
            "continue_final_message": rng.choice([None, True, False]),
        }
        try:
            said = rng.choice(texts).write_chat(talk, **options)
            written += 1
        except RequestError as error:
            said = str(error).replace("\n", "a line of its own")
        assert isinstance(said, str)
        assert "a line of its own" not in said
    assert 40 < written < 500


def test_text_that_no_tokenizer_takes():
    text = text_of(BRACKETS)
    for prompt in ("a\ud800", "\udfff"):
        with pytest.raises(RequestError, match="not valid Unicode at character"):
            text.encode(prompt)
        with pytest.raises(RequestError, match="not valid Unicode at character"):
            text.encode_chat([{"role": "user", "content": prompt}])


def test_a_tokenizer_that_fails_or_panics(monkeypatch: pytest.MonkeyPatch):
    text = text_of(BRACKETS)
    panic = type("PanicException", (BaseException,), {})
    for error in (ValueError("no"), panic("no")):
        monkeypatch.setattr(text, "tokenizer", lambda *a, error=error, **k: (_ for _ in ()).throw(error))
        with pytest.raises(RequestError, match=r"the tokenizer fails on it \(no\); give prompt_token_ids"):
            text.encode("a")
    monkeypatch.setattr(text, "tokenizer", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        text.encode("a")


def test_published_template_files(tmp_path: Path):
    text = text_of(CLOSED)
    text.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    loaded = Text.load(tmp_path)
    assert loaded is not None
    assert loaded.write_chat([USER]) == "<user>hi</user>\n"
