"""Bytes and products of one forward pass: a model as numbers and the mesh it runs on."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from jaxspec.errors import ConfigError
from jaxspec.perf.overlap import AssumedOverlap, Overlap

SHARPNESS = 6.0
SAMPLING_PASSES = 8  # over the float32 logits of a position: process, draw, compare


@dataclass(frozen=True)
class CacheCost:
    """One cached stream of a layer, as attention reads it.

    Attributes:
      entry_bytes: of one entry, all heads.
      heads: heads that tensor parallelism can split it by; one shared latent or key cannot be split.
      stride: positions per entry.
      reach: positions back that are read, None for all (windows, raw parts of entries).
      keeps: entries that one query attends to at most, None for all (an indexer chooses them).
      entry_flops: per query and entry read.
      fixed: whether it is one entry however long the text is, such as the state of a recurrent layer.
    """

    entry_bytes: float
    heads: int = 1
    stride: int = 1
    reach: int | None = None
    keeps: int | None = None
    entry_flops: float = 0.0
    fixed: bool = False

    def entries(self, positions: int, context: int) -> float:
        """Computes the entries of a row that a forward of ``positions`` queries after ``context`` positions reads."""
        if self.fixed:
            return 1.0
        seen = context + positions
        seen = seen if self.reach is None else min(seen, self.reach + positions)
        entries = seen / self.stride
        return entries if self.keeps is None else min(entries, self.keeps * positions)

    def flops(self, positions: int, context: int) -> float:
        """Computes a row's products: every query with every entry that it attends to."""
        if self.fixed:
            return positions * self.entry_flops
        seen = context if self.reach is None else min(context, self.reach)
        entries = max(seen / self.stride, 1.0)
        return positions * self.entry_flops * (entries if self.keeps is None else min(entries, self.keeps))


@dataclass(frozen=True)
class LayerCost:
    """Layers of one kind.

    Attributes:
      count: how many.
      dense_bytes: weights that every pass reads: attention, norms, router, shared expert or dense feed-forward.
      dense_flops: per position.
      caches: what attention reads.
      experts, top_k: E and A of a routed layer, 0 for none.
      expert_bytes: weights of one routed expert.
      expert_flops: of one routed expert for one position.
    """

    count: int
    dense_bytes: float
    dense_flops: float
    caches: tuple[CacheCost, ...] = ()
    experts: int = 0
    top_k: int = 0
    expert_bytes: float = 0.0
    expert_flops: float = 0.0


