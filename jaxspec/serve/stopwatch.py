"""Consecutive intervals of time."""

import time


class Stopwatch:
    """Measures consecutive intervals."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def lap(self) -> float:
        """Returns the seconds since the last lap."""
        began, self._began = self._began, time.monotonic()
        return self._began - began
