"""The experts that the target chose for each token of a text."""

import numpy as np


class RoutedExperts:
    """Collects expert choices by position, in whatever order they come; what comes again is the same."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, np.ndarray]] = []

    def add(self, start: int, expert_TYA: np.ndarray) -> None:
        """Takes the choices of consecutive positions from ``start`` on."""
        self._parts.append((start, np.array(expert_TYA)))

    def whole(self, length: int) -> np.ndarray | None:
        """Returns the choices of the first positions, [T, Y, A]; fewer where fewer were read, None where none were."""
        if not self._parts:
            return None
        ends = max(start + len(part) for start, part in self._parts)
        _, first = self._parts[0]
        all_TYA = np.zeros((ends, *first.shape[1:]), first.dtype)
        for start, part in self._parts:
            all_TYA[start : start + len(part)] = part
        return all_TYA[:length]
