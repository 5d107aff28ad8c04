"""The room that makes the demo pair: simple Python, the quick forward pass, the whole command, killed and resumed."""

import ast
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxspec.checkpoint.load.model import load_model
from jaxspec.models.catalog import arch_of
from jaxspec.models.transformer import Transformer, teacher_forced
from jaxspec.nn.policy import make_policy
from lab.pair import corpus, excerpts, texts
from lab.pair.forward import forward
from lab.pair.grammar import parses, whole_functions
from lab.pair.recipe import TINY
from lab.pair.simple_python import BUILTIN, LINES, WIDTH, functions, simplify
from lab.upcycle.documents import Document
from scripts.house_report import ROOT

EXACT = make_policy("float32")
WORDS = [f"n{a}{b}" for a in "abcd" for b in "abcdefghijklmnopqrstuvw"]
NAMES = [*BUILTIN.split(), "value", "key", "read", "size", *WORDS]
SOURCE = '''
class Reader:
    @property
    async def never(self): pass

    def read_value(self, the_key: str = "a", *rest, **more) -> int:
        """Says nothing."""
        import os
        self.key_size = self.key_size
        if the_key:  # a comment
            x = f"{the_key} key"
            x = f"{the_key} key"
            return x
        for value in range(1000):
            print(value, 2.5, b"size", the_key, rest, 4)
        try:
            pass
        except KeyError as problem:
            raise KeyError(problem)

def outer():
    return lambda: 1
'''
CODE = """def read{0}(value, key):
    if value > {1}:
        return key.append({2})
    for item in value:
        item.read(key, {3})
    return value
"""
# Ends the process at a batch of a training, as a power cut would.
RUN = """
import os, sys
from lab.pair import corpus, make
from tests.unit.lab.test_pair import documents
corpus.documents, whole = documents, corpus.batch
def batch(tokens, step, count, length, seed):
    if f"{seed} {step}" == os.environ.get("KILL"):
        os._exit(9)
    return whole(tokens, step, count, length, seed)
corpus.batch = batch
make.main(["--work", sys.argv[1], "--out", sys.argv[1] + "/pair", "--tiny"])
"""


def documents() -> dict[str, list[Document]]:
    """Small files in place of what is installed."""

    def file(i: int) -> str:
        return "\n\n".join(CODE.format(j, (j + i) % 9, i % 9, j * i % 5) for j in range(30))

    held_out = [Document(f"python/{name}.py", file(0)) for name in corpus.HELD_OUT]
    return {"held_out": held_out, "train": [Document(f"python/a{i}.py", file(i + 1)) for i in range(6)]}


def test_functions_become_simple():
    (function,) = functions(SOURCE)
    text = simplify(function, NAMES)
    assert text is not None
    assert text.splitlines() == [
        "def value(self, key='size'):",
        "    if key:",
        "        read = 'key'",
        "        return read",
        "    for value in range(3):",
        "        print(value, 100, 'size')",
        "    try:",
        "        pass",
        "    except KeyError as error:",
        f"        raise KeyError({NAMES[43]})",
    ]


def test_simple_functions_parse_and_keep_the_limits():
    count = 0
    for module in (ast, json, subprocess):
        for function in functions(Path(str(module.__file__)).read_text()):
            if text := simplify(function, NAMES):
                count += 1
                ast.parse(text)
                lines = text.splitlines()
                assert LINES[0] <= len(lines) <= LINES[1]
                assert all(len(line) <= WIDTH for line in lines)
                names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
                assert names <= {*NAMES, "error", "ValueError", "TypeError", "KeyError", "OSError"}
    assert count > 50


def test_only_functions_that_end_are_counted():
    text = "def f():\n    return 1\n\n\ndef g(:\n    pass\n\n\ndef unfinished():\n    retu"
    found = whole_functions(text)
    assert [parses(function) for function in found] == [True, False]


