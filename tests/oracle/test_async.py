"""Requests that are followed from event loops: the same text, whoever cancels, pauses, reads slowly or comes late."""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from jaxspec.errors import ConfigError, QueueFullError, RequestError
from jaxspec.serve import engine as engine_module
from jaxspec.serve.async_llm import AsyncLLM
from jaxspec.serve.fair_queue import FairQueue
from jaxspec.serve.llm import LLM
from jaxspec.serve.parameters import RequestOutputKind
from jaxspec.serve.request import RequestOutput, SamplingParams
from tests.oracle.conftest import CAPACITY, SharedPrograms

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": CAPACITY, "max_num_seqs": 2, "prefill_buckets": (8,), "max_logprobs": 0,
    "steps_per_dispatch": 2, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
}  # fmt: skip
PROMPTS = [[5, 9, 3 + i] for i in range(5)]


def sampled(tokens: int = 24, seed: int = 3, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.8, max_tokens=tokens, ignore_eos=True, seed=seed, **more)


LONG = sampled(80)


@pytest.fixture(scope="module")
def llm(target_dir: Path) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "Programs", SharedPrograms)
        yield LLM(target_dir, **SETTINGS)


def text(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


async def last(engine: AsyncLLM, prompt: list[int], params: SamplingParams, *args: Any, **more: Any) -> RequestOutput:
    outputs = [output async for output in engine.generate(prompt, params, *args, **more)]
    output = outputs[-1]
    assert output.finished
    return output


async def begun(engine: AsyncLLM, prompt: list[int], name: str) -> asyncio.Task[RequestOutput]:
    """A request that has its first tokens."""
    some = asyncio.Event()

    async def follow() -> RequestOutput:
        outputs = []
        async for output in engine.generate(prompt, LONG, name):
            outputs.append(output)
            some.set()
        return outputs[-1]

    task = asyncio.create_task(follow())
    await some.wait()
    return task


def idle(llm: LLM) -> bool:
    llm.get_metrics()
    return not llm.engine.busy and not llm.engine.samples and not llm.driver.subscribers._by_output


def test_texts_are_those_of_the_llm(llm: LLM):
    """Beside calls of the LLM in a thread; cumulative outputs only grow, and stay as they were."""
    wanted, beside = text(llm, PROMPTS, sampled()), text(llm, PROMPTS[:3], sampled(16, 7))

    async def follow(prompt: list[int]) -> list[RequestOutput]:
        return [output async for output in AsyncLLM(llm).generate(prompt, sampled())]

    async def main() -> list[list[RequestOutput]]:
        other = asyncio.create_task(asyncio.to_thread(text, llm, PROMPTS[:3], sampled(16, 7)))
        made = await asyncio.gather(*map(follow, PROMPTS))
        assert await other == beside
        return made

    for outputs, ids in zip(asyncio.run(main()), wanted, strict=True):
        grown = [output.outputs[0].token_ids for output in outputs]
        assert grown[-1] == ids
        assert len(grown) > 1
        assert all(a == b[: len(a)] and len(a) < len(b) for a, b in pairwise(grown))
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert idle(llm)


@pytest.mark.parametrize("kind", ["DELTA", "FINAL_ONLY"])
def test_what_is_new_or_the_end_alone(llm: LLM, kind: str):
    (wanted,) = text(llm, PROMPTS[:1], sampled())

    async def main() -> list[RequestOutput]:
        params = sampled(output_kind=RequestOutputKind[kind])
        return [output async for output in AsyncLLM(llm).generate(PROMPTS[0], params)]

    outputs = asyncio.run(main())
    assert [i for output in outputs for c in output.outputs for i in c.token_ids] == wanted
    assert (len(outputs) > 1) == (kind == "DELTA")


def test_a_cancelled_task_and_a_loop_that_is_left_end_their_requests(llm: LLM):
    (wanted,) = text(llm, PROMPTS[:1], LONG)

    async def main() -> None:
        engine = AsyncLLM(llm)
        task, other = await begun(engine, PROMPTS[1], "cancelled"), await begun(engine, PROMPTS[0], "goes on")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stream = engine.generate(PROMPTS[2], LONG, "left")
        async for _ in stream:
            break
        await stream.aclose()
        waits = asyncio.create_task(last(engine, PROMPTS[3], LONG))
        await asyncio.sleep(0)
        waits.cancel()
        assert (await other).outputs[0].token_ids == wanted
        assert engine._live == {}

    asyncio.run(main())
    assert idle(llm)


def test_abort_by_id_gives_what_there_is(llm: LLM):
    (wanted,) = text(llm, PROMPTS[:1], LONG)

    async def main() -> None:
        engine = AsyncLLM(llm)
        first, second = await begun(engine, PROMPTS[0], "a"), await begun(engine, PROMPTS[1], "b")
        with pytest.raises(RequestError, match="'a' goes on already"):
            await last(engine, PROMPTS[2], LONG, "a")
        await engine.abort(["a", "nobody"])
        (made,) = (await first).outputs
        assert made.finish_reason == "abort"
        assert 0 < len(made.token_ids) < 80
        assert made.token_ids == wanted[: len(made.token_ids)]
        await asyncio.to_thread(llm.abort, "b")
        assert (await second).outputs[0].finish_reason == "abort"
        assert (await last(engine, PROMPTS[0], LONG, "a")).outputs[0].token_ids == wanted

    asyncio.run(main())
    assert idle(llm)


def test_deadlines(llm: LLM):
    """Running, waiting, paused and not let in yet: each ends with what it has."""
    (wanted,) = text(llm, PROMPTS[:1], LONG)

    async def main() -> None:
        engine = AsyncLLM(llm, max_queued_requests=1)
        await engine.pause_generation(mode="keep")
        late = sampled(80, timeout_s=0.05)
        ends = await asyncio.gather(*(last(engine, prompt, late) for prompt in PROMPTS[:3]))
        assert [(end.outputs[0].finish_reason, end.outputs[0].token_ids) for end in ends] == [("timeout", [])] * 3
        await engine.resume_generation()
        assert (await last(engine, PROMPTS[0], sampled(80, timeout_s=600))).outputs[0].token_ids == wanted

    asyncio.run(main())
    step, calls = llm.engine.step, []

    def slow(steps: int | None = None) -> list[RequestOutput]:
        calls.append(steps)
        if len(calls) == 3:
            threading.Event().wait(0.3)
        return step(steps)

    llm.engine.step = slow
    (made,) = llm.generate([PROMPTS[0]], sampled(80, timeout_s=0.25), use_tqdm=False)[0].outputs
    llm.engine.step = step
    assert made.finish_reason == "timeout"
    assert 0 < len(made.token_ids) < 80
    assert made.token_ids == wanted[: len(made.token_ids)]
    assert idle(llm)
    with pytest.raises(RequestError, match="timeout_s must be None or a number of seconds above 0, got 0"):
        SamplingParams(timeout_s=0)


def test_a_slow_reader_holds_nobody_up(llm: LLM):
    """Its news are one output, however long it does not look."""

    async def main() -> None:
        engine = AsyncLLM(llm)
        slow = engine.generate(PROMPTS[0], LONG)
        await anext(slow)
        for _ in range(2):
            await last(engine, PROMPTS[1], LONG)
        rest = [output async for output in slow]
        assert len(rest) == 1, "all that came meanwhile is one piece of news"
        assert rest[0].outputs[0].token_ids == text(llm, PROMPTS[:1], LONG)[0]

    asyncio.run(main())


def test_a_queue_that_is_full(llm: LLM):
    params = sampled(8)
    wanted = text(llm, PROMPTS, params)

    async def main() -> None:
        waits = AsyncLLM(llm, max_queued_requests=1)
        most, extend = [0], FairQueue.extend

        def counted(queue: FairQueue, samples: Any) -> None:
            extend(queue, samples)
            most.append(len(queue))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FairQueue, "extend", counted)
            made = await asyncio.gather(*(last(waits, prompt, params) for prompt in PROMPTS))
        assert [output.outputs[0].token_ids for output in made] == wanted
        assert max(most) == 1
        strict = AsyncLLM(llm, max_queued_requests=2, when_full="error")
        await strict.pause_generation(mode="keep")
        tasks = [asyncio.create_task(last(strict, prompt, params)) for prompt in PROMPTS]
        full = asyncio.gather(*tasks[2:], return_exceptions=True)
        for error in await full:
            assert isinstance(error, QueueFullError)
            assert "2 requests wait already" in str(error)
        await strict.resume_generation()
        assert [(await task).outputs[0].token_ids for task in tasks[:2]] == wanted[:2]

    asyncio.run(main())
    assert idle(llm)
    with pytest.raises(ConfigError, match="when_full must be 'wait' or 'error'"):
        AsyncLLM(llm, when_full=cast(Any, "drop"))
    with pytest.raises(ConfigError, match="max_queued_requests must be an integer of at least 1, got 0"):
        AsyncLLM(llm, max_queued_requests=0)


