"""Requests run before every program is compiled, with those that are: the same text, and errors where they belong."""

import threading
import time
from collections.abc import Iterator

import pytest

from jaxspec.control.adaptive import Adaptive
from jaxspec.serve.background import CompiledPrograms
from jaxspec.serve.engine import Engine
from jaxspec.topology import PLAIN, AnyTopology, chain
from tests.oracle import conftest
from tests.oracle.conftest import Lab, SharedPrograms, generate, mixed_requests, tokens_of


class Gate(threading.Event):
    """Opens when a program is compiled, or failed to."""

    error: Exception | None = None


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[AnyTopology, Gate]]:
    """Events by topology: its program is there once its event is set."""
    gates: dict[AnyTopology, Gate] = {}

    class Gated(SharedPrograms):
        def __init__(self, *args, **how):
            super().__init__(*args, **how)
            there = dict(self.programs)

            def job(name: object, opens: Gate):
                def wait():
                    assert opens.wait(60)
                    if opens.error is not None:
                        raise opens.error
                    return there[name]

                return wait

            self.programs = CompiledPrograms({("dispatch", k): job(("dispatch", k), e) for k, e in gates.items()})
            self.programs.update({k: v for k, v in there.items() if k[1] not in gates})

    monkeypatch.setattr(conftest, "SharedPrograms", Gated)
    yield gates
    for event in gates.values():
        event.set()


def arms_of(engine: Engine) -> set[AnyTopology]:
    return set(engine.metrics.arms)


def test_a_text_that_has_begun_waits_for_no_compilation(lab: Lab, gate: dict[AnyTopology, Gate]):
    wanted = tokens_of(lab.reference("mixed", mixed_requests("mixed")))
    gate[PLAIN] = Gate()
    requests = mixed_requests("mixed")[:3]
    requests[2][1].speculative = False
    engine = lab.engine(lab.drafter("self", chain(2)))
    assert not engine.programs.complete
    outputs = generate(engine, requests, steps=2)
    assert tokens_of(outputs) == wanted[:3]
    assert len(outputs[2].outputs[0].token_ids) > len(outputs[1].outputs[0].token_ids), (
        "the last went on without drafts"
    )
    assert arms_of(engine) == {chain(2)}
    later = threading.Timer(0.5, gate[PLAIN].set)
    later.start()
    began = time.monotonic()
    assert tokens_of(generate(engine, [requests[2]], steps=2))
    assert time.monotonic() - began > 0.3, "a text that has not begun waits for its program"
    assert arms_of(engine) == {chain(2), PLAIN}


def test_what_failed_to_compile_fails_the_requests_that_need_it(lab: Lab, gate: dict[AnyTopology, Gate]):
    wanted = tokens_of(lab.reference("cold", mixed_requests("cold")))[:2]
    gate[PLAIN] = Gate()
    gate[PLAIN].error = MemoryError("no room to compile")
    gate[PLAIN].set()
    requests = mixed_requests("cold")[:2]
    engine = lab.engine(lab.drafter("self", chain(2)))
    assert tokens_of(generate(engine, requests)) == wanted
    plain = [(prompt, type(params)(**{**vars(params), "speculative": False})) for prompt, params in requests]
    with pytest.raises(MemoryError, match="no room"):
        generate(engine, plain)
    engine.abort()
    assert tokens_of(generate(engine, requests)) == wanted


def test_an_adaptive_control_waits_for_its_arms_and_texts_do_not(lab: Lab, gate: dict[AnyTopology, Gate]):
    requests, wanted = mixed_requests("cold"), tokens_of(lab.reference("cold", mixed_requests("cold")))
    gate[chain(2)] = Gate()
    control = Adaptive((PLAIN, chain(1), chain(2)))
    engine = lab.engine(lab.drafter("self", chain(2)), control=control)
    assert tokens_of(generate(engine, requests, steps=2)) == wanted
    assert (arms_of(engine), engine.untimed, engine.timing_due) == ({PLAIN}, True, False)
    gate[chain(2)].set()
    while not engine.timing_due:
        time.sleep(0.01)
    assert tokens_of(generate(engine, requests[:2], steps=2)) == wanted[:2], "short queues wait for no timing"
    assert engine.untimed
    rounds = engine.time_arms()
    next(rounds)
    engine.add([])
    assert sum(1 for _ in rounds) > 3
    assert not engine.untimed
    assert control.times.prior is not None
    assert tokens_of(generate(engine, requests, steps=2)) == wanted


def test_long_queues_wait_until_the_arms_are_timed(lab: Lab, gate: dict[AnyTopology, Gate]):
    requests, wanted = mixed_requests("cold"), tokens_of(lab.reference("cold", mixed_requests("cold")))
    gate[chain(2)] = Gate()
    engine = lab.engine(lab.drafter("self", chain(2)), control=Adaptive((PLAIN, chain(2))))
    dispatch = engine.programs.dispatch

    def opens(*args, **how):
        gate[chain(2)].set()
        return dispatch(*args, **how)

    engine.programs.dispatch = opens
    assert tokens_of(generate(engine, requests, steps=2)) == wanted
    assert not engine.untimed
