import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoint.heads.directory import load_head, save_head, stored_policy
from jaxspec.checkpoint.heads.formats import Verifier
from jaxspec.checkpoint.heads.layers import arch_of_head, layers_config, layers_of, rope_for_head
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.medusa import MedusaSpec
from jaxspec.nn.attention import AttentionSpec
from jaxspec.nn.ffn import FfnSpec
from jaxspec.nn.policy import make_policy
from jaxspec.nn.rope import RopeSpec
from jaxspec.protocol import CaptureSpec
from tests.unit.checkpoint.head_cases import (
    FIRST,
    FLOAT32,
    IDS_W,
    LATENT,
    LAYERS,
    ROUTED,
    TARGET,
    D,
    V,
    W,
    assert_same,
    head,
    layer_shapes,
    logits,
    spec,
)  # fmt: skip

VERIFIER = Verifier("models/target", ("Qwen3MoeForCausalLM",), 4)
LINEAR = {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 64}}
ANYWHERE = {
    "plain": spec(),
    "two-layers": spec({"num_hidden_layers": 2}, own_embedding=True),
    "flags": spec(LINEAR, norm_before_residual=True, norm_before_fc=True, norm_output=True),
    "fc_norm": spec({"rope_scaling": LATENT["rope_scaling"]}, fc_norm=True, reads=CaptureSpec(taps=(1, 8))),
    "whole-vocabulary": spec(draft_vocab=V),
    "parallel": spec({"num_hidden_layers": 2}, mask_token=7, own_embedding=True),
}
EAGLE3 = {
    "latent": spec(LATENT),
    "last": spec(reads=CaptureSpec(), last=True),
    "targets-head": spec(draft_vocab=0),
    "narrow": spec({"hidden_size": 16}, own_embedding=True),
}
SPECULATORS = {"qwen3": spec({"model_type": "qwen3"}), "biases": spec({"attention_bias": True})}
NATIVE = {
    "eagle1": spec(reads=CaptureSpec(), last=True, join="product", join_bias=True, draft_vocab=0),
    "eagle1-own-head": spec(reads=CaptureSpec(), last=True, join="product"),
    "shared-expert": spec(
        reads=CaptureSpec(shared_outputs=(1, 4)), routing=(1, 4), experts=TARGET.layers[0].ffn.experts
    ),
    "both-features": spec(reads=CaptureSpec(taps=(3,)), last=True, join_bias=True),
    "embedding-tap": spec(reads=CaptureSpec(taps=(0, 4))),
    "window": spec({"sliding_window": 16, "layer_types": ["sliding_attention"]}),
    "mixed-windows": spec(
        {"num_hidden_layers": 2, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    ),
    "qwen2": spec({"model_type": "qwen2", "qkv_bias": True}),
    "routed": spec(ROUTED | {"num_hidden_layers": 2}),
    "routed-shared": spec(
        ROUTED | {"model_type": "qwen3", "shared_expert_intermediate_size": 20},
        reads=CaptureSpec(),
        last=True,
        join="product",
    ),
    "partial": spec({"partial_rotary_factor": 0.5}),
}
MEDUSA = {
    "one": MedusaSpec(3, 1, D, V, V),
    "two": MedusaSpec(2, 2, D, V, V),
}
TRIPS = (
    [(case, of, form) for case, of in ANYWHERE.items() for form in ("native", "eagle3", "speculators")]
    + [(case, of, form) for case, of in EAGLE3.items() for form in ("native", "eagle3")]
    + [(case, of, form) for case, of in SPECULATORS.items() for form in ("native", "speculators")]
    + [(case, of, "native") for case, of in NATIVE.items()]
    + [(case, of, form) for case, of in MEDUSA.items() for form in ("native", "medusa")]
    + [("reduced-medusa", MedusaSpec(2, 1, D, V, W), "native"), ("bare-medusa", MedusaSpec(2, 1, D, V, 0), "native")]
)


@pytest.mark.parametrize(("of", "form"), [trip[1:] for trip in TRIPS], ids=[f"{c}-{f}" for c, _, f in TRIPS])
def test_what_is_saved_is_loaded_to_the_bit(tmp_path: Path, of, form):
    made = head(of)
    save_head(made, tmp_path / "head", form, verifier=VERIFIER)
    found = load_head(tmp_path / "head", TARGET, FLOAT32)
    arch = getattr(found.net.spec, "arch", None)
    if arch is not None:  # the family's name is a matter of the file
        found = replace(found, net=found.net.clone(spec=replace(found.net.spec, arch=replace(of.arch))))
        assert replace(arch, family=of.arch.family) == of.arch
    assert_same(found, made)


def test_a_detour_through_the_other_formats_changes_no_bit(tmp_path: Path):
    kind = np.dtype(jnp.bfloat16)
    made = head(spec({"num_hidden_layers": 2}, norm_output=True, fc_norm=True), make_policy(kind))
    found = made
    for n, form in enumerate(("eagle3", "native", "speculators", "eagle3", "native")):
        save_head(found, tmp_path / str(n), form, verifier=VERIFIER)
        found = load_head(tmp_path / str(n), TARGET, stored_policy(tmp_path / str(n)))
    assert_same(found, made)


@pytest.mark.parametrize("form", ["native", "eagle3", "speculators"])
def test_a_head_computes_the_same_after_it_was_saved(tmp_path: Path, form):
    made = head(ANYWHERE["plain"])
    save_head(made, tmp_path / "head", form, verifier=VERIFIER)
    np.testing.assert_array_equal(logits(load_head(tmp_path / "head", TARGET, FLOAT32)), logits(made))


def test_experts_have_the_names_that_qwen_gives_them(tmp_path: Path):
    made = head(NATIVE["routed-shared"])
    save_head(made, tmp_path / "head")
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    mlp = "layers.0.mlp."
    assert {n: tensors[n].shape for n in tensors if n.startswith(mlp) and ".experts." not in n} == {
        f"{mlp}gate.weight": (4, D), f"{mlp}shared_expert_gate.weight": (1, D),
        f"{mlp}shared_expert.gate_proj.weight": (20, D), f"{mlp}shared_expert.up_proj.weight": (20, D),
        f"{mlp}shared_expert.down_proj.weight": (D, 20),
    }  # fmt: skip
    own = made.params["params"]["first"]["ffn"]
    np.testing.assert_array_equal(tensors[f"{mlp}experts.3.up_proj.weight"].T, own["gate_up_ED2F"][3, :, 1])
    np.testing.assert_array_equal(tensors[f"{mlp}experts.2.down_proj.weight"].T, own["down_EFD"][2])
    layers = json.loads((tmp_path / "head" / "config.json").read_text())["transformer_layer_config"]
    stated = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}
    assert {key: layers[key] for key in stated} == stated
    assert layers["shared_expert_intermediate_size"] == 20


