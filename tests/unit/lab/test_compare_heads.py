"""The comparison of heads: equal sizes, and a table of what the seeds found."""

import argparse
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxspec.checkpoint.load.model import load_model
from jaxspec.decode.state import Target
from jaxspec.models.catalog import arch_of
from jaxspec.nn.policy import make_policy, policy_for
from jaxspec.serve.demo_pair import demo_model_dir
from jaxspec.train.head_nets import net_of
from tests.unit.serve.tiny_model import write_tiny_model

LAB = Path(__file__).resolve().parents[3] / "lab"
EXACT = make_policy("float32")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch):
    """The scripts import one another by name."""
    monkeypatch.syspath_prepend(str(LAB))
    import compare_heads
    import compare_table

    yield compare_heads, compare_table
    for name in ("compare_heads", "compare_table"):
        sys.modules.pop(name, None)


def test_heads_are_about_equally_large(scripts):
    compare_heads, _ = scripts
    config = json.loads((demo_model_dir("target") / "config.json").read_text())
    arch = arch_of(config)
    args = argparse.Namespace(
        out=Path("run"), seed=0, train="a.jsonl", held_out="b.jsonl", steps=10, rate=1e-3, prompts=2
    )
    for name in compare_heads.HEADS:
        settings = compare_heads.settings_of(name, args)
        net = net_of(settings.head, arch, config, EXACT)
        shapes = jax.eval_shape(lambda net=net: net.initial(jax.random.key(0)))
        size = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(shapes))
        assert 0.22e6 < size < 0.26e6, f"{name}: {size}"


def test_the_table_has_means_and_intervals(scripts, tmp_path: Path):
    _, compare_table = scripts
    for seed, length in enumerate((2.0, 2.2, 2.4)):
        figures = {f"k{k}/t{t}/acceptance_length": length + k / 10 for k in (3, 5) for t in (0, 1)}
        figures |= {f"k5/t0/accepted_at_{i}": 0.5**i for i in range(1, 6)}
        figures |= {f"{w}_recall_{d}": 0.25 for w in ("routing", "previous") for d in (1, 4)} if seed < 9 else {}
        record = {"steps": 7, "tokens_per_step": 2048, "seed": seed, "heads": {"ours": {"parameters": 2e6, **figures}}}
        (tmp_path / f"seed{seed}.json").write_text(json.dumps(record))
    text = compare_table.table(tmp_path)
    assert text.startswith("3 seeds, 7 steps of 2048 tokens")
    assert (
        "| ours | 2.00 M | 2.50 ± 0.50 | 2.70 ± 0.50 | 2.50 ± 0.50 | 2.70 ± 0.50 | 0.50 0.25 0.12 0.06 0.03 |" in text
    )
    assert "| ours | 0.25 ± 0.00 | 0.25 ± 0.00 | 0.25 ± 0.00 | 0.25 ± 0.00 |" in text
    (tmp_path / "costs.json").write_text(json.dumps({"heads": {"ours": {"draft_cost": 0.4}}}))
    assert "| 2.70 ± 0.50 | 0.40 | 0.50 0.25 0.12 0.06 0.03 |" in compare_table.table(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no seed\*\.json"):
        compare_table.table(tmp_path / "empty")


def test_drafting_takes_its_share_of_a_plain_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.syspath_prepend(str(LAB))
    import compare_cost

    model = load_model(write_tiny_model(tmp_path / "tiny"), policy_for("bfloat16", "cpu"))
    target = Target(model.params, model.net, compare_cost.BLOCK)
    draft = compare_cost.drafter_of(tmp_path / "tiny", model, model.net.policy)
    step_s, drafting_s = compare_cost.plain(target), compare_cost.drafting(target, draft)
    ratio = np.median([drafting_s() / step_s() for _ in range(9)])
    assert ratio > 0.5, "six passes of the same model: no draft is left out"
