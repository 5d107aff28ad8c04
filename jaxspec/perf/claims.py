"""Rules of thumb about speculation on MoE models, each checked for one model and machine."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from jaxspec.perf.cost import Mesh, byte_ratio
from jaxspec.perf.drafting import AcceptanceModel
from jaxspec.perf.links import link_time
from jaxspec.perf.machine import AssumedMachine
from jaxspec.perf.moesd import (
    acceptance_length,
    break_even_acceptance,
    expected_experts,
    saturation_tokens,
    tokens_per_expert,
)
from jaxspec.perf.overlap import AssumedOverlap
from jaxspec.perf.planner import PAYS, Option, Question, option

FIXED = 0.7  # acceptance per draft where a rule names none: batch sizes and contexts are compared at one value


@dataclass(frozen=True)
class Claim:
    """A rule and what the model of step time says about it.

    Attributes:
      rule: in the words of the guides.
      verdict: ``holds``, ``does not hold`` or ``depends``, for this model and machine.
      finding: with the numbers.
    """

    rule: str
    verdict: str
    finding: str


def claims(question: Question) -> tuple[Claim, ...]:
    """Checks every rule for a question's model, machine and first drafter."""
    fixed = replace(
        question, acceptance={d.kind: (AcceptanceModel((FIXED,)),) * 3 for d in question.drafters}, trees=()
    )
    rules: tuple[Callable[[Question], Claim], ...] = (
        _large_batch, _small_batch, _best_length, _long_context, _temperature, _prefill, _rate, _half, _drop,
        _saturated, _headroom, _static, _rounds, _promise,
    )  # fmt: skip
    return tuple(rule(fixed) for rule in rules)


def _best(question: Question, rows: int) -> Option:
    """Returns the best chain of the first drafter."""
    options = (option(question, question.drafters[0], rows, (1,) * k, bars=False) for k in question.lengths)
    return max(options, key=lambda o: o.speedup)


def _verdict(confirmed: Iterable[bool]) -> str:
    cases = list(confirmed)
    return "holds" if all(cases) else "depends" if any(cases) else "does not hold"


def _shown(o: Option) -> str:
    return f"{o.speedup:.2f}x with K = {o.length}"


def _large_batch(q: Question) -> Claim:
    best = {rows: _best(q, rows) for rows in (1, 16, 32, 64, 128)}
    numbers = ", ".join(f"{_shown(o)} at {rows}" for rows, o in best.items())
    return Claim(
        "Above a batch of 16 or 32 speculation stops paying: switch it off.",
        _verdict(best[rows].speedup < PAYS for rows in (16, 32, 64, 128)),
        f"acceptance does not depend on the batch, only the cost does: {numbers} (acceptance {FIXED})",
    )


def _small_batch(q: Question) -> Claim:
    best = {rows: _best(q, rows) for rows in (1, 2, 4, 8)}
    numbers = ", ".join(f"{_shown(o)} at {rows}" for rows, o in best.items())
    routed = q.model.routed
    ratio = f"; weights alone cost {byte_ratio(q.model, 1, 3):.2f} plain steps at batch 1, K = 3" if routed else ""
    return Claim(
        "At small batches speculation does not work for MoE models.",
        _verdict(o.speedup < PAYS for o in best.values()),
        f"{numbers} (acceptance {FIXED}){ratio}",
    )


def _best_length(q: Question) -> Claim:
    lengths = {(a, rows): _best(_accepting(q, a), rows).length for a in (0.6, 0.7, 0.8) for rows in (1, 8, 64)}
    numbers = "; ".join(
        f"acceptance {a}: " + ", ".join(f"{lengths[a, rows]} at batch {rows}" for rows in (1, 8, 64))
        for a in (0.6, 0.7, 0.8)
    )
    verdict = _verdict(4 <= length <= 6 for length in lengths.values())
    return Claim("The best number of drafts is 4 to 6.", verdict, f"best K by {numbers}")


def _accepting(q: Question, acceptance: float) -> Question:
    return replace(q, acceptance={d.kind: (AcceptanceModel((acceptance,)),) * 3 for d in q.drafters})


