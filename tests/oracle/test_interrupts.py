"""Whatever happens in the middle, an interrupt, a failed program, another thread: the next text is the right one."""

import copy
import gc
import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.checkpoint.heads.directory import save_head
from jaxspec.models.catalog import arch_of
from jaxspec.models.draft_head import DraftHead, HeadSpec
from jaxspec.models.trained_head import Head
from jaxspec.nn.policy import make_policy
from jaxspec.serve import engine as engine_module
from jaxspec.serve.driver import Driver
from jaxspec.serve.llm import LLM
from jaxspec.serve.parameters import RequestOutputKind
from jaxspec.serve.request import RequestOutput, SamplingParams
from jaxspec.serve.text import IncrementalText
from tests.oracle.conftest import CAPACITY, CONFIG, SharedPrograms
from tests.oracle.interrupting import Interrupted, alarms_interrupt, interrupted, is_idle

ROUNDS = {"head": 70, "paged": 70, "mesh": 60}
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": CAPACITY, "max_num_seqs": 2, "prefill_buckets": (8,), "max_logprobs": 0,
    "steps_per_dispatch": 2,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
WARM = SamplingParams(
    temperature=0.8, max_tokens=24, ignore_eos=True, seed=3, repetition_penalty=1.3, frequency_penalty=0.4
)
PROMPTS = [[5, 9, 3 + i] for i in range(4)]


def text(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


def run(llm: LLM, outputs: list[RequestOutput]) -> None:
    while not all(output.finished for output in outputs):
        llm.step()


@pytest.fixture(scope="module")
def llms(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, LLM]:
    layer = {k: v for k, v in CONFIG.items() if "expert" not in k and "moe" not in k and k != "architectures"}
    own = arch_of(layer | {"model_type": "llama", "num_hidden_layers": 1})
    policy = make_policy("float32")
    net = DraftHead(HeadSpec(own, CONFIG["hidden_size"], last=True, join="product", join_bias=True), policy)
    folder = tmp_path_factory.mktemp("heads") / "head"
    save_head(Head(net, jax.jit(net.initial)(jax.random.key(1)), None), folder)
    head = {"method": "eagle", "model": str(folder), "num_speculative_tokens": 2}
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "Programs", SharedPrograms)
        made = {
            "head": LLM(target_dir, **SETTINGS, speculative_config=head),
            "paged": LLM(target_dir, **SETTINGS, speculative_config=ngram, kv_page_size=16, num_kv_pages=7),
        }
    return made | {"mesh": LLM(target_dir, **SETTINGS, mesh={"expert": 2})}


@pytest.fixture
def alarm() -> Iterator[None]:
    with alarms_interrupt():
        yield


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("name", ["head", "paged", pytest.param("mesh", marks=pytest.mark.slow)])
def test_interrupts_at_any_moment(llms: dict[str, LLM], name: str):
    llm, rng, ends = llms[name], random.Random(0), Counter()
    wanted, logits = text(llm), llm.logits(PROMPTS[0])
    calls: list[Callable[[], Any]] = [
        lambda: text(llm),
        lambda: text(llm, WARM),
        lambda: list(llm.stream(PROMPTS[1], GREEDY)),
        lambda: llm.logits(PROMPTS[0]),
        lambda: (llm.submit(PROMPTS[2], GREEDY), llm.step(), llm.step(), llm.abort()),
    ]
    for round_ in range(ROUNDS[name]):
        kind = (0, 0, 2, 1, 0, 3, 4, 2)[round_ % 8]
        ends[interrupted(calls[kind], 10 ** rng.uniform(-4.5, -1.3))] += 1
        llm.abort()  # what was submitted, or its output, may have been lost with the interrupt
        assert text(llm) == wanted, round_
        assert is_idle(llm), round_
    np.testing.assert_array_equal(llm.logits(PROMPTS[0]), logits)
    assert ends["interrupted"] > ROUNDS[name] / 2, ends


@pytest.mark.usefixtures("alarm")
def test_an_interrupt_ends_the_callers_requests_alone(llms: dict[str, LLM]):
    llm, lasting = llms["paged"], SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    alone = llm.generate([PROMPTS[1]], lasting)[0].outputs[0].token_ids
    stream = llm.stream(PROMPTS[1], lasting)
    output = next(stream)
    outputs, submit = [], llm.prompts.requests

    def seen(*args: Any) -> Any:
        outputs.extend(requests := submit(*args))
        return requests

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.prompts, "requests", seen)
        many = [[7, 8, i % 60] for i in range(400)]  # seconds of work, of which a busy machine, too, leaves some
        assert interrupted(lambda: llm.generate(many, lasting), 0.2) == "interrupted"
    assert list(stream)[-1] is output
    assert output.outputs[0].token_ids == alone
    assert {c.finish_reason for samples in outputs for c in samples[0].output.outputs} >= {"abort"}
    assert all(samples[0].output.finished for samples in outputs)
    assert is_idle(llm)


