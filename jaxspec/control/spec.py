"""The constants of the adaptive control, each with its unit and why it is what it is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ControlSpec:
    """How cautious the control is, how much it tries, and how long it remembers.

    Values were chosen on recorded texts (``tests/unit/control/test_replay.py``); most may be off by half without harm.
    """

    # policy
    margin: float = 0.02  # share by which an arm must beat plain decoding or the arm in use: less is not worth a change
    sureness: float = 1.28  # standard errors to the lower bound of a gain: one of ten such bounds is too high
    decide_every: int = 96  # steps that a decision holds: deciding takes as long as a tenth of a step
    # acceptance
    verifications: float = 800.0  # remembered: texts change within some thousand tokens
    prior_hits: float = 16.0  # accepted drafts that a kind of requests, or a tree, needs to be unlike others
    lookups: float = 96.0  # steps of which it is remembered how many rows had drafts: that changes within a text
    # step times
    dispatches: float = 200.0  # remembered of an arm's ratio: programs do not change, contexts grow slowly
    pace_drift: float = 0.015  # relative change of a machine's pace from one dispatch to the next, as measured
    text_spread: float = 0.05  # relative difference between texts in what drafts add (they touch other experts)
    text_dispatches: float = 50.0  # that a text lasts
    noise: float = 0.04  # relative noise of a dispatch, before it is learned; it is taken to be an eighth at least
    noise_dispatches: float = 64.0  # over which it is learned
    outlier: float = 2.5  # standard deviations beyond which a time counts as just so far: other programs interfere
    prior_error: float = 0.25  # relative error that all ratios of the prior have in common
    guess_per_draft: float = 0.3  # plain steps that a draft adds where there is no prior at all
    guess_error: float = 1.0  # relative error of that
    skipped_ratio: float = 1.02  # plain steps that one takes which looks for drafts in vain, before it is measured
    switch_steps: float = 0.2  # plain steps that the first dispatch of another arm takes more, likewise
    prompt_steps: float = 1.0  # plain steps that one takes more after prompts, likewise
    cold_error: float = 1.5  # error of the logarithms of these two
    rows_slope: float = 0.25  # growth of a plain step's time with rows, both as logarithms: between memory and compute
    rows_error: float = 0.3  # error of that slope; a third of it is each arm's own
    # trials
    trial_share: float = 0.005  # share of all time that trials may lose
    debt_steps: int = 12  # plain steps that may be owed at most: a trial of the longest chain in vain
    min_wait: int = 64  # steps until what was rejected may be tried again, at first
    max_wait: int = 4096  # and at last
    contest_wait: int = 48  # steps until an arm that may replace the best one is tried again
    contest_growth: float = 1.1  # factor of that wait from contest to contest
    trial_dispatches: int = 4  # dispatches that a trial goes on while its arm may win
    unevenness: float = 0.25  # share by which waits differ, or trials might always meet the same place of texts
