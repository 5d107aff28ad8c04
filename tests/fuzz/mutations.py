"""Seeded ways to break a model directory, a head, a tokenizer, a job file or its forms: kind and number."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

COUNTS = {
    "config": 80,
    "weights": 60,
    "index": 30,
    "tokenizer": 50,
    "generation": 20,
    "head": 30,
    "job": 30,
    "forms": 60,
}
CASES = [f"{kind}-{number}" for kind, count in COUNTS.items() for number in range(count)]
TRAP = "import pathlib\npathlib.Path(__file__).with_name('ran').write_text('foreign code')\n"
ODD: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 63, 2**31, 2**63, 0.5, -0.5, 1e308, float("nan"), float("inf"), "x", "", "4096",
    [], [1, -1], ["full_attention"], {}, {"rope_type": "yarn", "factor": 0}, {"type": "linear"}, "silu", "gpt_oss",
]  # fmt: skip
MECHANISMS = [
    "sliding_window", "use_sliding_window", "layer_types", "rope_scaling", "rope_parameters", "rope_theta",
    "partial_rotary_factor", "attention_bias", "quantization_config", "tie_word_embeddings", "head_dim",
    "clip_qkv", "attn_logit_softcapping", "final_logit_softcapping", "text_config", "eos_token_id", "pad_token_id",
    "torch_dtype", "architectures", "auto_map", "attention_chunk_size", "mlp_only_layers", "decoder_sparse_step",
]  # fmt: skip
FORMS: dict[str, list[Any]] = {
    "json": [
        {"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, {"$ref": "https://example.org/a"},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1}, {"allOf": [{"type": "string"}, {"type": "null"}]},
        {"type": "string", "pattern": "(a+)+$"}, {"type": "string", "minLength": 9, "maxLength": 3}, {"enum": []},
        {"type": "integer", "minimum": 2**70, "maximum": 2**71}, {"type": "array", "minItems": 10**9}, {"not": {}},
        {"properties": {f"k{n}": {"enum": list(range(40))} for n in range(300)}}, "{", "[]", '{"type": "object"}', True,
    ],
    "regex": ["(", "[a-", "a{1000000}", "(a{200}){200}", "(?=a)b", r"\\1", "", "(a|a)*{9}", "\\p{Nope}", ".*" * 500],
    "grammar": [
        "start: start", "start: x", "root ::= root", 'start: "a"*', "start: /(/", "", "start: %json {", 'start: ""',
        'start: a\na: a "x" | "y"', "start: " + '"a" ' * 20_000, "start: (" * 2_000, '%llguidance {"x": 1}\nstart: "a"',
    ],
    "choice": [[], [""], ["a", "a"], "ab", [1], ["x" * 100_000], [["a"]], {"a": 1}],
}  # fmt: skip


def make_case(name: str, bases: dict[str, Path], directory: Path) -> None:
    """Writes one case into a new directory; the same name gives the same files."""
    kind, rng = name.split("-")[0], random.Random(name)
    shutil.copytree(bases[kind], directory)
    BREAK[kind](rng, directory)


def _odd(rng: random.Random) -> Any:
    return rng.choice(ODD)


def _config(rng: random.Random, directory: Path) -> None:
    _break_json(rng, directory / "config.json", MECHANISMS)


def _generation(rng: random.Random, directory: Path) -> None:
    keys = [
        "eos_token_id",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "max_new_tokens",
        "do_sample",
    ]
    file = directory / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0.7, "eos_token_id": [0]}))
    _break_json(rng, file, keys)


def _tokenizer(rng: random.Random, directory: Path) -> None:
    settings = directory / "tokenizer_config.json"
    how = rng.randrange(6)
    if how == 0:  # a class of its own, with code beside it
        (directory / "trap.py").write_text(TRAP)
        said = {"tokenizer_class": "Trap", "auto_map": {"AutoTokenizer": ["trap.Trap", None]}}
        settings.write_text(json.dumps({**json.loads(settings.read_text()), **said}))
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoConfig": "trap.Trap"}}))
        if rng.random() < 0.5:
            (directory / "tokenizer.json").unlink()
    elif how == 1:
        template = rng.choice([
            "{% for a in range(100000) %}{% for b in range(100000) %}{% for c in range(100000) %}{% endfor %}"
            "{% endfor %}{% endfor %}",
            "{{ 'a' * 9999999999 }}", "{{ [0] * 9999999999 }}", "{{ ''.__class__.__mro__ }}", "{{ messages[0].x.y }}",
            "{% include 'x' %}", "{{ raise_exception('no') }}", "{% for",
            "{{ 10 ** 10 ** 10 }}", "{{ '%9999999999d' % 1 }}",
        ])  # fmt: skip
        settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": template}))
    elif how == 2:
        _break_json(
            rng, settings, ["chat_template", "tokenizer_class", "eos_token", "added_tokens_decoder", "auto_map"]
        )
    else:
        _break_json(
            rng, directory / "tokenizer.json", ["model", "decoder", "normalizer", "pre_tokenizer", "added_tokens"]
        )


def _head(rng: random.Random, directory: Path) -> None:
    if rng.random() < 0.6:
        _break_json(
            rng,
            directory / "config.json",
            ["draft_vocab_size", "num_hidden_layers", "hidden_size", "taps", *MECHANISMS],
        )
    else:
        _break_tensors(rng, directory / "model.safetensors")


def _weights(rng: random.Random, directory: Path) -> None:
    file = directory / "model.safetensors"
    how = rng.randrange(4)
    if how == 0:
        shutil.copy(file, directory / rng.choice(["extra.safetensors", "model-2.safetensors"]))
        if rng.random() < 0.5:
            file.rename(directory / "first.safetensors")
    else:
        _break_tensors(rng, file)


def _index(rng: random.Random, directory: Path) -> None:
    file = directory / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    names = sorted(index["weight_map"])
    how = rng.randrange(4)
    if how == 0:
        _break_json(rng, file, ["weight_map", "metadata"])
        return
    outside = "outside.safetensors"
    entries = [
        f"../{outside}", str(directory.parent / outside), "/etc/passwd", ".", "", "x" * 5000, "missing.safetensors",
        "config.json", 7, None, ["a"], "shard-1.safetensors", "shard-2.safetensors",
    ]  # fmt: skip
    for name in rng.sample(names, rng.choice([1, len(names)])):
        index["weight_map"][name] = rng.choice(entries)
    if how == 1:
        del index["weight_map"][rng.choice(names)]
    file.write_text(json.dumps(index))


def _job(rng: random.Random, directory: Path) -> None:
    lines = (directory / "in.jsonl").read_bytes().splitlines()
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(lines))
        if rng.random() < 0.3:
            lines[place] = _flip(rng, lines[place])
        else:
            try:
                value = json.loads(lines[place])
            except ValueError:
                continue
            _mutate(
                rng, value, ["temperature", "max_tokens", "stop", "seed", "n", "logit_bias", "tool_choice", "prompt"]
            )
            lines[place] = json.dumps(value).encode()
    (directory / "in.jsonl").write_bytes(b"\n".join(lines) + b"\n")


def _forms(rng: random.Random, directory: Path) -> None:
    lines = [json.loads(line) for line in (directory / "in.jsonl").read_text().splitlines()]
    for line in rng.sample(lines, rng.randrange(1, len(lines))):
        name = rng.choice(sorted(FORMS))
        if rng.random() < 0.5:
            line.pop("response_format", None)
            line["structured_outputs"] = {name: rng.choice(FORMS[name])}
        else:
            _mutate(rng, line, ["structured_outputs", "response_format", "tool_choice", "tools", "n", "stop", "prompt"])
    (directory / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


BREAK: dict[str, Callable[[random.Random, Path], None]] = {
    "config": _config, "weights": _weights, "index": _index, "tokenizer": _tokenizer, "generation": _generation,
    "head": _head, "job": _job, "forms": _forms,
}  # fmt: skip


def _break_json(rng: random.Random, file: Path, keys: list[str]) -> None:
    """Damages a JSON file as a whole, or some values in it."""
    whole = rng.randrange(12)
    if whole == 0:
        file.write_bytes(_flip(rng, file.read_bytes()))
    elif whole == 1:
        file.write_bytes(file.read_bytes()[: rng.randrange(file.stat().st_size)])
    elif whole == 2:
        file.write_bytes(
            rng.choice([b'{"a":' * 100_000, b"[" * 100_000, b"\xff\xfe{\x00", b"\xef\xbb\xbf{}", b"[1]", b""])
        )
    elif whole == 3:
        _replace(rng, file)
    else:
        value = json.loads(file.read_text())
        for _ in range(rng.choice([1, 1, 2, 4])):
            _mutate(rng, value, keys)
        file.write_text(json.dumps(value))


def _mutate(rng: random.Random, value: Any, keys: list[str]) -> None:
    """Changes one value: a named key, any key of the top level, or any place deep inside."""
    if not isinstance(value, dict) or not value:
        return
    how = rng.randrange(4)
    if how == 0:
        value[rng.choice(keys)] = _odd(rng)
    elif how == 1:
        value[rng.choice(sorted(value))] = _odd(rng)
    elif how == 2:
        del value[rng.choice(sorted(value))]
    else:
        _deep(rng, value)


def _deep(rng: random.Random, value: Any) -> None:
    while True:
        places = sorted(value) if isinstance(value, dict) else range(len(value))
        place = rng.choice(list(places))
        if isinstance(value[place], dict | list) and value[place] and rng.random() < 0.8:
            value = value[place]
        else:
            value[place] = _odd(rng)
            return


def _break_tensors(rng: random.Random, file: Path) -> None:
    """Damages a safetensors file: its bytes, its header, a number in it, or what it is."""
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    how = rng.randrange(8)
    if how == 0:
        del data[rng.randrange(len(data)) :]
    elif how == 1:
        data[:8] = rng.choice([0, 1, length - 1, length + 1, 2**40, 2**63]).to_bytes(8, "little")
    elif how == 2:
        data[8 : 8 + length] = _flip(rng, bytes(data[8 : 8 + length]))
    elif how == 3:
        _replace(rng, file)
        return
    elif how == 4:
        data = bytearray(b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n")
    elif how == 5:
        data = data[: -rng.randrange(1, 64)] + rng.choice([b"", b"\0" * 100])
    else:
        header = json.loads(data[8 : 8 + length])
        entry = header[rng.choice([name for name in sorted(header) if name != "__metadata__"])]
        field = rng.choice(["dtype", "shape", "data_offsets"])
        entry[field] = {
            "dtype": rng.choice(["I16", "F64", "BOOL", "X", 3, None]),
            "shape": rng.choice([[2**62, 4], [-1], [0], 7, "x", [1.5]]),
            "data_offsets": rng.choice([[0, 4], [-4, 0], [0.0, 4.0], [4, 0], [0, 2**60], [], "x"]),
        }[field]
        text = json.dumps(header).encode()
        data = bytearray(len(text).to_bytes(8, "little") + text + data[8 + length :])
    file.write_bytes(data)


def _replace(rng: random.Random, file: Path) -> None:
    """Puts something that is no plain file in its place."""
    file.unlink()
    how = rng.randrange(5)
    if how == 0:
        os.mkfifo(file)
    elif how == 1:
        file.mkdir()
    elif how == 2:
        file.symlink_to(file.name)
    elif how == 3:
        file.symlink_to("/dev/zero")
    else:
        file.symlink_to("../outside.safetensors")


def _flip(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 6)):
        if changed:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)