@dataclass(frozen=True)
class ModelCost:
    """A model as the plain numbers that its speed and memory depend on.

    Attributes:
      name: for messages.
      model_dim, vocab_size, max_context: D, V, longest text.
      layers: by kind, in the order of the model.
      head_bytes, head_flops: of the product with the vocabulary.
      memory_bytes: of all parameters, by part.
      token_bytes, row_bytes: of the caches, per position and per row whatever its length.
      kv_heads, heads: G and H, which tensor parallelism must divide; 0 where one shared key or latent serves all heads.
      chain_only: why trees cannot be verified, None if they can.
      prediction: layers of multi-token prediction as a model of their own, None without.
    """

    name: str
    model_dim: int
    vocab_size: int
    max_context: int
    layers: tuple[LayerCost, ...]
    head_bytes: float
    head_flops: float
    memory_bytes: Mapping[str, float] = field(default_factory=dict)
    token_bytes: float = 0.0
    row_bytes: float = 0.0
    heads: int = 1
    kv_heads: int = 0
    chain_only: str | None = None
    prediction: "ModelCost | None" = None

    @classmethod
    def from_totals(
        cls,
        *,
        layers: int,
        dense_bytes: float,
        weight_bytes: float = 2.0,
        routed_layers: int = 0,
        experts: int = 0,
        top_k: int = 0,
        expert_bytes: float = 0.0,
        entry_bytes: float = 0.0,
    ) -> "ModelCost":
        """Makes a coarse model from sums over its parameters, for predictions of ratios.

        Args:
          layers: how many.
          dense_bytes: of all weights that every pass reads: neither routed experts nor the embedding.
          weight_bytes: of one number of them.
          routed_layers: how many of the layers have routed experts.
          experts: E of each of them.
          top_k: A of each of them.
          expert_bytes: of one expert of one layer.
          entry_bytes: of all caches, per cached position.
        """
        each, flops = dense_bytes / layers, 2.0 / weight_bytes
        cache = (CacheCost(entry_bytes / layers),)
        kinds = (
            LayerCost(layers - routed_layers, each, each * flops, cache),
            LayerCost(routed_layers, each, each * flops, cache, experts, top_k, expert_bytes, expert_bytes * flops),
        )
        return cls("", 0, 0, 0, tuple(kind for kind in kinds if kind.count), head_bytes=0.0, head_flops=0.0)

    @property
    def routed(self) -> LayerCost | None:
        """The kind of routed layer with the most layers, None for a dense model."""
        return max((x for x in self.layers if x.experts), key=lambda x: x.count, default=None)

    @property
    def routed_layers(self) -> int:
        """Number of layers with routed experts."""
        return sum(x.count for x in self.layers if x.experts)

    @property
    def dense_bytes(self) -> float:
        """Weights that every pass reads, head included."""
        return sum(x.count * x.dense_bytes for x in self.layers) + self.head_bytes

    def weight_bytes(self, rows: int, positions: int, overlap: Overlap | None = None) -> float:
        """Computes weight bytes that a pass over ``positions`` positions of each row reads."""
        overlap = AssumedOverlap(1.0) if overlap is None else overlap
        return self.dense_bytes + sum(
            times * layer.expert_bytes * overlap.touched(layer.experts, layer.top_k, rows, positions, index)
            for layer, index, times in routed_places(self, overlap)
        )


def routed_places(model: ModelCost, overlap: Overlap) -> Iterator[tuple[LayerCost, int, int]]:
    """Yields routed layers, their index among these in the order of ``model.layers``, and how many are alike."""
    index = 0
    for layer in model.layers:
        count = layer.count if layer.experts else 0
        yield from (
            ((layer, index + i, 1) for i in range(count)) if overlap.by_layer else [(layer, index, count)] * bool(count)
        )
        index += count


def byte_ratio(model: ModelCost, rows: int, length: int, overlap: Overlap | None = None) -> float:
    """Computes weight bytes of verifying K drafts over those of a plain step: the cost at the memory's speed."""
    return model.weight_bytes(rows, length + 1, overlap) / model.weight_bytes(rows, 1, overlap)


@dataclass(frozen=True)
class Rates:
    """Seconds per unit of work on one machine.

    Attributes:
      fixed_s: of every step, whatever it does.
      layer_s: of every layer: starting its programs.
      row_s, position_s: of every row, and of every position of a row.
      byte_s, flop_s: of a byte of dense weights, and of one of their products.
      expert_byte_s, expert_flop_s: of routed experts.
      kv_byte_s: of a cached byte that attention reads.
      link_byte_s, link_s: of a byte that a device sends to another of its node, and of starting to.
      network_byte_s, network_s: the same, to a device of another node.
      node: devices of a node.
      sharpness: p of the smooth maximum of bytes and products.
    """

    fixed_s: float = 0.0
    layer_s: float = 0.0
    row_s: float = 0.0
    position_s: float = 0.0
    byte_s: float = 0.0
    flop_s: float = 0.0
    expert_byte_s: float = 0.0
    expert_flop_s: float = 0.0
    kv_byte_s: float = 0.0
    link_byte_s: float = 0.0
    link_s: float = 0.0
    network_byte_s: float = 0.0
    network_s: float = 0.0
    node: int = 8
    sharpness: float = SHARPNESS


