"""How often drafted positions are accepted: running counts with what they say about the tokens of a step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, repeat
from operator import itemgetter

import numpy as np

LATE = 48.0  # verifications that may show that texts have changed
FEW = 4.0  # of them, before they replace what was known, where a position before was a surprise
LATE_LEAST = 16.0  # of them, before they may
SURPRISE = 3.0  # standard deviations by which they then differ from what chance allows
PRIOR = 8.0  # verifications of chains that stand in for the missing ones of a tree, of everyone for those of a kind
PLAIN_FADE = 1 / 32  # share of what is known of a request that a plain step of it forgets
UNTRIED = 2000.0  # verifications that do not try a position, until most of what was known of it is forgotten
SHARED = 32.0  # verifications of its kind that stand in for the missing ones of a request
KIND_MEMORY, PUT_OFF = 800.0, 64  # verifications of a kind that are remembered, and dispatches that are looked at later


@dataclass
class Survival:
    """Counts of tried and accepted drafts by position, older ones fading out.

    ``s_j``, the survival of position j, is the share of verifications that accept at least j drafts
    (``speculation.md`` calls the sum E[tau] = 1 + sum s_j). It is the product of the rates at which positions are
    accepted when all before them were, each counted by itself; no independence between positions is assumed. So what
    short drafts tell of the first positions counts for long ones, too. A position of a tree is a depth.

    Many verifications make estimates sure, and slow to follow. So the latest few are kept beside them, and replace
    them once chance does not explain how they differ.

    Attributes:
      length: positions that are counted.
      memory: verifications that are remembered.
    """

    length: int
    memory: float = 400.0
    _tried: list[float] = field(init=False)
    _hits: list[float] = field(init=False)
    _late: list[tuple[float, float]] = field(init=False)

    def __post_init__(self) -> None:
        self._tried, self._hits = [0.0] * self.length, [0.0] * self.length
        self._late = [(0.0, 0.0)] * self.length

    def add(
        self, length: int, accepted: Iterable[int] | Mapping[int, int], since: int | None = None, going: int = 0
    ) -> int:
        """Counts verifications of ``length`` drafts each.

        Args:
          length: of each.
          accepted: drafts that each accepted, or how many verifications accepted so many drafts.
          since: position from which on the latest replace what was known before; None to find out.
          going: drafts accepted so far by one verification more, whose end is not known.

        Returns:
          That position; ``length`` if there is none.
        """
        counts = Counter(accepted)
        new, changed = counts.total(), length if since is None else since
        if not length or not new + going:
            return changed
        tried = new
        for place in range(min(length, self.length)):
            hits, more = tried - counts[place], place < going
            known = _with((self._tried[place], self._hits[place]), tried + more, hits + more, self.memory)
            self._late[place] = late = _with(self._late[place], tried + more, hits + more, LATE)
            if since is None and place < changed and _surprising(late, known):
                changed = place
            self._tried[place], self._hits[place] = late if place >= changed and late[0] >= FEW else known
            tried = hits
        for place in range(length, self.length):  # what was not tried is known less and less
            fade = max(0.0, 1.0 - new / UNTRIED)
            self._tried[place], self._hits[place] = self._tried[place] * fade, self._hits[place] * fade
        return changed

    def by_position(self, beside: Survival | None = None) -> list[tuple[float, float]]:
        """Survival of each position and its standard error.

        Each rate counts as if one verification more had accepted as many as the position before does (one half before
        the first). So positions that were never tried, or not for long, follow the last one's rate, and a position
        that once was never accepted is not hopeless for ever. Errors are at most 0.5.

        Args:
          beside: counts of at least as many positions, whose rates stand in instead, as those of ``PRIOR``
            verifications.
        """
        found, last, spread = [], 1.0, 0.0
        for rate, tried in self.rates(beside):
            last *= rate
            spread += (1.0 - rate) / (rate * tried) if tried else 1.0  # relative variances of factors add up
            found.append((last, min(last * math.sqrt(spread), 0.5)))
        return found

    def rates(self, beside: Survival | None = None) -> list[tuple[float, float]]:
        """Rate of each position among the drafts whose predecessors were accepted, and of how many tries it is."""
        found, rate = [], 0.5
        others = repeat(None) if beside is None else (other for other, _ in beside.rates())
        for tried, hits, other in zip(self._tried, self._hits, others, strict=False):
            if other is None:
                rate = (hits + rate) / (tried + 1.0)
            else:
                tried += PRIOR
                rate = (hits + PRIOR * other) / tried
            found.append((rate, tried))
        return found


def _with(known: tuple[float, float], tried: int, hits: int, memory: float) -> tuple[float, float]:
    """Tries and hits with some more of them, of older ones no more than are remembered."""
    fade = max(0.0, 1.0 - max(0.0, known[0] + tried - memory) / max(known[0], 1.0))
    return known[0] * fade + tried, known[1] * fade + hits


def _surprising(late: tuple[float, float], known: tuple[float, float]) -> bool:
    """Whether the latest tries and hits are not of the law of all of them."""
    if not LATE_LEAST <= late[0] < known[0]:
        return False
    rate = (known[1] + 0.5) / (known[0] + 1.0)
    return abs(late[1] - rate * late[0]) > SURPRISE * math.sqrt(late[0] * rate * (1.0 - rate))


class RequestSurvival:
    """The same of every running request by itself, in arrays [B, K] with a row for each batch slot.

    What a request has not tried yet it shares with its kind, which weighs as much as ``SHARED`` verifications of it;
    what lies beyond its limit survives never. Kinds are known before requests begin (``SamplingParams.kind``), and tell
    much of what they will accept. Of a new kind everyone's drafts tell.

    Attributes:
      limits: of the running requests that have one, ascending.
      shares: of the running requests, by kind, in quarters.
      wanted: whether one of them at least wants drafts.
    """

    def __init__(self, rows: int, length: int, memory: float):
        """Empty slots.

        Args:
          rows: B.
          length: K, positions that are counted.
          memory: verifications that are remembered of each request.
        """
        self._memory, self._place_K = memory, np.arange(length)
        self._tried_BK, self._hits_BK = np.zeros((rows, length)), np.zeros((rows, length))
        self._limit_B, self._within_BK = np.full(rows, length), np.ones((rows, length))
        self._runs: list[int] = []
        self._kind_B, self._kinds = [0] * rows, dict[int, Survival]()
        self._new: list[tuple[int, Mapping[int, Sequence[int]]]] = []
        self.limits: list[int] = []
        self.shares: tuple[tuple[int, int], ...] = ()
        self.wanted = False

    def enter(self, row: int, limit: int | None = None, kind: int = 0) -> None:
        """A request takes a slot; ``limit`` is of the positions that it may accept, None for all."""
        self._learn()
        self._kind_B[row] = kind
        self._tried_BK[row] = self._hits_BK[row] = 0.0
        self._limit_B[row] = len(self._place_K) if limit is None else limit
        self._within_BK[row] = self._place_K < self._limit_B[row]
        self._runs.append(row)
        self._changed()

    def leave(self, row: int) -> None:
        """Its request ends."""
        self._runs.remove(row)
        self._changed()

    def _changed(self) -> None:
        limits_R = self._limit_B.take(np.array(self._runs, int))
        self.limits, self.wanted = sorted(limits_R[limits_R < len(self._place_K)].tolist()), bool(limits_R.any())
        counts = Counter(self._kind_B[row] for row in self._runs)
        self.shares = tuple((kind, round(4 * counts[kind] / len(self._runs))) for kind in sorted(counts))

    def add(self, length: int, accepted: Mapping[int, Sequence[int]]) -> None:
        """Counts verifications of ``length`` drafts each, or of as many as a request's limit allows, by row.

        Plain steps, of no drafts, carry a text away from what was seen of it: or one bad stretch would end drafting for
        the rest of a request, where everybody else's drafts pay.
        """
        self._new.append((length, accepted))
        if len(self._new) > PUT_OFF:
            self._learn()

    def _learn(self) -> None:
        """Looks at what was accepted since the last time."""
        for length, together in groupby(self._new, key=itemgetter(0)):
            by_row = dict[int, list[int]]()
            for _, accepted in together:
                for row, counts in accepted.items():
                    by_row.setdefault(row, []).extend(counts)
            if length:
                self._count(length, by_row)
            else:
                self._fade(by_row)
        self._new = []

    def _fade(self, accepted: Mapping[int, Sequence[int]]) -> None:
        """Forgets some for plain steps."""
        kept = (1.0 - PLAIN_FADE) ** max(map(len, accepted.values()), default=0)
        self._tried_BK *= kept
        self._hits_BK *= kept

    def _count(self, length: int, accepted: Mapping[int, Sequence[int]]) -> None:
        """Counts verifications, older ones fading out."""
        by_kind = dict[tuple[int, int], list[int]]()
        for row, counts in accepted.items():
            by_kind.setdefault((self._kind_B[row], min(length, int(self._limit_B[row]))), []).extend(counts)
        for (kind, limit), counts in by_kind.items():
            self._kinds.setdefault(kind, Survival(len(self._place_K), KIND_MEMORY)).add(limit, counts)
        rows, most = list(accepted), max(map(len, accepted.values()), default=0)
        count_RS = np.full((len(rows), most), -1)
        for place, counts in enumerate(accepted.values()):
            count_RS[place, : len(counts)] = counts
        new_R1 = (count_RS >= 0).sum(axis=1, keepdims=True)
        new_RK = new_R1 * (self._place_K < np.minimum(self._limit_B[rows], length)[:, None])
        above_RK = (count_RS[:, :, None] > self._place_K).sum(axis=1)
        tried_RK = self._tried_BK[rows]
        fade_RK = 1.0 - np.maximum(tried_RK + new_RK - self._memory, 0.0) / np.maximum(tried_RK, 1.0)
        fade_RK = np.where(new_RK > 0, np.maximum(fade_RK, 0.0), 1.0)
        self._tried_BK[rows] = tried_RK * fade_RK + new_RK
        self._hits_BK[rows] = self._hits_BK[rows] * fade_RK + above_RK

    def beside(self, everyone: Survival) -> list[tuple[float, float]]:
        """Survival of each position: the mean over the running requests, of whom there is one at least, and everyone's.

        Args:
          everyone: counts over all requests.
        """
        self._learn()
        every_K = [survival for survival, _ in everyone.by_position()]
        runs = np.array(self._runs)
        own_RK = self._hits_BK.take(runs, axis=0)
        own_RK += SHARED * self._of_its_kind(everyone, every_K)
        own_RK /= self._tried_BK.take(runs, axis=0) + SHARED
        np.minimum.accumulate(own_RK, axis=1, out=own_RK)
        own_RK *= self._within_BK.take(runs, axis=0)
        return list(zip((np.add.reduce(own_RK) / len(runs)).tolist(), every_K, strict=True))

    def _of_its_kind(self, everyone: Survival, every_K: list[float]) -> np.ndarray:
        """Survival of each position for the kind of each running request, [R, K]; [K] if there is but one."""
        if len(self._kinds) < 2:
            return np.array(every_K)
        by_kind = dict[int, list[float]]()
        for kind in self._kinds.keys() & dict(self.shares).keys():
            by_kind[kind] = [survival for survival, _ in self._kinds[kind].by_position(everyone)]
        return np.array([by_kind.get(self._kind_B[row], every_K) for row in self._runs])
