"""A mesh of devices gives the text of one device, with and without speculation, and sends what it is meant to send."""

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxspec.aot import hlo
from jaxspec.checkpoint.heads.directory import save_head
from jaxspec.checkpoint.heads.layers import layers_of
from jaxspec.errors import ConfigError
from jaxspec.inspect.model_cost import model_cost
from jaxspec.models.draft_head import DraftHead, HeadSpec
from jaxspec.models.trained_head import Head
from jaxspec.nn.policy import make_policy
from jaxspec.perf.cost import Mesh
from jaxspec.perf.links import collectives
from jaxspec.protocol import CaptureSpec
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams
from jaxspec.topology import chain
from tests.oracle.test_families_lossless import GOLDENS
from tests.random_params import random_params

ROWS, TOKENS = 4, 10
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 64, "max_num_seqs": ROWS, "prefill_buckets": (8,), "max_logprobs": 0,
}  # fmt: skip
CHAIN = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1}
TREE = {"method": "ngram", "speculative_token_tree": [2, 2], "prompt_lookup_min": 1}
SELF = {"method": "early_exit", "exit_layer": 1, "num_speculative_tokens": 2}
MTP = {"method": "mtp", "num_speculative_tokens": 2}
FAMILY, COLLECTIVES = "qwen3_moe", ("all-to-all", "all-gather", "all-reduce", "collective-permute")
ALL_AXES = {"data": 2, "expert": 2, "tensor": 2}


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def text(llm: LLM) -> list[list[int]]:
    """Greedy continuations; more requests than rows, so that rows are used again."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 90, size).tolist() for size in (3, 9, 14, 5, 7, 2)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
    return [output.outputs[0].token_ids for output in outputs]


@cache
def alone(name: str) -> list[list[int]]:
    """The text of one device, without speculation."""
    return text(LLM(GOLDENS[name], **SETTINGS))


@pytest.fixture(scope="module")
def whole() -> LLM:
    """An engine on a mesh with all axes, whose devices exchange rows."""
    return LLM(GOLDENS[FAMILY], **SETTINGS, mesh=ALL_AXES, speculative_config=CHAIN, expert_transport="padded")


def test_a_mesh_with_all_axes_gives_the_text_of_one_device(whole: LLM):
    assert text(whole) == alone(FAMILY)
    state: Any = whole.engine.state
    rows = ("data", "expert")
    assert state.history_BS.sharding.spec == P(rows, None)
    assert state.layers[0]["k"].sharding.spec == P(rows, ("tensor",), None, None)


def test_prefixes_are_taken_over_on_a_mesh(whole: LLM):
    whole.finish_compiling()
    whole.reset_prefix_cache()
    hits = []
    for _ in range(2):
        assert text(whole) == alone(FAMILY)
        hits.append(next(m.value for m in whole.get_metrics() if m.name == "vllm:prefix_cache_hits_total"))
    assert hits[0] < hits[1], "beginnings of 8 tokens"
    store = whole.engine.prefix.store
    assert store[0]["k_NYGZC"].sharding.spec == P(None, None, ("tensor",), None, None)


def test_two_exchanges_per_layer_whatever_is_verified(whole: LLM):
    """One dispatch and one combine, for one position and for six; only the bytes grow."""
    count: dict[int, Counter] = {0: Counter(), 5: Counter()}
    size: dict[int, Counter] = {0: Counter(), 5: Counter()}
    for drafts in count:
        module = hlo.parse(whole.engine.programs.programs["dispatch", chain(drafts)].as_text(), stepped=True)
        for instruction, run in module.executed():
            if not run.setup and not run.optional and instruction.opcode in COLLECTIVES:
                count[drafts][instruction.opcode] += run.times
                size[drafts][instruction.opcode] += run.times * sum(hlo.array_bytes(*a) for a in instruction.arrays)
    layers = len(whole.model.net.arch.layers)
    assert [count[k]["all-to-all"] for k in (0, 5)] == [2 * layers] * 2
    assert size[5]["all-to-all"] == 6 * size[0]["all-to-all"]
    cost = model_cost(whole.model.config, name=FAMILY)
    predicted = sum(c.count for c in collectives(cost, 1, Mesh(**ALL_AXES), 8) if c.kind == "exchange")
    assert predicted == count[0]["all-to-all"], "what jaxspec plan --devices counts"
    assert count[5] == count[0], "no other round either"
    assert not count[5]["collective-permute"], "no row moves to another device to be written or padded"
    whole_logits = ROWS * 6 * whole.model.net.arch.vocab_size * 4
    assert size[5]["all-gather"] < whole_logits / 8, "the best of each device's vocabulary, never the logits"


def test_biases_and_scores_on_a_mesh(whole: LLM):
    """Rows that differ; drafts from their own texts, and the scores of whole texts read in chunks."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, 90, size).tolist() for size in (3, 20, 14, 5, 7)]
    allowed = list(range(5, 90, 6))
    some: dict[str, Any] = {"allowed_token_ids": allowed, "logit_bias": {allowed[2]: 1.5}}
    params = [
        SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, **(some if n % 2 else {})) for n in range(5)
    ]
    texts = [o.prompt_token_ids + o.outputs[0].token_ids for o in whole.generate(prompts, params)]
    scores = whole.score(texts)
    for n, (prompt, text, entries) in enumerate(zip(prompts, texts, scores, strict=True)):
        logits = whole.logits(text).astype(np.float64)
        logp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        told = [entry.logprob for entry in entries[1:] if entry is not None]
        np.testing.assert_allclose(told, logp[np.arange(len(text) - 1), text[1:]], atol=1e-4)
        bias_V = np.zeros(logits.shape[1])
        if n % 2:
            bias_V[:] = -np.inf
            bias_V[allowed] = 0
            bias_V[allowed[2]] = 1.5
        chosen = (logits + bias_V)[len(prompt) - 1 : -1]
        picked = chosen[np.arange(TOKENS), text[len(prompt) :]]
        assert (picked > chosen.max(axis=1) - 1e-3).all(), n
    assert whole.engine.state.bias_BV.sharding.spec == P(("data", "expert"), None)
    assert whole.engine.state.sampling.bad_words_BWL.sharding.spec == P(("data", "expert"), None, None)


