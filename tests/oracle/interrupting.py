"""Interrupts that come in the middle of a call, and what must hold after them."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from jaxspec.serve.llm import LLM


class Interrupted(KeyboardInterrupt):
    """So that pytest does not end the tests where one gets through."""


@contextmanager
def alarms_interrupt() -> Iterator[None]:
    """The alarm's signal raises what an interrupt would."""

    def stop(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, stop)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def interrupted(call: Callable[[], Any], after_s: float) -> str:
    """How a call ended that an alarm came into."""
    end = "whole"
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, after_s)
            call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Interrupted:
        end = "interrupted"
    return end


def is_idle(llm: LLM) -> bool:
    """Nothing is held once everything that was asked for is done."""
    engine = llm.engine
    llm.get_metrics()
    full = engine.pool is None or engine.pool.free == engine.pool.total
    return not engine.busy and full and not np.asarray(engine.state.active_B).any()
