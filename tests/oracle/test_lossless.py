"""Losslessness: with any drafter, topology, rule, cache and batch the tokens are plain decoding's."""

from collections.abc import Iterator
from itertools import pairwise as neighbors
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.serve.llm import LLM
from jaxspec.serve.request import RequestOutput, SamplingParams
from jaxspec.topology import AnyTopology, DynamicTree, Topology, chain, tree
from tests.oracle.conftest import (
    CAPACITY,
    EOS,
    LETTERS,
    VOCAB,
    Lab,
    Request,
    Scripted,
    SharedPrograms,
    generate,
    mixed_requests,
    script,
    tokens_of,
)
from tests.oracle.covering import Case, every_case, pairwise

CHAINS = [chain(k) for k in (1, 2, 4, 8)]
TREES = [tree((2,)), tree((2, 2)), tree((3, 1, 1))]
UNEVEN = Topology((-1, 0, 0, 0, 1, 1, 2, 4, 4, 6))
GROWN = DynamicTree(top_k=3, steps=3, nodes=8)
# Every other shape costs seconds of compilation: these run always, the others only with the slow tests.
QUICK = (chain(4), tree((2, 2)))
BATCHES = ("cold", "warm", "mixed")


def name_of(topology: AnyTopology) -> str:
    if isinstance(topology, DynamicTree):
        return "grown"
    return f"chain{topology.drafts}" if topology.is_chain else "tree" + "".join(map(str, topology.parents[1:]))


def marked(*topologies: Topology, quick: tuple[Topology, ...] = QUICK) -> list:
    """Parameters of which all but the quick ones are slow."""
    return [pytest.param(t, id=name_of(t), marks=[] if t in quick else [pytest.mark.slow]) for t in topologies]


def accepted_by_script(drafter: Scripted, request: Request, number: int, output: RequestOutput) -> tuple[int, int]:
    """Accepted drafts and verifications that a scripted drafter must lead to."""
    prompt, end = request[0], len(request[0]) + len(output.outputs[0].token_ids)
    top, twins = drafter.topology, bool(drafter.twins)
    good = ~(np.asarray(drafter.wrong_RS[number]) | np.asarray(drafter.silent_RS[number]))
    anchor, accepted, steps = len(prompt) - 1, 0, 0
    while anchor + 1 < end:
        node, at = 0, anchor + 1
        while top.children[node] and at < end and good[at]:
            siblings = top.children[node]
            node, at = siblings[0 if twins else at % len(siblings)], at + 1
        committed = min(at - anchor, end - anchor - 1)
        accepted, steps, anchor = accepted + committed - 1, steps + 1, anchor + committed
    return accepted, steps


def check_script(drafter: Scripted, requests: list[Request], outputs: list[RequestOutput]) -> None:
    for number, (request, output) in enumerate(zip(requests, outputs, strict=True)):
        m = output.metrics
        assert (m.num_accepted_tokens, m.num_steps) == accepted_by_script(drafter, request, number, output)


def test_plain_decoding_is_the_teacher_forced_argmax(lab: Lab):
    model = lab.model("target")
    requests = mixed_requests("cold")
    teach = jax.jit(lambda ids, position: model.net.apply(model.params, ids, position, method="logits_of")[0])
    position = np.arange(CAPACITY, dtype=np.int32)[None]
    for (prompt, _), output in zip(requests, lab.reference("cold", requests), strict=True):
        text = prompt + output.outputs[0].token_ids
        logits = teach(np.asarray([text + [0] * (CAPACITY - len(text))], np.int32), position)[:, : len(text)]
        best = np.asarray(jnp.argmax(logits[0], axis=-1))[len(prompt) - 1 : -1]
        assert best.tolist() == output.outputs[0].token_ids


def test_the_reference_batches_vary(lab: Lab):
    texts = [c[0] for kind in BATCHES for c in tokens_of(lab.reference(kind, mixed_requests(kind)))]
    assert len({token for text in texts for token in text}) > VOCAB // 2
    ended = [o.outputs[0] for o in lab.reference("warm", mixed_requests("warm"))]
    assert {c.finish_reason for c in ended} == {"stop", "length"}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("topology", marked(*CHAINS, *TREES, UNEVEN, quick=(*QUICK, UNEVEN)))
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0], ids=["perfect", "mixture", "adversarial"])
def test_scripted_drafts(lab: Lab, topology: Topology, batch: str, wrong: float):
    requests = mixed_requests(batch)
    plain = lab.reference(batch, requests)
    for twins in (False, True) if not topology.is_chain and 0 < wrong < 1 else (False,):
        drafter = script(requests, plain, topology, wrong=wrong, silent=0.2 if 0 < wrong < 1 else 0.0, twins=twins)
        outputs = lab.run(drafter, requests)
        assert tokens_of(outputs) == tokens_of(plain)
        check_script(drafter, requests, outputs)
        if wrong == 1:
            assert sum(o.metrics.num_accepted_tokens for o in outputs) == 0


