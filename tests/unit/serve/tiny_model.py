"""A model directory small enough for tests of serving: one golden expert layer and a tokenizer."""

import json
from pathlib import Path

import ml_dtypes  # noqa: F401  numpy knows bfloat16 by it
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

GOLDEN = Path(__file__).parents[2] / "golden" / "qwen2_moe"
CHAT = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + ' ' }}{% endfor %}assistant:"
SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT, "eos_token": "<end>"}


def write_tiny_model(directory: Path) -> Path:
    """Writes it, with a byte-pair vocabulary of the size of the model's."""
    directory.mkdir()
    config = json.loads((GOLDEN / "config.json").read_text())
    config |= {"eos_token_id": 0, "num_hidden_layers": 1, "mlp_only_layers": []}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = load_file(GOLDEN / "model.safetensors")
    kept = {name: x for name, x in tensors.items() if "layers." not in name or "layers.0." in name}
    save_file(kept, directory / "model.safetensors")
    tokenizer = Tokenizer(models.BPE(unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    text = "the cat sat on a mat: user assistant said, hello world one two three"
    trainer = trainers.BpeTrainer(vocab_size=config["vocab_size"], special_tokens=["<end>"], show_progress=False)
    tokenizer.train_from_iterator([text] * 3, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    return directory
