"""Structured output: the text is plain decoding's with the same grammar, and fits it, whatever drafts."""

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.decode import masked_step
from jaxspec.errors import RequestError
from jaxspec.serve import masked_programs
from jaxspec.serve.grammar import source_of
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import RequestOutput, SamplingParams
from jaxspec.serve.structured_outputs import StructuredOutputsParams
from lab.grammar_schemas import make_schema
from tests.oracle.conftest import SharedPrograms
from tests.oracle.grammar_model import write_grammar_model
from tests.oracle.interrupting import alarms_interrupt, interrupted, is_idle

LENGTH, A = 40, 65  # the id of "a", the 65th printable character
SCHEMAS = [make_schema(seed) for seed in (3, 8)]
PROMPTS = ["hello", '{"name": ', "abc", "12, ", "name", "value", "list", "[true, "]
COMMON = "name value list true 12 " * 2  # more than one block of the prefix cache
FORMS: list[dict[str, Any] | None] = [
    {"json": SCHEMAS[0].schema, "disable_any_whitespace": True}, None,
    {"json": json.dumps(SCHEMAS[1].schema)}, {"regex": "[a-c]{3,9}-[0-9]{2}"}, {"choice": ["yes", "no", "maybe é"]},
    None, {"grammar": 'start: "x" b\nb: /[0-9]{4}/ | "(" b ")"'}, {"json_object": True, "disable_any_whitespace": True},
]  # fmt: skip
EXTRAS: list[dict[str, Any]] = [
    {}, {"logprobs": 2}, {"repetition_penalty": 1.3}, {"logit_bias": {70: 3.0}, "logprobs": 1}, {"n": 2}, {},
    {"presence_penalty": 0.5, "top_k": 9}, {"min_p": 0.05, "bad_words": ["a"]},
]  # fmt: skip
SPECULATION: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "chain": {"num_speculative_tokens": 3},
    "tree": {"speculative_token_tree": [2, 1]},
    "lookup": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1},
    "standard": {"num_speculative_tokens": 2, "rejection_sample_method": "standard"},
}
Texts = list[tuple[list[int], str | None]]


class Engines:
    """Engines by how they speculate, made when first asked for."""

    def __init__(self, directory: Path):
        self.directory, self.made, self.plain = directory, {}, {}

    def __getitem__(self, name: str) -> LLM:
        if name not in self.made:
            config = SPECULATION[name]
            if config is not None and "method" not in config:
                config = {"model": str(self.directory), **config}
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("jaxspec.serve.engine.Programs", SharedPrograms)
                self.made[name] = LLM(
                    self.directory, speculative_config=config, dtype="float32", max_model_len=96, max_num_seqs=4,
                    prefill_buckets=[16], max_logprobs=2, compile_cache=False, kernels="xla",
                )  # fmt: skip
        return self.made[name]

    def reference(self, temperature: float) -> Texts:
        if temperature not in self.plain:
            self.plain[temperature] = texts(run(self["plain"], temperature))
        return self.plain[temperature]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(write_grammar_model(tmp_path_factory.mktemp("grammar")))


def params_of(temperature: float) -> list[SamplingParams]:
    some = []
    for number, (form, extra) in enumerate(zip(FORMS, EXTRAS, strict=True)):
        form = None if form is None else StructuredOutputsParams(**form)
        some.append(
            SamplingParams(temperature=temperature, seed=number, max_tokens=LENGTH, structured_outputs=form, **extra)
        )
    return some


def run(llm: LLM, temperature: float) -> list[RequestOutput]:
    return llm.generate(PROMPTS, params_of(temperature))


def texts(outputs: list[RequestOutput]) -> Texts:
    return [(c.token_ids, c.finish_reason) for output in outputs for c in output.outputs]


