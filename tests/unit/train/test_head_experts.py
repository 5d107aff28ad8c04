"""Heads with experts of their own: settings, the loss that spreads tokens over them, and the mesh that holds them."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jaxspec.checkpoint.heads.directory import load_head
from jaxspec.checkpoint.heads.layers import layers_config, layers_of
from jaxspec.checkpoint.load.model import load_model
from jaxspec.config import shipped
from jaxspec.errors import ConfigError
from jaxspec.nn.moe import MoeSpec
from jaxspec.nn.policy import make_policy
from jaxspec.nn.router import Routing
from jaxspec.train.block_nets import KINDS
from jaxspec.train.expert_balance import RoutedSlots, balance_loss
from jaxspec.train.head_nets import net_of
from jaxspec.train.run import train
from jaxspec.train.run_log import read_metrics
from jaxspec.train.settings import HeadSettings, identity, load_run_settings
from tests.unit.serve.tiny_model import write_tiny_model
from tests.unit.train.test_head_nets import ARCH, CONFIG, POLICY

ROUTED = ("eagle", "eagle3", "peagle", "shared_expert", *KINDS)


def net(**settings: Any) -> Any:
    return net_of(msgspec.convert({"kind": "eagle3", "num_experts": 4} | settings, HeadSettings), ARCH, CONFIG, POLICY)


@pytest.mark.parametrize("kind", ROUTED)
def test_every_kind_with_layers_can_have_experts(kind: str):
    more: dict[str, Any] = {"own_head": False} if kind in ("eagle", *KINDS) else {}
    more |= {"commons": "default", "taps": []} if kind == "shared_expert" else {}
    arch = net(kind=kind, layers=2, **more).spec.arch
    ffns = [layer.ffn for layer in arch.layers]
    assert arch.expert_layers == (0, 1)
    # As wide as what a token goes through in the target, 2 * 8 + 24, over the two that it chooses.
    assert {(ffn.experts, ffn.top_k, ffn.hidden, ffn.shared_hidden) for ffn in ffns} == {(4, 2, 20, 0)}
    assert layers_of(layers_config(arch)).layers == arch.layers, "its config says the same"


def test_what_is_given_wins():
    ffn = net(num_experts_per_tok=3, moe_intermediate_size=5, shared_expert_intermediate_size=6).spec.arch.layers[0].ffn
    assert (ffn.top_k, ffn.hidden, ffn.shared_hidden, ffn.shared_gate) == (3, 5, 6, True)
    assert (ffn.router.kind, ffn.router.renormalize) == ("softmax", True)
    assert net(shared_expert_intermediate_size=10).spec.arch.layers[0].ffn.hidden == (40 - 10) // 2
    assert net(num_experts=1).spec.arch.layers[0].ffn.top_k == 1


WRONG = [
    ({"kind": "medusa"}, 'num_experts = 4, but heads of kind "medusa" have no experts of their own; leave it out'),
    ({"kind": "draft_model"}, "have no experts of their own"),
    ({"num_experts_per_tok": 5}, "num_experts_per_tok = 5 is more than num_experts = 4; lower it"),
    ({"num_experts": -1}, "num_experts must be at least 0, got -1"),
    ({"num_experts_per_tok": 0}, "num_experts_per_tok must be at least 1, got 0"),
    ({"intermediate_size": 8}, "intermediate_size = 8 is of a dense feed-forward.* give moe_intermediate_size"),
    ({"num_experts": 0, "moe_intermediate_size": 8}, "moe_intermediate_size is of experts.* set num_experts, too"),
]


@pytest.mark.parametrize(("settings", "says"), WRONG)
def test_what_contradicts_itself_is_one_error(settings: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        net(**settings)


def test_runs_of_dense_heads_keep_their_identity():
    """Runs that began before heads had experts go on."""
    dense = identity(load_run_settings("eagle3", ["target=x"]))
    assert not any("expert" in key for key in dense["head"])
    assert "balance" not in dense["loss"]
    routed = identity(load_run_settings("eagle3", ["target=x", "head.num_experts=8", "loss.balance=0.5"]))
    assert (routed["head"]["num_experts"], routed["loss"]["balance"]) == (8, 0.5)


def slots(logits_BXE: Any, expert_BXA: Any, weight_BX: Any) -> list[RoutedSlots]:
    logits, expert = jnp.asarray(logits_BXE, jnp.float32), jnp.asarray(expert_BXA, jnp.int32)
    flat = expert.reshape(-1, expert.shape[-1])
    routing = Routing(flat, jnp.ones(flat.shape), logits.reshape(-1, logits.shape[-1]))
    return [RoutedSlots(routing, jnp.asarray(weight_BX, jnp.float32))]


def test_even_use_has_the_loss_one_and_a_single_expert_that_of_all():
    pairs = [[[0, 1], [2, 3], [1, 2], [3, 0]]]
    even, figures = balance_loss(slots(np.zeros((1, 4, 4)), pairs, np.ones((1, 4))), jnp.ones(1))
    assert (float(even), float(figures["dead_experts"])) == (1.0, 0.0)
    steep = np.tile([60.0, 0.0, 0.0, 0.0], (1, 4, 1))
    one, figures = balance_loss(slots(steep, np.zeros((1, 4, 1)), np.ones((1, 4))), jnp.ones(1))
    assert (round(float(one), 6), float(figures["dead_experts"])) == (4.0, 0.75)


def test_slots_that_do_not_count_change_nothing():
    rng = np.random.default_rng(0)
    logits, weight = rng.normal(size=(2, 6, 4)), np.array([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]])
    expert = np.argsort(-logits, axis=-1)[..., :2]
    share = jnp.asarray([3 / 7, 4 / 7])
    whole, figures = balance_loss(slots(logits, expert, weight), share)
    each = [balance_loss(slots(logits[r : r + 1, :n], expert[r : r + 1, :n], np.ones((1, n))), jnp.ones(1))[0]
            for r, n in enumerate((3, 4))]  # fmt: skip
    assert np.allclose(whole, (3 * each[0] + 4 * each[1]) / 7), "so rows may be computed apart from one another"
    used = set(expert[0, :3].ravel()) | set(expert[1, :4].ravel())
    assert float(figures["dead_experts"]) == 1 - len(used) / 4


def test_its_gradient_makes_routers_even():
    logits = jnp.zeros((1, 8, 4)).at[..., 0].set(3.0)

    def loss(logits: Any) -> Any:
        expert = jnp.argmax(logits, axis=-1, keepdims=True)
        return balance_loss(slots(logits, expert, np.ones((1, 8))), jnp.ones(1))[0]

    before = loss(logits)
    for _ in range(20):
        logits = logits - 2.0 * jax.grad(loss)(logits)
    assert loss(logits) < 0.5 * before


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a target and data."""
    folder = tmp_path_factory.mktemp("experts")
    write_tiny_model(folder / "target")
    rng = np.random.default_rng(0)
    records = [{"token_ids": rng.integers(1, 30, 10).tolist(), "prompt_length": 4} for _ in range(10)]
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