def test_a_copy_of_the_targets_config_gives_a_dense_head_no_experts():
    dense = tuple(layer_shapes("layers.0.", 2 * D, FIRST))
    assert layers_of(LAYERS | ROUTED, dense) == layers_of(LAYERS)
    routed = layers_of(LAYERS | ROUTED | {"mlp_only_layers": [0]}, (*dense, "layers.0.mlp.gate.weight"))
    assert routed == layers_of(LAYERS | ROUTED), "nor are the target's dense layers the head's"
    assert routed.expert_layers == (0,)


def test_a_missing_expert_is_named(tmp_path: Path):
    save_head(head(NATIVE["routed"]), tmp_path / "head")
    file = tmp_path / "head" / "model.safetensors"
    tensors = load_file(file)
    del tensors["layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"1 missing: layers\.1\.mlp\.experts\.3\.up_proj\.weight"):
        load_head(tmp_path / "head", TARGET, FLOAT32)


def test_our_own_format_needs_no_target(tmp_path: Path):
    made = head(NATIVE["shared-expert"])
    save_head(made, tmp_path / "head")
    assert_same(load_head(tmp_path / "head", None, FLOAT32), made)
    save_head(head(spec()), tmp_path / "other", "eagle3")
    with pytest.raises(ConfigError, match="depends on its target"):
        load_head(tmp_path / "other", None, FLOAT32)


def test_an_export_states_both_conventions_and_every_flag(tmp_path: Path):
    save_head(head(spec(norm_before_residual=True)), tmp_path / "head", "eagle3")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    wanted = {
        "architectures": ["LlamaForCausalLMEagle3"], "norm_before_residual": True, "norm_before_fc": False,
        "fc_norm": False, "draft_vocab_size": W, "target_hidden_size": D, "num_aux_hidden_states": 3, "bias": False,
        "tie_word_embeddings": False, "rope_theta": 50000.0, "head_dim": 8, "torch_dtype": "float32",
    }  # fmt: skip
    assert wanted.items() <= config.items()
    # SpecForge reads a stated false as: no norm in front of the head.
    assert "norm_output" not in config
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 2 * D)
    np.testing.assert_array_equal(tensors["d2t"] + np.arange(W), IDS_W)
    assert tensors["d2t"].dtype == np.int64
    assert tensors["t2d"].dtype == bool
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), IDS_W)


