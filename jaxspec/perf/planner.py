"""Planning of speculation: for each batch size the best drafter and shape, its speed-up, and the error bar."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from jaxspec.errors import ConfigError
from jaxspec.perf.cost import Mesh, ModelCost, Rates
from jaxspec.perf.device_memory import Memory, memory, most_rows
from jaxspec.perf.drafting import ASSUMED, AcceptanceModel, Branching, DraftCost, head_for
from jaxspec.perf.machine import Machine
from jaxspec.perf.moesd import break_even_acceptance, speedup, target_efficiency
from jaxspec.perf.transport_cost import Transport, pass_of, transport_times

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8)
TREES: tuple[Branching, ...] = (
    (2,), (3,), (2, 1), (2, 2), (3, 2), (2, 1, 1), (2, 2, 1), (3, 2, 1), (2, 1, 1, 1), (2, 2, 1, 1),
)  # fmt: skip
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PAYS = 1.02  # as of the controller: less is not worth the trouble


@dataclass(frozen=True)
class Option:
    """One way to speculate at one batch size.

    Attributes:
      kind, branching: drafter, and drafts per node by level; a chain of K is K ones.
      acceptance_length: tokens per target pass.
      cost: a step over a plain one, drafting included.
      speedup, low, high: over plain decoding; likely, and the ends of what assumptions and acceptance leave open.
      tok_per_s: of the whole batch.
      token_s: seconds per token that one row sees.
      break_even: acceptance per draft at which it is worth nothing, None where no acceptance is enough; chains only.
    """

    kind: str
    branching: Branching
    acceptance_length: float
    cost: float
    speedup: float
    low: float
    high: float
    tok_per_s: float
    token_s: float
    break_even: float | None

    @property
    def length(self) -> int:
        """K, the deepest draft."""
        return len(self.branching)

    @property
    def positions(self) -> int:
        """Nodes that are verified."""
        return nodes(self.branching)

    @property
    def verdict(self) -> str:
        """Whether it pays: ``yes``, ``no``, or ``maybe`` where the error bar crosses."""
        return "yes" if self.low >= PAYS else "no" if self.high < PAYS else "maybe"


@dataclass(frozen=True)
class BatchPlan:
    """The best option at one batch size.

    Attributes:
      rows: of the batch.
      memory: of a device, with the best option.
      plain_s: seconds of a plain step, which gives every row a token.
      plain_tok_per_s: of the whole batch.
      best: the fastest option by likely numbers.
      chains: chains of the best option's drafter, by K.
      break_even: least acceptance per draft that pays with this drafter, and its K; None where none does.
      target_efficiency: MoESD's, of the best option.
      touched: distinct experts per layer, plain and verifying the best option.
      transports: seconds of what transports differ in, by transport of a plain step; empty where experts lie whole.
    """

    rows: int
    memory: Memory
    plain_s: float
    plain_tok_per_s: float
    best: Option
    chains: tuple[Option, ...]
    break_even: tuple[float, int] | None
    target_efficiency: float
    touched: tuple[float, float]
    transports: Mapping[Transport, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Question:
    """A question to the planner.

    Attributes:
      model: the target.
      machines: the likely one first, the others span the error bars.
      drafters: to choose from.
      mesh: of devices.
      room_bytes: of memory that a device may use.
      acceptance: by drafter's kind: low, likely and high; kinds that are missing take ``ASSUMED``.
      context: cached positions per row.
      lengths: of chains; empty for the trees alone.
      trees: to choose from where the target can verify them.
      rates: of a device, to price transports with; None prices none.
    """

    model: ModelCost
    machines: tuple[Machine, ...]
    drafters: tuple[DraftCost, ...]
    mesh: Mesh = field(default_factory=Mesh)
    room_bytes: float = math.inf
    acceptance: Mapping[str, tuple[AcceptanceModel, ...]] = field(default_factory=dict)
    context: int = 1024
    lengths: tuple[int, ...] = LENGTHS
    trees: tuple[Branching, ...] = TREES
    rates: Rates | None = None

    def __post_init__(self) -> None:
        if not self.drafters or not self.machines or not (self.lengths or self.trees):
            raise ConfigError("plan: needs a machine, a drafter and lengths")
        if not 0 <= self.context < self.model.max_context:
            raise ConfigError(
                f"plan: {self.model.name} reads up to {self.model.max_context} tokens, got a context of {self.context}"
            )

    def acceptances(self, kind: str) -> tuple[AcceptanceModel, ...]:
        """Returns low, likely and high acceptance of a drafter; all the same if it was given."""
        return self.acceptance[kind] if kind in self.acceptance else ASSUMED[kind][:3]


def nodes(branching: Branching) -> int:
    """Counts positions of one verification, the anchor included."""
    count, level = 1, 1
    for width in branching:
        level *= width
        count += level
    return count


def possible_drafters(model: ModelCost) -> tuple[DraftCost, ...]:
    """Returns what can draft for any model: lookup, its own prediction, and heads of the usual sizes."""
    mtp = (DraftCost("mtp", model.prediction),) if model.prediction else ()
    return (DraftCost("ngram"), *mtp, head_for(model, "eagle"), head_for(model, "medusa"))


def option(question: Question, draft: DraftCost, rows: int, branching: Branching, *, bars: bool = True) -> Option:
    """Predicts one way to speculate."""
    count, context = nodes(branching), question.context
    acceptances = question.acceptances(draft.kind)
    lengths = [a.length(branching) for a in acceptances]
    likely = lengths[len(lengths) // 2]
    costs = []
    for machine in question.machines if bars else question.machines[:1]:
        plain_s = machine.verify_s(rows, 1, context)
        verify_s, draft_s = machine.verify_s(rows, count, context), machine.draft_s(draft, rows, branching, context)
        costs.append((verify_s / plain_s, draft_s / plain_s))
    ratios = [
        speedup(acceptance_length=length, verify_ratio=verify, draft_cost=drafting)
        for length, (verify, drafting) in product({likely, *(lengths if bars else ())}, costs)
    ]
    gain = speedup(acceptance_length=likely, verify_ratio=costs[0][0], draft_cost=costs[0][1])
    plain_s = question.machines[0].verify_s(rows, 1, context)
    chain = all(width == 1 for width in branching)
    return Option(
        kind=draft.kind,
        branching=branching,
        acceptance_length=likely,
        cost=sum(costs[0]),
        speedup=gain,
        low=min(ratios),
        high=max(ratios),
        tok_per_s=rows * gain / plain_s,
        token_s=plain_s / gain,
        break_even=break_even_acceptance(cost=sum(costs[0]), length=len(branching)) if chain else None,
    )


def plan_batch(question: Question, rows: int) -> BatchPlan:
    """Finds the best option at one batch size."""
    if rows < 1:
        raise ConfigError(f"plan: a batch has at least one row, got {rows}")
    shapes = [(1,) * k for k in question.lengths]
    options = []
    for draft in question.drafters:
        trees = () if _chain_only(question.model, draft) else question.trees
        options += [(option(question, draft, rows, shape, bars=False), draft) for shape in (*shapes, *trees)]
    rough, draft = max(options, key=lambda pair: pair[0].speedup)
    best = option(question, draft, rows, rough.branching)
    chains = tuple(option(question, draft, rows, (1,) * k) for k in question.lengths)
    levels = [(o.break_even, o.length) for o in chains if o.break_even is not None]
    machine = question.machines[0]
    plain_s = machine.verify_s(rows, 1, question.context)
    verify_s = machine.verify_s(rows, best.positions, question.context)
    return BatchPlan(
        rows=rows,
        memory=memory(
            question.model, room_bytes=question.room_bytes, rows=rows, context=question.context,
            length=best.positions - 1, mesh=question.mesh, draft=draft,
        ),
        plain_s=plain_s,
        plain_tok_per_s=rows / plain_s,
        best=best,
        chains=chains,
        break_even=min(levels) if levels else None,
        target_efficiency=target_efficiency(plain_time_s=plain_s, verify_time_s=verify_s),
        touched=(machine.touched(rows, 1), machine.touched(rows, best.positions)),
        transports=_transports(question, rows),
    )  # fmt: skip


def _transports(question: Question, rows: int) -> Mapping[Transport, float]:
    if question.rates is None or question.mesh.expert == 1:
        return {}
    return transport_times(pass_of(question.model, rows, 1, question.context), question.mesh, question.rates)


def _chain_only(model: ModelCost, draft: DraftCost) -> bool:
    """Whether target or drafter cannot do trees."""
    return draft.kind == "medusa" or bool(model.chain_only or (draft.model and draft.model.chain_only))


def plan(question: Question, batches: Sequence[int] = BATCHES) -> tuple[BatchPlan, ...]:
    """Finds the best option at each batch size."""
    return tuple(plan_batch(question, rows) for rows in batches)


def fitting_rows(question: Question) -> int | None:
    """Returns the rows whose plain decoding fits at the question's context; None if the room is not known."""
    if math.isinf(question.room_bytes):
        return None
    return most_rows(question.model, room_bytes=question.room_bytes, context=question.context, mesh=question.mesh)


def price_per_million(price_per_hour: float, tok_per_s: float) -> float:
    """Computes the cost of a million tokens at so many per second on machines of that price."""
    return price_per_hour / 3600 / tok_per_s * 1e6
