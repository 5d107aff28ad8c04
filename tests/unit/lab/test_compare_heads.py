"""The comparison of heads: settings, equal sizes, and a table of what was measured."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxspec.checkpoint.load.model import read_config
from jaxspec.models.catalog import arch_of
from jaxspec.nn.policy import make_policy
from jaxspec.serve.demo_pair import resolve_model
from jaxspec.train.head_nets import net_of
from lab.compare_heads import HEADS, ratio, settings_of, table

LOOKED_UP = ("head_DW", "head_DV", "embed_VD", "markov_in_VR", "selector")
OTHERS = {"shared_expert": (6.5e6, 6.6e6), "draft_model": (5.0e6, 5.2e6)}  # docs/results/2026-11-head-kinds.md


@pytest.mark.parametrize("kind", HEADS)
def test_heads_are_about_equally_large(kind: str, tmp_path: Path):
    settings = settings_of(kind, tmp_path, seed=3, steps=7)
    assert (settings.train.steps, settings.head.kind) == (7, kind)
    assert (settings.features.cache is None) == (settings.head.taps == "default")
    config = read_config(resolve_model(settings.target))
    net = net_of(settings.head, arch_of(config), config, make_policy("float32"))
    shapes = jax.tree_util.tree_leaves_with_path(jax.eval_shape(lambda: net.initial(jax.random.key(0))))
    trained = [x.shape for path, x in shapes if not any(name in jax.tree_util.keystr(path) for name in LOOKED_UP)]
    least, most = OTHERS.get(kind, (5.2e6, 6.0e6))
    assert least < sum(map(np.prod, trained)) < most


def test_a_run_may_differ_and_the_others_do_not(tmp_path: Path):
    changes = ["loss.block.anchors=512", "optimizer.muon=0.01"]
    changed, usual = (settings_of("dspark", tmp_path, 3, 7, given) for given in (changes, []))
    assert (changed.loss.block.anchors, changed.optimizer.muon) == (512, 0.01)
    assert (usual.loss.block.anchors, usual.optimizer.muon) == (128, 0.005)


def measured(lengths: list[int]) -> str:
    passes = [[10 * tokens, 10] for tokens in lengths]
    rows = [{"drafts": k, "temperature": t, "passes": passes} for k in (3, 7) for t in (0.0, 1.0)]
    return json.dumps(rows)


def test_the_table_compares_on_the_same_requests(tmp_path: Path):
    for name, lengths in (("eagle3-3", [2, 2, 3, 3]), ("dflash-3", [4, 4, 6, 6])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "measured.json").write_text(measured(lengths))
    points = [
        {"rows": 1, "length": k, "context": c, "step_s": s, "draft_s": d}
        for k, s, d, c in ((0, 2.0, 0.0, 128), (3, 3.0, 1.0, 130), (0, 9.0, 0.0, 900), (3, 9.0, 8.0, 900))
    ]
    (tmp_path / "dflash-3" / "cost.json").write_text(json.dumps({"points": points}))
    title, _, dflash, eagle3 = table(tmp_path).splitlines()
    assert title.startswith("| head | K = 3, T = 0 | K = 7, T = 0 | K = 3, T = 1 | K = 7, T = 1 |")
    assert dflash == f"| dflash-3 |{' 5.00 (2.00, 2.00 to 2.00) |' * 4} 1x3 0.50 | 1x3 1.50 |"
    assert eagle3 == f"| eagle3-3 |{' 2.50 |' * 4}  |  |"
    with pytest.raises(FileNotFoundError, match=r"no \*/measured\.json"):
        table(tmp_path / "empty")


def test_an_interval_covers_no_difference_where_requests_disagree():
    one, other = np.array([[30, 10], [10, 10]] * 20), np.array([[10, 10], [30, 10]] * 20)
    middle, low, high = ratio(one, other)
    assert middle == 1
    assert 0.5 < low < 0.9 < 1.1 < high < 2
