"""A head that ships without what its target has, in int8, is a head again beside the target."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxspec.checkpoint.heads.compact import expand, shrink
from jaxspec.checkpoint.heads.directory import load_head, save_head
from jaxspec.models.trained_head import Head
from jaxspec.protocol import CaptureSpec
from tests.unit.checkpoint.head_cases import FLOAT32, IDS_W, TARGET, V, embedding, head, spec, write_target

MORE = np.arange(0, V, 2, dtype=np.int32)  # a vocabulary other than that of the training


@pytest.fixture(scope="module")
def trained() -> Head:
    return head(spec({"model_type": "qwen3"}, fc_norm=True, norm_output=True, reads=CaptureSpec(taps=(1, 4, 8))))


@pytest.mark.parametrize("ids_W", [IDS_W, MORE], ids=["its vocabulary", "another"])
def test_it_is_what_was_trained_but_for_rounding(trained: Head, tmp_path: Path, ids_W: np.ndarray):
    target = write_target(tmp_path / "target")
    save_head(trained, tmp_path / "trained")
    shrink(tmp_path / "trained", tmp_path / "compact", ids_W)
    expand(tmp_path / "compact", target, tmp_path / "whole")
    found = load_head(tmp_path / "whole", TARGET, FLOAT32)
    assert found.ids_W is not None
    np.testing.assert_array_equal(found.ids_W, ids_W)
    np.testing.assert_array_equal(found.params["params"]["head_DW"], embedding()[ids_W].T)
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(trained.params["params"]), jax.tree.leaves(found.params), strict=True
    ):
        if path[-1].key == "head_DW":
            continue
        one, other = np.asarray(one), np.asarray(other)
        step = np.abs(one).max() / 127 if "norm" not in path[-1].key else 0
        # Half a step of int8, and the bfloat16 that the numbers are written in.
        assert np.abs(one - other).max() <= 0.51 * step + np.abs(one).max() / 256, path


def test_it_is_small_and_says_what_it_is(trained: Head, tmp_path: Path):
    save_head(trained, tmp_path / "trained")
    shrink(tmp_path / "trained", tmp_path / "compact", IDS_W)
    config = json.loads((tmp_path / "compact" / "config.json").read_text())
    assert (config["architectures"], config["head"]["draft_vocab"]) == (["JaxspecDraftHead"], len(IDS_W))
    files = ("trained/model.safetensors", "compact/head.npz")
    sizes = [(tmp_path / name).stat().st_size for name in files]
    assert sizes[1] < 0.45 * sizes[0]