def test_the_quick_forward_pass_is_the_models():
    for config in (TINY.target | {"num_hidden_layers": 2}, TINY.draft):
        net = Transformer(arch_of(config), EXACT)
        params = jax.tree.map(lambda x: 3 * x, jax.jit(net.initial)(jax.random.key(0)))
        token_BT = jnp.asarray(np.random.default_rng(0).integers(0, 320, (3, 20)), jnp.int32)
        position_BT = jnp.broadcast_to(jnp.arange(20, dtype=jnp.int32), token_BT.shape)
        wanted, hidden = jax.jit(lambda p, net=net, t=token_BT, at=position_BT: teacher_forced(net, p, t, at))(params)
        found, routing = jax.jit(lambda p, t=token_BT, config=config: forward(p, t, config, 4.0))(params)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
        for ours, theirs in zip(routing, hidden.routing, strict=True):
            np.testing.assert_array_equal(np.sort(ours.expert_MA), np.sort(theirs.expert_MA))
        assert len(routing) == (2 if "num_experts" in config else 0)


def test_batches_depend_on_their_numbers_alone():
    tokens = np.arange(1000, dtype=np.uint16)
    rows = [corpus.batch(tokens, step, 4, 16, seed=1) for step in range(30)]
    np.testing.assert_array_equal(corpus.batch(tokens, 7, 4, 16, seed=1), rows[7])
    assert all(np.all(np.diff(row) == 1) for row in rows)
    starts = np.concatenate(rows)[:61, 0]
    assert len(set(starts)) == 61, "each window once in an epoch"
    np.testing.assert_array_equal(texts.prompts(tokens, 20, 8, 0)[:3], texts.prompts(tokens, 3, 8, 0))


def test_excerpts_end_where_a_body_begins(tmp_path: Path):
    (tmp_path / "held_out.json").write_text(json.dumps({d.name: d.text for d in documents()["held_out"]}))
    tokenizer = corpus.train_tokenizer(documents()["train"], tmp_path, 320)
    excerpts.write(tmp_path, tmp_path / "out.json", count=16)
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found) == 16
    assert len({entry["file"] for entry in found}) == len(corpus.HELD_OUT)
    for entry in found:
        assert entry["prompt"].splitlines()[-1].startswith("def ")
        assert excerpts.LEAST <= len(tokenizer.encode(entry["prompt"]).ids) <= excerpts.MOST
        assert parses(entry["prompt"] + "\n    pass")


def command(work: Path, **environment: str) -> int:
    """Runs the whole command in a process of its own with one device."""
    flags = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", RUN, str(work)], env=os.environ | flags | environment, check=False
    ).returncode


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("whole")
    assert command(work) == 0
    return work


def digests(work: Path) -> list[str]:
    names = ("target", "draft", "head")
    return [hashlib.sha256((work / "pair" / name / "model.safetensors").read_bytes()).hexdigest() for name in names]


@pytest.mark.slow
def test_the_command_makes_a_pair_that_loads(whole: Path):
    for name, family in (("target", "qwen2_moe"), ("draft", "llama")):
        model = load_model(whole / "pair" / name, make_policy())
        assert (model.net.arch.family, model.net.arch.vocab_size) == (family, 320)
        assert Tokenizer.from_file(str(whole / "pair" / name / "tokenizer.json")).token_to_id(corpus.END) == 0
    record = json.loads((whole / "pair" / "provenance.json").read_text())
    assert set(record["runs"]) == {"target", "draft", "head"}
    assert [entry["step"] for entry in record["runs"]["target"]["held_out"]] == [2, 4, 6]
    assert str(whole) not in json.dumps(record)
    training = json.loads((whole / "pair" / "head" / "training.json").read_text())
    assert training["target"]["name"] == "target"


@pytest.mark.slow
def test_a_killed_command_ends_with_the_same_weights(whole: Path, tmp_path: Path):
    for kill in (f"{TINY.of_target.seed} 5", f"{TINY.of_draft.seed} 3"):
        assert command(tmp_path, KILL=kill) == 9
    assert command(tmp_path) == 0
    assert digests(tmp_path) == digests(whole)


@pytest.mark.slow
def test_texts_are_the_targets(whole: Path):
    (file,) = (whole / "runs").glob("*/texts/train.jsonl")
    text = texts.read(file)
    assert text.shape == (TINY.texts, TINY.length)
    model = load_model(whole / "pair" / "target", EXACT)
    logits = np.asarray(forward(model.params, jnp.asarray(text[:, :-1]), TINY.target, 4.0)[0])[:, TINY.prompt - 1 :]
    gap = logits.max(-1) - np.take_along_axis(logits, text[:, TINY.prompt :, None], -1)[..., 0]
    assert gap[0::2].max() < 0.05, "even rows are greedy, up to the rounding of bfloat16"
    assert gap[1::2].max() > 0.05, "odd rows are sampled"
