"""Tied models whose files hold a head all the same: another one counts, a copy of the embedding is dropped."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxspec.checkpoint.load.model import Model, load_model, plan_model
from jaxspec.checkpoint.load.save import save_model
from jaxspec.nn.policy import Policy, make_policy
from tests.unit.checkpoint.model_edits import EMBEDDING, HEAD, edit_config, edit_tensors
from tests.unit.serve.tiny_model import write_tiny_model


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model whose config says tied."""
    directory = write_tiny_model(tmp_path / "tiny")
    edit_config(directory, tie_word_embeddings=True)
    return directory


def load(directory: Path, *, own_head: bool) -> Model:
    return load_model(directory, make_policy(own_head=own_head))


@pytest.mark.parametrize("own_head", [False, True])
def test_the_files_head_counts(directory: Path, own_head: bool):
    model = load(directory, own_head=own_head)
    edit_config(directory, tie_word_embeddings=False)
    untied = load(directory, own_head=own_head)
    assert not model.net.arch.tied
    assert model.net == untied.net
    assert np.array_equal(model.params["params"]["head_DV"], untied.params["params"]["head_DV"])
    assert not np.array_equal(model.params["params"]["head_DV"].T, model.params["params"]["embed_VD"])


def test_one_other_number_makes_another_head(directory: Path):
    def edit(held: dict[str, np.ndarray]) -> None:
        held[HEAD] = held[EMBEDDING].copy()
        held[HEAD][-1, -1] += 1

    edit_tensors(directory, edit)
    assert not load(directory, own_head=False).net.arch.tied


def test_a_copy_of_the_embedding_is_dropped(directory: Path):
    edit_tensors(directory, lambda held: held.update({HEAD: held[EMBEDDING].copy()}))
    model = load(directory, own_head=False)
    assert model.net.arch.tied
    assert "head_DV" not in model.params["params"]
    assert not any(plan_model(directory, Policy()).problems.values())


def test_without_a_head_in_the_files_it_is_the_embedding(directory: Path):
    edit_tensors(directory, lambda held: held.pop(HEAD))
    model = load(directory, own_head=True)
    assert model.net.arch.tied
    assert np.array_equal(model.params["params"]["head_DV"].T, model.params["params"]["embed_VD"])


def test_a_head_of_another_shape_is_refused(directory: Path):
    edit_tensors(directory, lambda held: held.update({HEAD: held[HEAD][:-1]}))
    assert HEAD in plan_model(directory, Policy()).problems["shape"][0]


def test_what_is_saved_again_says_untied(directory: Path, tmp_path: Path):
    model = load(directory, own_head=False)
    kind = np.dtype(model.net.policy.storage.param)
    save_model(tmp_path / "again", model.params, model.net.arch, model.config, kind)
    again = load(tmp_path / "again", own_head=False)
    assert again.config["tie_word_embeddings"] is False
    assert np.array_equal(again.params["params"]["head_DV"], model.params["params"]["head_DV"])


def test_the_config_is_not_touched(directory: Path):
    assert load(directory, own_head=False).config == json.loads((directory / "config.json").read_text())
