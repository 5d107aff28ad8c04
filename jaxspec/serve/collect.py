"""From a dispatch's result to what samples, metrics and the control learn of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxspec.control.decision import Outcome
from jaxspec.decode.dispatch import DispatchResult
from jaxspec.serve.metrics import EngineMetrics
from jaxspec.serve.request import Logprob, RequestOutput
from jaxspec.serve.sample import Sample


@dataclass
class Collected:
    """A dispatch's tokens, as samples took them.

    Attributes:
      moved: requests that it moved forward.
      ended: rows whose sample ended.
      accepted: accepted drafts of each verification, by how many were tried and the kind of request.
      skipped_tokens: tokens of steps without drafts.
    """

    moved: dict[int, RequestOutput] = field(default_factory=dict)
    ended: list[tuple[int, Sample]] = field(default_factory=list)
    accepted: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    skipped_tokens: int = 0


def collect(
    result: DispatchResult, rows: Sequence[Sample | None], eos: set[int], metrics: EngineMetrics, *, prunes: bool
) -> Collected:
    """Hands each row's tokens to its sample.

    Args:
      result: of the dispatch.
      rows: sample in each row.
      eos: ids that end a text.
      metrics: of the engine, which counts.
      prunes: whether drafts may have been pruned.
    """
    taken, sparse = Collected(), result.report.sparse
    for row, sample in enumerate(rows):
        if sample is None:
            continue
        taken.moved[id(sample.output)] = sample.output
        tried = sample.tried(result.length)
        try:
            counts = _take(result, row, sample, eos, metrics, tried if prunes else None)
        except Exception as error:  # of this request alone, such as of its text
            counts = []
            sample.fail(f"this text could not be taken over ({type(error).__name__}: {error})")
        if result.broken_B[row] and sample.completion.finish_reason is None:
            sample.fail(_broken(sample))
        verified = counts
        if sparse:  # where it proposed nothing, nothing was tried
            verified = [n for n, some in zip(counts, result.verified_BX[row].tolist(), strict=False) if some]
        taken.skipped_tokens += len(counts) - len(verified)
        taken.accepted.setdefault((tried, sample.params.kind), []).extend(verified)
        if sample.completion.finish_reason is not None:
            taken.ended.append((row, sample))
    return taken


def _broken(sample: Sample) -> str:
    p, where = sample.params, f"the model's logits are not finite at position {sample.length}"
    advice = "look for NaN or infinity in the weights, or try dtype float32"
    if sample.constraint is not None and sample.constraint.error:
        return f"structured_outputs: {sample.constraint.error}; look for parts that can never end"
    if sample.biased or sample.bad_words or p.min_tokens or sample.constraint is not None:
        return f"{where}, or every token is banned there; allow more tokens, or {advice}"
    return f"{where}; {advice}"


def _take(
    result: DispatchResult, row: int, sample: Sample, eos: set[int], metrics: EngineMetrics, unpruned: int | None
) -> list[int]:
    """Hands the tokens of a dispatch to a sample, step by step.

    Returns:
      Accepted drafts of each verification, without a last one that was cut short.
    """
    accepted: list[int] = []
    wanted = sample.params.logprobs
    counts, drafts, ids = (x[row].tolist() for x in (result.count_BX, result.verified_BX, result.token_BXT))
    for step, (count, drafted) in enumerate(zip(counts, drafts, strict=True)):
        if count == 0:  # its text ended on the device
            break
        tokens = ids[step][:count]
        logprobs = None if wanted is None else _logprobs(result, row, step, tokens, wanted)
        metrics.cut_drafts += 0 if unpruned is None else unpruned - drafted
        if sample.routes is not None:
            sample.routes.add(sample.length, result.expert_BXTYA[row, step, :count])
        before = sample.output.metrics.num_accepted_tokens
        ended = sample.take(tokens, drafted, logprobs, eos)
        metrics.add(drafted, sample.output.metrics.num_accepted_tokens - before, sample.completion)
        if ended:
            break
        accepted.append(count - 1)
    sample.show()
    if result.length:
        sample.observed = sample.length
    else:
        sample.unobserved = True
    return accepted


def _logprobs(result: DispatchResult, row: int, step: int, tokens: list[int], most: int) -> list[dict[int, Logprob]]:
    """Returns log-probabilities of one verification's tokens: the sampled one and the ``most`` best."""
    # Sliced on the host: a slice on the device would compile a program for each length.
    values = np.asarray(result.report.logprob_BXTL)[row, step, : len(tokens)]
    ids = np.asarray(result.report.top_BXTL)[row, step, : len(tokens)]
    entries = []
    for token, value, top in zip(tokens, values, ids, strict=True):
        entry = {
            int(i): Logprob(float(v), r + 1)
            for r, (i, v) in enumerate(zip(top[1:], value[1:], strict=True))
            if r < most
        }
        entry.setdefault(token, Logprob(float(value[0]), int(top[0])))
        entries.append(entry)
    return entries


def outcome_of(result: DispatchResult, taken: Collected, rows: int, **measured: Any) -> Outcome:
    """Returns the outcome of a dispatch for whoever decides about the next.

    Args:
      result: of the dispatch.
      taken: what its rows took.
      rows: that ran.
      measured: times and circumstances, by the names of ``Outcome``.
    """
    steps, touched_K = max(result.steps, 1), result.report.counts.touched_K
    return Outcome(
        rows=rows, steps=result.steps, accepted=taken.accepted, skipped_tokens=taken.skipped_tokens,
        touched=() if touched_K is None else tuple(np.asarray(touched_K) / steps),
        drafted=float(result.verified_BX.sum() / steps),
        depth=float(result.verified_BX.max(axis=0).sum() / steps),
        skipped=int((~result.verified_X).sum()),
        rows_with_drafts=tuple((result.drafts_BX > 0).sum(axis=0).tolist()) if result.report.sparse else (),
        active=float((result.count_BX > 0).sum() / steps),
        **measured,
    )  # fmt: skip