def _long_context(q: Question) -> Claim:
    far = min(32768, q.model.max_context - 1)
    near, long = _best(replace(q, context=min(1024, far)), 8), _best(replace(q, context=far), 8)
    return Claim(
        "Above a context of 32K speculation is not worth it.",
        "holds" if long.speedup < PAYS else "does not hold",
        f"the K + 1 positions of a row share one read of its cache: {_shown(near)} at {min(1024, far)} tokens, "
        f"{_shown(long)} at {far}, batch 8",
    )


def _temperature(q: Question) -> Claim:
    cold, warm, claimed = (_best(_accepting(q, a), 8).speedup for a in (0.7, 0.65, 0.45))
    return Claim(
        "At temperature 1 acceptance falls to .40 to .50, so that speculation is useless.",
        "holds" if warm < PAYS else "does not hold",
        f"measured drops of tokens per pass are 3 to 17 % (DeepSeek-V3 4.83 to 4.68, gpt-oss-120b 2.81 to 2.65): from "
        f"{cold:.2f}x at acceptance .70 to {warm:.2f}x at .65; .45 would leave {claimed:.2f}x, batch 8",
    )


def _prefill(q: Question) -> Claim:
    machine, best = q.machines[0], _best(q, 8)
    prompt, answer = min(8192, q.model.max_context - 256), 128
    prefill_s, decode_s = 8 * machine.prefill_s(prompt, 1024), answer * machine.verify_s(8, 1, min(q.context, prompt))
    share, gain = prefill_s / (prefill_s + decode_s), (prefill_s + decode_s) / (prefill_s + decode_s / best.speedup)
    return Claim(
        "Prefill-heavy work gains nothing.",
        "holds" if gain < PAYS else "depends",
        f"reading {prompt} tokens takes {share:.0%} of a request with {answer} new ones, and speculation does not "
        f"shorten it: {best.speedup:.2f}x of the decoding is {gain:.2f}x of the whole, batch 8",
    )


def _rate(q: Question) -> Claim:
    rows = 8
    o = option(q, q.drafters[0], rows, (1, 1, 1), bars=False)
    need = o.break_even
    rate = None if need is None else (acceptance_length(acceptance=need, length=3) - 1) / 3
    words = (
        "no acceptance is enough" if rate is None else f"the break-even at K = 3, batch {rows} is a rate of {rate:.0%}"
    )
    return Claim(
        "Drop speculation when the acceptance rate is below 30 %.",
        "depends",
        f"{words}; rate is accepted over proposed, (tau - 1) / K; compare s / tau of one more draft with what it costs",
    )


def _half(q: Question) -> Claim:
    best = {rows: _best(_accepting(q, 0.5), rows) for rows in (1, 8, 64)}
    return Claim(
        "An acceptance below .5 makes it slower.",
        _verdict(o.speedup < PAYS for o in best.values()),
        "at .5: " + ", ".join(f"{_shown(o)} at batch {rows}" for rows, o in best.items()),
    )


def _drop(q: Question) -> Claim:
    high, low = (acceptance_length(acceptance=a, length=5) for a in (0.75, 0.65))
    cost = {rows: option(q, q.drafters[0], rows, (1,) * 5, bars=False).cost for rows in (1, 64)}
    need = {rows: break_even_acceptance(cost=c, length=5) for rows, c in cost.items()}
    words = ", ".join(
        f"{'none' if need[rows] is None else f'{need[rows]:.2f}'} at batch {rows} (a step costs {cost[rows]:.2f})"
        for rows in cost
    )
    return Claim(
        "From .75 to .65 acceptance an MoE model loses more than a dense one.",
        "does not hold",
        f"tokens per pass fall from {high:.2f} to {low:.2f} ({low / high - 1:.0%}) for any model; what differs is the "
        f"break-even acceptance at K = 5: {words}",
    )