@pytest.mark.parametrize(
    ("name", "sizes", "speculation", "transport"),
    [
        slow("qwen3_moe", {"expert": 4, "tensor": 2}, TREE, "padded"),
        slow("qwen3_moe", {"expert": 2, "tensor": 4}, TREE, "sum"),
        slow("qwen3_moe", {"expert": 8}, CHAIN, "sum"),
        slow("qwen3_moe", {"data": 4, "tensor": 2}, SELF, "auto"),
        slow("qwen3_moe", ALL_AXES, None, "auto"),
        slow("deepseek_v3", ALL_AXES, MTP, "padded"),
        slow("glm_moe_dsa", {"data": 2, "expert": 4}, MTP, "padded"),
        slow("glm4_moe", ALL_AXES, CHAIN, "padded"),
        slow("llama3", {"data": 4, "tensor": 2}, SELF, "auto"),
    ],
)
def test_a_mesh_gives_the_text_of_one_device(name: str, sizes: dict, speculation: dict | None, transport: str):
    found = LLM(GOLDENS[name], **SETTINGS, mesh=sizes, speculative_config=speculation, expert_transport=transport)
    assert text(found) == alone(name)


@pytest.mark.parametrize("transport", ["sum", slow("padded")])
def test_a_head_has_its_experts_where_the_target_has_its(tmp_path: Path, transport: str):
    config = json.loads((GOLDENS[FAMILY] / "config.json").read_text())
    own = layers_of(config | {"num_hidden_layers": 1, "num_experts": 4, "norm_topk_prob": True})
    net = DraftHead(HeadSpec(own, own.model_dim, CaptureSpec(taps=(0, 1))), make_policy("float32"))
    save_head(Head(net, random_params(net, 0), None), tmp_path / "head")
    speculation = {"method": "eagle3", "model": str(tmp_path / "head"), "num_speculative_tokens": 2}
    llm = LLM(
        GOLDENS[FAMILY], **SETTINGS, mesh={"data": 2, "expert": 2}, speculative_config=speculation,
        expert_transport=transport,
    )  # fmt: skip
    ffn: Any = llm.engine.programs.drafter.params["params"]["first"]["ffn"]
    for name in ("gate_up_ED2F", "down_EFD"):
        assert ffn[name].sharding.spec[0] == "expert"
        assert {shard.data.shape[0] for shard in ffn[name].addressable_shards} == {2}
    assert text(llm) == alone(FAMILY)


def test_meshes_that_do_not_fit_are_refused():
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"mesh": {"expert": 16}}, "needs 16 devices, there are 8"),
        ({"mesh": {"model": 2}}, r"unknown axes \['model'\]"),
        ({"mesh": {"data": 8}}, r"4 rows \(max_num_seqs\) cannot be split evenly over data = 8.*multiple of 8"),
        (
            {"mesh": {"expert": 2}, "expert_transport": "ring"},
            "expert_transport 'ring' is not known; known are .*padded",
        ),
        ({"mesh": {"expert": 2}, "expert_transport": "ragged"}, "no ragged exchange on a CPU"),
        ({"mesh": {"expert": 2}, "kernels": "native"}, "kernels 'native' compute on one device"),
        ({"expert_transport": "padded"}, "expert_transport 'padded' is for several devices; give mesh, too"),
        ({"mesh": {"expert": 3}}, r"ffn/down_EFD: expert = 8 over expert = 3"),
    ]
    for named, words in refusals:
        with pytest.raises(ConfigError, match=words):
            LLM(GOLDENS["qwen3_moe"], **(SETTINGS | named))
