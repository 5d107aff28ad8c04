"""Biases, allowed tokens and bad words: with any drafter the text of plain decoding, which is what NumPy says."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxspec.errors import RequestError
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import RequestOutput, SamplingParams
from jaxspec.topology import DynamicTree, chain
from tests.oracle.conftest import CAPACITY, EOS, LETTERS, VOCAB, Lab, SharedPrograms, mixed_requests, tokens_of

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": CAPACITY, "max_num_seqs": 3, "prefill_buckets": (8, 32), "max_logprobs": 3,
}  # fmt: skip
PROMPTS = [prompt for prompt, _ in mixed_requests("cold")][:6]
LENGTH = 18
ALLOWED = list(range(2, VOCAB, 5))
STYLES: dict[str, dict[str, Any]] = {
    "logit_bias": {"logit_bias": {3: 6.0, 11: 5.0, 40: -100.0}},
    "allowed_token_ids": {"allowed_token_ids": ALLOWED},
    "bad_words": {},  # what each text says without them
    "everything": {
        "logit_bias": {ALLOWED[0]: 2.0, ALLOWED[3]: -4.0, 1: 50.0}, "allowed_token_ids": ALLOWED,
        "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2, "min_tokens": 6,
        "stop_token_ids": ALLOWED[5:7],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def llms(lab: Lab) -> Iterator[dict[str, LLM]]:
    """Plain decoding, and drafters of every kind: lookup and a draft model, in a chain and in a tree."""
    target = str(lab.target_dir)
    configs: dict[str, dict[str, Any] | None] = {
        "plain": None,
        "lookup": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
        "chain": {"model": target, "num_speculative_tokens": 4},
        "tree": {"model": target, "speculative_token_tree": [2, 2]},
        "standard": {"model": target, "num_speculative_tokens": 4, "rejection_sample_method": "standard"},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxspec.serve.engine.Programs", SharedPrograms)
        yield {name: LLM(target, speculative_config=config, **SETTINGS) for name, config in configs.items()}


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def words_of(text: list[int]) -> list[str]:
    """Bad words that a text says: a token, two and three in a row; and one that it says nowhere."""
    spans = ((4, 5), (1, 3), (7, 9), (11, 14), (0, 9))
    return ["".join(LETTERS[i] for i in text[a:b]) for a, b in spans if len(text[a:b]) == b - a] + [LETTERS[5] * 7]


BASE: dict[float, list[list[int]]] = {}


def base(plain: LLM, temperature: float) -> list[list[int]]:
    """The texts without any of it."""
    params = [SamplingParams(temperature=temperature, seed=n, max_tokens=LENGTH, ignore_eos=True) for n in range(6)]
    if temperature not in BASE:
        BASE[temperature] = tokens(plain.generate(PROMPTS, params))
    return BASE[temperature]


def params_of(llms: dict[str, LLM], style: str, temperature: float) -> list[SamplingParams]:
    """Every other request uses nothing."""
    some = []
    for n, text in enumerate(base(llms["plain"], temperature)):
        extra = STYLES[style] if n % 2 == 0 else {}
        if n % 2 == 0 and style in ("bad_words", "everything"):
            extra = {**extra, "bad_words": words_of(text)}
        some.append(SamplingParams(temperature=temperature, seed=n, max_tokens=LENGTH, ignore_eos=True, **extra))
    return some


def oracle(llm: LLM, prompt: list[int], made: list[int], p: SamplingParams) -> np.ndarray:
    """Scores of the next token, from teacher-forced logits, in vLLM's order."""
    x = llm.logits(prompt + made)[-1].astype(np.float64)
    if p.allowed_token_ids is not None:
        x[[i for i in range(VOCAB) if i not in p.allowed_token_ids]] = -np.inf
    for word in p.bad_words or []:
        *rest, last = map(LETTERS.index, word)
        if made[len(made) - len(rest) :] == rest and len(made) >= len(rest):
            x[last] = -np.inf
    for i, value in (p.logit_bias or {}).items():
        x[i] += value
    if len(made) < p.min_tokens:
        x[p.stop_token_ids or []] = -np.inf
    count = np.bincount(made, minlength=VOCAB)
    known = (count > 0) | np.isin(np.arange(VOCAB), prompt)
    x = np.where(known, np.where(x > 0, x / p.repetition_penalty, x * p.repetition_penalty), x)
    return x - p.frequency_penalty * count - p.presence_penalty * (count > 0)


