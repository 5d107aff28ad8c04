"""A tokenizer of one token per character, with marks for turns, in a model directory of its own."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jaxspec.checkpoint.text.codec import Text

LETTERS = [chr(i) for i in range(32, 127)] + ["\n"]
END = "<end>"
VOCAB = len(LETTERS) + 1
CHAT = (
    "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% if m.role == 'assistant' %}<end>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
# Leaves out what earlier answers thought, as templates of reasoning models do.
FORGETFUL = (
    "{% for m in messages %}[{{ m.role[0] }}]{% if loop.last or m.role == 'user' %}{{ m.content }}"
    "{% else %}{{ m.content.split('|')[-1] }}{% endif %}{% if m.role == 'assistant' %}<end>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)


def write_tokenizer(directory: Path, template: str = CHAT) -> Text:
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(LETTERS)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(END, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": " ", "eos_token": END}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    text = Text.load(directory)
    assert text is not None
    return text


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
