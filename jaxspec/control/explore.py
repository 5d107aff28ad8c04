"""Which arm is tried while another one is best: ``balance += share * time - what trials lost``, and none in debt.

What was tried and rejected waits twice as long each time: chains together, each tree by itself. An arm that may replace
the best one (a contest) is tried again sooner, and for some dispatches: a few unlucky ones would keep it out for long.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxspec.control.decision import Decision, Outcome
from jaxspec.control.sparse import Share
from jaxspec.control.spec import ControlSpec
from jaxspec.control.step_time import StepTimes


class Gain(NamedTuple):
    """Tokens per second of an arm over those of plain decoding.

    Attributes:
      value: predicted; 0 where nothing is known.
      lower, upper: what it is for sure, and may be at most; a tree may accept what chains do now, whatever it did.
      verified: steps in which it verifies drafts; the others are plain.
      added: time that a verification adds to a step, in plain steps.
    """

    value: float
    lower: float
    upper: float
    verified: Share = Share()
    added: float = 0.0

    def to_replace(self, margin: float) -> float:
        """Returns what another arm must gain at least, to be used instead of this one."""
        return self.value * (1.0 + margin * self.verified.steps)


class Trials:
    """Decides when to try which arm, and keeps the account.

    Attributes:
      steps: that were decided about.
      debt_s: what trials, and showing drafters what was decoded plainly, have lost and not earned yet.
    """

    def __init__(self, spec: ControlSpec, chains: int, times: StepTimes):
        """Owes nothing; arms from index ``chains`` on are trees."""
        self._spec, self._chains, self._times = spec, chains, times
        self.steps, self.debt_s = 0, 0.0
        self._waits: dict[int, float] = {}
        self._ran: dict[int, float] = {}
        self._contest_at, self._contest_wait = 0.0, float(spec.contest_wait)
        self._trial, self._left = 0, 0  # the arm of the trial that goes on, and dispatches that it may have
        self._asked = 0

    def choose(self, best: int, gains: Sequence[Gain], rows: int) -> int | None:
        """Returns an arm to try now instead of the best one, None where none is due or affordable."""
        self._asked += 1
        trial, self._trial = self._trial, 0
        if self.debt_s >= self._spec.debt_steps * self._times.plain_s(rows):
            return None
        if trial not in (0, best) and self._left > 0 and self._may_win(trial, best, gains):
            self._trial = trial
            return trial
        for arm in range(self._chains - 1, len(gains)):
            # The longest chain tells about all positions of all chains; about a tree only the tree does. What ran and
            # found no draft at all waits as others do.
            seen = self._times.seen(arm)
            if seen < 2 and (seen or self._due(arm)):
                return arm
        if best and self._due(0):
            return 0  # what plain decoding takes must stay known
        others = [arm for arm in range(1, len(gains)) if arm != best]
        if self._contest_at <= self.steps:
            rival = max(others, key=lambda arm: gains[arm].upper, default=0)
            if self._may_win(rival, best, gains):
                return rival
        # Also a chain without hope, for texts change; it tells about trees, which then need not be run in vain.
        due = [arm for arm in others if self._due(arm) and (arm < self._chains or gains[arm].upper > gains[best].value)]
        return max(due, key=lambda arm: gains[arm].value if arm < self._chains else gains[arm].upper, default=None)

    def record(self, arm: int, outcome: Outcome, *, chosen: bool) -> None:
        """Counts a dispatch; one that nobody decided about earns nothing."""
        spec = self._spec
        if not self.steps and self._times.prior is None:  # so a fresh engine may learn at all
            self.debt_s = -2 * spec.debt_steps * outcome.time_s / outcome.steps
        if chosen:
            self.steps += outcome.steps
            self._owe(outcome.catch_up_s - spec.trial_share * (outcome.time_s + outcome.catch_up_s))
        self._ran[self._group(arm)] = self.steps

    def record_trial(self, arm: int, upper: float, decision: Decision, outcome: Outcome) -> None:
        """Counts what a trial lost, and sets how long its like waits; ``upper``: of its gain, 0 where that is known."""
        spec, group, fresh = self._spec, self._group(arm), arm == 0 or self._trial != arm
        plain_s = self._times.plain_s(outcome.rows)
        # What the best arm would have taken for as many tokens. They are a matter of luck, which sums do without.
        instead_s = outcome.tokens / outcome.rows * plain_s / decision.best
        self._owe(outcome.time_s - instead_s + fresh * self._times.switch_s)
        if fresh:
            self._trial, self._left = arm, spec.trial_dispatches
        self._left -= 1
        wait = self._waits.get(group, spec.min_wait)
        if arm:
            self._contest_at = self.steps + self.uneven(self._contest_wait)
            self._contest_wait = min(self._contest_wait * spec.contest_growth, spec.max_wait)
            if outcome.skipped < outcome.steps and upper > decision.best:
                self._ran[group] -= wait  # it may pay, and that is not known yet: only the account bounds its trials
                return
        if fresh:
            # Chains wait so long that together with others that never pay their trials stay within the share.
            slower = (1.0 - (decision.gain or 1.0) / decision.best) * outcome.steps
            begins = (outcome.catch_up_s + 2 * self._times.switch_s) / plain_s
            longest = max(2 * spec.min_wait, (slower + begins) / spec.trial_share) if group == 1 else math.inf
            self._waits[group] = min(2 * wait, longest, spec.max_wait)

    def reset(self, *, sides: bool) -> None:
        """Begins anew where another arm is best: contests; other waits, too, where drafting begins or ends."""
        self._contest_wait = float(self._spec.contest_wait)
        self._waits = {} if sides else self._waits

    def uneven(self, wait: float) -> float:
        """Returns a wait that differs from time to time, or all trials might meet texts at the same place."""
        turn = self._asked * 0.6180339887 % 1.0  # multiples of the golden ratio repeat least
        return wait * (1.0 + self._spec.unevenness * (2.0 * turn - 1.0))

    def _owe(self, more_s: float) -> None:
        # What is earned beyond the debt does not pile up.
        self.debt_s = max(min(self.debt_s, 0.0), self.debt_s + more_s)

    def _group(self, arm: int) -> int:
        """Returns what waits together: plain decoding, all chains, each tree."""
        return min(arm, 1) if arm < self._chains else arm

    def _due(self, arm: int) -> bool:
        """Returns whether an arm's group has waited long enough; drafts that never ran need not."""
        group = self._group(arm)
        since = self._ran.get(group, -math.inf if arm else 0.0)
        return since + self.uneven(self._waits.get(group, self._spec.min_wait)) <= self.steps

    def _may_win(self, arm: int, best: int, gains: Sequence[Gain]) -> bool:
        return gains[arm].upper > (gains[best].to_replace(self._spec.margin) if best else 1.0)