@pytest.mark.parametrize("style", STYLES)
def test_greedy_text_is_what_numpy_says(llms: dict[str, LLM], style: str):
    params = params_of(llms, style, 0.0)
    for n, made in enumerate(tokens(llms["plain"].generate(PROMPTS, params))):
        for place, token in enumerate(made):
            scores = oracle(llms["plain"], PROMPTS[n], made[:place], params[n])
            assert scores[token] > scores.max() - 1e-3, (n, place)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("style", STYLES)
def test_speculation_changes_nothing(llms: dict[str, LLM], style: str, temperature: float):
    params = params_of(llms, style, temperature)
    plain = tokens(llms["plain"].generate(PROMPTS, params))
    without = base(llms["plain"], temperature)
    assert [plain[n] for n in (1, 3, 5)] == [without[n] for n in (1, 3, 5)], "neighbors"
    assert all(plain[n] != without[n] for n in (0, 2, 4))
    for name in ("lookup", "chain", "tree"):
        outputs = llms[name].generate(PROMPTS, params)
        assert tokens(outputs) == plain, name
        accepted = sum(o.metrics.num_accepted_tokens for o in outputs[::2])
        # The draft is the target, and knows of biases; of bad words and penalties it does not.
        if style in ("logit_bias", "allowed_token_ids") and name == "chain":
            steps = sum(o.metrics.num_steps for o in outputs[::2])
            assert (accepted + steps) / steps > 4


@pytest.mark.parametrize("name", ["plain", "chain", "tree", "standard"])
def test_what_is_not_allowed_is_never_said(llms: dict[str, LLM], name: str):
    for temperature in (0.0, 1.0):
        params = params_of(llms, "everything", temperature)
        for n, made in enumerate(tokens(llms[name].generate(PROMPTS, params))):
            if n % 2 == 0:
                assert set(made) <= set(ALLOWED)
                text = "".join(LETTERS[i] for i in made)
                assert not any(word in text for word in params[n].bad_words or [])
        assert not llms[name].engine.busy


def test_settings_leave_with_their_request(llms: dict[str, LLM]):
    for name in ("plain", "chain"):
        llms[name].generate(PROMPTS[:3], params_of(llms, "everything", 0.0)[:3])
        greedy = [SamplingParams(temperature=0.0, seed=n, max_tokens=LENGTH, ignore_eos=True) for n in range(6)]
        assert tokens(llms[name].generate(PROMPTS, greedy)) == base(llms["plain"], 0.0)
        state = llms[name].engine.state.sampling
        assert not np.asarray(state.biased_B).any()
        assert (np.asarray(state.bad_words_BWL) == -1).all()


def test_where_everything_is_banned_the_request_ends_with_an_error(llms: dict[str, LLM]):
    nothing = SamplingParams(allowed_token_ids=[7], bad_words=[LETTERS[7]], temperature=0.8, max_tokens=5)
    later = SamplingParams(allowed_token_ids=[7], bad_words=[LETTERS[7] * 3], temperature=0.0, max_tokens=9)
    fine = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    for name in ("plain", "chain", "tree", "standard"):
        first, second, third = llms[name].generate(PROMPTS[:3], [nothing, later, fine])
        assert (first.outputs[0].token_ids, first.outputs[0].finish_reason) == ([], "error")
        assert (second.outputs[0].token_ids, second.outputs[0].finish_reason) == ([7, 7], "error")
        position = len(PROMPTS[1]) + 1
        assert f"not finite at position {position}, or every token is banned there" in (second.outputs[0].error or "")
        assert third.outputs[0].token_ids == base(llms["plain"], 0.0)[2]
        assert third.outputs[0].error is None
        assert first.finished
        assert not llms[name].engine.busy