def fits(number: int, text: str) -> bool:
    if number in (0, 2):
        return SCHEMAS[number // 2].accepts(json.loads(text))
    if number == 7:
        return isinstance(json.loads(text), dict)
    return {
        3: partial(re.fullmatch, "[a-c]{3,9}-[0-9]{2}"),
        4: ["yes", "no", "maybe é"].__contains__,
        6: partial(re.fullmatch, r"x(\(*)[0-9]{4}(\)*)"),
    }[number](text) not in (None, False)


def check_forms(outputs: list[RequestOutput]) -> int:
    """Checks the texts that were not cut; returns how many."""
    ended = 0
    for number, output in enumerate(outputs):
        for c in output.outputs:
            assert c.finish_reason in ("stop", "length"), c.error
            if FORMS[number] is not None and c.finish_reason == "stop":
                assert fits(number, c.text), (number, c.text)
                ended += 1
    return ended


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_plain_texts_have_their_forms(engines: Engines, temperature: float):
    assert check_forms(run(engines["plain"], temperature)) >= 4


@pytest.mark.parametrize("name", ["tree", *(pytest.param(n, marks=pytest.mark.slow) for n in ("chain", "lookup"))])
def test_speculation_changes_nothing(engines: Engines, name: str):
    for temperature in (0.0, 1.0):
        outputs = run(engines[name], temperature)
        assert texts(outputs) == engines.reference(temperature)
        limited = [output for output, form in zip(outputs, FORMS, strict=True) if form is not None]
        assert sum(o.metrics.num_accepted_tokens for o in limited) > sum(o.metrics.num_steps for o in limited) / 4


@pytest.mark.slow
def test_rejection_sampling_keeps_to_the_forms(engines: Engines):
    for temperature in (0.0, 1.0):
        assert check_forms(run(engines["standard"], temperature)) >= 4
    assert texts(run(engines["standard"], 0.0)) == engines.reference(0.0)


def test_neighbors_without_grammars_say_what_they_say_alone(engines: Engines):
    for temperature in (0.0, 1.0):
        alone = [n for n, form in enumerate(FORMS) if form is None]
        params = params_of(temperature)
        outputs = engines["plain"].generate([PROMPTS[n] for n in alone], [params[n] for n in alone])
        together = engines["tree"].generate(PROMPTS, params)
        assert texts(outputs) == texts([together[n] for n in alone])


def test_a_batch_without_grammars_runs_the_program_that_it_always_did(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(masked_programs.MaskedPrograms, "dispatch", lambda *_: pytest.fail("masked"))
    engines["plain"].generate(PROMPTS[:5], SamplingParams(max_tokens=3))


def test_a_step_that_fails_goes_on_to_the_same_text(engines: Engines, monkeypatch: pytest.MonkeyPatch):
    llm, calls = engines["tree"], []
    right = masked_programs.MaskedPrograms.dispatch

    def fails(self, state, *rest):
        calls.append(1)
        if len(calls) in (3, 7):
            right(self, state, *rest)
            raise MemoryError("once")
        return right(self, state, *rest)

    monkeypatch.setattr(masked_programs.MaskedPrograms, "dispatch", fails)
    submitted = [llm.submit(p, s) for p, s in zip(PROMPTS, params_of(1.0), strict=True)]
    failures = 0
    while not all(output.finished for output in submitted):
        try:
            llm.step()
        except MemoryError:
            failures += 1
    assert failures == 2
    assert texts(submitted) == engines.reference(1.0)


def test_interrupts_at_any_moment(engines: Engines):
    llm, rng, ends = engines["tree"], random.Random(0), Counter()
    prompts = [f"{COMMON}{prompt}" for prompt in PROMPTS]
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate(prompts, params_of(0.0)),
        lambda: list(llm.stream(prompts[3], params_of(0.8)[3])),
        lambda: (llm.submit(prompts[0], params_of(0.0)[0]), llm.step(), llm.step()),
    ]
    wanted = texts(calls[0]())
    assert llm.generate(prompts[0], params_of(0.0)[0])[0].num_cached_tokens
    with alarms_interrupt():
        for round_ in range(24):
            ends[interrupted(calls[(0, 0, 1, 0, 2)[round_ % 5]], 10 ** rng.uniform(-4, -0.7))] += 1
            llm.abort()
            assert texts(calls[0]()) == wanted, round_
            assert is_idle(llm), round_
    assert ends["interrupted"] > 12, ends


def test_interrupts_while_schemas_are_read():
    schema: Any = {"type": "object", "properties": {"kind": {"anyOf": [{"type": "array"}, {"type": "string"}]}}}
    params, rng, ends = StructuredOutputsParams(json=schema), random.Random(0), Counter()
    with alarms_interrupt():
        for _ in range(400):
            ends[interrupted(lambda: [source_of(params) for _ in range(30)], 10 ** rng.uniform(-5, -3.3))] += 1
    assert ends["interrupted"] > 40, ends


def test_the_form_begins_after_thinking(engines: Engines):
    wanted = "[a-c]{3,9}-[0-9]{2}"
    params = SamplingParams(
        temperature=1.0, seed=2, n=4, max_tokens=70, logit_bias={A: 9.0, A + 1: 9.0, A + 2: 8.0},
        structured_outputs=StructuredOutputsParams(regex=wanted, after="ab"),
    )  # fmt: skip
    plain, fast = (engines[name].generate(["hello"], params) for name in ("plain", "tree"))
    assert texts(plain) == texts(fast)
    thoughts = []
    for c in fast[0].outputs:
        thought, _, answer = c.text.partition("ab")
        thoughts.append(thought)
        assert re.fullmatch(wanted, answer), c.text
    assert any(thoughts)
    at_once = engines["tree"].generate(["so ab\n"], params)
    assert all(re.fullmatch(wanted, c.text) for c in at_once[0].outputs)


def test_where_a_grammar_has_no_end_the_request_alone_fails(engines: Engines):
    endless = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    params = params_of(0.0)
    params[1] = SamplingParams(structured_outputs=StructuredOutputsParams(json=endless))
    outputs = engines["tree"].generate(PROMPTS, params)
    assert outputs[1].outputs[0].finish_reason == "error"
    assert "allows nothing after this text" in (outputs[1].outputs[0].error or "")
    assert texts(outputs[2:]) == engines.reference(0.0)[2:]


def test_forced_tokens_take_the_places_of_the_first_drafts():
    proposal = masked_step.Proposal(np.asarray([[5, 6, 7]]), np.asarray([[True, False, False]]), None)
    forced = masked_step.with_forced(proposal, np.asarray([[9, -1, -1]]))
    assert np.asarray(forced.token_BN).tolist() == [[9, 6, 7]]
    assert np.asarray(forced.valid_BN).tolist() == [[True, False, False]]


def test_several_hosts_are_refused(engines: Engines, monkeypatch: pytest.MonkeyPatch):
    llm = engines["plain"]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.delitem(vars(llm.prompts), "_grammars", raising=False)
    with pytest.raises(RequestError, match="grammars need one process; take replicas"):
        run(llm, 0.0)
