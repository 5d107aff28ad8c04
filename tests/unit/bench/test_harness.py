"""The model of lm-evaluation-harness, over a stand-in of the harness: what it asks of a model, as its 0.4.13 does."""

import importlib
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxspec.cli.main import main
from jaxspec.errors import ConfigError
from jaxspec.serve.llm import LLM
from tests.unit.serve.tiny_model import write_tiny_model

TEXTS = [("the cat", " sat on a mat"), ("", "hello world"), ("one two", " three")]


class TemplateLM:
    """Encodes pairs of context and continuation, as the harness's class of that name."""

    def __init__(self):
        self.cache_hook = SimpleNamespace(add_partial=lambda *args: None)

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        pairs: list[tuple[Any, list[int], list[int]]] = []
        for context, continuation in (request.args for request in requests):
            before = self.tok_encode(context) if context else [self.prefix_token_id]
            whole = self.tok_encode(context + continuation) if context else before + self.tok_encode(continuation)
            pairs.append(((context, continuation), before, whole[len(before) :]))
        return self._loglikelihood_tokens(pairs)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def rolling_windows(token_list: list[int], prefix_token: int, max_seq_len: int, context_len: int):
    """Disjoint pairs of context and predicted tokens; the context is what stands before, or the prefix."""
    for first in range(0, len(token_list), max_seq_len):
        yield [token_list[first - 1] if first else prefix_token], token_list[first : first + max_seq_len]


@pytest.fixture(scope="module")
def harness():
    """The module, imported over the stand-in."""
    names = {name: ModuleType(name) for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.utils")}
    names["lm_eval.api.model"].TemplateLM = TemplateLM
    utils = names["lm_eval"].utils = names["lm_eval.utils"]
    utils.get_rolling_token_windows, utils.make_disjoint_window = rolling_windows, lambda pair: pair
    with pytest.MonkeyPatch.context() as patch:
        for name, module in names.items():
            patch.setitem(sys.modules, name, module)
        yield importlib.import_module("jaxspec.bench.harness")
    sys.modules.pop("jaxspec.bench.harness", None)


@pytest.fixture(scope="module")
def lm(harness: ModuleType, tmp_path_factory: pytest.TempPathFactory):
    directory = write_tiny_model(tmp_path_factory.mktemp("harness") / "tiny")
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}
    return harness.JaxspecLM(
        str(directory), speculative_config=json.dumps(ngram), batch_size=2, dtype="float32", max_model_len=48,
        prefill_buckets=(16,), steps_per_dispatch=2,
    )  # fmt: skip


def request(*args: Any) -> SimpleNamespace:
    return SimpleNamespace(args=args)


def reference(llm: LLM, ids: list[int], first: int) -> tuple[float, bool]:
    """Sum of log-probabilities from a place on, and whether greedy decoding says the same."""
    logits = llm.logits(ids).astype(np.float64)[first - 1 : -1]
    logp = (
        logits
        - np.log(np.sum(np.exp(logits - logits.max(-1, keepdims=True)), -1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )
    tail = ids[first:]
    return float(logp[range(len(tail)), tail].sum()), bool((logits.argmax(-1) == tail).all())


def test_continuations_get_the_log_probability_of_teacher_forcing(lm: Any):
    scores = lm.loglikelihood([request(*pair) for pair in TEXTS])
    for (context, continuation), (value, is_greedy) in zip(TEXTS, scores, strict=True):
        before = lm.tok_encode(context) if context else [lm.prefix_token_id]
        whole = lm.tok_encode(context + continuation) if context else before + lm.tok_encode(continuation)
        wanted, greedy = reference(lm.llm, whole, len(before))
        assert value == pytest.approx(wanted, abs=1e-4)
        assert is_greedy == greedy


def test_a_text_that_greedy_decoding_wrote_is_greedy(lm: Any):
    prompt = lm.tok_encode("the cat")
    said = lm.llm.generate([{"prompt_token_ids": prompt}], lm._sampling({"max_gen_toks": 6, "until": []}))
    ((_, is_greedy),) = lm._loglikelihood_tokens([(None, prompt, said[0].outputs[0].token_ids)])
    assert is_greedy


def test_long_texts_are_scored_window_by_window(lm: Any):
    text = "the cat sat on a mat hello world one two three " * 12
    ids, length = lm.tok_encode(text), lm.max_length
    assert len(ids) > length
    wanted = 0.0
    for context, part in rolling_windows(ids, lm.prefix_token_id, length, 1):
        wanted += reference(lm.llm, context + part, 1)[0]
    assert lm.loglikelihood_rolling([request(text)]) == [pytest.approx(wanted, abs=1e-3)]


def test_contexts_that_are_too_long_lose_their_beginning(lm: Any):
    ids = lm.tok_encode("the cat sat on a mat " * 20)
    ((value, _),) = lm._loglikelihood_tokens([(None, ids[:-2], ids[-2:])])
    kept = ids[-(lm.max_length + 1) :]
    assert value == pytest.approx(reference(lm.llm, kept, len(kept) - 2)[0], abs=1e-4)


def test_generation_takes_the_tasks_settings(lm: Any):
    plain = lm.generate_until([request("the cat", {"until": [], "max_gen_toks": 8, "do_sample": False})])[0]
    stop = plain.strip().split()[0] if plain.strip() else plain
    settings = {"until": [stop], "max_gen_toks": 8, "temperature": 0.0}
    cut = lm.generate_until([request("the cat", settings), request("hello", {"until": "zzz", "max_tokens": 3})])
    assert cut[0] == plain.split(stop)[0]
    assert len(cut) == 2


def test_speculative_config_must_be_json(harness: ModuleType):
    with pytest.raises(ConfigError, match="speculative_config is not valid JSON"):
        harness.JaxspecLM("anywhere", speculative_config="{")


def test_the_command_says_what_to_install(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    assert main(["lm_eval", "--tasks", "hellaswag"]) == 2
    assert "pip install 'jaxspec[eval]'" in capsys.readouterr().err
