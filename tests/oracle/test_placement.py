"""Wherever a placement puts experts, the text is that of one device, and routing still speaks of experts."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint.files.fingerprint import digests
from jaxspec.checkpoint.load.model import load_model
from jaxspec.errors import ConfigError
from jaxspec.models.transformer import teacher_forced
from jaxspec.nn.moe import MoeSpec
from jaxspec.nn.policy import make_policy
from jaxspec.perf.expert_placement import EMPTY, LayerSlots, Placement, balanced, save_placement
from jaxspec.serve.llm import LLM
from jaxspec.sharding.mesh import make_mesh
from tests.oracle.test_families_lossless import ARCHS, GOLDENS
from tests.oracle.test_mesh import CHAIN, MTP, SETTINGS, alone, text

FLOAT32 = jnp.dtype("float32")


def placed(name: str, devices: int, redundant: int, seed: int = 0) -> Placement:
    """For loads in which one expert of each layer has most of all."""
    rng, arch = np.random.default_rng(seed), ARCHS[name]
    layers = []
    for y, layer in enumerate(arch.layers):
        if isinstance(layer.ffn, MoeSpec):
            load = rng.integers(1, 20, layer.ffn.experts)
            load[rng.integers(len(load))] = 100
            layers.append(LayerSlots(y, balanced(load.tolist(), devices, redundant)))
    config = json.loads((GOLDENS[name] / "config.json").read_text())
    return Placement(1, {"name": name, **digests(config)}, devices, redundant, tuple(layers))


@pytest.mark.parametrize(
    ("name", "devices", "redundant", "speculation", "transport"),
    [
        ("qwen3_moe", 3, 4, CHAIN, "padded"),  # of 8 experts, which 3 does not divide
        pytest.param("deepseek_v3", 4, 4, MTP | {"num_speculative_tokens": 1}, "sum", marks=pytest.mark.slow),
    ],
)
def test_a_placement_gives_the_text_of_one_device(
    tmp_path: Path, name: str, devices: int, redundant: int, speculation: dict, transport: str
):
    placement = placed(name, devices, redundant)
    if redundant > 1:
        assert all(max(layer.slots.count(e) for e in layer.slots if e != EMPTY) > 1 for layer in placement.layers)
    save_placement(placement, tmp_path / "placement.json")
    llm = LLM(
        GOLDENS[name], **SETTINGS, mesh={"expert": devices}, speculative_config=speculation,
        expert_transport=transport, expert_placement=tmp_path / "placement.json",
    )  # fmt: skip
    assert text(llm) == alone(name)


@pytest.mark.parametrize(
    ("name", "depth"),
    [("gpt_oss_mxfp4", "unrolled"), pytest.param("deepseek_v3_fp8", "stacked", marks=pytest.mark.slow)],
)
def test_every_layout_of_weights_is_put_into_slots(name: str, depth: Any):
    """Entries of one tensor, and numbers with scales; layers apart and stacked."""
    policy = make_policy(FLOAT32, depth=depth)
    token = np.random.default_rng(2).integers(1, 90, (2, 12)).astype(np.int32)
    position = np.tile(np.arange(12, dtype=np.int32), (2, 1))
    forced = jax.jit(teacher_forced, static_argnums=0)
    whole = load_model(GOLDENS[name], policy)
    wanted, before = forced(whole.net, whole.params, token, position)
    mesh, placement = make_mesh({"expert": 2}), placed(name, 2, 2)
    found = load_model(GOLDENS[name], policy.update(transport="padded"), mesh=mesh, placement=placement)
    logits, hidden = forced(found.net, found.params, token, position)
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=2e-5 * float(np.abs(wanted).max()))
    for one, other in zip(hidden.routing, before.routing, strict=True):
        np.testing.assert_array_equal(one.expert_MA, other.expert_MA, "routing speaks of experts")
    shards = [
        leaf.sharding.spec[1 if depth == "stacked" and leaf.ndim > 3 else 0]
        for path, leaf in jax.tree_util.tree_leaves_with_path(found.params)
        if "down_EFD" in jax.tree_util.keystr(path) and leaf.ndim >= 3
    ]
    assert shards
    assert set(shards) == {"expert"}


def test_placements_of_something_else_are_refused(tmp_path: Path):
    file, name = tmp_path / "placement.json", "qwen3_moe"
    save_placement(placed(name, 2, 0), file)
    refusals: list[tuple[str, dict[str, Any], str]] = [
        (name, {"mesh": {"expert": 4}}, r"made for 2 devices along the axis expert, the mesh has 4"),
        (name, {}, r'made for 2 devices .*there is no mesh; give mesh=\{"expert": 2\}'),
        (
            "deepseek_v3",
            {"mesh": {"expert": 2}},
            r"made for another model \(qwen3_moe, 2 expert layers; this one has 2",
        ),
        (name, {"mesh": {"expert": 2}, "expert_placement": GOLDENS[name] / "config.json"}, "placement of version None"),
    ]
    for model, named, words in refusals:
        with pytest.raises(ConfigError, match=words):
            LLM(GOLDENS[model], **(SETTINGS | {"expert_placement": file} | named))
