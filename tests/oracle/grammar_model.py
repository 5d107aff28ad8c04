"""A tiny model with a vocabulary of bytes and pieces of JSON, so that a text has many spellings."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.oracle.conftest import CONFIG, write_model

VOCAB = 320
TEXT = '{"name": "a", "value": 12, "list": [true, false, null]}, {"name":"b","value":3.5} </think> <tool_call>'


def write_grammar_model(directory: Path) -> Path:
    """Writes the model and its tokenizer, whose id 0 ends texts."""
    write_model(directory, CONFIG | {"vocab_size": VOCAB, "num_hidden_layers": 1}, 0)
    write_grammar_tokenizer(directory)
    return directory


def write_grammar_tokenizer(directory: Path) -> None:
    """Writes the tokenizer alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<end>"], initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
