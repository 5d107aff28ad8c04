"""Memory of one device of a mesh: weights, caches, drafter and buffers, and how many rows fit."""

from dataclasses import dataclass

from jaxspec.perf.cost import Mesh, ModelCost
from jaxspec.perf.drafting import DraftCost

WHOLE = ("norms", "hyper-connections", "router")  # every device of the tensor axis has them
CHUNK = 256  # positions of a prompt that one forward reads


@dataclass(frozen=True)
class Memory:
    """Bytes on one device by part.

    Attributes:
      by_part: of the model's parameters, then ``drafter``, ``caches`` and ``buffers``.
      room_bytes: what may be used.
    """

    by_part: dict[str, float]
    room_bytes: float

    @property
    def total_bytes(self) -> float:
        """All parts."""
        return sum(self.by_part.values())

    @property
    def fits(self) -> bool:
        """Whether there is room for all of it."""
        return self.total_bytes <= self.room_bytes


def memory(
    model: ModelCost,
    *,
    room_bytes: float,
    rows: int,
    context: int,
    length: int = 0,
    mesh: Mesh | None = None,
    draft: DraftCost | None = None,
) -> Memory:
    """Computes the memory of the device that holds most.

    Args:
      model: the target.
      room_bytes: what a device may use.
      rows: of the whole batch.
      context: longest text of a row, in positions.
      length: drafts per step.
      mesh: one device if None; routed experts are split over expert and tensor, the other matrices over tensor, rows
        over data and expert.
      draft: its weights and caches are counted, too.
    """
    mesh = Mesh() if mesh is None else mesh
    local = -(-rows // (mesh.data * mesh.expert))
    by_part: dict[str, float] = {}
    for part, size in model.memory_bytes.items():
        ways = 1 if part in WHOLE else mesh.tensor
        if part == "multi-token prediction" and model.prediction is not None:
            routed = sum(x.count * x.experts * x.expert_bytes for x in model.prediction.layers)
            by_part[part] = (routed / mesh.expert + size - routed) / ways
        else:
            by_part[part] = size / ways / (mesh.expert if part in ("routed experts", "router") else 1)
    caches = local * (model.token_bytes * context / max(min(mesh.tensor, model.kv_heads or 1), 1) + model.row_bytes)
    by_part["caches"] = caches
    if draft is not None and draft.model is not None:
        per_row = (
            draft.model.token_bytes * context + draft.model.row_bytes if draft.kind != "mtp" else _own(model, context)
        )
        by_part["drafter"] = draft.memory_bytes(length) + local * per_row
    by_part["buffers"] = _buffers(model, local, context, length + 1) / mesh.tensor
    return Memory(by_part, room_bytes)


def _own(model: ModelCost, context: int) -> float:
    """Computes caches of multi-token prediction, like those of as many of the model's own layers."""
    assert model.prediction is not None
    layers = sum(x.count for x in model.layers)
    return sum(x.count for x in model.prediction.layers) / layers * model.token_bytes * context


def _buffers(model: ModelCost, rows: int, context: int, positions: int) -> float:
    """Computes float32 logits and scores of verified positions, token counts, texts, and the streams of a forward."""
    widest = max(rows * positions, CHUNK)
    vocabulary = rows * model.vocab_size * (2 * 4 * positions + 5)
    return vocabulary + rows * context * 4 + widest * model.model_dim * 4 * 8


def most_rows(model: ModelCost, *, room_bytes: float, context: int, mesh: Mesh | None = None, most: int = 65536) -> int:
    """Returns the rows of a batch whose plain decoding fits, 0 if not even the weights do."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        fits = memory(model, room_bytes=room_bytes, rows=middle, context=context, mesh=mesh).fits
        low, high = (middle, high) if fits else (low, middle - 1)
    return low
