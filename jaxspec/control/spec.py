"""The constants of the adaptive control, with their units and why each has its value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ControlSpec:
    """How cautious the control is, and how long it remembers."""

    margin: float = 0.02
    sureness: float = 1.28
    decide_every: int = 96
    verifications: float = 800.0
    prior_hits: float = 16.0
    lookups: float = 96.0
    dispatches: float = 200.0
    pace_drift: float = 0.015
    text_spread: float = 0.05
    text_dispatches: float = 50.0
    noise: float = 0.04
    noise_dispatches: float = 64.0
    outlier: float = 2.5
    prior_error: float = 0.25
    guess_per_draft: float = 0.3
    guess_error: float = 1.0
    skipped_ratio: float = 1.02
    switch_steps: float = 0.2
    prompt_steps: float = 1.0
    cold_error: float = 1.5
    rows_slope: float = 0.25
    rows_error: float = 0.3
    trial_share: float = 0.005
    debt_steps: int = 12
    min_wait: int = 64
    max_wait: int = 4096
    contest_wait: int = 48
    contest_growth: float = 1.1
    trial_dispatches: int = 4
    unevenness: float = 0.25
