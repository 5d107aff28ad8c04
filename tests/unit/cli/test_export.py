"""``jaxspec export`` and ``import``: names, dtypes, and heads that no other engine takes."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoint.heads.directory import save_head
from jaxspec.cli.main import main
from jaxspec.models.catalog import arch_of
from jaxspec.models.draft_head import DraftHead, HeadSpec
from jaxspec.models.medusa import Medusa, MedusaSpec
from jaxspec.models.trained_head import Head
from jaxspec.nn.policy import make_policy
from jaxspec.protocol import CaptureSpec

EXACT = make_policy("float32")
TARGET = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 40, "hidden_size": 16,
    "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24,
    "max_position_embeddings": 64, "rope_theta": 100.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
LAYERS = arch_of(TARGET | {"num_hidden_layers": 1})
SPECS: dict[str, Any] = {
    "eagle3": HeadSpec(LAYERS, 16, CaptureSpec(taps=(1, 2, 3)), draft_vocab=20),
    "shared_expert": HeadSpec(LAYERS, 16, CaptureSpec(shared_outputs=(0, 2)), fc_norm=True, draft_vocab=20),
    "medusa": MedusaSpec(2, 1, 16, 40, 40),
}


def head_at(place: Path, kind: str, target: str | None = None) -> Path:
    net: Any = Medusa(SPECS[kind], EXACT) if kind == "medusa" else DraftHead(SPECS[kind], EXACT)
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(net.initial, jax.random.key(0))
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), shapes)
    save_head(Head(net, params, None if kind == "medusa" else np.arange(0, 40, 2, dtype=np.int32)), place)
    if target is not None:
        (place / "training.json").write_text(json.dumps({"target": {"name": target}}))
    return place


def target_at(place: Path, **more: Any) -> Path:
    place.mkdir()
    (place / "config.json").write_text(json.dumps(TARGET | more))
    return place


def weights_of(place: Path) -> dict[str, np.ndarray]:
    (file,) = place.glob("*.safetensors")
    return load_file(file)


def test_a_head_comes_back_to_the_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    head, target = head_at(tmp_path / "head", "eagle3"), target_at(tmp_path / "target")
    assert main(["export", str(head), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    assert "out: eagle3 head in float32, ready" in capsys.readouterr().out.replace("\n", "")
    assert main(["import", str(tmp_path / "out"), str(tmp_path / "back"), "--target", str(target)]) == 0
    first, last = weights_of(head), weights_of(tmp_path / "back")
    assert set(first) == set(last)
    assert all(first[name].tobytes() == last[name].tobytes() for name in first)


def test_published_heads_are_bfloat16(tmp_path: Path):
    head = head_at(tmp_path / "head", "eagle3")
    assert main(["export", str(head), str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    whole, half = weights_of(head), weights_of(tmp_path / "out")
    assert {str(x.dtype) for name, x in half.items() if name not in ("d2t", "t2d")} == {"bfloat16"}
    assert half["d2t"].dtype == np.int64
    np.testing.assert_array_equal(half["norm.weight"], whole["norm.weight"].astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("arguments", "trained", "named"),
    [
        (["--verifier-name", "Qwen/Qwen3-8B", "--target", "TARGET"], None, "Qwen/Qwen3-8B"),
        (["--target", "TARGET"], None, "target"),
        (["--target", "PUBLISHED"], None, "org/model"),
        (["--target", "MOVED"], None, "moved"),
        ([], "mine", "mine"),
    ],
)
def test_the_verifier_is_named_as_others_know_it(tmp_path: Path, arguments: list[str], trained: Any, named: str):
    places = {
        "TARGET": target_at(tmp_path / "target"),
        "PUBLISHED": target_at(tmp_path / "published", _name_or_path="org/model"),
        "MOVED": target_at(tmp_path / "moved", _name_or_path=str(tmp_path / "elsewhere" / "model")),
    }
    head = head_at(tmp_path / "head", "eagle3", trained)
    given = [str(places.get(word, word)) for word in arguments]
    assert main(["export", str(head), str(tmp_path / "out"), "--format", "speculators", *given]) == 0
    written = (tmp_path / "out" / "config.json").read_text()
    assert json.loads(written)["speculators_config"]["verifier"]["name_or_path"] == named
    assert str(tmp_path) not in written


def test_a_verifier_without_a_name_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    head = head_at(tmp_path / "head", "eagle3")
    assert main(["export", str(head), str(tmp_path / "out"), "--format", "speculators"]) == 2
    assert "give its directory (--target) or its name (--verifier-name)" in capsys.readouterr().err


def test_advice_can_be_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    head, medusa = head_at(tmp_path / "head", "shared_expert"), head_at(tmp_path / "medusa", "medusa")
    assert main(["export", str(head), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "commons" in said
    assert "No other engine's format can; jaxspec serves it as it is, and native writes it" in said
    assert main(["export", str(head), str(tmp_path / "out"), "--format", "native"]) == 0
    assert main(["export", str(medusa), str(tmp_path / "out2"), "--format", "eagle3"]) == 2
    assert "These formats can: medusa; jaxspec serves it as it is" in capsys.readouterr().err
    assert main(["export", str(medusa), str(tmp_path / "out2")]) == 0, "its own format is the default"
    assert json.loads((tmp_path / "out2" / "config.json").read_text())["architectures"] == ["MedusaModel"]


@pytest.mark.parametrize("command", ["export", "import"])
def test_positional_arguments_have_names(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "HEAD OUT" in " ".join(capsys.readouterr().out.split())