def test_callers_take_turns(llm: LLM):
    """One who asks for much does not hold up one who asks for little; one caller's requests go in their order."""
    ends: list[str] = []
    params = sampled(6)

    async def main() -> None:
        engine = AsyncLLM(llm)

        async def one(name: str, client: str) -> None:
            await last(engine, PROMPTS[0], params, name, client=client)
            ends.append(name)

        await engine.pause_generation(mode="keep")
        many = [asyncio.create_task(one(f"many {i}", "many")) for i in range(12)]
        batch = asyncio.create_task(asyncio.to_thread(llm.generate, PROMPTS * 3, params, use_tqdm=False))
        while len(llm.engine.held_back) < 12 + 15:
            await asyncio.sleep(0.01)
        few = [asyncio.create_task(one(f"few {i}", "few")) for i in range(2)]
        while len(llm.engine.held_back) < 12 + 15 + 2:
            await asyncio.sleep(0.01)
        await engine.resume_generation()
        await asyncio.gather(*many, *few)
        await batch

    asyncio.run(main())
    assert [name for name in ends if name.startswith("many")] == [f"many {i}" for i in range(12)]
    assert ends.index("few 1") <= 5, ends


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_pause_and_resume(llm: LLM, mode: Any):
    wanted = text(llm, PROMPTS[:3], LONG)

    async def main() -> None:
        engine = AsyncLLM(llm)
        tasks = [await begun(engine, prompt, str(prompt)) for prompt in PROMPTS[:2]]
        await engine.pause_generation(mode=mode)
        assert await engine.is_paused()
        late = asyncio.create_task(last(engine, PROMPTS[2], LONG))
        steps = llm.engine.metrics.dispatches
        await asyncio.sleep(0.1)
        assert llm.engine.metrics.dispatches == steps, "nothing runs"
        assert not late.done()
        assert all(task.done() == (mode != "keep") for task in tasks)
        await engine.resume_generation()
        assert (await late).outputs[0].token_ids == wanted[2]
        for task, ids in zip(tasks, wanted, strict=False):
            (made,) = (await task).outputs
            assert made.finish_reason == ("abort" if mode == "abort" else "length")
            assert made.token_ids == (ids[: len(made.token_ids)] if mode == "abort" else ids)

    asyncio.run(main())
    assert not llm.is_paused()
    assert idle(llm)


