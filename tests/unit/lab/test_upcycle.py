"""Checks that upcycling begins at the dense model, serves what was trained, and holds texts out."""

import hashlib
import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint.load.model import load_model
from jaxspec.checkpoint.upcycled import assemble, pack, save, unpack
from jaxspec.models.transformer import teacher_forced
from jaxspec.nn.policy import make_policy
from jaxspec.serve.upcycled_model import SHIPPED
from lab.upcycle import base, chats, export, prose, questions, tokens
from lab.upcycle.documents import Document
from lab.upcycle.network import TINY, lower, upper_dense, upper_routed
from lab.upcycle.objective import Weights, cross_entropy, divergence, objective
from lab.upcycle.train import batches, build_update, optimizer, rate_at
from tests.unit.lab.dense_files import write_dense


@pytest.fixture(scope="module")
def frozen():
    return base.random(TINY, jnp.float32)


@pytest.fixture(scope="module")
def experts():
    """Experts as training leaves them: not zero, and rounded as they ship."""
    drawn = base.experts(TINY)
    down = np.random.default_rng(1).normal(size=drawn["down"].shape) * 0.2
    return {**drawn, "down": down.astype(np.float32)}


@pytest.fixture(scope="module")
def token_BT():
    return jnp.asarray(np.random.default_rng(2).integers(TINY.vocab, size=(4, 24)))


@jax.jit
def logits_of(frozen, experts, token_BT):
    hidden, _ = upper_routed(frozen, experts, lower(frozen, token_BT, TINY, "xla"), TINY, "xla")
    return hidden @ frozen["embed"].T


def served_logits(directory, token_BT, dtype="float32"):
    loaded = load_model(directory, make_policy(dtype))
    position_BT = jnp.broadcast_to(jnp.arange(token_BT.shape[1]), token_BT.shape)
    return np.asarray(teacher_forced(loaded.net, loaded.params, token_BT, position_BT)[0])


def test_serves_what_was_trained(frozen, experts, token_BT, tmp_path):
    write_dense(frozen, tmp_path / "dense")
    packed = pack(experts, TINY.first)
    paths = save(packed, tmp_path, TINY.top_k)
    assemble(tmp_path / "dense", paths, tmp_path / "mixture")

    trained = logits_of(frozen, jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), unpack(packed)), token_BT)
    np.testing.assert_allclose(served_logits(tmp_path / "mixture", token_BT), trained, atol=2e-5, rtol=2e-5)
    assert np.abs(trained - served_logits(tmp_path / "dense", token_BT)).max() > 0.01


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_begins_as_the_dense_model(dtype, frozen, token_BT, tmp_path):
    write_dense(frozen, tmp_path / "dense")
    assemble(tmp_path / "dense", save(pack(base.experts(TINY), TINY.first), tmp_path, TINY.top_k), tmp_path / "mixture")
    dense, mixture = (served_logits(tmp_path / name, token_BT, dtype) for name in ("dense", "mixture"))
    np.testing.assert_array_equal(dense, mixture)


def test_rounds_weights_by_column(experts):
    shipped = unpack(pack(experts, TINY.first))
    for name in ("gate", "up", "down"):
        most = np.abs(experts[name]).max(2, keepdims=True)
        assert (np.abs(shipped[name].astype(np.float32) - experts[name]) <= most * (0.5 / 127 + 2**-8)).all()


def test_cross_entropy_and_divergence_by_hand(frozen):
    hidden = jnp.asarray(np.random.default_rng(3).normal(size=(12, TINY.dim)).astype(np.float32))
    label = jnp.asarray([5, 1, 7, 9, 1, 3, 8, 2, 4, 6, 10, 11])
    log = jax.nn.log_softmax(hidden @ frozen["embed"].T)
    counted = [-log[i, int(y)] for i, y in enumerate(label) if y != 1]
    np.testing.assert_allclose(cross_entropy(hidden, label, frozen["embed"]), np.mean(counted), rtol=1e-5)
    wanted = jax.nn.log_softmax(-hidden @ frozen["embed"].T)
    apart = jnp.mean(jnp.sum(jnp.exp(wanted) * (wanted - log), -1))
    np.testing.assert_allclose(divergence(hidden, -hidden, frozen["embed"]), apart, rtol=1e-5)