def test_later_layers_have_the_norm_under_both_names(tmp_path: Path):
    save_head(head(ANYWHERE["two-layers"]), tmp_path / "head", "eagle3")
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    np.testing.assert_array_equal(tensors["layers.1.hidden_norm.weight"], tensors["layers.1.input_layernorm.weight"])
    assert not np.array_equal(tensors["layers.0.hidden_norm.weight"], tensors["layers.0.input_layernorm.weight"])


def test_a_speculators_export_names_its_target(tmp_path: Path):
    save_head(head(ANYWHERE["parallel"]), tmp_path / "head", "speculators", verifier=VERIFIER)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["speculators_model_type"] == "peagle"
    assert config["mask_token_id"] == 7
    assert config["transformer_layer_config"]["vocab_size"] == V
    stated = config["speculators_config"]
    assert stated["verifier"] == {"name_or_path": "models/target", "architectures": ["Qwen3MoeForCausalLM"]}
    assert stated["proposal_methods"][0]["speculative_tokens"] == 4
    with pytest.raises(ConfigError, match="names the target"):
        save_head(head(spec()), tmp_path / "other", "speculators")
    assert not (tmp_path / "other").exists()


REFUSED = [
    (NATIVE["shared-expert"], "eagle3", "reads shared experts.*predicts the target's experts"),
    (NATIVE["eagle1"], "eagle3", "joins by a product as EAGLE-1"),
    (NATIVE["both-features"], "speculators", "last hidden state besides"),
    (NATIVE["embedding-tap"], "eagle3", "boundary 0"),
    (NATIVE["window"], "eagle3", "see a window"),
    (NATIVE["routed"], "eagle3", "layers have experts, .* dense"),
    (NATIVE["routed"], "speculators", "layers have experts, .* jaxspec serves it as it is"),
    (SPECULATORS["qwen3"], "eagle3", "queries and keys are normalized"),
    (SPECULATORS["biases"], "eagle3", "biases, which SGLang leaves out"),
    (EAGLE3["latent"], "speculators", "latent"),
    (EAGLE3["last"], "speculators", "no taps"),
    (EAGLE3["targets-head"], "speculators", "target's vocabulary product"),
    (EAGLE3["narrow"], "speculators", "hidden size 16 is not the target's 32"),
    (spec(mask_token=3, fc_norm=True), "speculators", "lost by vLLM"),
    (spec(), "medusa", "decoder layers"),
    (MEDUSA["one"], "eagle3", "no decoder layer"),
    (MedusaSpec(2, 1, D, V, W), "medusa", "no map of ids"),
    (MedusaSpec(2, 1, D, V, 0), "medusa", "target's vocabulary product"),
]


