"""Counts the distinct experts of each verification, on the routes of the texts that a run produced."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from jaxspec.bench.measure import Run
from jaxspec.bench.record import Experts
from jaxspec.checkpoint.load.model import Model
from jaxspec.inspect.text_routes import routed_experts
from jaxspec.nn.moe import MoeSpec
from jaxspec.perf.moesd import expected_experts


def touched_experts(
    model: Model, prompts: Sequence[Sequence[int]], run: Run, *, rows: int, drafts: int
) -> Experts | None:
    """Counts the experts that the steps of a speculative run touched, outside any timed run.

    The engine's timed loop returns no routes. So the finished texts are read once more with every route recorded,
    and the steps are recovered from which tokens were drafts: a step of a row reads its anchor and K positions
    after it. Rejected drafts are not in the text; its own next tokens stand in for them, as a better drafter would
    have proposed. Requests that were sent together count as one batch, idle rows do not count, and plain decoding
    is the same steps with their anchors alone.

    Args:
      model: target.
      prompts: token ids of the requests, in order.
      run: a speculative run of them.
      rows: decoded together.
      drafts: K.

    Returns:
      The counts, None if the model has no experts, or kinds of them that cannot be averaged.
    """
    layers = [layer.ffn for layer in model.net.arch.layers if isinstance(layer.ffn, MoeSpec)]
    kinds = {(layer.experts, layer.top_k, layer.identities) for layer in layers}
    if len(kinds) != 1 or layers[0].identities:
        return None
    experts, top_k = layers[0].experts, layers[0].top_k
    texts = [[*prompt, *ids] for prompt, ids in zip(prompts, run.token_ids, strict=True)]
    routes = routed_experts(model, texts)
    anchors = [_anchors(len(p), drafted) for p, drafted in zip(prompts, run.drafted, strict=True)]
    plain, wide, busy = [], [], []
    for first in range(0, len(texts), rows):
        batch = range(first, min(first + rows, len(texts)))
        for step in range(max(len(anchors[i]) for i in batch)):
            at = [(i, anchors[i][step]) for i in batch if step < len(anchors[i])]
            plain.append(_distinct(routes, [(i, a, a + 1) for i, a in at]))
            wide.append(_distinct(routes, [(i, a, a + 1 + drafts) for i, a in at]))
            busy.append(len(at))
    expected = partial(expected_experts, num_experts=experts, top_k=top_k)
    return Experts(
        plain=float(np.mean(plain)),
        speculative=float(np.mean(wide)),
        plain_independent=float(np.mean([expected(tokens=b) for b in busy])),
        speculative_independent=float(np.mean([expected(tokens=b * (1 + drafts)) for b in busy])),
        layers=len(layers),
        experts=experts,
        experts_per_token=top_k,
        texts=len(texts),
    )


def _anchors(prompt: int, drafted: Sequence[bool]) -> list[int]:
    """Returns where the verifications of a text began: a step ends with a token that was no draft."""
    ends = [i for i, draft in enumerate(drafted) if not draft]
    return [prompt - 1, *(prompt + i for i in ends[:-1])]


def _distinct(routes: Sequence[np.ndarray], windows: Sequence[tuple[int, int, int]]) -> float:
    """Returns the mean over layers of the distinct experts that positions [start, stop) of some texts chose."""
    chosen = np.concatenate(
        [routes[i][:, start:stop].reshape(len(routes[i]), -1) for i, start, stop in windows], axis=1
    )
    ordered = np.sort(chosen, axis=1)
    return float(np.mean(1 + np.sum(ordered[:, 1:] != ordered[:, :-1], axis=1)))