@dataclass(frozen=True)
class Mesh:
    """Devices along each axis of ``jaxspec/sharding``."""

    data: int = 1
    expert: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        if min(self.data, self.expert, self.tensor) < 1:
            raise ConfigError(f"mesh: every axis needs at least one device, got {self}")

    @property
    def devices(self) -> int:
        """All of them."""
        return self.data * self.expert * self.tensor

    def check(self, model: ModelCost) -> None:
        """Checks that the axes divide the model.

        Raises:
          ConfigError: says which, and what divides.
        """
        experts = {x.experts for x in model.layers if x.experts}
        wrong = [f"expert={self.expert} does not divide {e} experts" for e in experts if e % self.expert]
        if self.expert > 1 and not experts:
            wrong.append(f"expert={self.expert} needs routed experts, and {model.name} has none")
        for name, count in (("heads", model.heads), ("key heads", model.kv_heads)):
            if count and count % self.tensor:
                wrong.append(f"tensor={self.tensor} does not divide {count} {name}")
        if wrong:
            raise ConfigError(f"mesh: {'; '.join(sorted(wrong))}; choose divisors")


@dataclass(frozen=True)
class PassWork:
    """Bytes that must move and products that must be computed at the same time, the same ``count`` times over.

    Attributes:
      cause: ``dense``, ``experts``, ``kv``, ``head`` or ``sampling``.
      count: how often.
      size_bytes, flops: each time, on the slowest device.
    """

    cause: str
    count: int
    size_bytes: float
    flops: float


def busiest_share(touched: float, experts: int, ranks: int) -> float:
    """Computes the expected touched experts on the rank that has most of them, if they fall on ranks at random.

    The mean plus sqrt(2 ln ranks) standard deviations of a hypergeometric draw, within what is possible.
    """
    if ranks == 1:
        return touched
    mean = touched / ranks
    variance = mean * (1 - 1 / ranks) * max(experts - touched, 0.0) / max(experts - 1, 1)
    return min(max(mean + math.sqrt(2 * math.log(ranks) * variance), min(touched, 1.0)), touched, experts / ranks)


def works(
    model: ModelCost,
    *,
    rows: int,
    positions: int = 1,
    context: int = 0,
    mesh: Mesh | None = None,
    overlap: Overlap | None = None,
    head_positions: int | None = None,
) -> list[PassWork]:
    """Returns what one pass over ``positions`` positions of each row moves and computes, on the slowest device.

    Args:
      model: what is read and computed.
      rows: of the whole batch; axes data and expert split them.
      positions: per row, the anchor included: K + 1 where K drafts are verified.
      context: cached positions per row.
      mesh: one device if None.
      overlap: of routed experts; None takes independent routing, which is the upper bound.
      head_positions: positions per row whose logits are computed; None for all.
    """
    if rows < 1 or positions < 1 or context < 0:
        raise ConfigError(
            f"step time: rows and positions are at least 1, the context at least 0; got {rows}, {positions}, {context}"
        )
    mesh = Mesh() if mesh is None else mesh
    overlap = AssumedOverlap(1.0) if overlap is None else overlap
    heads = positions if head_positions is None else head_positions
    local, group, tensor = math.ceil(rows / (mesh.data * mesh.expert)), math.ceil(rows / mesh.data), mesh.tensor
    parts = []
    for layer in model.layers:
        products = local * positions * layer.dense_flops
        parts.append(PassWork("dense", layer.count, layer.dense_bytes / tensor, products / tensor))
        for c in layer.caches:
            read = local * c.entry_bytes * c.entries(positions, context) / min(c.heads, tensor)
            parts.append(PassWork("kv", layer.count, read, local * c.flops(positions, context) / tensor))
    for layer, index, times in routed_places(model, overlap):
        touched = overlap.touched(layer.experts, layer.top_k, group, positions, index)
        busiest = busiest_share(touched, layer.experts, mesh.expert) / tensor
        products = layer.top_k * group * positions * layer.expert_flops * busiest / touched
        parts.append(PassWork("experts", times, layer.expert_bytes * busiest, products))
    if heads:
        parts.append(PassWork("head", 1, model.head_bytes / tensor, local * heads * model.head_flops / tensor))
        logits = local * heads * 4.0 * model.vocab_size / tensor
        parts.append(PassWork("sampling", 1, SAMPLING_PASSES * logits, 0.0))
    return parts
