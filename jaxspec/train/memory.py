"""An update's memory: how many rows are computed together, and whether rounds are recomputed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec.errors import ConfigError
from jaxspec.models.arch import ArchSpec, LayerSpec
from jaxspec.models.block_head import BlockHead, BlockSpec
from jaxspec.models.draft_head import DraftHead, HeadSpec
from jaxspec.models.medusa import Medusa
from jaxspec.models.mtp import Mtp
from jaxspec.models.transformer import Transformer
from jaxspec.nn.attention import AttentionSpec
from jaxspec.nn.grouped_experts import MOST_ROWS
from jaxspec.nn.latent_attention import LatentSpec
from jaxspec.nn.moe import MoeSpec
from jaxspec.nn.query_blocks import BLOCK, queries_at_once
from jaxspec.nn.shardings import named_shardings
from jaxspec.train.objective import Net
from jaxspec.train.settings import LossSettings, TrainSettings
from jaxspec.train.vocab_loss import LOGIT_BYTES, default_positions, position_bytes

HOST_SHARE, DEVICE_SHARE = 0.85, 0.95  # of what is free; the rest is the compiler's, and lost between buffers
HOST_BYTES = 3 * 10**9 // 2  # of a host's memory that Python and the compiler take themselves
HOST_POSITIONS = 4096  # that keep a CPU busy; more at a time only take memory
GB = 1e9
MARGIN = 1.1  # what XLA loses between buffers is up to 7 %; on a CPU the estimate is 0.93 to 1.6 times what it allots
GPU_MARGIN = 1.05  # of what is counted buffer by buffer


@dataclass(frozen=True)
class UpdateWork:
    """What an update computes.

    Attributes:
      arch: of the target.
      net: what is trained.
      loss: its loss.
      length: T.
      width: tokens of the draft vocabulary.
      vectors: of the target's width that are kept at every position for the head to read.
      target_bytes: the frozen target on one device.
      head_bytes: the trained parameters on one device.
      devices: that rows are split over.
      widens: whether products of the head are computed in float32, as by XLA:CPU in any case.
    """

    arch: ArchSpec
    net: Net
    loss: LossSettings
    length: int
    width: int
    vectors: int
    target_bytes: int
    head_bytes: int
    devices: int = 1
    widens: bool = True


@dataclass(frozen=True)
class MemoryPlan:
    """How an update is computed.

    Attributes:
      rows: that are computed together.
      parts: parts that the rows of a pass are computed in.
      remat: whether each round is computed again for its gradient.
      needed: bytes of one device by what they are for.
      room: bytes that are free, None where that is not known.
    """

    rows: int
    parts: int
    remat: bool
    needed: Mapping[str, int] = field(default_factory=dict)
    room: int | None = None

    @property
    def total(self) -> int:
        """Bytes of one device."""
        return sum(self.needed.values())

    def words(self) -> str:
        """Returns one line of what was chosen and why."""
        rows = f"{self.rows} row{'s' * (self.rows > 1)} at a time"
        rows += f", {self.parts} times" if self.parts > 1 else ""
        again = ", rounds computed again for their gradients" if self.remat else ""
        free = "" if self.room is None else f" of {self.room / GB:.1f} GB"
        return f"{rows}{again}; about {self.total / GB:.1f}{free or ' GB'} ({_listed(self.needed)})"


def plan_memory(work: UpdateWork, settings: TrainSettings, room: int | None, enough: int | None = None) -> MemoryPlan:
    """Chooses as many rows as fit, and recomputes rounds only where a single row does not fit otherwise.

    ``room`` are the free bytes of each device, None if unknown; ``enough`` positions keep a device busy, and rows
    beyond them are not computed together. Raises ConfigError if nothing fits.
    """
    asked = settings.micro_rows
    counts = [asked] if asked else [n for n in range(settings.rows, 0, -1) if settings.rows % n == 0]
    counts = [n for n in counts if n % work.devices == 0]
    if enough is not None:
        counts = [n for n in counts if n // work.devices * work.length <= enough] or counts[-1:]
    levels = (False, True) if settings.remat is None else (settings.remat,)
    plans = [_plan(work, settings, rows, remat=remat, room=room) for remat in levels for rows in counts]
    fits = next((plan for plan in plans if room is None or plan.total <= room), None)
    if fits is not None:
        return fits
    smallest = min(plans, key=lambda plan: plan.total)
    if asked and settings.remat is not None:  # the user knows better
        return smallest
    raise ConfigError(
        f"train: {smallest.rows} row{'s' * (smallest.rows > 1)} of {work.length} tokens and {work.loss.rounds} rounds "
        f"at a time take about {smallest.total / GB:.1f} GB ({_listed(smallest.needed)}), and {(room or 0) / GB:.1f} "
        "GB are free; "
        f"{_cures(work, settings, smallest, room or 0)}"
    )


def _plan(work: UpdateWork, settings: TrainSettings, rows: int, *, remat: bool, room: int | None) -> MemoryPlan:
    parts = settings.rows // rows
    passes = parts * settings.accumulation
    return MemoryPlan(rows, parts, remat, dict(_needed(work, rows // work.devices, remat=remat, passes=passes)), room)


def _cures(work: UpdateWork, settings: TrainSettings, smallest: MemoryPlan, room: int) -> str:
    if smallest.total - smallest.needed["activations"] > room:
        return (
            "the target and the head alone do not fit: split them over devices (mesh.expert, mesh.tensor), take a "
            "smaller head.draft_vocab_size, or free memory"
        )
    smaller = ["data.length", *(["loss.rounds"] if work.loss.rounds > 1 else []), "head.draft_vocab_size"]
    fewer = [f"train.rows (now {settings.rows})"] if smallest.rows > 1 else []
    return f"lower {', '.join([*fewer, *smaller])}, or set train.memory_gb if more is free than this"


def _listed(needed: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size / GB:.1f}" for name, size in needed.items() if size)


def _needed(work: UpdateWork, rows: int, *, remat: bool, passes: int) -> Iterator[tuple[str, int]]:
    """Bytes of one device by what they are for, on the safe side of what XLA allots."""
    yield "target", work.target_bytes
    if isinstance(work.net, DraftHead) and not work.widens:
        # Parameters, two moments, and the sum of gradients over passes.
        yield "head with optimizer", work.head_bytes * (3 + (passes > 1))
        yield "activations", int(GPU_MARGIN * draft_head_bytes(work, work.net.spec, rows, remat=remat))
        return
    # Parameters, two moments, their change, the gradient, and its sum over passes.
    yield "head with optimizer and gradients", work.head_bytes * (5 + (passes > 1))
    read = 4 * rows * work.length * work.vectors * work.arch.model_dim
    layer, rounds = _target_layer(work, rows), _rounds(work, rows, remat=remat)
    yield "activations", int(MARGIN * (read + max(layer, rounds)))


def _target_layer(work: UpdateWork, rows: int) -> int:
    """Bytes of one layer of the target while it runs; nothing of it is kept."""
    return max(_layer_bytes(layer, work.arch.model_dim, rows, work.length) for layer in work.arch.layers)


def _layer_bytes(layer: LayerSpec, dim: int, rows: int, length: int) -> int:
    """Bytes that a layer has at once without gradients; routed experts compute some rows at a time."""
    mixer, ffn = layer.attention, layer.ffn
    if isinstance(mixer, AttentionSpec):
        inner = (mixer.heads + 2 * mixer.kv_heads) * mixer.head_dim
    else:
        inner = 3 * _heads(layer) * 256
    places, shared = rows * length, 0 if ffn is None else 3 * ffn.hidden
    experts = 0
    if isinstance(ffn, MoeSpec):
        shared, experts = 3 * ffn.shared_hidden, 2 * ffn.top_k * (3 * ffn.hidden + dim)
    floats = places * (8 * dim + 3 * inner + shared) + min(places, MOST_ROWS) * experts
    return 4 * floats + 3 * _score_bytes(layer, rows, length)


def _heads(layer: LayerSpec) -> int:
    return getattr(layer.attention, "heads", 16)


def _score_bytes(layer: LayerSpec, rows: int, keys: int) -> int:
    """Scores of the queries that are attended for at a time."""
    heads = rows * _heads(layer)
    return 4 * heads * min(queries_at_once(heads, keys), keys) * keys


def _rounds(work: UpdateWork, rows: int, *, remat: bool) -> int:
    """Bytes that the rounds of drafting keep for their gradients, and the most that is computed at a time."""
    o, t, places = work.loss, work.length, rows * work.length
    if isinstance(work.net, Medusa):
        spec = work.net.spec
        heads = spec.heads * (2 * spec.layers + 2) * spec.dim
        return 4 * places * heads + _vocabulary(work, rows, spec.heads)
    if isinstance(work.net, BlockHead):
        return _blocks(work, work.net.spec, rows, remat=remat)
    arch, trained = (work.net.spec.arch if isinstance(work.net, DraftHead) else work.net.arch), layers_of(work.net)
    count, slots = (o.rounds, float(o.rounds)) if isinstance(work.net, DraftHead | Mtp) else (1, 1.0)
    if isinstance(work.net, DraftHead) and work.net.spec.mask_token is not None:
        slots = 1 + sum(o.counts(t)) / t
    kept = 5 if isinstance(work.net, Transformer) else 2  # of a softmax, and of rounds that are divided at their end
    layers = [_kept_floats(layer, arch.model_dim, count, 0 if t > BLOCK else kept * t) for layer in trained]
    inputs = 6 * arch.model_dim
    each = inputs + (sum(_cached_floats(layer) for layer in trained) if remat else sum(layers))
    once = sum(layers) if remat else 0
    attention = max(6 * _score_bytes(layer, rows, t) for layer in trained)
    activations = int(4 * places * (slots * each + once))
    return activations + max(_vocabulary(work, rows, count), attention)


def layers_of(net: DraftHead | Mtp | Transformer) -> tuple[LayerSpec, ...]:
    """Returns the layers that a round runs."""
    if isinstance(net, Mtp):
        return net.arch.mtp[:1]
    return net.spec.arch.layers if isinstance(net, DraftHead) else net.arch.layers


def _blocks(work: UpdateWork, spec: BlockSpec, rows: int, *, remat: bool) -> int:
    """The same of heads that draft blocks, whose rows see the whole text."""
    blocks = min(work.loss.block.anchors, work.length)
    count, drafts, dim = rows * blocks * spec.block_size, rows * blocks * spec.drafts, spec.arch.model_dim
    attention = max(6 * _score_bytes(layer, rows, work.length + spec.block_size) for layer in spec.arch.layers)
    kept = attention if blocks * spec.block_size <= BLOCK else 0
    layers = sum(_kept_floats(layer, dim, 1, 0) + 8 * dim * (spec.conv_taps > 0) for layer in spec.arch.layers)
    text = rows * work.length * (6 * dim + sum(2 * _cached_floats(layer) for layer in spec.arch.layers))
    read = dim + 2 * spec.markov_rank + spec.selector_rank + work.arch.model_dim
    some = default_positions(rows, blocks * spec.drafts, work.arch.vocab_size, work.width, 1)
    vocabulary = 4 * work.arch.vocab_size * work.arch.model_dim
    vocabulary += rows * some * position_bytes(work.arch.vocab_size, work.width, 1)
    activations = 4 * (count * (6 * dim + layers) + text + 3 * drafts * read) + len(spec.arch.layers) * kept
    return int(activations / (2 if remat else 1)) + max(vocabulary, attention)


def draft_head_bytes(work: UpdateWork, spec: HeadSpec, rows: int, *, remat: bool) -> int:
    """Computes the most bytes that an update of a head of EAGLE's kind has at once on a GPU, besides its state.

    Counted in the buffers that XLA allots for an H100, see docs/planning.md: the target's layer runs; then all rounds
    are kept, and either the vocabulary product or a layer's gradient is computed; then parameters change. Letters as in
    docs/architecture.md, F hidden units and Q the width of all queries; a position of a layer keeps 14 F + 4 Q bytes.
    """
    o, places, dim = work.loss, rows * work.length, spec.arch.model_dim
    wide = min(4 * dim * spec.draft_vocab, work.head_bytes)
    layers = work.head_bytes - wide  # bytes of the parameters that the rounds read, and of their gradients
    slots = o.rounds if spec.mask_token is None else 1 + sum(o.counts(work.length)) / work.length
    widths = [_widths(layer, dim) for layer in spec.arch.layers]
    all_kept = sum(14 * hidden + 4 * queries + 4 * keys + 18 * dim for hidden, queries, keys in widths)
    # Recomputed rounds keep their input, the gradient of their output, and keys and values.
    each = 8 * dim + sum(4 * keys for *_, keys in widths) if remat else all_kept
    kept = places * (slots * each + 2 * spec.feature_dim)
    gradient = max(20 * hidden + 8 * queries + 22 * dim for hidden, queries, _ in widths)
    gradient += all_kept * (len(widths) - 1) // len(widths) if remat else 0
    attention = max(6 * _score_bytes(layer, rows, work.length) for layer in spec.arch.layers)
    backward = layers + max(places * gradient, attention)
    # The gradient of some positions, before it is added to that of all.
    vocabulary = wide + wide // 2 + LOGIT_BYTES + 4 * places * work.arch.model_dim
    read = 4 * places * work.vectors * work.arch.model_dim
    return int(
        max(
            read + _target_layer(work, rows),
            layers / 2 + kept + max(vocabulary, backward),
            2 * work.head_bytes,  # gradient and change
        )
    )


def _hidden(layer: LayerSpec, dim: int) -> int:
    """Hidden units that a position goes through; what an expert reads and returns counts as half as many as its D."""
    ffn = layer.ffn
    if isinstance(ffn, MoeSpec):
        return ffn.top_k * (ffn.hidden + dim // 2) + ffn.shared_hidden
    return ffn.hidden if ffn else 0


def _widths(layer: LayerSpec, dim: int) -> tuple[int, int, int]:
    """Returns the hidden units of a head's layer, and the widths of its queries and keys."""
    mixer = layer.attention
    assert isinstance(mixer, AttentionSpec), "heads have ordinary attention"
    hidden = _hidden(layer, dim)
    return hidden, mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim


def _kept_floats(layer: LayerSpec, dim: int, rounds: int, scores: int) -> int:
    """Numbers per slot that the gradient of one layer of one round reads, of each head's scores so many."""
    mixer = layer.attention
    inner = (mixer.heads + mixer.kv_heads) * mixer.head_dim * 2 if isinstance(mixer, AttentionSpec) else 6 * dim
    if isinstance(mixer, LatentSpec):  # queries before and after their product with the keys' weights, and values
        inner = mixer.heads * (mixer.plain_dim + 3 * (mixer.rank + mixer.rope.dim) + mixer.rank + 2 * mixer.value_dim)
    heads = mixer.heads if isinstance(mixer, AttentionSpec) else _heads(layer)
    routed = isinstance(layer.ffn, MoeSpec)  # in blocks that are not full
    return 8 * dim + inner + scores * heads + (8 if routed else 4) * _hidden(layer, dim) + rounds * heads


def _cached_floats(layer: LayerSpec) -> int:
    mixer = layer.attention
    if isinstance(mixer, LatentSpec):
        return 2 * mixer.rank + mixer.rope.dim
    return 2 * mixer.kv_heads * mixer.head_dim if isinstance(mixer, AttentionSpec) else 0


def _vocabulary(work: UpdateWork, rows: int, rounds: int) -> int:
    """Bytes of the vocabulary product of some positions, and of what it reads with gradients of all."""
    vocab = work.arch.vocab_size
    some = default_positions(rows, work.length, vocab, work.width, rounds) * position_bytes(vocab, work.width, rounds)
    # Backends without products of bfloat16 widen the target's vocabulary product.
    wide = 4 * vocab * work.arch.model_dim
    return wide + rows * (some + 3 * 4 * rounds * work.length * work.arch.model_dim)


def held_bytes(tree: Any, mesh: Mesh | None) -> int:
    """Returns the bytes of arrays, or of shapes and dtypes, on one device."""
    if mesh is None:
        return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
    places = named_shardings(tree, mesh, allow_replication=True)
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(places), strict=True)
    return sum(int(np.prod(place.shard_shape(x.shape))) * x.dtype.itemsize for x, place in pairs)


def free_bytes() -> int | None:
    """Returns what a run may take of the memory of a device; None where the machine does not say."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(DEVICE_SHARE * (stats["bytes_limit"] - stats.get("bytes_in_use", 0)))
    free = [size for size in (_available(), _left_in_group()) if size is not None]
    return max(int(HOST_SHARE * min(free)) - HOST_BYTES, 0) if free else None


def _available(file: Path = Path("/proc/meminfo")) -> int | None:
    """Memory of the host that is available without swapping."""
    try:
        lines = dict(line.split(":", 1) for line in file.read_text().splitlines() if ":" in line)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return None


def _left_in_group(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that the control group of this process may still take; None without a limit."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            return max(int((root / limit).read_text()) - int((root / used).read_text()), 0)
        except (OSError, ValueError):
            continue
    return None