def test_updates_lower_the_loss_and_change_experts_only(frozen):
    row_BT = jnp.asarray(np.random.default_rng(4).integers(2, 12, size=(6, 25)))
    experts = base.experts(TINY)
    loss = partial(objective, sizes=TINY, kernel="xla", chats=2, weights=Weights())
    before, figures = jax.jit(loss)(experts, frozen, row_BT)
    assert float(figures["divergence"]) == pytest.approx(0, abs=1e-6)
    update, state = build_update(TINY, "xla", 2), optimizer().init(experts)
    for _ in range(30):
        experts, state, figures = update(experts, state, frozen, row_BT, jnp.float32(0.02))
    assert float(figures["loss"]) < float(before) - 0.2
    assert float(figures["divergence"]) > 0.001
    assert np.abs(np.asarray(experts["down"])).max() > 0.01


def test_all_experts_are_chosen_equally_often_where_inputs_differ_in_nothing_but_noise(frozen, token_BT):
    _, seen = upper_routed(frozen, base.experts(TINY), lower(frozen, token_BT, TINY, "xla"), TINY, "xla")
    np.testing.assert_allclose(np.asarray(seen["used_E"]).sum(-1), TINY.top_k, rtol=1e-5)
    centered = base.centered(base.experts(TINY), seen["mean_D"])
    along = jnp.einsum("yd,yde->ye", seen["mean_D"], centered["router"])
    np.testing.assert_allclose(along, 0, atol=1e-5)