def test_only_the_last_tokens_of_a_prompt(llms: dict[str, LLM]):
    long = PROMPTS[2] * 4
    params = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
    for llm in (llms["plain"], llms["chain"]):
        cut = llm.generate([long[:60]], SamplingParams(**params, truncate_prompt_tokens=9))[0]
        assert cut.prompt_token_ids == long[51:60]
        assert tokens([cut]) == tokens(llm.generate([long[51:60]], SamplingParams(**params)))
        fits = llm.generate([long], SamplingParams(**params, truncate_prompt_tokens=-1, min_tokens=3))[0]
        assert fits.prompt_token_ids == long[-(CAPACITY - 3) :]
        assert len(fits.outputs[0].token_ids) == 3
        short = llm.generate([PROMPTS[0]], SamplingParams(**params, truncate_prompt_tokens=9))[0]
        assert short.prompt_token_ids == PROMPTS[0]


def test_text_is_left_out_where_it_is_not_wanted(llms: dict[str, LLM]):
    params = {"temperature": 0.8, "seed": 1, "max_tokens": 8}
    with_text, without = (
        llms["chain"].generate(PROMPTS[:1], SamplingParams(**params, detokenize=d))[0].outputs[0] for d in (True, False)
    )
    assert (without.text, without.token_ids) == ("", with_text.token_ids)
    assert with_text.text


def test_streams_of_every_kind(llms: dict[str, LLM]):
    params: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 14, "n": 2, "logprobs": 1}
    whole = llms["chain"].generate([PROMPTS[1]], SamplingParams(**params))[0]
    news = list(llms["chain"].stream(PROMPTS[1], SamplingParams(**params, output_kind="delta")))
    for index, wanted in enumerate(whole.outputs):
        pieces = [c for output in news for c in output.outputs if c.index == index]
        assert [t for c in pieces for t in c.token_ids] == wanted.token_ids
        assert "".join(c.text for c in pieces) == wanted.text
        assert [p for c in pieces for p in c.logprobs or []] == wanted.logprobs
        assert pieces[-1].finish_reason == wanted.finish_reason
        assert len(pieces) > 2
    (only,) = llms["chain"].stream(PROMPTS[1], SamplingParams(**params, output_kind="final_only"))
    assert only.outputs == whole.outputs
    submitted = llms["chain"].submit(PROMPTS[1], SamplingParams(**params, output_kind="final_only"))
    steps = 0
    while not (moved := llms["chain"].step(1)):
        steps += 1
    assert moved == [submitted]
    assert steps > 0


def test_what_no_engine_can_do_is_refused(llms: dict[str, LLM]):
    for values, words in (
        ({"logit_bias": {VOCAB: 1}}, rf"logit_bias: token ids are from 0 to {VOCAB - 1}"),
        ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids: token ids are from"),
        ({"bad_words": [LETTERS[3] * 17]}, "bad_words: at most 64 sequences of 2 to 16 tokens"),
        ({"prompt_logprobs": 4}, "prompt_logprobs: at most 3, got 4"),
    ):
        with pytest.raises(RequestError, match=words):
            llms["plain"].generate([PROMPTS[0]], SamplingParams(**values))
    assert EOS not in ALLOWED


@pytest.mark.parametrize("topology", [chain(2), DynamicTree(top_k=3, steps=3, nodes=8)], ids=["chain", "dynamic tree"])
@pytest.mark.parametrize("kind", ["mtp", "self"])
def test_heads_and_dynamic_trees_with_biases(lab: Lab, kind: str, topology: Any):
    """Where a head proposes; every third request uses nothing."""
    requests = []
    for n, (prompt, params) in enumerate(mixed_requests("mixed")):
        some = [{"allowed_token_ids": ALLOWED}, {"logit_bias": {3: 6.0, 11: 5.0, 40: -100.0}}, {}][n % 3]
        requests.append((prompt, SamplingParams(**{**vars(params), **some})))
    plain = lab.reference("biased", requests)
    outputs = lab.run(lab.drafter(kind, topology), requests)
    assert tokens_of(outputs) == tokens_of(plain)
    assert all(set(o.outputs[0].token_ids) <= set(ALLOWED) for o in plain[::3])
    if kind == "self":
        assert sum(o.metrics.num_accepted_tokens for o in outputs) > sum(o.metrics.num_steps for o in outputs) / 2
