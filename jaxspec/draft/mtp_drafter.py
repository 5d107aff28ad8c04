"""The target's own layers of multi-token prediction as a drafter: they continue from its hidden states."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxspec.cache.window import Window
from jaxspec.draft.autoregress import Root, draft
from jaxspec.draft.draft_vocab import DraftVocab
from jaxspec.draft.last_hidden import committed_rows, gather_last, last_index, scatter_last
from jaxspec.draft.network_drafter import CachedDrafter
from jaxspec.draft.target_product import CutProduct, TargetDrafter
from jaxspec.models.apply import apply
from jaxspec.models.arch import MtpForm
from jaxspec.models.caches import Layout, init_layer_caches, unstacked
from jaxspec.models.mtp import Caches, Mtp, feature_shape
from jaxspec.models.transformer import Transformer, embed
from jaxspec.nn.inputs import Inputs
from jaxspec.protocol import Anchor, Commit, Proposal
from jaxspec.pytree import pytree, replace, static
from jaxspec.shapes import Array, Params
from jaxspec.topology import AnyTopology

LATER_LAYERS = "later layers of multi-token prediction read hidden states that no cache keeps"


@pytree
class MtpState:
    """State of the layers for B rows.

    Attributes:
      caches: one per layer.
      features: what each layer returned at the last committed position, [B, D] or [B, N, D]; where layers are not
        chained, what all but the last joined there, and then what the first returned.
    """

    caches: Caches
    features: tuple[Array, ...]


@dataclass(frozen=True)
class LayerInputs:
    """Inputs that all layers share, at consecutive positions of each row."""

    token_BT: Array
    embedded_BTD: Array
    position_BT: Array
    window: Window

    def shifted(self, left_B: Array) -> "LayerInputs":
        """Returns the inputs without the first ones of each row."""
        token_BT, embedded_BTD = _shift(self.token_BT, left_B), _shift(self.embedded_BTD, left_B)
        return LayerInputs(token_BT, embedded_BTD, _shift(self.position_BT, left_B), self.window)


@pytree
class MtpHeads(TargetDrafter, CachedDrafter):
    """Drafts with the layers that were trained together with the target (DeepSeek-V3 2024, section 2.2).

    At position j the first layer joins the target's hidden state there with the embedding of token j + 1 and predicts
    token j + 2; layer m joins what layer m - 1 returned at position j - 1 with the same token and predicts the same
    one, from m tokens less of real hidden states. So layer m fills its slot j - m. Observing runs all layers over
    the committed positions. Draft k + 1 is what layer min(k, n - 1) predicts; the last layer goes on from its own
    output. Positions without a real hidden state are written ahead and overwritten by the next observation.

    Layers that are not chained (MiMo-V2-Flash) join the target's hidden state of their slot each, with a token that
    lies m positions further on: as SGLang's ``multi_layer_eagle_worker_v2.py`` runs them, for which it was contributed.

    Attributes:
      net: the layers.
    """

    params: Params
    base: Params
    net: Mtp = static()
    target: Transformer = static()
    topology: AnyTopology = static()
    block: int = static(default=128)
    vocab: DraftVocab | None = None
    product: CutProduct | None = None
    needs = "hidden"

    @property
    def stages(self) -> int:
        """The first n - 1 cells run several layers, the others only the last."""
        return self._layers - 1

    @property
    def _layers(self) -> int:
        return len(self.net.arch.mtp)

    @property
    def _form(self) -> MtpForm:
        return self.net.arch.mtp_form

    @property
    def own_product(self) -> bool:
        return self._form.own_heads

    def init_state(self, rows: int, capacity: int, slack: int) -> MtpState:
        arch = self.net.arch
        caches = init_layer_caches(arch.mtp, self.net.policy, self.cache_size(rows, capacity, slack))
        return MtpState(caches, tuple(jnp.zeros((rows, *feature_shape(arch))) for _ in arch.mtp))

    @property
    def prefix_refusal(self) -> str:
        """Says so of several layers: the second joins what the first returned a position before, which is not kept."""
        return LATER_LAYERS if self.stages else ""

    @property
    def cache_layout(self) -> Layout:
        return unstacked(self.net.arch.mtp)

    def caches_of(self, state: MtpState) -> Caches:
        return state.caches

    def with_caches(self, state: MtpState, caches: Caches) -> MtpState:
        return replace(state, caches=caches)

    def propose(self, state: MtpState, anchor: Anchor, rule: str) -> tuple[Proposal, MtpState]:
        features = tuple(x[:, None] for x in state.features)
        first = features[0 if self._form.chained else -1]
        root = Root(apply(self.net, self.params, 0, first, method="last"), features, anchor.length_B >= self._layers)
        proposal, caches = draft(self, state.caches, anchor, rule, root)
        return proposal, replace(state, caches=caches)

    def run(
        self, state: Caches, token_BT: Array, feature: tuple[Array, ...], position_BT: Array, window: Window, stage: int
    ) -> tuple[Array, tuple[Array, ...], Caches]:
        inputs = LayerInputs(token_BT, embed(self.target, self.base, token_BT), position_BT, window)
        caches, features = list(state), list(feature)
        first = stage + 1 if stage < self.stages else self._layers - 1
        lasts = {}
        for layer in range(first, self._layers):
            before = feature[layer - 1 if stage < self.stages else layer]
            lasts[layer], out, caches[layer] = self._layer(layer, inputs, before, caches[layer])
            features[layer] = out if self._form.chained or layer == self._layers - 1 else before
        return lasts[first], tuple(features), tuple(caches)

    def observe(self, state: MtpState, commit: Commit) -> MtpState:
        embedded_BTD = embed(self.target, self.base, commit.next_BT)
        inputs = LayerInputs(commit.next_BT, embedded_BTD, commit.position_BT, self.window_of(commit))
        x, chained = commit.hidden.stream if self._form.stream else commit.hidden.last_BTD, self._form.chained
        caches, joined, returned = [], [], []
        for layer, (cache, old) in enumerate(zip(state.caches, state.features, strict=True)):
            final_B = None if chained and layer < self._layers - 1 else last_index(commit)
            out, cache = self._observe_layer(layer, inputs, x, cache, final_B)
            caches.append(cache)
            joined.append(gather_last(x, commit))
            returned.append(gather_last(out, commit) if final_B is None else out[:, 0])
            # The next layer joins what this one returned, or joined, one position earlier.
            passed = out if chained else x
            x = jnp.concatenate([committed_rows(old, commit)[:, None], passed[:, :-1]], axis=1)
        features = returned if chained else [*joined[:-1], returned[0]]
        kept = (scatter_last(old, new, commit) for old, new in zip(state.features, features, strict=True))
        return MtpState(tuple(caches), tuple(kept))

    def logits(self, last_BTD: Array) -> Array:
        return last_BTD if self.own_product else self.target_logits(last_BTD)

    def _observe_layer(
        self, layer: int, inputs: LayerInputs, feature: Array, cache: Any, output_index_B: Array | None
    ) -> tuple[Array, Any]:
        """Runs a layer over committed positions but those before position 0 of its slots."""
        if layer == 0:
            _, out, cache = self._layer(0, inputs, feature, cache, output_index_B)
            return out, cache
        left_B = jnp.maximum(layer - inputs.window.start_B, 0)
        output_index_B = None if output_index_B is None else jnp.maximum(output_index_B - left_B, 0)
        _, out, cache = self._layer(layer, inputs.shifted(left_B), _shift(feature, left_B), cache, output_index_B)
        return out if output_index_B is not None else _shift(out, -left_B), cache

    def _layer(
        self, layer: int, inputs: LayerInputs, feature: Array, cache: Any, output_index_B: Array | None = None
    ) -> tuple[Array, Array, Any]:
        """Runs a layer in its own slots."""
        start_B = jnp.maximum(inputs.window.start_B - layer, 0)
        window = replace(inputs.window, start_B=start_B, output_index_B=output_index_B)
        own = Inputs(inputs.token_BT, jnp.maximum(inputs.position_BT - layer, 0), window, cache)
        return apply(self.net, self.params, layer, inputs.embedded_BTD, feature, own)


def _shift(x: Array, left_B: Array) -> Array:
    """Moves the entries [B, T, ...] of each row to the left; an end is repeated."""
    index_BT = jnp.arange(x.shape[1], dtype=jnp.int32)[None] + left_B[:, None]
    index_BT = jnp.clip(index_BT, 0, x.shape[1] - 1)
    return jnp.take_along_axis(x, index_BT.reshape(*index_BT.shape, *[1] * (x.ndim - 2)), axis=1)
