"""The engine: compiled once, nothing copied, served in order, pages and rows given back, counts that add up."""

import re
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxspec.aot import hlo
from jaxspec.errors import CapacityError
from jaxspec.protocol import Drafter
from jaxspec.serve import engine as engine_module
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams
from jaxspec.topology import PLAIN, Topology, chain, tree
from tests.oracle.conftest import (
    CAPACITY,
    VOCAB,
    Lab,
    SharedPrograms,
    generate,
    mixed_requests,
    script,
    tokens_of,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
METRICS = {
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
}


@pytest.fixture(scope="module")
def llm(target_dir: Path) -> LLM:
    """A self-drafting engine over its real, ahead-of-time programs."""
    llm = LLM(
        target_dir,
        speculative_config={"model": str(target_dir), "num_speculative_tokens": 3},
        dtype="float32",
        max_model_len=400,
        max_num_seqs=2,
        max_logprobs=2,
    )
    llm.finish_compiling()
    return llm


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Programs that JAX compiles while a test runs."""
    events: list[str] = []

    def listen(name: str, duration: float, **rest: object) -> None:
        if name == "/jax/core/compile/backend_compile_duration":
            events.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(1, VOCAB, n).tolist() for n in lengths]


def test_nothing_compiles_after_warm_up(llm: LLM, compiled: list[str]):
    llm.generate(prompts_of(1, 2), GREEDY)
    compiled.clear()
    llm.generate(prompts_of(1, 2, 7, 31, 32, 33, 34, 64, 100, 256, 257, 258, 300), GREEDY)
    llm.generate(
        prompts_of(3),
        SamplingParams(temperature=0.7, top_p=0.5, top_k=4, seed=1, max_tokens=9, speculative=False),
    )
    llm.generate(
        prompts_of(3, 5, 4),
        SamplingParams(repetition_penalty=1.2, presence_penalty=1, min_tokens=3, n=2, max_tokens=40),
    )
    list(llm.stream(prompts_of(50)[0], GREEDY))
    assert compiled == []


def test_logprobs_compile_nothing(llm: LLM, compiled: list[str]):
    for most in (3, 5, 8):
        llm.generate(prompts_of(4, 9), SamplingParams(temperature=0.9, logprobs=2, max_tokens=most, seed=most))
    assert compiled == []


def test_the_listener_hears_compilations(compiled: list[str]):
    jax.jit(lambda x: x * 3 + 1)(np.float32(2))
    assert compiled


def test_one_dispatch_reads_one_small_array(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    read, dispatched = [], []
    real_get, real_dispatch = jax.device_get, llm.engine.programs.dispatch

    def get(x):
        read.append(x.size)
        return real_get(x)

    def dispatch(*args, **how):
        state, report = real_dispatch(*args, **how)
        dispatched.append(args)
        report.logprob_BXTL.delete()
        report.top_BXTL.delete()
        return state, report

    monkeypatch.setattr(engine_module.jax, "device_get", get)
    monkeypatch.setattr(llm.engine.programs, "dispatch", dispatch)
    llm.generate(prompts_of(4, 20, 9), GREEDY)
    assert len(read) == len(dispatched) > 0
    assert max(read) <= 2 * (8 + 1) * (4 + 3)


def cache_shapes(llm: LLM) -> set[tuple[int, ...]]:
    return {pages.shape for pages in jax.tree.leaves((llm.engine.state.layers, llm.engine.state.draft))}


@pytest.mark.parametrize(
    "name",
    [("dispatch", PLAIN), ("dispatch", chain(3)), ("prefill", 32), ("prefill", 256), "admit", "retire"],
    ids=str,
)
def test_the_cache_is_neither_copied_nor_doubled(llm: LLM, name: str | tuple):
    program = llm.engine.programs.programs[name]
    state_bytes = sum(x.nbytes for x in jax.tree.leaves(llm.engine.state))
    cache_bytes = sum(x.nbytes for x in jax.tree.leaves((llm.engine.state.layers, llm.engine.state.draft)))
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= state_bytes
    copies, text = [], program.as_text()
    for shape in cache_shapes(llm):
        pages = f"f32[{','.join(map(str, shape))}]"
        assert pages in text
        copies += re.findall(rf"= {re.escape(pages)}\S* copy(?:-start)?\(.*", text)
    assert copies == []
    if name in (("dispatch", PLAIN), "admit", "retire"):
        assert memory.temp_size_in_bytes < cache_bytes


@pytest.mark.parametrize("topology", [PLAIN, chain(3)], ids=str)
def test_no_step_sorts_a_vocabulary(llm: LLM, topology: Topology):
    """Truncation and drafts do without: on a GPU a sort is launched outside of graphs, on a CPU it takes long."""
    module = hlo.parse(llm.engine.programs.programs["dispatch", topology].as_text(), stepped=True)
    every = [instruction for inside in module.computations.values() for instruction in inside]
    wide = [one for one in every if any(shape[-1:] == (VOCAB,) for _, shape in one.arrays)]
    assert wide, "the step has scores"
    assert [one.result for one in wide if one.opcode == "sort"] == []


def test_requests_are_served_in_order(lab: Lab):
    requests = mixed_requests("cold")
    engine = lab.engine(script(requests, lab.reference("cold", requests), chain(4), wrong=0.3))
    started: list[str] = []
    real = engine.programs.admit

    def admit(state, row, prompt, *rest):
        started.append(prompt.tobytes())
        return real(state, row, prompt, *rest)

    engine.programs.admit = admit
    generate(engine, requests)
    assert started == [np.asarray(prompt, np.int32).tobytes() for prompt, _ in requests]
    assert engine.rows == [None] * 3
    assert not bool(np.asarray(engine.state.active_B).any())


def small_pool(lab: Lab, drafter: Drafter | None = None):
    requests = mixed_requests("cold")
    drafter = drafter or script(requests, lab.reference("cold", requests), chain(8), wrong=0.2)
    return requests, lab.engine(drafter, block=16, page=16, pages=1 + 8)


def test_exhausted_pages_make_requests_wait(lab: Lab):
    """Eight pages hold the longest request alone, or two short ones; all rows are never filled."""
    requests, engine = small_pool(lab)
    held = []
    real = engine.programs.dispatch

    def dispatch(*args, **how):
        held.append(sum(row is not None for row in engine.rows))
        ids = [page for row in engine.rows if row is not None for page in row.pages]
        assert len(ids) == len(set(ids))
        assert 0 not in ids
        return real(*args, **how)

    engine.programs.dispatch = dispatch
    outputs = generate(engine, requests)
    assert tokens_of(outputs) == tokens_of(lab.reference("cold", requests))
    assert max(held) == 2
    assert engine.pool.free == engine.pool.total == 8


def test_a_request_that_can_never_fit_is_refused(target_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_module, "Programs", SharedPrograms)
    settings = {"max_model_len": CAPACITY, "max_num_seqs": 3, "prefill_buckets": (8, 32), "max_logprobs": 0}
    llm = LLM(target_dir, dtype="float32", kv_page_size=16, num_kv_pages=1 + 5, **settings)
    short, long = prompts_of(3, 60)
    wanted = llm.generate([short], GREEDY)[0].outputs[0].token_ids
    with pytest.raises(CapacityError, match=r"98 tokens.* 7 pages of 16, the pool has 5; raise num_kv_pages"):
        llm.generate([short, long], GREEDY)
    assert not llm.engine.busy
    assert llm.engine.pool.free == 5
    assert llm.generate([short], GREEDY)[0].outputs[0].token_ids == wanted


def test_a_closed_stream_frees_its_rows_and_no_others(llm: LLM):
    first, second = prompts_of(10, 20)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    whole = llm.generate([second], params)[0].outputs[0].token_ids
    left, kept = llm.stream(first, params), llm.stream(second, params)
    next(left)
    next(kept)
    assert all(row is not None for row in llm.engine.rows)
    left.close()
    llm.get_metrics()  # whatever is asked for comes after what the close has asked for
    assert sum(row is not None for row in llm.engine.rows) == 1
    final = list(kept)[-1]
    assert final.finished
    assert final.outputs[0].token_ids == whole
    assert not llm.engine.busy


def test_generating_while_a_stream_is_open_disturbs_neither(llm: LLM):
    first, second, third = prompts_of(10, 20, 30)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    wanted = [o.outputs[0].token_ids for o in llm.generate([first, second, third], params)]
    stream = llm.stream(first, params)
    output = next(stream)
    inside = [o.outputs[0].token_ids for o in llm.generate([second, third], params)]
    list(stream)
    assert [output.outputs[0].token_ids, *inside] == wanted


def totals(llm: LLM) -> dict[str, float]:
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        found[metric.name] = found.get(metric.name, 0) + metric.value
    return found


def test_counts_add_up(llm: LLM):
    before = totals(llm)
    prompts = prompts_of(3, 40, 9, 17)
    params = [
        SamplingParams(temperature=t, seed=1, max_tokens=m) for t, m in ((0.0, 20), (0.8, 13), (1.0, 30), (0.0, 1))
    ]
    outputs = llm.generate(prompts, params)
    change = {name: value - before[name] for name, value in totals(llm).items()}
    assert set(change) >= METRICS
    drafts, proposed, accepted = (
        change[f"vllm:spec_decode_num_{name}_total"] for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    made = sum(len(o.outputs[0].token_ids) for o in outputs)
    assert change["vllm:generation_tokens_total"] == made
    assert change["vllm:prompt_tokens_total"] == sum(map(len, prompts))
    assert change["vllm:request_success_total"] == 4
    assert change["vllm:spec_decode_num_accepted_tokens_per_pos_total"] == accepted
    assert 0 < accepted <= proposed == 3 * drafts
    assert accepted == sum(sum(o.outputs[0].drafted) for o in outputs)
    for output in outputs:
        m = output.metrics
        assert sum(m.num_accepted_tokens_per_pos) == m.num_accepted_tokens <= m.num_draft_tokens
        assert m.num_accepted_tokens_per_pos == sorted(m.num_accepted_tokens_per_pos, reverse=True)
        assert m.mean_acceptance_length == pytest.approx(len(output.outputs[0].token_ids) / m.num_steps)
        assert m.drafted_acceptance_length == pytest.approx(1 + m.num_accepted_tokens / m.num_drafts)
        assert m.draft_acceptance_rate == pytest.approx(m.num_accepted_tokens / m.num_draft_tokens)
        assert m.acceptance_per_pos == [n / m.num_drafts for n in m.num_accepted_tokens_per_pos]
        assert m.num_accepted_tokens + m.num_steps == len(output.outputs[0].token_ids)
    assert drafts == sum(o.metrics.num_drafts for o in outputs)
    positions = [m.labels for m in llm.get_metrics() if m.name.endswith("per_pos_total")]
    assert positions == [{"position": str(n)} for n in range(3)]


def test_counts_with_a_tree(lab: Lab):
    requests = mixed_requests("mixed")
    engine = lab.engine(script(requests, lab.reference("mixed", requests), tree((2, 2)), wrong=0.3))
    outputs = generate(engine, requests)
    s = engine.metrics.speculation
    assert sum(s.num_accepted_tokens_per_pos) == s.num_accepted_tokens <= s.num_draft_tokens
    assert engine.metrics.generated_tokens == sum(len(o.outputs[0].token_ids) for o in outputs)


def test_outputs_say_what_happened(llm: LLM):
    output = llm.generate(["abcabc"], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))[0]
    assert output.prompt == "abcabc"
    assert len(output.prompt_token_ids) == 6
    assert output.finished
    assert output.request_id.isdigit()
    assert 0 < output.time_s["first_token"] <= output.time_s["total"]
    choice = output.outputs[0]
    assert (choice.index, choice.finish_reason, choice.stop_reason) == (0, "length", None)
    assert (choice.logprobs, choice.cumulative_logprob) == (None, None)
    assert choice.text == llm.text.decode(choice.token_ids)
    assert len(choice.text) == len(choice.token_ids) == len(choice.drafted) == 5
    assert llm.generate([[1, 2]], GREEDY)[0].prompt is None
