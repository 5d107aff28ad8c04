"""Checks that the demo corpus round-trips, keeps its held-out files apart, and gives the same data on every run."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers")

SCRIPT = Path(__file__).resolve().parents[3] / "lab" / "demo_corpus.py"
CODE = "def f_{0}(value):\n    if value:\n        return [value, {0}]\n    return 'né'\n\n\n"


@pytest.fixture(scope="module")
def demo_corpus():
    spec = importlib.util.spec_from_file_location("demo_corpus", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo_corpus"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["demo_corpus"]


@pytest.fixture(scope="module")
def library(demo_corpus, tmp_path_factory):
    root = tmp_path_factory.mktemp("library")
    for index, name in enumerate(demo_corpus.HELD_OUT):
        (root / name).write_text("".join(CODE.format(100 * index + part) for part in range(20)), encoding="utf-8")
    code = "".join(CODE.format(part) for part in range(5000, 5040))
    for name in (
        "a.py",
        "b.py",
        "test/c.py",
        "package/tests/c.py",
        "site-packages/c.py",
        "_sysconfigdata_x.py",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n{code}" if name != "b.py" else f"# a.py\n{code}", encoding="utf-8")
    (root / "package" / "d.py").write_text(code, encoding="utf-8")
    (root / "copy.py").write_bytes((root / demo_corpus.HELD_OUT[0]).read_bytes())
    (root / "latin.py").write_bytes(b"x = '\xe9'\n")
    (root / "table.py").write_text("# names\nTABLE = {\n" + "    0x41: 'a', # first\n" * 30 + "}\n", encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def corpus(demo_corpus, library):
    return demo_corpus.collect(library)


@pytest.fixture(scope="module")
def tokenizer_dir(demo_corpus, corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("tokenizer")
    demo_corpus.train_tokenizer(corpus, out, vocab_size=320)
    return out


def test_collect_leaves_out_what_it_says(demo_corpus, corpus):
    assert [file.name for file in corpus.train] == ["a.py", "package/d.py"]
    assert [file.name for file in corpus.held_out] == list(demo_corpus.HELD_OUT)
    assert corpus.skipped == {
        "directory": 3,
        "machine settings": 1,
        "not utf-8": 1,
        "duplicate or empty": 2,
        "data table": 1,
    }


def test_held_out_files_are_never_trained_on(corpus):
    held_out = {file.text for file in corpus.held_out}
    assert held_out.isdisjoint(file.text for file in corpus.train)
    assert {file.name for file in corpus.held_out}.isdisjoint(file.name for file in corpus.train)


def test_digest_follows_content(demo_corpus, corpus, library):
    assert demo_corpus.collect(library).digest == corpus.digest
    changed = (demo_corpus.SourceFile("a.py", corpus.train[0].text + "#"), *corpus.train[1:])
    assert demo_corpus._digest(changed) != corpus.digest


def test_missing_held_out_module_is_named(demo_corpus, tmp_path):
    with pytest.raises(ValueError, match=r"calendar\.py"):
        demo_corpus.collect(tmp_path)


def test_tokenizer_round_trips(demo_corpus, corpus, tokenizer_dir):
    tokenizer = demo_corpus.load_tokenizer(tokenizer_dir)
    assert tokenizer.token_to_id(demo_corpus.END_OF_TEXT) == demo_corpus.END_OF_TEXT_ID
    for text in [file.text for file in corpus.train + corpus.held_out] + ["\t\r\n \x00漢🙂 \n"]:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_transformers_reads_the_directory(corpus, tokenizer_dir):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_dir, trust_remote_code=False)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0, 0)
    text = corpus.held_out[0].text
    assert tokenizer.decode(tokenizer.encode(text)) == text
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "sort"}], add_generation_prompt=True, tokenize=False
    )
    assert rendered == "# user: sort\n# assistant:\n"


def test_encode_marks_every_file(demo_corpus, corpus, tokenizer_dir, tmp_path):
    record = demo_corpus.encode(corpus, tokenizer_dir, tmp_path)
    assert json.loads((tmp_path / "corpus.json").read_text(encoding="utf-8")) == record
    tokens = np.load(tmp_path / "held_out.npy")
    offsets = record["held_out"]["token_offsets"]
    assert tokens.dtype == np.uint16
    assert sorted(offsets.values()) == np.flatnonzero(tokens == demo_corpus.END_OF_TEXT_ID).tolist()
    start = offsets["csv.py"]
    end = min([offset for offset in offsets.values() if offset > start], default=len(tokens))
    text = demo_corpus.load_tokenizer(tokenizer_dir).decode(tokens[start + 1 : end].tolist())
    assert text == next(file.text for file in corpus.held_out if file.name == "csv.py")


def test_batch_depends_on_its_arguments_only(demo_corpus):
    tokens = np.arange(1000, dtype=np.uint16)
    run = [demo_corpus.batch(tokens, step=step, batch_size=3, length=16, seed=1) for step in range(60)]
    demo_corpus._plan_epoch.cache_clear()
    for step in (59, 7, 0):
        np.testing.assert_array_equal(demo_corpus.batch(tokens, step=step, batch_size=3, length=16, seed=1), run[step])
    assert run[0].dtype == np.int32
    assert run[0].shape == (3, 17)
    assert not np.array_equal(run[0], demo_corpus.batch(tokens, step=0, batch_size=3, length=16, seed=2))


def test_batch_sees_each_window_once_an_epoch(demo_corpus):
    tokens = np.arange(1000, dtype=np.uint16)
    windows = (1000 - 16) // 16
    epochs = [demo_corpus.batch(tokens, step=epoch, batch_size=windows, length=16, seed=1) for epoch in range(3)]
    for rows in epochs:
        starts = np.sort(rows[:, 0])
        assert set(np.diff(starts)) == {16}
        np.testing.assert_array_equal(rows - rows[:, :1], np.broadcast_to(np.arange(17), rows.shape))
    assert len({int(rows[:, 0].min()) for rows in epochs}) > 1


@pytest.mark.parametrize(("size", "step"), [(31, 0), (1000, -1)])
def test_batch_refuses(demo_corpus, size, step):
    with pytest.raises(ValueError, match="need at least 32 tokens"):
        demo_corpus.batch(np.zeros(size, np.uint16), step=step, batch_size=1, length=16, seed=0)


def test_batch_fits_the_shortest_stream(demo_corpus):
    for seed in range(40):
        rows = demo_corpus.batch(np.arange(32, dtype=np.uint16), step=seed, batch_size=1, length=16, seed=seed)
        assert rows.shape == (1, 17)


def test_held_out_prompts(demo_corpus, corpus, tokenizer_dir):
    prompts = demo_corpus.held_out_prompts(corpus, tokenizer_dir, 45, 12, seed=3)
    assert prompts == demo_corpus.held_out_prompts(corpus, tokenizer_dir, 45, 12, seed=3)
    assert len({(prompt.name, prompt.line) for prompt in prompts}) == 45
    assert {prompt.name for prompt in prompts} == set(demo_corpus.HELD_OUT)
    tokenizer = demo_corpus.load_tokenizer(tokenizer_dir)
    texts = {file.name: file.text for file in corpus.held_out}
    for prompt in prompts:
        assert len(prompt.token_ids) == 12
        assert tuple(tokenizer.encode(prompt.text).ids) == prompt.token_ids
        assert "\n".join(texts[prompt.name].split("\n")[prompt.line - 1 :]).startswith(prompt.text)


def test_too_many_prompts_are_refused(demo_corpus, corpus, tokenizer_dir):
    with pytest.raises(ValueError, match="ask for less"):
        demo_corpus.held_out_prompts(corpus, tokenizer_dir, 5000, 12, seed=3)