FAILING = ["dispatch", "read", "admit", "retire"]


@pytest.mark.parametrize("name", ROUNDS)
@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("program", FAILING)
def test_a_failed_program_takes_no_request_along(
    llms: dict[str, LLM], monkeypatch: pytest.MonkeyPatch, name: str, params: SamplingParams, program: str
):
    llm = llms[name]
    wanted = text(llm, params)
    outputs = [llm.submit(prompt, params) for prompt in PROMPTS]
    for _ in range(3):
        llm.step()
    assert any(output.outputs[0].token_ids for output in outputs)
    before = getattr(llm.engine.programs, program)

    def fail(*args: Any, **how: Any) -> Any:
        monkeypatch.undo()
        before(*args, **how)  # which takes the state with it
        raise MemoryError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(llm.engine.programs, program, fail)
    with pytest.raises(MemoryError, match="RESOURCE_EXHAUSTED"):
        run(llm, outputs)
    ended = [output for output in outputs if output.finished]
    run(llm, outputs)
    assert [output.outputs[0].token_ids for output in outputs] == wanted
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    assert len(ended) < len(outputs)
    assert is_idle(llm)


def test_the_failing_call_gets_the_failure_and_the_next_its_text(llms: dict[str, LLM], monkeypatch: pytest.MonkeyPatch):
    llm = llms["mesh"]
    wanted = text(llm)
    before = llm.engine.programs.dispatch

    def fail(*args: Any, **how: Any) -> Any:
        before(*args, **how)
        raise MemoryError

    monkeypatch.setattr(llm.engine.programs, "dispatch", fail)
    for _ in range(2):
        with pytest.raises(MemoryError):
            text(llm)
        assert not llm.engine.busy, "its requests went with the call"
    with pytest.raises(MemoryError):
        list(llm.stream(PROMPTS[0], GREEDY))
    monkeypatch.undo()
    assert text(llm) == wanted
    assert is_idle(llm)


def test_no_memory_for_a_new_state_either(llms: dict[str, LLM], monkeypatch: pytest.MonkeyPatch):
    llm = llms["head"]
    wanted = text(llm)

    def fail(*_: Any, **how: Any) -> Any:
        raise MemoryError

    output = llm.submit(PROMPTS[0], GREEDY)
    monkeypatch.setattr(llm.engine.programs, "dispatch", fail)
    monkeypatch.setattr(llm.engine.scheduler, "allocate", fail)
    for _ in range(3):
        with pytest.raises(MemoryError):
            llm.step()
    monkeypatch.undo()
    while not output.finished:
        llm.step()
    assert output.outputs[0].token_ids == wanted[0]
    assert text(llm) == wanted


def test_a_request_that_fails_by_itself(llms: dict[str, LLM], monkeypatch: pytest.MonkeyPatch):
    llm, add = llms["paged"], IncrementalText.add
    wanted = text(llm)

    def failing(self: IncrementalText, token: int, *args: Any, **more: Any) -> Any:
        if token == wanted[1][5]:
            raise ValueError("no such bytes")
        return add(self, token, *args, **more)

    monkeypatch.setattr(IncrementalText, "add", failing)
    outputs = llm.generate(PROMPTS, GREEDY)
    streamed = list(llm.stream(PROMPTS[1], GREEDY))[-1]
    monkeypatch.undo()
    for output, ids in zip(outputs, wanted, strict=True):
        completion, fails = output.outputs[0], wanted[1][5] in ids
        assert output.finished
        assert completion.finished()
        assert completion.finish_reason == ("error" if fails else "length")
        assert (completion.error is not None) == fails
        if not fails:
            assert completion.token_ids == ids
    bad = outputs[1].outputs[0]
    assert bad.error == "this text could not be taken over (ValueError: no such bytes)"
    assert (streamed.finished, streamed.outputs[0].finish_reason) == (True, "error")
    assert is_idle(llm)
    assert text(llm) == wanted


def test_threads_get_their_texts(llms: dict[str, LLM]):
    llm = llms["head"]
    wanted = [llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]
    logits = llm.logits(PROMPTS[0])
    start = threading.Barrier(4)

    def generate(index: int) -> bool:
        return llm.generate([PROMPTS[index]], GREEDY)[0].outputs[0].token_ids == wanted[index]

    def stream(index: int) -> bool:
        return list(llm.stream(PROMPTS[index], GREEDY))[-1].outputs[0].token_ids == wanted[index]

    def submit(index: int) -> bool:
        output = llm.submit(PROMPTS[index], GREEDY)
        while not output.finished:
            llm.step()
        return output.outputs[0].token_ids == wanted[index]

    def see(index: int) -> bool:
        return bool(np.array_equal(llm.logits(PROMPTS[0]), logits))

    def work(thread: int) -> list[bool]:
        start.wait()
        return [(generate, stream, see, submit)[(thread + turn) % 4](turn % 4) for turn in range(10)]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(4)))
    assert np.array(results).all(), results
    assert is_idle(llm)