FACTORS: dict[str, list[Any]] = {
    "drafter": ["ngram", "self", "random", "mtp", "scripted"],
    "topology": [*QUICK, GROWN, *(t for t in (*CHAINS, *TREES) if t not in QUICK)],
    "rule": ["match", "greedy"],
    "cache": ["rows", "pages"],
    "layout": ["native", "unrolled"],
}
PAGES = {"block": 16, "page": 16, "pages": 2 + 2 * 128 // 16}  # too few for all rows at once


def possible(case: Case) -> bool:
    return case["topology"] != GROWN or case["drafter"] not in ("ngram", "scripted")


def named(case: Case) -> str:
    return "-".join(name_of(v) if name == "topology" else v for name, v in case.items())


# Each case compiles a program. Stacked weights run with every family in test_families_lossless.
QUICK_CASES = pairwise(every_case(FACTORS | {"topology": [*QUICK, GROWN], "layout": ["native"]}, possible))
SLOW_CASES = [case for case in every_case(FACTORS, possible) if case not in QUICK_CASES]


@pytest.mark.parametrize(
    "case", [*QUICK_CASES, *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW_CASES)], ids=named
)
def test_any_drafter_topology_rule_and_cache(lab: Lab, case: Case):
    """Every pair of values in the quick cases, every combination in the slow ones."""
    for batch, steps in zip(BATCHES if case["rule"] == "match" else ["cold"], (None, 1, 3), strict=False):
        check_case(lab, case, batch, steps)


