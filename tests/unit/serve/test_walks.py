"""What other lengths would have accepted on the text that one walked through."""

import math

import numpy as np
import pytest

from jaxspec.draft.methods import FROM_TOKENS
from jaxspec.serve.survival import Survival
from jaxspec.serve.walks import Walks
from tests.unit.serve.test_replay import Text, recorded

LENGTHS = range(1, 6)


def stretches(tokens: int, seed: int = 0) -> list[bool]:
    """Which tokens a drafter gets right: easy stretches of nine in ten, hard ones of three in ten."""
    rng = np.random.default_rng(seed)
    easy = np.cumsum(rng.random(tokens) < 0.06) % 2
    return (rng.random(tokens) < np.where(easy, 0.9, 0.3)).tolist()


def walk(right: list[bool], length: int) -> list[int]:
    """What drafts of a length accept, verification after verification."""
    found, place = list[int](), 0
    while place + length < len(right):
        count = 0
        while count < length and right[place + count]:
            count += 1
        found.append(count)
        place += count + 1
    return found


def errors(drafter: str) -> tuple[float, float]:
    """Relative errors of a length's tokens as another one's walks tell them, on recorded texts: replayed, and not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxspec.serve.survival.SURPRISE", math.inf)
        return _errors(drafter)


def _errors(drafter: str) -> tuple[float, float]:
    found, missed = list[float](), list[float]()
    for name, texts in recorded().items():
        walked = {k: [ended for text in texts for ended in (_ended(text, k),) if ended] for k in LENGTHS}
        for ran in LENGTHS if name.startswith(drafter + " ") else ():
            walks, alone = Walks(5, 5, 1e6, from_tokens=drafter in FROM_TOKENS), Survival(5, 1e6)
            for accepted in walked[ran]:
                walks.add(ran, accepted)
                alone.add(ran, accepted)
            for length in LENGTHS:
                truth, positions = Survival(length, 1e6), min(ran, length)
                truth.add(length, [count for accepted in walked[length] for count in accepted])
                if length != ran:
                    of_truth = tokens(truth, positions)
                    found.append(tokens(walks.counts[length], positions) / of_truth - 1)
                    missed.append(tokens(alone, positions) / of_truth - 1)
    return float(np.sqrt(np.mean(np.square(found)))), float(np.sqrt(np.mean(np.square(missed))))


def _ended(text: Text, length: int) -> list[int]:
    """What verifications of a recorded text accept, but for a last one that is cut short."""
    found, place = list[int](), 0
    while place < len(text) and place + (count := min(max(text[place], 0), length)) < len(text):
        found.append(count)
        place += count + 1
    return found


def tokens(counts: Survival, length: int) -> float:
    """Committed per verification."""
    return 1 + sum(survival for survival, _ in counts.by_position()[:length])


def test_runs_of_right_drafts_say_what_shorter_drafts_accept():
    walks = Walks(3, 3, 800.0, from_tokens=True)
    walks.add(3, [2, 0, 1])
    ones, twos, threes = (Survival(length, 800.0) for length in (1, 2, 3))
    ones.add(1, [1, 0, 0, 1])  # behind the first two right drafts there is the wrong one
    twos.add(2, [2, 0, 1])
    threes.add(3, [2, 0, 1])
    assert [counts.by_position() for counts in walks.counts[1:]] == [c.by_position() for c in (ones, twos, threes)]


def test_a_run_that_has_not_ended_tells_what_is_known_of_it():
    walks = Walks(3, 3, 800.0, from_tokens=True)
    walks.add(3, [0, 3])
    ones, twos = Survival(1, 800.0), Survival(2, 800.0)
    ones.add(1, [0, 1, 1])  # the second one's bonus token is the target's own, right or wrong
    twos.add(2, [0, 2])
    assert [counts.by_position() for counts in walks.counts[1:3]] == [ones.by_position(), twos.by_position()]
    walks, threes = Walks(3, 3, 800.0, from_tokens=True), Survival(3, 800.0)
    walks.add(1, [0, 1])
    threes.add(1, [0], going=1)
    assert walks.counts[3].by_position() == threes.by_position()


@pytest.mark.parametrize("ran", LENGTHS)
def test_every_length_is_known_from_any(ran: int, monkeypatch: pytest.MonkeyPatch):
    """Shorter ones to a hundredth; longer ones, as far as positions were tried, with six tenths of the error."""
    monkeypatch.setattr("jaxspec.serve.survival.SURPRISE", math.inf)
    right, walks, alone = stretches(40_000), Walks(5, 5, 1e6, from_tokens=True), Survival(5, 1e6)
    accepted = walk(right, ran)
    for start in range(0, len(accepted), 64):
        walks.add(ran, accepted[start : start + 64])
        alone.add(ran, accepted[start : start + 64])
    for length in LENGTHS:
        truth, positions = Survival(length, 1e6), min(ran, length)
        truth.add(length, walk(right, length))
        error, of_all = (tokens(c, positions) / tokens(truth, positions) - 1 for c in (walks.counts[length], alone))
        if length <= ran:
            assert abs(error) < 0.01, length
            assert length == ran or of_all < -0.02, length
        else:
            assert abs(error) < 0.6 * of_all, length


@pytest.mark.parametrize(("drafter", "most"), [("draft_model", 0.5), ("ngram", 0.5), ("shared_expert", 0.85)])
def test_on_recorded_texts_lengths_know_each_other_better(drafter: str, most: float):
    replayed, of_all = errors(drafter)
    assert replayed < most * of_all


def test_shorter_drafts_of_a_head_are_taken_to_accept_what_its_long_ones_did():
    head, alone = Walks(3, 3, 800.0, from_tokens=False), Survival(2, 800.0)
    head.add(3, [2, 0, 1])
    alone.add(2, [2, 0, 1])
    assert head.counts[2].by_position() == alone.by_position()


def test_a_change_that_one_length_sees_is_one_for_all():
    """Or a length would look better than another for what it has not noticed yet."""
    walks, sure = Walks(5, 5, 800.0, from_tokens=True), list[list[float]]()
    for _ in range(10):
        walks.add(1, ([1] * 9 + [0]) * 8)
    for _ in range(8):
        sure.append([counts.by_position()[0][1] for counts in walks.counts[1:]])
        walks.add(1, [0, 1, 0, 1])
    jumps = np.diff(sure, axis=0) > 0.02
    assert jumps.sum(axis=0).tolist() == [1] * 5
    assert jumps.all(axis=1).sum() == 1


def test_no_drafts_tell_nothing():
    walks = Walks(2, 3, 800.0, from_tokens=True)
    walks.add(0, [0, 0, 0])
    walks.add(2, [])
    assert [counts.by_position() for counts in walks.counts] == [Survival(n).by_position() for n in (0, 1, 3)]
