"""Cost and acceptance of drafting, by kind of drafter and shape of the draft."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from jaxspec.errors import ConfigError
from jaxspec.perf.cost import CacheCost, LayerCost, Mesh, ModelCost, Rates
from jaxspec.perf.moesd import survival, survival_length
from jaxspec.perf.overlap import Overlap
from jaxspec.perf.pass_time import step_time

KINDS = ("ngram", "draft_model", "mtp", "eagle", "medusa")
DRAFT_VOCAB = 32_000  # EAGLE-3's reduced vocabulary
LOOKUP_BYTES = 32  # per position of the text: its ids, compared with the last tokens
Branching = tuple[int, ...]


@dataclass(frozen=True)
class DraftCost:
    """A drafter as the cost of its passes.

    Attributes:
      kind: of ``KINDS``.
      model: draft model, layers of multi-token prediction, or head; None for prompt lookup.
      block: rows of the one pass of a head that drafts a block at once, 0 where drafts follow one another.
    """

    kind: str
    model: ModelCost | None = None
    block: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"drafter {self.kind!r} is not known; known are {', '.join(KINDS)}")
        if (self.model is None) != (self.kind == "ngram"):
            raise ConfigError(
                f"drafter {self.kind}: {'takes no' if self.kind == 'ngram' else 'needs a'} model of its own"
            )

    def memory_bytes(self, length: int) -> float:
        """Its own parameters; multi-token prediction is a part of the target already."""
        if self.model is None or self.kind == "mtp":
            return 0.0
        times = length if self.kind == "medusa" else 1
        return times * sum(self.model.memory_bytes.values())


@dataclass(frozen=True)
class AcceptanceModel:
    """Probabilities that drafts are accepted.

    Attributes:
      conditional: of the best draft at each depth after accepted ones; the last value counts for all deeper ones.
      sibling: that the second draft of a node is accepted if the first was not; each further one half as likely. An
        assumption: no such figure is published for these models.
    """

    conditional: tuple[float, ...]
    sibling: float = 0.25

    def __post_init__(self) -> None:
        if not self.conditional or not all(0 <= a <= 1 for a in (*self.conditional, self.sibling)):
            raise ConfigError(
                f"acceptance: probabilities from 0 to 1 are needed, got {self.conditional}, {self.sibling}"
            )

    def length(self, branching: Branching) -> float:
        """Tokens committed per target pass, bonus included, for a chain (1, 1, ...) or a full tree."""
        lost = [prod(1 - self.sibling * 0.5**r for r in range(width - 1)) for width in branching]
        deep = (self.conditional[min(d, len(self.conditional) - 1)] for d in range(len(branching)))
        return survival_length(survival([1 - (1 - a) * x for a, x in zip(deep, lost, strict=True)]))


# Assumed acceptance where none is given: low, likely, high, and where from.
ASSUMED: Mapping[str, tuple[AcceptanceModel, AcceptanceModel, AcceptanceModel, str]] = {
    "ngram": (
        AcceptanceModel((0.1,)), AcceptanceModel((0.35,)), AcceptanceModel((0.75,)),
        "an assumption; from new prose to text that is copied from the prompt",
    ),
    "draft_model": (
        AcceptanceModel((0.57,)), AcceptanceModel((0.75,)), AcceptanceModel((0.95,)),
        "an assumption; MoESD's Qwen2 pair commits 4.5 of 5 on HumanEval",
    ),
    "mtp": (
        AcceptanceModel((0.85, 0.75, 0.62)), AcceptanceModel((0.897, 0.802, 0.662)),
        AcceptanceModel((0.912, 0.851, 0.794)),
        "Qwen3-Next per position .897 .719 .476, tuned .912 .776 .616",
    ),
    "eagle": (
        AcceptanceModel((0.57,)), AcceptanceModel((0.66,)), AcceptanceModel((0.75,)),
        "gpt-oss-120b, three drafts: 2.07 tokens per pass (Red Hat), 2.41 (SpecDrift); EAGLE-3 on Qwen3-30B-A3B more",
    ),
    "medusa": (
        AcceptanceModel((0.45,)), AcceptanceModel((0.55,)), AcceptanceModel((0.65,)),
        "an assumption; nothing is published on MoE targets",
    ),
}  # fmt: skip


def acceptance_of_positions(survives: Sequence[float]) -> AcceptanceModel:
    """Makes a model from the share of passes in which each position is accepted, as engines report it.

    Raises:
      ConfigError: the shares are not from 0 to 1 and falling.
    """
    survival_length(survives)
    if not survives:
        raise ConfigError("acceptance: at least one position is needed")
    later = (b / a if a else 0.0 for a, b in pairwise(survives))
    return AcceptanceModel((survives[0], *later))


def head_for(target: ModelCost, kind: str) -> DraftCost:
    """Returns a head of the usual sizes, which somebody would have to train or download.

    ``eagle``: EAGLE-3's one layer (Li 2025, 2503.01840): 3 D to D, attention over 2 D inputs with a quarter of the
    query width in keys and values, a feed-forward of 4 D, 32,000 tokens. ``medusa``: per draft one residual layer of D
    x D and a head of its own (Cai 2024, 2401.10774); the cost is that of one such head.
    """
    d, vocab = target.model_dim, min(target.vocab_size, DRAFT_VOCAB)
    if kind == "medusa":
        values, cache, vocab = float(d * d), (), target.vocab_size
    elif kind == "eagle":
        values, cache = d * d * (3 + 2 * 1.5 + 1 + 12.0), (CacheCost(2 * 2 * d / 4, heads=8, entry_flops=4.0 * d),)
    else:
        raise ConfigError(f"drafter {kind!r} has no usual size; known are eagle and medusa")
    layer = LayerCost(1, 2 * values, 2 * values, cache)
    memory = {"layers": 2 * values, "head": 2.0 * d * vocab}
    model = ModelCost(
        f"{kind} head", d, vocab, target.max_context, (layer,), memory["head"], 2.0 * d * vocab, memory,
        token_bytes=sum(c.entry_bytes for c in cache), heads=target.heads, chain_only=target.chain_only,
    )  # fmt: skip
    return DraftCost(kind, model)


def draft_time(
    draft: DraftCost,
    rates: Rates,
    *,
    rows: int,
    branching: Branching,
    context: int,
    mesh: Mesh | None = None,
    overlap: Overlap | None = None,
) -> float:
    """Computes seconds of drafting one step and of observing what was committed, in the same dispatch as verification.

    A draft model runs K + 1 passes; layers of prediction and EAGLE heads K - 1, and one more over all committed
    positions, for they continue from the target's states; Medusa's heads run once. Of that one more the last layer
    runs at one position per row but for keys and values, whose products at the others, which read no further weights,
    are not counted. A block is one pass; what it then observes are keys and values alone, and not counted either.

    Args:
      draft: whose.
      rates: of the machine.
      rows: of the whole batch.
      branching: drafts per node, by level; a chain of K is K ones.
      context: cached positions per row.
      mesh: the drafter is replicated over its tensor axis.
      overlap: of its routed experts.
    """
    depth = len(branching)
    if depth == 0:
        return 0.0
    mesh = Mesh() if mesh is None else mesh
    rates = replace(rates, fixed_s=0.0, row_s=0.0, position_s=0.0)
    if draft.model is None:
        local = -(-rows // (mesh.data * mesh.expert))
        return 2 * rates.layer_s + local * context * LOOKUP_BYTES * rates.byte_s
    widths = [prod(branching[:d]) for d in range(depth + 1)]
    if draft.kind == "medusa":
        return depth * _pass(draft.model, rates, rows, 1, context, mesh, overlap)
    if draft.kind == "draft_model":
        cells = [(draft.model, w, w if d < depth else 0) for d, w in enumerate(widths)]
    elif draft.block:
        cells = [(draft.model, draft.block, depth)]
    else:
        layers = draft.model.layers
        each = [replace(draft.model, layers=(layers[min(d, len(layers) - 1)],)) for d in range(depth)]
        cells = [(each[d], widths[d], widths[d]) for d in range(1, depth)]
        cells.extend(_observing(draft.model, depth + 1))
    return sum(_pass(m, rates, rows, w, context, mesh, overlap, head) for m, w, head in cells)


def _observing(model: ModelCost, positions: int) -> Iterator[tuple[ModelCost, int, int]]:
    """Yields passes over what was committed, the last layer by itself."""
    *inner, last = model.layers
    inner += [replace(last, count=last.count - 1)] if last.count > 1 else []
    if inner:
        yield replace(model, layers=tuple(inner)), positions, 0
    yield replace(model, layers=(replace(last, count=1),)), 1, 1


def _pass(
    model: ModelCost, rates: Rates, rows: int, width: int, context: int, mesh: Mesh, overlap: Overlap | None,
    head: int | None = None,
) -> float:  # fmt: skip
    """Computes seconds of a pass of the drafter; its experts, if any, are split like the target's."""
    own_mesh = Mesh(mesh.data, mesh.expert) if model.routed else Mesh(mesh.data * mesh.expert)
    return step_time(
        model, rates, rows=rows, positions=width, context=context, mesh=own_mesh, overlap=overlap, head_positions=head
    ).total_s
