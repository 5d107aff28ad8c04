"""Recurrent layers that read prompts in chunks: the model's numbers, and one text with and without drafts."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, ConfigError, SamplingParams
from jaxspec.checkpoint.load.model import load_model
from jaxspec.models.transformer import Transformer, forward, head
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.policy import make_policy
from jaxspec.serve.request import RequestOutput
from jaxspec.shapes import Array

GOLDEN = Path(__file__).parents[1] / "golden"
HYBRIDS = [
    pytest.param(name, marks=[] if name == "qwen3_next" else [pytest.mark.slow])
    for name in ("qwen3_next", "kimi_linear", "granitemoehybrid", "nemotron_h", "minimax", "bailing_hybrid")
]


def outputs_of(llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    params = [
        SamplingParams(temperature=t, seed=n, max_tokens=20, ignore_eos=True)
        for n, t in enumerate([0.0, 0.0, 0.9, 0.9])
    ]
    return llm.generate(prompts, params, use_tqdm=False)


def texts(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("name", HYBRIDS)
def test_texts_do_not_depend_on_drafts_or_neighbors(name: str):
    vocab = json.loads((GOLDEN / name / "config.json").read_text())["vocab_size"]
    rng = np.random.default_rng(0)
    prompts = [(rng.integers(2, vocab, length).tolist() * 3)[-length:] for length in (150, 40, 97, 70)]
    sizes = {"max_model_len": 200, "dtype": "float32", "recurrence": "chunks"}
    plain = LLM(GOLDEN / name, max_num_seqs=1, **sizes)
    drafts = {"method": "draft_model", "model": str(GOLDEN / name), "num_speculative_tokens": 3}
    fast = LLM(plain.model, speculative_config=drafts, max_num_seqs=3, max_model_len=200, recurrence="chunks")
    assert fast.model.net.policy.compute.recurrence == "chunks"
    wanted, drafted = texts(outputs_of(plain, prompts)), outputs_of(fast, prompts)
    assert texts(drafted) == wanted
    drafted_count = sum(output.metrics.num_draft_tokens for output in drafted)
    assert 0 < sum(output.metrics.num_accepted_tokens for output in drafted) < drafted_count


@pytest.mark.parametrize("name", HYBRIDS)
def test_whole_texts_and_packed_ones_have_the_logits_of_steps(name: str):
    model = load_model(GOLDEN / name, make_policy("float32"))
    token_BT = jnp.asarray(np.random.default_rng(1).integers(2, model.net.arch.vocab_size, (2, 100)), jnp.int32)

    def logits(recurrence: str) -> Array:
        net = Transformer(model.net.arch, model.net.policy.update(recurrence=recurrence))
        position_BT = jnp.broadcast_to(jnp.arange(100, dtype=jnp.int32), token_BT.shape)
        hidden = forward(net, model.params, Inputs(token_BT, position_BT))
        return head(net, model.params, hidden.last_BTD)

    np.testing.assert_allclose(logits("chunks"), logits("steps"), rtol=0, atol=1e-4)


def test_a_model_without_recurrent_layers_refuses_chunks():
    with pytest.raises(ConfigError, match=r"'chunks', but qwen3_moe has no recurrent layers; leave it out"):
        LLM(GOLDEN / "qwen3_moe", recurrence="chunks")
    with pytest.raises(ConfigError, match=r"recurrence 'scan' is not known; known are \['steps', 'chunks'\]"):
        LLM("/nowhere", recurrence="scan")