def check_case(lab: Lab, case: Case, batch: str, steps: int | None) -> None:
    """Runs a batch; its tokens are plain decoding's, and its counts what the drafter must reach."""
    kind, topology, layout = (case[name] for name in ("drafter", "topology", "layout"))
    requests = mixed_requests(batch)
    plain = lab.reference(batch, requests, layout=layout)
    scripted = kind == "scripted"
    drafter = script(requests, plain, topology, wrong=0.3) if scripted else lab.drafter(kind, topology, layout=layout)
    engine = lab.engine(drafter, layout=layout, rule=case["rule"], **(PAGES if case["cache"] == "pages" else {}))
    outputs = generate(engine, requests, steps)
    assert tokens_of(outputs) == tokens_of(plain), batch
    if scripted:
        check_script(drafter, requests, outputs)
    if case["cache"] == "pages":
        assert engine.pool.free == engine.pool.total
    accepted, drafted, steps = (
        sum(getattr(o.metrics, f"num_{name}") for o in outputs) for name in ("accepted_tokens", "draft_tokens", "steps")
    )
    if kind == "self" and topology == GROWN:
        assert accepted > 1.5 * steps
    elif kind == "self" and batch == "cold":  # every draft on the first path is accepted
        for output in outputs:
            count = len(output.outputs[0].token_ids)
            assert output.metrics.num_steps == -(-count // (topology.max_depth + 1))
            assert output.metrics.num_accepted_tokens == count - output.metrics.num_steps
    elif kind == "random" and batch == "cold":
        assert accepted < (0.2 * steps if topology == GROWN else 0.15 * drafted)


@pytest.mark.parametrize("topology", [pytest.param(chain(4), marks=pytest.mark.slow), tree((2, 2))], ids=name_of)
def test_many_rows(lab: Lab, topology: Topology):
    """Above 16 rows the caches are written by scatters."""
    check_many_rows(lab, topology, "float32")


@pytest.mark.served
@pytest.mark.slow
@pytest.mark.parametrize("topology", QUICK, ids=name_of)
def test_many_rows_in_bfloat16(lab: Lab, topology: Topology):
    check_many_rows(lab, topology, "bfloat16")


def check_many_rows(lab: Lab, topology: Topology, dtype: str) -> None:
    requests = [r for kind in BATCHES for r in mixed_requests(kind)]
    requests = [(p, SamplingParams(**{**vars(s), "seed": n})) for n, (p, s) in enumerate(requests)][:18]
    few = lab.reference("many", requests, dtype=dtype)
    many = lab.reference("many", requests, dtype=dtype, rows=17)
    assert tokens_of(many) == tokens_of(few)
    drafter = script(requests, few, topology, wrong=0.3)
    outputs = lab.run(drafter, requests, dtype=dtype, rows=17)
    assert tokens_of(outputs) == tokens_of(few)
    check_script(drafter, requests, outputs)


SERVED = [
    ("scripted", tree((2, 2))),
    *(pytest.param(kind, topology, marks=pytest.mark.slow)
      for kind, topology in (("mtp", tree((2, 2))), ("scripted", chain(4)), ("self", chain(4)))),
]  # fmt: skip


@pytest.mark.served
@pytest.mark.parametrize(
    ("kind", "topology"), SERVED, ids=lambda value: value if isinstance(value, str) else name_of(value)
)
def test_bfloat16(lab: Lab, kind: str, topology: Topology):
    for batch in ("cold", "mixed"):
        requests = mixed_requests(batch)
        plain = lab.reference(batch, requests, dtype="bfloat16")
        assert tokens_of(plain) == tokens_of(lab.reference(batch, requests, dtype="bfloat16", rows=1))
        scripted = kind == "scripted"
        drafter = script(requests, plain, topology, wrong=0.3) if scripted else lab.drafter(kind, topology, "bfloat16")
        outputs = lab.run(drafter, requests, dtype="bfloat16")
        assert tokens_of(outputs) == tokens_of(plain)
        if scripted:
            check_script(drafter, requests, outputs)


SETTINGS = {"dtype": "float32", "max_model_len": CAPACITY, "max_num_seqs": 3, "prefill_buckets": (8, 32)}


@pytest.fixture(scope="module")
def llms(lab: Lab) -> Iterator[dict[str, LLM]]:
    """One plain and two speculative engines behind the public door."""
    configs = {
        "plain": None,
        "chain": {"model": str(lab.target_dir), "num_speculative_tokens": 4},
        "tree": {"method": "ngram", "speculative_token_tree": [2, 2], "prompt_lookup_min": 1},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxspec.serve.engine.Programs", SharedPrograms)
        yield {
            name: LLM(lab.target_dir, speculative_config=config, max_logprobs=3, **SETTINGS)
            for name, config in configs.items()
        }


PROMPTS = [prompt for prompt, _ in mixed_requests("cold")]
STYLES = {
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7, "presence_penalty": -0.5},
    "all penalties": {"repetition_penalty": 0.8, "presence_penalty": 0.4, "frequency_penalty": -0.6},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": list(range(0, VOCAB, 5))},
    "stop ids": {"stop_token_ids": list(range(1, 14))},
    "stop string": {"stop": [LETTERS[43], LETTERS[7] + LETTERS[9]]},
    "stop string kept": {"stop": LETTERS[12:20], "include_stop_str_in_output": True},
    "ignore_eos": {"ignore_eos": True},
    "samples": {"n": 3},
    "logprobs": {"logprobs": 2},
}


def seen(outputs: list[RequestOutput]) -> list[list[tuple]]:
    return [[(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in o.outputs] for o in outputs]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("style", STYLES)
def test_every_setting(llms: dict[str, LLM], style: str, temperature: float):
    params = [
        SamplingParams(temperature=temperature, seed=n, max_tokens=14 + n, **STYLES[style]) for n in range(len(PROMPTS))
    ]
    plain = llms["plain"].generate(PROMPTS, params)
    for name in ("chain", "tree"):
        outputs = llms[name].generate(PROMPTS, params)
        assert seen(outputs) == seen(plain), name
        for ours, theirs in zip(outputs, plain, strict=True):
            for mine, other in zip(ours.outputs, theirs.outputs, strict=True):
                assert (mine.logprobs is None) == (style != "logprobs")
                assert [sorted(p) for p in mine.logprobs or []] == [sorted(p) for p in other.logprobs or []]
                for p, q in zip(mine.logprobs or [], other.logprobs or [], strict=True):
                    for token, found in p.items():
                        assert found.rank == q[token].rank
                        assert found.logprob == pytest.approx(q[token].logprob, abs=1e-4)
    reasons = {c.finish_reason for o in plain for c in o.outputs}
    if style == "ignore_eos":
        assert reasons == {"length"}
    if style == "min_tokens":
        assert min(len(c.token_ids) for o in plain for c in o.outputs) > 9
    if "stop" in style:
        assert "stop" in reasons


def test_logprobs_are_the_teacher_forced_ones(llms: dict[str, LLM]):
    llm = llms["chain"]
    prompt = PROMPTS[2]
    output = llm.generate(
        [prompt], SamplingParams(temperature=0.8, seed=4, max_tokens=12, logprobs=3, ignore_eos=True)
    )[0]
    choice = output.outputs[0]
    logits = llm.logits(prompt + choice.token_ids).astype(np.float64)[len(prompt) - 1 : -1]
    logp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert choice.logprobs is not None
    total = 0.0
    for row, entry, token in zip(logp, choice.logprobs, choice.token_ids, strict=True):
        assert set(entry) == {token, *np.argsort(-row)[:3].tolist()}
        assert all(found.logprob == pytest.approx(row[i], abs=1e-4) for i, found in entry.items())
        assert all(found.rank == 1 + int((row > row[i]).sum()) for i, found in entry.items())
        total += row[token]
    assert choice.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_a_seed_gives_one_text_alone_or_in_any_row(llms: dict[str, LLM]):
    wanted = SamplingParams(temperature=0.9, seed=123, max_tokens=15)
    other = SamplingParams(temperature=0.9, max_tokens=11)
    prompt = PROMPTS[3]
    alone = seen(llms["plain"].generate([prompt], wanted))[0]
    for llm in llms.values():
        for place in range(4):
            prompts = [*PROMPTS[:place], prompt, *PROMPTS[place:5]]
            params = [wanted if n == place else other for n in range(len(prompts))]
            assert seen(llm.generate(prompts, params))[place] == alone
    different = llms["plain"].generate([prompt], SamplingParams(temperature=0.9, seed=124, max_tokens=15))
    assert seen(different)[0] != alone


def test_samples_of_one_request_differ(llms: dict[str, LLM]):
    output = llms["chain"].generate([PROMPTS[1]], SamplingParams(temperature=1.0, n=3, seed=1, max_tokens=12))[0]
    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 3


@pytest.mark.parametrize("name", ["chain", "tree"])
def test_requests_choose_their_speculation(llms: dict[str, LLM], name: str):
    choices = [
        False,
        {"num_speculative_tokens": 1},
        None,
        True,
        {"num_speculative_tokens": 0},
        {"num_speculative_tokens": 99},
    ]

    def params(choose: bool) -> list[SamplingParams]:
        return [
            SamplingParams(
                temperature=0.0,
                max_tokens=16,
                ignore_eos=True,
                speculative=choices[n % len(choices)] if choose else None,
            )
            for n in range(len(PROMPTS))
        ]

    plain = llms["plain"].generate(PROMPTS, params(False))
    outputs = llms[name].generate(PROMPTS, params(True))
    assert seen(outputs) == seen(plain)
    depth = {"chain": 4, "tree": 2}[name]
    for n, output in enumerate(outputs):
        choice, m = choices[n % len(choices)], output.metrics
        limit = {False: 0, None: depth, True: depth}[choice] if not isinstance(choice, dict) else 0
        limit = min(choice["num_speculative_tokens"], depth) if isinstance(choice, dict) else limit
        assert all(count == 0 for count in m.num_accepted_tokens_per_pos[limit:])
        assert (m.num_draft_tokens == 0) if limit == 0 else (m.num_drafts > 0 or name == "tree")
        if name == "chain":
            assert m.num_steps == -(-16 // (limit + 1))
    alone = llms[name].generate(
        PROMPTS[:2], SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, speculative=False)
    )
    assert seen(alone) == seen(plain[:2])


def test_stream_equals_generate(llms: dict[str, LLM]):
    for params in (
        SamplingParams(temperature=0.8, seed=5, max_tokens=14),
        SamplingParams(temperature=0.0, max_tokens=9, n=2),
    ):
        for name, llm in llms.items():
            texts, final = [], None
            for final in llm.stream(PROMPTS[2], params):
                texts.append(final.outputs[0].text)
            assert final is not None
            assert final.finished
            assert seen([final]) == seen(llms["plain"].generate([PROMPTS[2]], params)), name
            assert all(b.startswith(a) for a, b in neighbors(texts))


def test_rows_end_at_the_capacity(llms: dict[str, LLM]):
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    prompt = PROMPTS[2]
    plain = llms["plain"].generate([prompt], params)
    assert len(plain[0].outputs[0].token_ids) == CAPACITY - len(prompt)
    assert plain[0].outputs[0].finish_reason == "length"
    for name in ("chain", "tree"):
        assert seen(llms[name].generate([prompt], params)) == seen(plain)


def test_texts_end_at_the_end_of_text(llms: dict[str, LLM]):
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=50)
    for output in llms["chain"].generate(PROMPTS, params):
        ids = output.outputs[0].token_ids
        assert EOS not in ids[:-1]
        assert (ids[-1] == EOS) == (output.outputs[0].finish_reason == "stop")
