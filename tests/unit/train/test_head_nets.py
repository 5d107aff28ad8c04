"""Settings of a head become its network: defaults are the target's, and what cannot be is one error."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jaxspec.config import shipped
from jaxspec.errors import ConfigError
from jaxspec.models.block_head import BlockHead
from jaxspec.models.catalog import arch_of
from jaxspec.models.draft_head import DraftHead
from jaxspec.models.medusa import Medusa
from jaxspec.models.mtp import Mtp
from jaxspec.models.transformer import Transformer
from jaxspec.nn.policy import make_policy
from jaxspec.train.block_nets import KINDS
from jaxspec.train.head_nets import ends_of, net_of, start_from_target
from jaxspec.train.settings import HeadSettings, load_run_settings

CONFIG = {
    "model_type": "qwen2_moe", "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 8,
    "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16, "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64,
    "rope_theta": 500.0, "mlp_only_layers": [1],
}  # fmt: skip
ARCH = arch_of(CONFIG)
POLICY = make_policy("float32")


def net(**settings: Any) -> Any:
    return net_of(msgspec.convert({"kind": "eagle3"} | settings, HeadSettings), ARCH, CONFIG, POLICY)


def zeros(initial: Any) -> Any:
    """Parameters without the time that it takes to compile random ones."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(initial, jax.random.key(0)))


@pytest.mark.parametrize("name", sorted(p.stem for p in shipped("heads").glob("*.toml")))
def test_every_shipped_head_fits_a_target(name: str):
    found = net_of(load_run_settings("demo", [f'head="{name}"']).head, ARCH, CONFIG, POLICY)
    kinds = {"medusa": Medusa, "draft_model": Transformer, "mtp": Mtp} | dict.fromkeys(KINDS, BlockHead)
    assert isinstance(found, kinds.get(name, DraftHead))


def test_what_is_not_given_is_the_targets():
    spec = net().spec
    layer = spec.arch.layers[0]
    assert spec.reads.taps == (2, 4, 5)
    assert (spec.target_dim, spec.arch.model_dim, spec.draft_vocab) == (16, 16, 40)
    assert (layer.attention.heads, layer.attention.kv_heads, layer.attention.head_dim) == (2, 1, 8)
    assert layer.attention.rope.theta == 500
    assert layer.ffn.hidden == 2 * 8 + 24, "what a token goes through in the target"


def test_what_is_given_wins():
    spec = net(
        layers=2, hidden_size=32, intermediate_size=7, num_attention_heads=4, head_dim=6, taps=[1, 8],
        own_embedding=True, draft_vocab_size=10, rope_theta=9.0, norm_output=True, fc_norm=True, qk_norm=True,
    ).spec  # fmt: skip
    layer = spec.arch.layers[1]
    assert (len(spec.arch.layers), spec.arch.model_dim, layer.ffn.hidden) == (2, 32, 7)
    assert (layer.attention.heads, layer.attention.kv_heads, layer.attention.head_dim) == (4, 4, 6)
    assert (spec.reads.taps, spec.draft_vocab, layer.attention.rope.theta) == ((1, 8), 10, 9.0)
    assert (spec.norm_output, spec.fc_norm, spec.norm_before_residual) == (True, True, False)
    assert (layer.attention.qk_norm, net().spec.arch.layers[0].attention.qk_norm) == ("head", "none")


def test_kinds_differ_in_what_they_read_and_predict():
    eagle = net(kind="eagle", own_head=False).spec
    assert (eagle.join, eagle.last, eagle.join_bias, eagle.draft_vocab, eagle.reads.taps) == (
        "product",
        True,
        True,
        0,
        (),
    )
    assert net(kind="peagle").spec.mask_token == 39
    assert net(kind="peagle", mask_token=5).spec.mask_token == 5
    shared = net(kind="shared_expert", taps=[], commons="default", routing=[0, 2]).spec
    assert shared.reads.shared_outputs == (2, 4, 6), "layer 1 is dense"
    assert (shared.routing, shared.experts) == ((0, 2), 4)