@pytest.mark.parametrize("routed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_samples_from_its_own_next_token_distribution(routed, frozen, experts):
    scaled = {**frozen, "embed": 8 * frozen["embed"]}
    added = jax.tree.map(jnp.asarray, experts) if routed else None
    prompt = jnp.asarray([[9, 9, 5, 6, 7], [3, 4, 5, 6, 7]])
    cold = jnp.full(2, 1e-6, jnp.float32)
    drawn = chats.sample(scaled, added, prompt, jnp.asarray([2, 0]), jax.random.key(0), cold, sizes=TINY, steps=4)

    @jax.jit
    def best(token_BT):
        """What follows each token, whatever comes after it."""
        x = lower(scaled, token_BT, TINY, "xla")
        hidden = upper_routed(scaled, added, x, TINY, "xla")[0] if routed else upper_dense(scaled, x, TINY, "xla")
        return jnp.argmax(hidden @ scaled["embed"].T, axis=-1)

    for row, first in enumerate((2, 0)):
        text = list(map(int, prompt[row, first:]))
        for step in range(4):
            padded_BT = jnp.asarray([text + [0] * (9 - len(text))])
            assert int(drawn[row, step]) == int(best(padded_BT)[0, len(text) - 1])
            text.append(int(drawn[row, step]))


def test_rows_cover_a_stream_once_a_pass():
    stream = np.arange(101, dtype=np.uint16)
    cut = tokens.rows(stream, 10)
    assert cut.shape == (10, 11)
    assert (cut[1:, 0] == cut[:-1, -1]).all()
    some = next(tokens.shuffled(stream, 10, 9, seed=0))
    assert len({int(row[0]) for row in some}) == 9
    kinds = batches({"a": stream, "b": stream + np.uint16(500)}, {"a": 2, "b": 1}, 10)
    batch = next(kinds)
    assert batch.shape == (3, 11)
    assert (batch[:2] < 500).all()
    assert (batch[2:] >= 500).all()


def test_rate_rises_holds_and_ends_near_zero():
    rates = [rate_at(done, 1.0) for done in (0.0, 0.01, 0.02, 0.5, 0.75, 1.0)]
    assert rates == pytest.approx([0.02, 0.5, 1, 1, 0.5, 0.02])


def test_documents_are_held_out_by_name(tmp_path, monkeypatch):
    from lab.upcycle import documents

    names = [name for name in (f"package{i}" for i in range(400)) if documents.number(name) % documents.PARTS == 0]
    held, trained = names[0], next(f"other{i}" for i in range(99) if documents.number(f"other{i}") % documents.PARTS)
    code = "def f(value):\n    return value + 1\n\n\n" * 900
    files = {}
    for name, folders in {held: ("inside",), trained: ("own", "own/_vendor/inside")}.items():
        files[name] = []
        for folder in folders:
            path = tmp_path / name / folder / "a.py"
            path.parent.mkdir(parents=True)
            path.write_text(f"# {name} {folder}\n{code}")
            files[name].append((f"{name}/{folder}/a.py", path))
    monkeypatch.setattr(documents, "packages", lambda: files)
    sets = documents.python()
    assert [document.name for document in sets["packages"]] == [f"{held}/inside/a.py"]
    assert [document.name for document in sets["train"] + sets["files"]] == [f"{trained}/own/a.py"]


def test_chats_have_the_form_of_the_template():
    asked = tokens.asked("Why?")
    assert tokens.said(["Why?", "So."]) == asked + "So.<|im_end|>\n"
    assert Document("a", asked).text.startswith("<|im_start|>system")
    assert replace(TINY, first=3).upper == 1


def test_reads_pages_and_manuals_as_text():
    page = "<head><title>x</title></head><body><nav>menu</nav><h1>Title</h1><p>One &amp; two.</p><style>s</style>"
    assert prose.clean(prose.from_page(page)) == "Title\n\nOne & two."
    manual = '.TH ls 1\n.SH NAME\nls \\- list \\fBfiles\\fP\n.PP\nSee\n.BR dir (1)\n.\\" a remark\n'
    assert prose.clean(prose.from_manual(manual)).split() == ["NAME", "ls", "-", "list", "files", "See", "dir", "(1)"]
    assert prose.clean("a line  \n+-----+-----+\n\n\n\nanother") == "a line\n\nanother"


def test_questions_are_made_of_functions_and_passages():
    code = 'def count(x):\n    """Counts the words of a text, each once only."""\n    return len(set(x.split()))\n'
    (asked,) = questions.about_code([Document("a", code)])
    assert "count" in asked
    passage = "A sentence that says something about nothing. " * 8
    (asked,) = questions.about_prose([Document("b", passage)])
    assert asked.endswith(passage.strip())


def test_experts_that_go_by_kind_of_text_are_told_from_even_ones():
    even = [[0.25] * 4] * 2
    assert export.summary({"a": even, "b": even})["choices_that_differ_from_the_mean"] == {"a": 0.0, "b": 0.0}
    apart = export.summary({"a": [[0.5, 0.5, 0.0, 0.0]], "b": [[0.0, 0.0, 0.5, 0.5]]})
    assert apart["choices_that_differ_from_the_mean"] == {"a": 0.5, "b": 0.5}
    assert apart["least_share"] == apart["greatest_share"] == 0.25


def test_what_ships_is_what_its_provenance_says():
    record = json.loads((SHIPPED / "provenance.json").read_text())
    parts = sorted(SHIPPED.glob("experts-*.safetensors"))
    assert {part.name: hashlib.sha256(part.read_bytes()).hexdigest() for part in parts} == record["files"]
    assert sum(part.stat().st_size for part in parts) < 24_000_000
    loss = record["held_out_nats_per_token"]
    for kind in ("prose", "chats", "people"):
        assert loss["mixture"][kind] <= loss["dense"][kind]
    assert loss["mixture"]["python_packages"] <= loss["dense"]["python_packages"] - 0.15
    assert record["use_of_experts"]["least_share"] > 0.01
