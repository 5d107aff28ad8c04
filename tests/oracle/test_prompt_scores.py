"""Log-probabilities of prompts are those of teacher-forced logits, and no length compiles anything of its own."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxspec.errors import RequestError
from jaxspec.serve import compiled
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams
from tests.oracle.conftest import CAPACITY, VOCAB, Lab, SharedPrograms

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": CAPACITY, "max_num_seqs": 2, "prefill_buckets": (8, 32), "max_logprobs": 3,
}  # fmt: skip
LENGTHS = (1, 2, 8, 9, 40, 70, CAPACITY)
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}


def texts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(1, VOCAB, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def llms(lab: Lab) -> Iterator[dict[str, LLM]]:
    target = str(lab.target_dir)
    draft = {"model": str(lab.draft_dir), "num_speculative_tokens": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxspec.serve.engine.Programs", SharedPrograms)
        yield {
            "plain": LLM(target, **SETTINGS),
            "paged with a draft model": LLM(target, speculative_config=draft, kv_page_size=16, **SETTINGS),
        }


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    return x - np.log(np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)) - x.max(1, keepdims=True)


@pytest.mark.parametrize("name", ["plain", "paged with a draft model"])
def test_scores_are_the_teacher_forced_ones(llms: dict[str, LLM], name: str):
    some, llm = texts(), llms[name]
    scores = llm.score(some)
    for ids, entries in zip(some, scores, strict=True):
        logp = log_softmax(llm.logits(ids))
        assert len(entries) == len(ids)
        assert entries[0] is None
        for place, entry in enumerate(entries[1:]):
            wanted = logp[place, ids[place + 1]]
            assert entry is not None
            assert entry.logprob == pytest.approx(wanted, abs=1e-5)
            assert entry.rank == 1 + int((logp[place] > wanted).sum())
    assert llm.score(some[3]) == [scores[3]], "one text alone"
    assert llm.score(np.asarray(some[3])) == [scores[3]]
    assert llm.score([]) == []
    assert not llm.engine.busy


@pytest.mark.parametrize("name", ["plain", "paged with a draft model"])
def test_prompt_logprobs(llms: dict[str, LLM], name: str):
    llm, some = llms[name], texts()[:-1]
    params = [SamplingParams(**GREEDY, prompt_logprobs=n % 4, logprobs=2) for n in range(len(some))]
    quiet = llm.generate(some, SamplingParams(**GREEDY))
    outputs = llm.generate(some, params)
    for n, (ids, output, other) in enumerate(zip(some, outputs, quiet, strict=True)):
        assert output.outputs[0].token_ids == other.outputs[0].token_ids, "nothing else changes"
        assert output.num_cached_tokens is None, "all of the prompt is read, though the prefix cache has most of it"
        assert other.prompt_logprobs is None
        entries, logp = output.prompt_logprobs, log_softmax(llm.logits(ids))
        assert entries is not None
        assert len(entries) == len(ids)
        assert entries[0] is None
        for place, entry in enumerate(entries[1:]):
            assert entry is not None
            best = np.argsort(-logp[place], kind="stable")[: n % 4].tolist()
            assert set(entry) == {ids[place + 1], *best}
            for i, value in entry.items():
                assert value.logprob == pytest.approx(logp[place, i], abs=1e-5)
                assert value.rank == 1 + int((logp[place] > logp[place, i]).sum())


def test_generation_and_scores_agree(llms: dict[str, LLM]):
    prompt = texts()[3]
    for llm in llms.values():
        params = SamplingParams(temperature=0.9, seed=2, max_tokens=20, ignore_eos=True, logprobs=1, n=2)
        for made in llm.generate([prompt], params)[0].outputs:
            (scores,) = llm.score(prompt + made.token_ids)
            told = [entry[token] for entry, token in zip(made.logprobs or [], made.token_ids, strict=True)]
            for a, b in zip(scores[len(prompt) :], told, strict=True):
                assert a is not None
                assert (a.logprob, a.rank) == (pytest.approx(b.logprob, abs=1e-5), b.rank)


def test_all_samples_share_the_prompt_s_log_probabilities(llms: dict[str, LLM]):
    """They are computed once, though the third sample waits for a row."""
    output = llms["plain"].generate([texts()[4]], SamplingParams(n=3, seed=0, max_tokens=3, prompt_logprobs=1))[0]
    alone = llms["plain"].generate([texts()[4]], SamplingParams(seed=0, max_tokens=3, prompt_logprobs=1))[0]
    assert output.prompt_logprobs == alone.prompt_logprobs
    assert all(c.finish_reason for c in output.outputs)


def test_no_length_compiles_a_program_of_its_own(llms: dict[str, LLM], monkeypatch: pytest.MonkeyPatch):
    llm = llms["plain"]
    llm.score([[1] * 40, [2] * 5])
    monkeypatch.setattr(compiled, "compile_program", lambda *_, **__: pytest.fail("compiled again"))
    for length in range(1, CAPACITY + 1, 7):
        assert len(llm.score([[1] * length])[0]) == length
    for length in (2, 40, 64, 65, 70, 96):
        llm.logits([1] * length)
    assert llm._teacher._cache_size() == 2, "64 and 128 tokens"


def test_scores_beside_requests_that_decode(llms: dict[str, LLM]):
    """Texts are read in rows that are free, and leave the others as they are."""
    llm, some = llms["paged with a draft model"], texts()
    wanted = llm.generate([some[3]], SamplingParams(**{**GREEDY, "max_tokens": 20}))[0].outputs[0].token_ids
    alone = llm.score(some)
    output = llm.submit(some[3], SamplingParams(**{**GREEDY, "max_tokens": 20}))
    assert llm.score(some) == alone
    while not output.finished:
        llm.step()
    assert output.outputs[0].token_ids == wanted
    assert llm.engine.pool is not None
    assert llm.engine.pool.free == llm.engine.pool.total


def test_texts_that_cannot_be_scored(llms: dict[str, LLM]):
    for bad, words in (
        ([[1] * (CAPACITY + 1)], rf"score: {CAPACITY + 1} tokens, the capacity is {CAPACITY}"),
        ([[]], "at least one token"),
        ([[1, VOCAB]], rf"integers from 0 to {VOCAB - 1}"),
        (["abc"], "at least one token is needed, got 'abc'"),
    ):
        with pytest.raises(RequestError, match=words):
            llms["plain"].score(bad)
    assert not llms["plain"].engine.busy
