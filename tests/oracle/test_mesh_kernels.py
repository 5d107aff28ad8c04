"""Kernels on a mesh with a tensor axis, interpreted: the text and the logits of one device, with drafts and without."""

from typing import Any

import numpy as np
import pytest

from jaxspec.serve.llm import LLM
from pallas_kernels.select import SlowKernelWarning
from tests.oracle.test_families_lossless import GOLDENS
from tests.oracle.test_mesh import ALL_AXES, CHAIN, FAMILY, MTP, SELF, SETTINGS, TREE, alone, slow, text

TENSOR, BOTH = {"tensor": 2}, {"expert": 2, "tensor": 2}


def engine(name: str, sizes: dict[str, int], speculation: dict[str, Any] | None, transport: str = "sum") -> LLM:
    how: dict[str, Any] = {"mesh": sizes, "speculative_config": speculation, "expert_transport": transport}
    return LLM(GOLDENS[name], **SETTINGS, kernels="interpret", **how)


@pytest.mark.parametrize(("name", "sizes", "speculation"), [
    (FAMILY, TENSOR, CHAIN),
    slow(FAMILY, TENSOR, None),
    (FAMILY, BOTH, TREE),
    slow(FAMILY, BOTH, CHAIN),
    slow(FAMILY, {"expert": 2, "tensor": 4}, CHAIN),
    slow("gpt_oss", TENSOR, CHAIN),
    slow("mixtral_window", BOTH, CHAIN),
    slow("deepseek_v3", BOTH, MTP),
    slow("qwen3_next", TENSOR, CHAIN),
    slow("glm4_moe", BOTH, MTP),
    slow("llama3", {"tensor": 4}, SELF),
])  # fmt: skip
def test_a_tensor_axis_gives_the_text_of_one_device(name: str, sizes: dict, speculation: dict | None):
    assert text(engine(name, sizes, speculation)) == alone(name)


IGNORED = f"ignore::{SlowKernelWarning.__module__}.{SlowKernelWarning.__name__}"


@pytest.mark.slow
@pytest.mark.filterwarnings(IGNORED)
def test_experts_whose_scales_are_cut_are_xlas_beside_kernels():
    assert text(engine("gpt_oss_mxfp4", TENSOR, TREE)) == alone("gpt_oss_mxfp4")


@pytest.mark.filterwarnings(IGNORED)
@pytest.mark.parametrize("sizes", [slow(BOTH), slow(ALL_AXES)])
def test_rows_of_their_own_are_exchanged_beside_kernels(sizes: dict):
    assert text(engine(FAMILY, sizes, CHAIN, "padded")) == alone(FAMILY)


def test_every_device_gets_a_copy_of_a_head_where_there_are_more_devices_than_heads():
    """Four query heads share two of keys and values; on four devices each has one of its own."""
    llm = engine(FAMILY, {"tensor": 4}, CHAIN)
    state: Any = llm.engine.state
    assert [spec.attention.kv_copies for spec in llm.model.net.arch.layers] == [2, 2]
    assert {shard.data.shape[1] for shard in state.layers[0]["k"].addressable_shards} == {1}
    assert text(llm) == alone(FAMILY)


def test_logits_are_those_of_one_device():
    prompt = np.random.default_rng(3).integers(1, 90, 20).tolist()
    wanted = LLM(GOLDENS[FAMILY], **SETTINGS).logits(prompt)
    np.testing.assert_allclose(engine(FAMILY, BOTH, None).logits(prompt), wanted, atol=1e-4)
