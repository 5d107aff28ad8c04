"""What training reads of a rollout: log-probabilities that scoring gives to the bit, and the experts of each token."""

from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint.load.model import load_model
from jaxspec.errors import ConfigError, RequestError
from jaxspec.models.transformer import chosen_experts, teacher_forced
from jaxspec.nn.policy import make_policy
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import RequestOutput, SamplingParams
from jaxspec.shapes import Array, Params
from tests.oracle.conftest import CAPACITY, VOCAB

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
TREE = {"method": "ngram", "speculative_token_tree": [2, 2], "prompt_lookup_min": 1}


def rollout(llm: LLM, **more: Any) -> list[RequestOutput]:
    """Prompts of many lengths, more than there are rows."""
    rng = np.random.default_rng(2)
    prompts = [rng.integers(1, VOCAB, length).tolist() for length in (1, 5, 30, 63)]
    params = SamplingParams(n=2, temperature=1.0, max_tokens=30, seed=4, logprobs=0, ignore_eos=True, **more)
    return llm.generate(prompts, params, use_tqdm=False)


def small_lm(draft_dir: Path) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(draft_dir), "num_speculative_tokens": 2}


CASES = [
    pytest.param("bfloat16", "auto", "tree", (8, 32), id="bfloat16, kernels of the CPU, a tree"),
    pytest.param("float32", "auto", "ngram", (8, 64), id="float32, kernels of the CPU, prompt lookup"),
    pytest.param("float32", "xla", "draft", None, id="float32, XLA, a draft model", marks=pytest.mark.slow),
    pytest.param("bfloat16", "xla", "draft", None, id="bfloat16, XLA, a draft model", marks=pytest.mark.slow),
    pytest.param("bfloat16", "auto", "none", None, id="bfloat16, plain", marks=pytest.mark.slow),
    pytest.param("float32", "xla", "tree", None, id="float32, XLA, a tree", marks=pytest.mark.slow),
]


@pytest.mark.served
@pytest.mark.parametrize(("dtype", "kernels", "method", "buckets"), CASES)
def test_reported_log_probabilities_are_the_scored_ones_to_the_bit(
    target_dir: Path, draft_dir: Path, dtype: str, kernels: str, method: str, buckets: tuple[int, ...] | None
):
    """Sampled token by token and draft by draft, beside others; scored in chunks, prompt and text in one."""
    config = {"ngram": NGRAM, "tree": TREE, "draft": small_lm(draft_dir), "none": None}[method]
    llm = LLM(
        target_dir, dtype=dtype, kernels=kernels, speculative_config=config, max_model_len=CAPACITY, max_num_seqs=3,
        prefill_buckets=buckets,
    )  # fmt: skip
    outputs = rollout(llm)
    made = [(output, c) for output in outputs for c in output.outputs]
    scores = llm.score([output.prompt_token_ids + c.token_ids for output, c in made])
    if config is not None:
        assert sum(output.metrics.num_accepted_tokens for output in outputs) > 0
        assert any(False in c.drafted and True in c.drafted for _, c in made)
    for (output, c), entries in zip(made, scores, strict=True):
        reported = [entry[token] for entry, token in zip(c.logprobs or [], c.token_ids, strict=True)]
        scored = [entry for entry in entries[len(output.prompt_token_ids) :] if entry is not None]
        assert [(one.logprob, one.rank) for one in scored] == [(one.logprob, one.rank) for one in reported]


@pytest.fixture(scope="module")
def routed(target_dir: Path) -> dict[str, LLM]:
    settings: dict[str, Any] = {
        "dtype": "float32", "max_model_len": CAPACITY, "max_num_seqs": 3, "prefill_buckets": (8, 32), "max_logprobs": 1,
        "enable_return_routed_experts": True,
    }  # fmt: skip
    return {
        name: LLM(target_dir, speculative_config=config, **settings)
        for name, config in {"plain": None, "ngram": NGRAM}.items()
    }


def test_experts_of_each_token(routed: dict[str, LLM], target_dir: Path):
    """With drafts as without, also after a failed step, and those of a forward over the whole text."""
    model = load_model(target_dir, make_policy("float32"))
    place = jnp.arange(CAPACITY, dtype=jnp.int32)[None]

    @jax.jit
    def experts_of(params: Params, token: Array) -> Array:
        return chosen_experts(model.net, teacher_forced(model.net, params, token, place)[1], token)

    wanted = rollout(routed["plain"])
    outputs = rollout(routed["ngram"], prompt_logprobs=0)
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 0
    for output, other in zip(outputs, wanted, strict=True):
        for c, same in zip(output.outputs, other.outputs, strict=True):
            ids = output.prompt_token_ids + c.token_ids
            assert c.token_ids == same.token_ids
            assert c.routed_experts is not None
            assert c.routed_experts.dtype == np.uint8
            assert c.routed_experts.shape == (len(ids) - 1, 2, 2)
            np.testing.assert_array_equal(c.routed_experts, same.routed_experts)
            token = np.zeros((1, CAPACITY), np.int32)  # one program for texts of all lengths
            token[0, : len(ids) - 1] = ids[:-1]
            np.testing.assert_array_equal(c.routed_experts, experts_of(model.params, token)[0, : len(ids) - 1])


def test_experts_of_texts_that_end_early_or_are_read_again(routed: dict[str, LLM], monkeypatch: pytest.MonkeyPatch):
    llm = routed["ngram"]
    params = SamplingParams(temperature=1.0, max_tokens=40, seed=4, ignore_eos=True)
    (whole,) = llm.generate([[3, 4, 5]], params, use_tqdm=False)[0].outputs
    ends = SamplingParams(temperature=1.0, max_tokens=40, seed=4, stop_token_ids=[whole.token_ids[9]], ignore_eos=True)
    (short,) = llm.generate([[3, 4, 5]], ends, use_tqdm=False)[0].outputs
    assert whole.routed_experts is not None
    assert short.routed_experts is not None
    assert len(short.routed_experts) == 3 + len(short.token_ids) - 1 < len(whole.routed_experts)
    np.testing.assert_array_equal(short.routed_experts, whole.routed_experts[: len(short.routed_experts)])
    dispatch, calls = llm.engine.programs.dispatch, []

    def failing(*args: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError("no room")
        return dispatch(*args, **more)

    monkeypatch.setattr(llm.engine.programs, "dispatch", failing)
    output = llm.submit([3, 4, 5], params)
    while not output.finished:
        try:
            llm.step()
        except MemoryError:
            assert len(calls) == 2
    assert output.outputs[0].token_ids == whole.token_ids
    again = output.outputs[0].routed_experts
    assert again is not None
    np.testing.assert_array_equal(again, whole.routed_experts)


def test_experts_that_nobody_asks_for(routed: dict[str, LLM], target_dir: Path, monkeypatch: pytest.MonkeyPatch):
    quiet = SamplingParams(temperature=0.0, max_tokens=3, return_routed_experts=False)
    assert routed["plain"].generate([[3]], quiet, use_tqdm=False)[0].outputs[0].routed_experts is None
    llm = routed["plain"]
    monkeypatch.setattr(llm.prompts, "spec", llm.prompts.spec.__class__(3, CAPACITY))
    with pytest.raises(RequestError, match=r"built without LLM\(enable_return_routed_experts=True\)"):
        llm.generate([[3]], SamplingParams(return_routed_experts=True))
    with pytest.raises(ConfigError, match="enable_return_routed_experts must be true or false, got 1"):
        LLM(target_dir, enable_return_routed_experts=cast(Any, 1))
