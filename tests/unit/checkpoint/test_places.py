"""Name tables and packs: bijections between published tensors and parameters, for every family."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint.files.stream import TensorName
from jaxspec.checkpoint.load.places import abstract_params, flatten, part_shapes, resolve_rules
from jaxspec.checkpoint.names.known import known_tables
from jaxspec.checkpoint.names.packs import PACKS
from jaxspec.models.arch import ArchSpec
from jaxspec.models.catalog import arch_of, known_families
from jaxspec.models.mtp import Mtp
from jaxspec.models.transformer import Transformer
from jaxspec.nn.param import kind_of
from jaxspec.nn.policy import make_policy
from pallas_kernels.quantized import Format, Quantized

GOLDENS = sorted(file.parent for file in (Path(__file__).parents[2] / "golden").glob("*/config.json"))
BF16 = jnp.dtype("bfloat16")
LAYOUTS = ("unrolled", "stacked")
SHARED = {"ernie4_5_moe": {"model.norm.weight"}}  # of the model, and of its layer of multi-token prediction


def arches() -> list:
    """Of each golden config, in both layouts, and stacked with the other kind of head."""
    found = []
    for source in GOLDENS:
        arch = arch_of(json.loads((source / "config.json").read_text()))
        found += [
            *(pytest.param(arch, layout, id=f"{source.name}-{layout}") for layout in LAYOUTS),
            pytest.param(replace(arch, tied=not arch.tied), "stacked", id=f"{source.name}-other-head"),
        ]
    return found


def test_every_family_has_a_name_table():
    assert set(known_tables()) >= set(known_families())


@pytest.mark.parametrize(("arch", "layout"), arches())
def test_name_table_is_a_bijection_onto_the_parameters(arch: ArchSpec, layout):
    table, policy = known_tables()[arch.family], make_policy(BF16, depth=layout)
    sides = [(Transformer(arch, policy), table.rules(arch))]
    sides += [(Mtp(arch, policy), table.mtp_rules(arch))] if arch.mtp else []
    names: list[TensorName] = []
    for net, rules in sides:
        leaves = flatten(abstract_params(net))
        found = resolve_rules(rules, leaves, arch)
        assert set(found) == set(leaves)
        for path, leaf in found.items():
            assert leaf.shape == leaves[path].shape
            assert sorted(leaf.rules) == list(np.ndindex(leaf.shape[: leaf.lead]))
            names += [name for rule in leaf.rules.values() for name in rule.names]
    assert {name.whole for name, count in Counter(names).items() if count > 1} == SHARED.get(arch.family, set())


def packed_parts() -> list[tuple[str, tuple[int, ...]]]:
    found = {("each", (3, 8)), ("slot", (24,)), ("key_value", (16, 2, 2, 4))}  # of draft heads, which have no golden
    for source in GOLDENS:
        arch = arch_of(json.loads((source / "config.json").read_text()))
        leaves = flatten(abstract_params(Transformer(arch, make_policy(BF16))))
        for leaf in resolve_rules(known_tables()[arch.family].rules(arch), leaves, arch).values():
            found |= {(rule.pack, leaf.part) for rule in leaf.rules.values()}
    return sorted(found)


def test_packs_move_every_number_and_come_back():
    parts, rng = packed_parts(), np.random.default_rng(0)
    assert {pack for pack, _ in parts} == set(PACKS)
    for pack, shape in parts:
        leaf = rng.permutation(int(np.prod(shape))).reshape(shape)
        arrays = PACKS[pack].split(leaf)
        assert [array.shape for array in arrays] == part_shapes(pack, shape)
        np.testing.assert_array_equal(PACKS[pack].join(arrays, shape), leaf)
        assert sorted(np.concatenate([a.ravel() for a in arrays])) == list(range(leaf.size))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "deepseek_v4", "opt"])
def test_abstract_parameters_are_those_of_the_network(name: str, layout):
    """One look at each kind of layer and expert finds what tracing all of them does."""
    source = next(d for d in GOLDENS if d.name == name)
    arch = arch_of(json.loads((source / "config.json").read_text()))
    blocks = Format("fp8", (128, 128, 128))
    kinds = ("ffn/gate_up_ED2F", "ffn/shared/gate_up_D2F")
    policy = make_policy(BF16, depth=layout, formats=tuple((kind, blocks) for kind in kinds))
    for cls in (Transformer, Mtp) if arch.mtp else (Transformer,):
        net = cls(arch, policy)
        found = flatten(abstract_params(net))
        assert found == flatten(jax.eval_shape(net.initial, jax.random.key(0))["params"])
        quantized = {kind_of(path.split("/")) for path, leaf in found.items() if isinstance(leaf, Quantized)}
        assert quantized == {kind_of(path.split("/")) for path in found} & set(kinds)


def test_kinds_forget_layers_and_experts():
    assert kind_of(("layers_3", "ffn", "down_EFD")) == "ffn/down_EFD"
    assert kind_of(("segment_0", "attention", "qkv_DGQC")) == "attention/qkv_DGQC"
    assert kind_of(("mtp_0", "block", "ffn", "shared", "down_FD")) == "ffn/shared/down_FD"
    assert kind_of(("layers_0", "ffn", "down_FD")) == kind_of(("layers_1", "ffn", "down_FD"))
