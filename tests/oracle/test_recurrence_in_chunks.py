"""Recurrent layers that read prompts in chunks: the model's numbers, and one text with and without drafts."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec import LLM, ConfigError, SamplingParams
from jaxspec.checkpoint.load.model import load_model
from jaxspec.models.transformer import Transformer, forward, head
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.policy import make_policy
from jaxspec.serve.request import RequestOutput

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
    sizes = {"max_model_len": 200, "max_logprobs": 0, "recurrence": "chunks", "prefill_buckets": (64, 256)}
    plain = LLM(GOLDEN / name, max_num_seqs=1, dtype="float32", **sizes)
    drafts = {"method": "draft_model", "model": str(GOLDEN / name), "num_speculative_tokens": 3}
    fast = LLM(plain.model, speculative_config=drafts, max_num_seqs=3, **sizes)
    assert fast.model.net.policy.compute.recurrence == "chunks"
    wanted, drafted = texts(outputs_of(plain, prompts)), outputs_of(fast, prompts)
    assert texts(drafted) == wanted
    drafted_count = sum(output.metrics.num_draft_tokens for output in drafted)
    assert 0 < sum(output.metrics.num_accepted_tokens for output in drafted) < drafted_count


@pytest.mark.parametrize("name", HYBRIDS)
def test_whole_texts_are_as_near_to_the_reference_as_in_steps(name: str):
    """Norms of small outputs enlarge what either form rounds, so single logits may differ by more than both err."""
    model, says = load_model(GOLDEN / name, make_policy("float32")), load_file(GOLDEN / name / "reference.safetensors")
    long_BT = np.random.default_rng(1).integers(2, model.net.arch.vocab_size, (2, 150))

    def logits(recurrence: str, token_BT: np.ndarray) -> np.ndarray:
        net = Transformer(model.net.arch, model.net.policy.update(recurrence=recurrence))
        position_BT = jnp.broadcast_to(jnp.arange(token_BT.shape[1], dtype=jnp.int32), token_BT.shape)
        inputs = Inputs(jnp.asarray(token_BT, jnp.int32), position_BT)
        run = jax.jit(lambda params: head(net, params, forward(net, params, inputs).last_BTD))
        return np.asarray(run(model.params))

    chunks, steps = (np.abs(logits(form, says["input_ids"]) - says["logits"]).max() for form in ("chunks", "steps"))
    assert chunks <= 2 * steps + 1e-5
    assert np.mean(np.abs(logits("chunks", long_BT) - logits("steps", long_BT))) < 3e-5


def test_a_model_without_recurrent_layers_refuses_chunks():
    with pytest.raises(ConfigError, match=r"'chunks', but qwen3_moe has no recurrent layers; leave it out"):
        LLM(GOLDEN / "qwen3_moe", recurrence="chunks")
    with pytest.raises(ConfigError, match=r"recurrence 'scan' is not known; known are \['steps', 'chunks'\]"):
        LLM("/nowhere", recurrence="scan")