def test_a_pause_holds_calls_of_threads(llm: LLM):
    wanted = text(llm, PROMPTS[:1], sampled())
    llm.pause_generation(mode="keep")
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(text, llm, PROMPTS[:1], sampled()) for _ in range(2)]
        streams = pool.submit(lambda: [o.outputs[0].token_ids[:] for o in llm.stream(PROMPTS[0], sampled())])
        threading.Event().wait(0.1)
        assert not any(call.done() for call in (*calls, streams))
        llm.resume_generation()
        assert [call.result() for call in calls] == [wanted, wanted]
        assert streams.result()[-1] == wanted[0]
    with pytest.raises(RequestError, match="mode must be one of"):
        llm.pause_generation(mode=cast(Any, "never"))


def test_a_failing_step_goes_on_or_is_raised(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    wanted, dispatch = text(llm, PROMPTS[:1], sampled()), llm.engine.programs.dispatch
    fails: list[bool | None] = [True]

    def failing(*args: Any, **more: Any) -> Any:
        if fails and (fails[0] is None or fails.pop()):
            raise MemoryError("no room")
        return dispatch(*args, **more)

    monkeypatch.setattr(llm.engine.programs, "dispatch", failing)
    assert asyncio.run(last(AsyncLLM(llm), PROMPTS[0], sampled())).outputs[0].token_ids == wanted[0]
    fails[:] = [None]
    made = asyncio.run(last(AsyncLLM(llm), PROMPTS[0], sampled()))
    assert made.outputs[0].finish_reason == "error"
    assert "no room" in str(made.outputs[0].error)
    monkeypatch.undo()
    monkeypatch.setattr(llm.engine, "step", lambda steps=None: (_ for _ in ()).throw(MemoryError("never")))
    with pytest.raises(MemoryError, match="never"):
        asyncio.run(last(AsyncLLM(llm), PROMPTS[0], sampled()))
    monkeypatch.undo()
    assert text(llm, PROMPTS[:1], sampled()) == wanted
    assert idle(llm)


SCRIPT = """
import asyncio, os, signal, sys
from jaxspec import AsyncLLM, SamplingParams

engine = AsyncLLM(sys.argv[1], dtype="float32", max_model_len=96, max_num_seqs=2, prefill_buckets=(8,), max_logprobs=0)
params = SamplingParams(temperature=0.8, max_tokens=80, ignore_eos=True)

async def main():
    streams = [engine.generate([5, 9, 3 + i], params) for i in range(3)]
    for stream in streams[:2]:
        await anext(stream)
    waits = asyncio.create_task(anext(streams[2]))
    if sys.argv[2] == "interrupted":
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)
    return streams, waits

kept = asyncio.run(main())
print("ends")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "status", "said"), [("interrupted", -signal.SIGINT, ""), ("left", 0, "ends")])
def test_a_process_ends_with_requests_that_run(target_dir: Path, how: str, status: int, said: str):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(target_dir), how], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode in (status, 128 - status if status else 0), done.stderr
    assert done.stdout.strip() == said
    assert "Fatal" not in done.stderr
    assert "never retrieved" not in done.stderr
