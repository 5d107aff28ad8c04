"""Name tables: which published tensors make up which parameter, in both directions."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from jaxspec.models.arch import ArchSpec
from jaxspec.nn.moe import MoeSpec

Arrays = list[np.ndarray]


@dataclass(frozen=True)
class Pack:
    """A bijection between published arrays and one parameter; it only moves axes, it never changes a value.

    Attributes:
      join: published arrays to parameter.
      split: parameter to published arrays.
    """

    join: Callable[[Arrays, ArchSpec], np.ndarray]
    split: Callable[[np.ndarray, ArchSpec], Arrays]


@dataclass(frozen=True)
class Rule:
    """One parameter and the published tensors that it is made of.

    Attributes:
      leaf: path of the parameter, ``{y}`` for the layer and ``{e}`` for the expert.
      hub: published names, in the order that ``pack`` takes them.
      pack: name of the bijection.
    """

    leaf: str
    hub: tuple[str, ...]
    pack: str = "copy"


def _join_qkv(arrays: Arrays, arch: ArchSpec) -> np.ndarray:
    spec = arch.layers[0].attention
    parts = [a.reshape(spec.kv_heads, -1, spec.head_dim, *a.shape[1:]) for a in arrays]
    joined = np.concatenate(parts, axis=1)
    return np.moveaxis(joined, -1, 0) if joined.ndim == 4 else joined


def _split_qkv(leaf: np.ndarray, arch: ArchSpec) -> Arrays:
    spec = arch.layers[0].attention
    group = spec.heads // spec.kv_heads
    joined = np.moveaxis(leaf, 0, -1) if leaf.ndim == 4 else leaf
    cuts = (joined[:, :group], joined[:, group : group + 1], joined[:, group + 1 :])
    return [cut.reshape(-1, *joined.shape[3:]) for cut in cuts]


PACKS: Mapping[str, Pack] = {
    "copy": Pack(lambda a, _: a[0], lambda leaf, _: [leaf]),
    "transpose": Pack(lambda a, _: a[0].T, lambda leaf, _: [leaf.T]),
    "qkv": Pack(_join_qkv, _split_qkv),
    "out": Pack(
        lambda a, arch: a[0].T.reshape(-1, arch.layers[0].attention.head_dim, a[0].shape[0]),
        lambda leaf, _: [leaf.reshape(-1, leaf.shape[-1]).T],
    ),
    "gate_up": Pack(
        lambda a, _: np.stack([a[0].T, a[1].T], axis=1),
        lambda leaf, _: [leaf[:, 0].T, leaf[:, 1].T],
    ),
}


@dataclass(frozen=True)
class Table:
    """All rules of a family.

    Attributes:
      top: parameters outside the layers.
      attention: of every layer; rules whose parameter the architecture lacks do not apply.
      dense: feed-forward of a dense layer.
      moe: router and shared expert of an expert layer.
      expert: one routed expert.
      ignored: endings of published names that carry no parameter.
    """

    top: tuple[Rule, ...]
    attention: tuple[Rule, ...]
    dense: tuple[Rule, ...]
    moe: tuple[Rule, ...] = ()
    expert: tuple[Rule, ...] = ()
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)

    def rules(self, arch: ArchSpec) -> Iterator[Rule]:
        """Every rule with layer and expert numbers filled in."""
        embedding = next(rule.hub for rule in self.top if rule.leaf == "embed_VD")
        for rule in self.top:
            yield replace(rule, hub=embedding) if rule.leaf == "head_DV" and arch.tied else rule
        for y, layer in enumerate(arch.layers):
            moe = isinstance(layer.ffn, MoeSpec)
            for rule in (*self.attention, *(self.moe if moe else self.dense)):
                yield _fill(rule, y=y)
            if isinstance(layer.ffn, MoeSpec):
                for e in range(layer.ffn.experts):
                    for rule in self.expert:
                        yield _fill(rule, y=y, e=e)


def _fill(rule: Rule, **numbers: int) -> Rule:
    def fill(text: str) -> str:
        for name, number in numbers.items():
            text = text.replace("{" + name + "}", str(number))
        return text

    return Rule(fill(rule.leaf), tuple(fill(name) for name in rule.hub), rule.pack)


EMBEDDING = (
    Rule("embed_VD", ("model.embed_tokens.weight",)),
    Rule("norm_D", ("model.norm.weight",)),
    Rule("head_DV", ("lm_head.weight",), "transpose"),
)


def attention_rules(prefix: str = "model.layers.{y}.") -> tuple[Rule, ...]:
    """Llama-style attention with every optional part; absent parameters drop their rule."""
    a = prefix + "self_attn."
    return (
        Rule("layers_{y}/attention_norm_D", (prefix + "input_layernorm.weight",)),
        Rule("layers_{y}/ffn_norm_D", (prefix + "post_attention_layernorm.weight",)),
        Rule("layers_{y}/attention/qkv_DGQC", tuple(f"{a}{n}_proj.weight" for n in "qkv"), "qkv"),
        Rule("layers_{y}/attention/qkv_bias_GQC", tuple(f"{a}{n}_proj.bias" for n in "qkv"), "qkv"),
        Rule("layers_{y}/attention/q_norm_C", (a + "q_norm.weight",)),
        Rule("layers_{y}/attention/k_norm_C", (a + "k_norm.weight",)),
        Rule("layers_{y}/attention/out_HCD", (a + "o_proj.weight",), "out"),
        Rule("layers_{y}/attention/out_bias_D", (a + "o_proj.bias",)),
    )


def gated_rules(leaf: str, hub: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"):
    """The rules of one gated feed-forward layer under a parameter path and a published prefix."""
    end = "_{e}" if "{e}" in hub else ""
    return (
        Rule(f"{leaf}gate_up_D2F{end}", (f"{hub}{gate}.weight", f"{hub}{up}.weight"), "gate_up"),
        Rule(f"{leaf}down_FD{end}", (f"{hub}{down}.weight",), "transpose"),
    )
