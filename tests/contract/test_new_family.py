"""A family that nobody knows is a row, a name table and a config: with these alone it loads, runs and speculates."""

import ast
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxspec
from jaxspec.checkpoint.load.model import load_model
from jaxspec.checkpoint.load.save import save_model
from jaxspec.checkpoint.names import known as table_catalog
from jaxspec.checkpoint.names import tables
from jaxspec.errors import ConfigError
from jaxspec.inspect.describe import count_parameters
from jaxspec.models import catalog as family_catalog
from jaxspec.models import families
from jaxspec.models.catalog import arch_of, known_families
from jaxspec.models.transformer import Transformer
from jaxspec.nn.ffn import ACTIVATIONS, FfnSpec
from jaxspec.nn.policy import make_policy
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams
from jaxspec.shapes import Params
from tests.oracle.conftest import SharedPrograms
from tests.random_params import random_params

ROW = '''"""Made up: sinks, windows by turns, queries normalized over all heads, half-rotated; a gated shared expert."""

from jaxspec.models.family import Family, MoeRow
from jaxspec.models.mixers.gqa import GqaRow

FAMILY = Family(
    model_type="made_up",
    mixer=GqaRow(out_bias=True, qk_norm="full", alternating=True, sinks=True),
    moe=MoeRow(
        experts=("experts",),
        top_k="experts_per_token",
        hidden="expert_width",
        router="sigmoid",
        choice_bias=True,
        exact=True,
        shared_hidden="shared_width",
        shared_gate=True,
        first_dense="dense_layers",
    ),
    defaults={"partial_rotary_factor": 0.5},
)
'''
NAMES = '''"""Tensor names of the made-up family."""

from jaxspec.checkpoint.names.table import NameRule, Table, attention_rules, gated_rules, router_rules

TABLES = {
    "made_up": Table(
        top=(
            NameRule("embed_VD", ("words.weight",)),
            NameRule("norm_D", ("last_norm.weight",)),
            NameRule("head_DV", ("answers.weight",), "transpose"),
        ),
        layer=(
            NameRule("attention_norm_D", ("norm_1.weight",)),
            NameRule("ffn_norm_D", ("norm_2.weight",)),
            *attention_rules("look.", "out"),
            *gated_rules("ffn/", "think.", "g", "u", "d"),
            *router_rules("choose.weight", "choose.bias"),
            NameRule("ffn/shared_gate_D1", ("all.gate.weight",), "transpose"),
            *gated_rules("ffn/shared/", "all.", "g", "u", "d"),
        ),
        expert=gated_rules("ffn/", "one.{e}.", "g", "u", "d"),
        prefix="blocks.{y}.",
    )
}
'''
CONFIG = {
    "model_type": "made_up",
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "sliding_window": 6,
    "experts": 4,
    "experts_per_token": 2,
    "expert_width": 16,
    "shared_width": 24,
    "dense_layers": 1,
    "max_position_embeddings": 64,
    "eos_token_id": [0, 1],
}
# Text models inside of others that have a config here, or as transformers saves them; and those whose published config
# is not at hand, but the reference alone.
UNPUBLISHED = {
    "kimi_k25", "qwen3_5_moe_text", "deepseek_v2", "dots1", "ernie4_5_moe", "exaone_moe", "gemma4_text",
    "hunyuan_v1_moe", "hy_v3", "llama4_text", "phimoe", "solar_open", "step3p7", "mistral4", "sarvam_mla",
    "granitemoeshared",
}  # fmt: skip
FLOAT = jnp.dtype("float32")
POLICY = make_policy(FLOAT)