def test_other_calls_within_a_stream(llms: dict[str, LLM]):
    llm = llms["paged"]
    wanted = text(llm)
    seen = []
    for number, output in enumerate(llm.stream(PROMPTS[0], GREEDY)):
        seen.append(len(output.outputs[0].token_ids))
        if number == 1:
            assert text(llm) == wanted
    assert seen[-1] == GREEDY.max_tokens, "the end comes, whoever ran the steps"
    assert seen == sorted(seen)


def test_each_submitted_request_is_returned_once(llms: dict[str, LLM]):
    llm = llms["paged"]
    outputs = [llm.submit(prompt, GREEDY) for prompt in PROMPTS]
    text(llm)
    ends: Counter[int] = Counter()
    for _ in range(30):
        ends.update(id(output) for output in llm.step() if output.finished)
    assert ends == Counter(map(id, outputs))
    gone = llm.submit(PROMPTS[0], GREEDY)
    kept = llm.submit(PROMPTS[1], GREEDY)
    llm.abort([gone])
    assert (gone.finished, gone.outputs[0].finish_reason) == (True, "abort")
    assert [o for _ in range(30) for o in llm.step() if o.finished] == [kept]


def test_an_engine_goes_with_its_llm(llms: dict[str, LLM]):
    llm, engine = copy.copy(llms["paged"]), copy.copy(llms["paged"].engine)
    engine.reset()
    llm.engine, llm.driver = engine, Driver(engine, llm.driver.worker)
    del engine
    text(llm)
    list(llm.stream(PROMPTS[0], GREEDY))
    engine = weakref.ref(llm.engine)
    del llm
    gc.collect()
    assert engine() is None


def test_a_request_whose_steps_always_fail_ends(llms: dict[str, LLM], monkeypatch: pytest.MonkeyPatch):
    llm = llms["paged"]
    wanted = text(llm)

    def fail(*_: Any, **how: Any) -> Any:
        raise MemoryError("too much")

    outputs = [llm.submit(prompt, GREEDY) for prompt in PROMPTS]
    monkeypatch.setattr(llm.engine.programs, "dispatch", fail)
    for _ in range(3):
        with pytest.raises(MemoryError):
            llm.step()
    monkeypatch.undo()
    ends: Counter[int] = Counter()
    for _ in range(30):
        ends.update(id(output) for output in llm.step() if output.finished)
    assert ends == Counter(map(id, outputs)), "each is returned once"
    failed = [output.outputs[0] for output in outputs[: SETTINGS["max_num_seqs"]]]
    assert {c.finish_reason for c in failed} == {"error"}
    assert failed[0].error == "3 steps failed before another token came (MemoryError: too much)"
    others = [output.outputs[0].token_ids for output in outputs[SETTINGS["max_num_seqs"] :]]
    assert others == wanted[SETTINGS["max_num_seqs"] :]
    assert is_idle(llm)


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
def test_what_an_interrupted_step_had_moved_comes_with_the_next(
    llms: dict[str, LLM], monkeypatch: pytest.MonkeyPatch, kind: RequestOutputKind
):
    llm, call = llms["paged"], llms["paged"].driver.worker.call
    wanted = text(llm)
    params = SamplingParams(temperature=0.0, max_tokens=GREEDY.max_tokens, ignore_eos=True, output_kind=kind)
    outputs = [llm.submit(prompt, params) for prompt in PROMPTS]

    def late(*args: Any, **more: Any) -> Any:
        call(*args, **more)
        raise Interrupted

    texts: dict[str, list[int]] = {output.request_id: [] for output in outputs}
    ends: Counter[str] = Counter()
    for turn in range(60):
        monkeypatch.setattr(llm.driver.worker, "call", late if turn % 3 else call)
        try:
            moved = llm.step()
        except Interrupted:
            continue
        assert len({id(output) for output in moved}) == len(moved)
        for output in moved:
            ids = output.outputs[0].token_ids
            texts[output.request_id] = texts[output.request_id] + ids if kind is RequestOutputKind.DELTA else list(ids)
            ends[output.request_id] += output.finished
    monkeypatch.undo()
    assert [texts[output.request_id] for output in outputs] == wanted
    assert set(ends.values()) == {1}
    assert is_idle(llm)