def test_blocks_are_normalized_and_read_as_many_taps_as_they_have_layers():
    spec = net(kind="dflash", layers=3, own_head=False, block={"size": 16, "window": 9}).spec
    assert spec.reads.taps == (2, 4, 6)
    assert {(layer.attention.qk_norm, layer.attention.window) for layer in spec.arch.layers} == {("head", 9)}
    assert (spec.drafts, spec.mask_token, spec.draft_vocab, spec.from_anchor) == (15, 39, 0, False)
    assert net(kind="dspark", block={"size": 7}).spec.drafts == 7
    assert net(kind="dspark", block={"size": 7, "from_anchor": False}).spec.drafts == 6


WRONG = [
    ({"kind": "dflash", "block": {"size": 1}}, "blocks of 1 leave nothing to draft"),
    ({"kind": "dflash", "taps": [9]}, r"taps \[9\] are beyond"),
    ({"kind": "dflash", "taps": []}, "it reads nothing; give taps"),
    ({"kind": "dflash2", "block": {"conv_taps": 2, "conv_group": 3}}, "does not fit its width"),
    ({"kind": "dspark", "block": {"confidence": "markov"}}, "through a Markov head, which it lacks"),
    ({"taps": [1, 9]}, r"taps \[9\] are beyond the target's depth; .* from 0 to 8"),
    ({"taps": []}, "it reads nothing"),
    ({"commons": [0, 1]}, r"layers \[1\] have no routed experts in this target; those that do are \[0, 2, 3"),
    ({"hidden_size": 32}, "hidden_size = 32 is not the target's 16"),
    ({"kind": "eagle", "hidden_size": 32}, "EAGLE-1 head continues from the target's hidden states"),
    ({"own_head": False, "draft_vocab_size": 8}, "draft_vocab_size needs own_head"),
    ({"kind": "mtp", "layers": 2, "taps": [1]}, "everything about its layer .*; leave out layers, taps"),
    ({"kind": "peagle", "mask_token": 40}, "mask_token 40 is beyond the target's vocabulary of 40"),
]


@pytest.mark.parametrize(("settings", "says"), WRONG)
def test_what_cannot_be_is_one_error(settings: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        net(**settings)


def test_a_dense_target_has_no_experts_to_read():
    dense = CONFIG | {"model_type": "llama", "head_dim": 8}
    settings = HeadSettings(kind="shared_expert", commons="default")
    with pytest.raises(ConfigError, match="no layers with routed experts"):
        net_of(settings, arch_of(dense), dense, POLICY)


def test_a_norm_that_is_the_targets_own_cannot_be_trained():
    config = json.loads((Path(__file__).parents[2] / "golden/ernie4_5_moe/config.json").read_text())
    with pytest.raises(ConfigError, match=r"shares model\.norm\.weight with the model itself"):
        net_of(HeadSettings(kind="mtp"), arch_of(config), config, POLICY)


def test_own_parts_start_as_the_targets():
    made = net(draft_vocab_size=3, own_embedding=True)
    params: Any = zeros(made.initial)
    target: Any = {
        "params": {
            "embed_VD": jnp.arange(640.0).reshape(40, 16), "head_DV": -jnp.arange(640.0).reshape(16, 40),
            "norm_D": jnp.full(16, 3.0),
        }
    }  # fmt: skip
    ids = np.array([1, 5, 39], np.int32)
    found: Any = start_from_target(params, ends_of(target, ids))["params"]
    assert np.array_equal(found["head_DW"], target["params"]["head_DV"][:, ids])
    assert np.array_equal(found["embed_VD"], target["params"]["embed_VD"])
    assert np.array_equal(found["norm_D"], target["params"]["norm_D"]), "which the product comes after"
    assert np.array_equal(found["fc_XD"], params["params"]["fc_XD"])