def forget() -> None:
    family_catalog.known_families.cache_clear()
    table_catalog.known_tables.cache_clear()


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The two files where discovery finds them, as if they lay in the package."""
    for package, text in ((families, ROW), (tables, NAMES)):
        folder = tmp_path / package.__name__
        folder.mkdir()
        (folder / "made_up.py").write_text(text)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    importlib.invalidate_caches()
    forget()
    yield
    forget()
    for package in (families, tables):
        sys.modules.pop(f"{package.__name__}.made_up", None)
        package.__dict__.pop("made_up", None)


def random_model(directory: Path) -> tuple[Params, Path]:
    """Parameters whose texts vary, and their checkpoint."""
    arch = arch_of(CONFIG)
    params = random_params(Transformer(arch, POLICY), 0, wide=7.0)
    save_model(directory, params, arch, CONFIG, np.dtype("float32"))
    return params, directory


@pytest.mark.usefixtures("made_up")
def test_a_row_and_a_table_are_a_family(tmp_path: Path):
    arch = arch_of(CONFIG)
    assert isinstance(arch.layers[0].ffn, FfnSpec)
    assert [layer.attention.window for layer in arch.layers] == [6, None, 6]
    params, directory = random_model(tmp_path / "model")
    assert count_parameters(arch)[0] == sum(x.size for x in jax.tree.leaves(params))
    names = load_file(directory / "model.safetensors")
    assert names["blocks.2.one.3.d.weight"].shape == (32, 16)
    assert names["blocks.1.look.sinks"].shape == (4,)
    assert names["blocks.1.look.q_norm.weight"].shape == (32,)
    assert {name.split(".")[0] for name in names} == {"words", "last_norm", "answers", "blocks"}
    found = load_model(directory, POLICY).params
    assert jax.tree.structure(found) == jax.tree.structure(params)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.usefixtures("made_up")
def test_it_generates_and_speculates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jaxspec.serve.engine.Programs", SharedPrograms)
    _, directory = random_model(tmp_path / "model")
    settings = {"dtype": "float32", "max_model_len": 48, "max_num_seqs": 2, "max_logprobs": 0, "prefill_buckets": (8,)}
    prompts = [[2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [20, 30, 40]]
    params = [SamplingParams(temperature=t, seed=3, max_tokens=20, ignore_eos=True) for t in (0.0, 0.8)]
    texts = []
    for config in (None, {"model": str(directory), "speculative_token_tree": [2, 1, 1]}):
        llm = LLM(directory, speculative_config=config, **settings)
        assert llm.eos == {0, 1}
        outputs = llm.generate(prompts, params)
        texts.append([o.outputs[0].token_ids for o in outputs])
    assert texts[0] == texts[1]
    assert len({token for text in texts[0] for token in text}) > 8, "the texts vary"
    assert outputs[0].metrics.num_steps == 5, "a model drafts its own text: all of 3 drafts and one more per step"


@pytest.mark.usefixtures("made_up")
def test_its_config_is_checked_like_any_other(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"missing \['expert_width', 'experts'\]"):
        arch_of({key: value for key, value in CONFIG.items() if key not in ("experts", "expert_width")})
    assert "made_up" in known_families()


def test_it_is_not_known_without_its_files():
    with pytest.raises(ConfigError, match="model_type 'made_up' is not known; the nearest of the"):
        arch_of(CONFIG)


def test_no_code_asks_which_family_it_runs():
    """Families are told apart by data: nothing compares a ``model_type``; activations may carry a family's name."""
    names, found = set(known_families()) - set(ACTIVATIONS), []
    for file in Path(jaxspec.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Compare | ast.MatchValue):
                texts = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
                found += [f"{file.name}:{node.lineno} {name}" for name in texts & names]
    assert found == []


def test_every_family_has_a_table_a_published_config_and_a_reference():
    root = Path(__file__).parents[2]
    assert set(table_catalog.known_tables()) == set(known_families())
    for folder, why in (("tests/golden/*/config.json", "goldens"), ("configs/models/*.json", "configs")):
        kinds = {json.loads(file.read_text())["model_type"] for file in root.glob(folder)}
        assert set(known_families()) - kinds <= (UNPUBLISHED if why == "configs" else set()), why