def _saturated(q: Question) -> Claim:
    routed, rule = q.model.routed, "Once a batch touches all experts, verifying loads no more weights."
    if routed is None:
        return Claim(rule, "holds", "a dense layer is one expert, touched by the first token")
    sizes = {"num_experts": routed.experts, "top_k": routed.top_k}
    full = saturation_tokens(**sizes)
    ratio, before = byte_ratio(q.model, full, 3), byte_ratio(q.model, max(full // 8, 1), 3)
    return Claim(
        rule,
        "holds" if ratio < 1.1 else "depends",
        f"{full} tokens touch 95 % of {routed.experts} experts; at that batch K = 3 reads {ratio:.2f} times a plain "
        f"step's weights, at an eighth of it {before:.2f}; 4 tokens touch {expected_experts(**sizes, tokens=4):.1f}, "
        f"{AssumedOverlap().touched(**sizes, rows=1, positions=4):.1f} with the overlap that is usual",
    )


def _headroom(q: Question) -> Claim:
    routed, machine = q.model.routed, q.machines[0]
    rule = "Decoding leaves products idle, so that verifying is free."
    if routed is None or not isinstance(machine, AssumedMachine) or not machine.rates.expert_flop_s:
        cost = option(q, q.drafters[0], 8, (1, 1, 1), bars=False).cost
        return Claim(rule, "depends", f"a step with K = 3 costs {cost:.2f} plain ones at batch 8")
    rates, sizes = machine.rates, {"num_experts": routed.experts, "top_k": routed.top_k}
    ridge = routed.expert_bytes * rates.expert_byte_s / (routed.expert_flops * rates.expert_flop_s)
    each = tokens_per_expert(**sizes, tokens=128 * 4)
    return Claim(
        rule,
        "depends",
        f"products are idle indeed: batch 128 with K = 3 gives an expert {each:.0f} tokens, its products take as "
        f"long as its bytes at {ridge:.0f}; but small batches read more experts: {byte_ratio(q.model, 1, 3):.2f} times "
        f"the weights at batch 1 and {byte_ratio(q.model, 8, 3):.2f} at 8",
    )


def _static(q: Question) -> Claim:
    gains = {a: option(_accepting(q, a), q.drafters[0], 128, (1,) * 5, bars=False).speedup for a in (0.45, 0.7)}
    return Claim(
        "Above a concurrency of 100, drafts of a fixed length cost 30 to 40 % of the throughput.",
        "holds" if gains[0.7] < 0.7 else "does not hold" if gains[0.45] >= PAYS else "depends",
        ", ".join(f"{gain:.2f}x at acceptance {a}" for a, gain in gains.items()) + ", five drafts, batch 128",
    )


def _rounds(q: Question) -> Claim:
    layers, machine = q.model.routed_layers, q.machines[0]
    rule = "Verifying N drafts takes N all-to-all rounds under expert parallelism."
    if not layers:
        return Claim(rule, "does not hold", "this model has no routed experts")
    words = f"one dispatch and one combine in each of {layers} layers, whatever K: {2 * layers} collectives per pass"
    if isinstance(machine, AssumedMachine) and machine.mesh.expert > 1:
        mesh: Mesh = machine.mesh
        local = -(-8 // (mesh.data * mesh.expert))
        one, many = (1e3 * link_time(q.model, machine.rates, local * n, mesh) for n in (1, 6))
        words += f"; only bytes grow: {one:.2f} ms plain, {many:.2f} ms with 5 drafts, batch 8 on {mesh.expert} devices"
    return Claim(rule, "does not hold", words)


def _promise(q: Question) -> Claim:
    o = option(_accepting(q, 0.75), q.drafters[0], 1, (1,) * 5, bars=False)
    low, high = (acceptance_length(acceptance=a, length=5) for a in (0.74, 0.78))
    return Claim(
        "Acceptance .75 and five drafts give 4 tokens per pass, four times the speed.",
        "does not hold",
        f"(1 - .75^6) / .25 = {o.acceptance_length:.2f} tokens, the bonus included, are the ceiling; over a step of "
        f"{o.cost:.2f} plain ones that is {o.speedup:.2f}x at batch 1; 4.2x at .74 to .78, as is claimed too, "
        f"exceeds its own ceiling of {low:.2f} to {high:.2f}",
    )