@pytest.mark.parametrize(("of", "form", "why"), REFUSED, ids=[f"{n}" for n in range(len(REFUSED))])
def test_what_a_format_cannot_express_is_refused_with_the_reason(tmp_path: Path, of, form, why):
    with pytest.raises(ConfigError, match=why):
        save_head(head(of), tmp_path / "head", form, verifier=VERIFIER)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_format_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="known are native, eagle3, dflash, speculators, medusa"):
        save_head(head(spec()), tmp_path / "head", cast(Any, "gguf"))


def test_a_head_is_replaced_as_a_whole_and_nothing_else_is(tmp_path: Path, monkeypatch):
    save_head(head(spec()), tmp_path / "head")
    second = head(spec(norm_output=True))
    save_head(second, tmp_path / "head")
    assert_same(load_head(tmp_path / "head", TARGET, FLOAT32), second)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match="holds no draft head"):
        save_head(second, other)
    (other / "config.json").unlink()
    save_head(second, other)

    def full(*_args, **_kwargs):
        raise OSError("no space left")

    monkeypatch.setattr("jaxspec.checkpoint.heads.directory.save_file", full)
    with pytest.raises(OSError, match="no space"):
        save_head(head(spec()), other)
    assert_same(load_head(other, TARGET, FLOAT32), second)
    assert sorted(os.listdir(tmp_path)) == ["head", "other"]


def test_layers_that_no_config_describes_are_refused():
    arch = spec().arch
    strange = replace(arch.layers[0], attention=replace(arch.layers[0].attention, sinks=True))
    with pytest.raises(ConfigError, match="mechanisms that no published config"):
        layers_config(replace(arch, layers=(strange,)))


def test_the_sharpened_scale_of_latent_attention_comes_back():
    arch = layers_of(LATENT)
    again = layers_of(layers_config(arch))
    assert again == arch
    assert arch.layers[0].attention.scale > 12**-0.5


def test_missing_extra_and_misshaped_tensors_are_all_named(tmp_path: Path):
    save_head(head(spec()), tmp_path / "head", "eagle3")
    file = tmp_path / "head" / "model.safetensors"
    tensors = load_file(file)
    del tensors["norm.weight"]
    tensors["fc.weight"] = np.zeros((D, 2 * D), np.float32)
    tensors["stray"] = np.zeros(2, np.float32)
    save_file(tensors, file)
    with pytest.raises(CheckpointError) as caught:
        load_head(tmp_path / "head", TARGET, FLOAT32)
    text = str(caught.value)
    assert "1 missing: norm.weight" in text
    assert "1 not known: stray" in text
    assert f"fc.weight: ({D}, {2 * D}) in the file, ({D}, {3 * D}) by the config" in text


def test_layers_keep_their_rotation():
    assert layers_config(layers_of(LAYERS))["rope_parameters"] == {"rope_type": "default", "rope_theta": 50000.0}


def test_layers_from_numbers_are_those_of_a_config_of_them():
    yarn = LAYERS | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}
    for config in (LAYERS, yarn):
        target = layers_of(config)
        attention = AttentionSpec(4, 2, 8, rope_for_head(config, 8))
        assert arch_of_head(target, attention, layers=1, model_dim=D, ffn=FfnSpec(48)) == target
    assert rope_for_head(yarn, 6, 9.0) == RopeSpec(9.0, 6)
    with pytest.raises(ConfigError, match="4 attention heads cannot share 3"):
        arch_of_head(layers_of(LAYERS), AttentionSpec(4, 3, 8), layers=1, model_dim=D, ffn=FfnSpec(48))