HEADS = {
    "eagle3": 'kind="eagle3", taps=[0, 1], draft_vocab_size=20',
    "dspark": 'kind="dspark", own_head=false, block={size=3, markov_rank=2, window=5}',
}


# Both have the layer; what is slow differs in what follows it.
@pytest.mark.parametrize("kind", ["eagle3", pytest.param("dspark", marks=pytest.mark.slow)])
def test_experts_on_an_axis_of_the_mesh_are_updated_as_on_one_device(place: Path, tmp_path: Path, kind: str):
    routed = "num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=8"
    changes = [
        f'target="{place / "target"}"', f'data={{train=["{place / "data.jsonl"}"], length=12}}',
        f"head={{{HEADS[kind]}, {routed}}}", "loss.balance=0.1", "train.steps=1", "train.rows=4", "optimizer.warmup=0",
        "loss.rounds=2", "train.compute_dtype='float32'", "train.target_dtype='float32'",
        # By nearly the gradient itself; Adam's first change is the gradient's sign, which rounding flips near 0.
        "optimizer.learning_rate=1.0", "optimizer.eps=1.0", "optimizer.clip=0.0",
    ]  # fmt: skip
    params, figures = {}, {}
    for name, mesh in (("one", []), ("mesh", ["mesh.data=2", "mesh.expert=2"])):
        out = tmp_path / name
        settings = load_run_settings("demo", [*changes, *mesh, f'out="{out}"'])
        result = train(settings, place / "target")
        params[name], before = result.params, result.run.init()
        assert (result.run.frozen.net.policy.compute.mesh is not None) == bool(mesh)
        figures[name] = read_metrics(out)[-1]
    leaves = jax.tree_util.tree_flatten_with_path(params["mesh"])[0]
    split = {path[-1].key: leaf for path, leaf in leaves if path[-1].key in ("gate_up_ED2F", "down_EFD")}
    for leaf in split.values():
        assert leaf.sharding.spec[0] == "expert"
        assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {2}, "half of the experts each"
    assert len(split) == 2
    for name in ("loss", "grad_norm", "balance_loss", "dead_experts"):
        assert np.isclose(figures["mesh"][name], figures["one"][name], rtol=1e-5), name
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    each = (jax.tree.leaves(tree) for tree in (params["one"], params["mesh"], before))
    for path, one, other, old in zip(paths, *each, strict=True):
        assert np.abs(one - old).max() > 1e-5, f"{path} is trained"
        assert np.allclose(one, other, rtol=1e-5, atol=1e-6), path
    target = load_model(place / "target", make_policy("float32"))
    saved = load_head(tmp_path / "mesh" / "last", target.net.arch, make_policy("float32"))
    assert isinstance(saved.net.spec.arch.layers[0].ffn, MoeSpec)
    for one, other in zip(*(jax.tree.leaves(x) for x in (saved.params, params["mesh"])), strict=True):
        assert np.array_equal(one, other)


def test_shipped_heads_stay_dense():
    names = [path.stem for path in shipped("heads").glob("*.toml")]
    assert {load_run_settings("demo", [f'head="{name}"']).head.num_experts for name in names} == {0}
