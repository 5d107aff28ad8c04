"""Name tables: which published tensors make up which parameter, in both directions."""

from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from jaxspec.checkpoint.files.stream import TensorName
from jaxspec.checkpoint.names.copies import COPIED
from jaxspec.models.arch import ArchSpec
from jaxspec.nn.moe import MoeSpec

# Tables of rotations that old checkpoints hold; they follow from the config.
ROTATION = (
    "rotary_emb.inv_freq", "rotary_emb.original_inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached",
    "rope.freqs",
)  # fmt: skip


@dataclass(frozen=True)
class NameRule:
    """One parameter and the published tensors that it is made of.

    Attributes:
      leaf: path of the parameter, ``{y}`` for the layer and ``{e}`` for the expert.
      hub: published names, in the order that ``pack`` takes them.
      pack: name of the bijection.
      entry: which entry of their first axis is read, None for all of it.
      copies: of each head of keys and values in the parameter, see ``copies``.
    """

    leaf: str
    hub: tuple[str, ...]
    pack: str = "copy"
    entry: int | None = None
    copies: int = 1

    @cached_property
    def names(self) -> tuple[TensorName, ...]:
        """The tensors, or their entries, in the order of ``hub``."""
        return tuple(TensorName(name, self.entry) for name in self.hub)


class Unread(NamedTuple):
    """Published names that loading passes over: by their beginnings, their endings, or whole."""

    prefixes: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()

    def covers(self, name: str) -> bool:
        """Whether a name is one of them."""
        return name in self.names or name.startswith(self.prefixes) or name.endswith(self.suffixes)


@dataclass(frozen=True)
class MtpNames:
    """Rules of the layers of multi-token prediction, in addition to those of the decoder layer that each of them has.

    Attributes:
      join: of a layer; its names follow the layer's prefix.
      shared: of what the layers have in common; whole names.
      prefix: published prefix of a layer, ``{y}`` for its number after the last main one, ``{n}`` for its own; None for
        the prefix of all layers.
      layer, expert: of the decoder layer and of one of its experts, where they are not the model's.
      copies: copies of the model's embedding and head in such a layer, which nothing reads.
    """

    join: tuple[NameRule, ...] = ()
    shared: tuple[NameRule, ...] = ()
    prefix: str | None = None
    layer: tuple[NameRule, ...] | None = None
    expert: tuple[NameRule, ...] | None = None
    copies: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """All rules of a family; a rule whose parameter the architecture lacks does not apply.

    Attributes:
      top: parameters outside the layers.
      layer: of a layer.
      expert: one routed expert.
      experts_stacked: whether published tensors hold all experts of a layer along their first axis.
      expert_apart: of one routed expert in layers whose experts are not stacked, in a family where others are.
      mtp: of multi-token prediction.
      prefix: published prefix of a layer.
      ignored: endings of published names that carry no parameter.
      others: beginnings of the published names of other models in the same files, such as an image encoder.
      scales: how the scales of quantized weights are published: ``X.weight_scale_inv`` or ``X.scale`` with
        ``X.weight``, or ``X_scales`` with ``X_blocks``.
    """

    top: tuple[NameRule, ...]
    layer: tuple[NameRule, ...]
    expert: tuple[NameRule, ...] = ()
    experts_stacked: bool = False
    expert_apart: tuple[NameRule, ...] = ()
    mtp: MtpNames = MtpNames()
    prefix: str = "model.layers.{y}."
    ignored: tuple[str, ...] = ROTATION
    others: tuple[str, ...] = ()
    scales: Literal["weight_scale_inv", "scale", "blocks"] = "weight_scale_inv"

    def rules(self, arch: ArchSpec, names: Container[str] = ()) -> Iterator[NameRule]:
        """Yields every rule of the model itself with layer and expert numbers filled in.

        Args:
          arch: of the model.
          names: of the tensors that there are, which say whether experts are stacked where releases differ.
        """
        embedding = self.hub_names("embed_VD")
        for rule in self.top:
            yield replace(rule, hub=embedding) if rule.leaf == "head_DV" and arch.tied else rule
        for y, layer in enumerate(arch.layers):
            prefix = self.prefix.replace("{y}", str(y))
            yield from _filled(self.layer, f"layers_{y}/", prefix, layer.attention)
            yield from self._experts(f"layers_{y}/", prefix, layer.ffn, self.expert, names)

    def hub_names(self, leaf: str) -> tuple[str, ...]:
        """Returns the published names of a parameter outside the layers."""
        return next(rule.hub for rule in self.top if rule.leaf == leaf)

    def unread(self, arch: ArchSpec) -> Unread:
        """Returns what the model itself does not read, such as multi-token prediction or a copy of a tied head."""
        prefix = self.mtp.prefix
        prefixes = (
            tuple(_fill(self.prefix, y=len(arch.layers) + n) for n in range(len(arch.mtp)))
            if prefix is None
            else (prefix.partition("{")[0],)
        )
        return Unread(self.others + prefixes, self.ignored + (self.hub_names("head_DV") if arch.tied else ()))

    def mtp_rules(self, arch: ArchSpec, names: Container[str] = ()) -> Iterator[NameRule]:
        """Yields every rule of multi-token prediction, under ``mtp_0/``; its decoder layer's under ``mtp_0/block/``.

        Families that publish none have DeepSeek's and GLM's names for what is trained here.

        Args:
          arch: of the model.
          names: see ``rules``.
        """
        own = self.mtp if self.mtp.join or self.mtp.shared else UNPUBLISHED
        for n, layer in enumerate(arch.mtp):
            path, prefix = f"mtp_{n}/", _fill(own.prefix or self.prefix, y=len(arch.layers) + n, n=n)
            yield from _filled(own.join, path, prefix)
            yield from _filled(own.shared, path, "")
            block = self.layer if own.layer is None else own.layer
            yield from _filled(block, f"{path}block/", prefix, layer.attention)
            expert = self.expert if own.expert is None else own.expert
            yield from self._experts(f"{path}block/", prefix, layer.ffn, expert, names)

    def _experts(
        self, path: str, prefix: str, ffn: object, rules: tuple[NameRule, ...], names: Container[str]
    ) -> Iterator[NameRule]:
        """Yields the rules of every expert of a layer, from a stack of them or each from its own tensors."""
        if not isinstance(ffn, MoeSpec):
            return
        apart = any(prefix + _fill(name, e=0) in names for rule in self.expert_apart for name in rule.hub)
        for e in range(ffn.experts):
            for rule in self.expert_apart if apart else rules:
                hub = tuple(prefix + _fill(name, e=e) for name in rule.hub)
                entry = e if self.experts_stacked and not apart else None
                yield NameRule(path + _fill(rule.leaf, e=e), hub, rule.pack, entry)


def _filled(rules: tuple[NameRule, ...], path: str, prefix: str, attention: object = None) -> Iterator[NameRule]:
    """Yields rules under a path of parameters and a published prefix, of a layer with such attention."""
    copies = getattr(attention, "kv_copies", 1)
    for rule in rules:
        own = copies if rule.leaf in COPIED else 1
        yield NameRule(path + rule.leaf, tuple(prefix + name for name in rule.hub), rule.pack, copies=own)


def _fill(text: str, **numbers: int) -> str:
    for name, number in numbers.items():
        text = text.replace("{" + name + "}", str(number))
    return text


EMBEDDING = (
    NameRule("embed_VD", ("model.embed_tokens.weight",)),
    NameRule("norm_D", ("model.norm.weight",)),
    NameRule("head_DV", ("lm_head.weight",), "transpose"),
)
NORMS = (
    NameRule("attention_norm_D", ("input_layernorm.weight",)),
    NameRule("ffn_norm_D", ("post_attention_layernorm.weight",)),
)

# Of a layer of multi-token prediction: what it joins, inside of it or, of Qwen, beside all of them.
JOIN = (
    NameRule("embed_norm_D", ("enorm.weight",)),
    NameRule("hidden_norm_D", ("hnorm.weight",)),
    NameRule("join_XD", ("eh_proj.weight",), "transpose"),
)
LAST_NORM = NameRule("norm_D", ("final_layernorm.weight",))
UNPUBLISHED = MtpNames((*JOIN, LAST_NORM))
JOIN_OUTSIDE = (
    NameRule("embed_norm_D", ("mtp.pre_fc_norm_embedding.weight",)),
    NameRule("hidden_norm_D", ("mtp.pre_fc_norm_hidden.weight",)),
    NameRule("join_XD", ("mtp.fc.weight",), "transpose"),
    NameRule("norm_D", ("mtp.norm.weight",)),
)


def layer_norm_rules(leaf: str, hub: str) -> tuple[NameRule, NameRule]:
    """Returns the rules of a norm with a bias."""
    return NameRule(f"{leaf}_D", (f"{hub}.weight",)), NameRule(f"{leaf}_bias_D", (f"{hub}.bias",))


def attention_rules(hub: str = "self_attn.", out: str = "o_proj") -> tuple[NameRule, ...]:
    """Returns the rules of Llama-style attention with every optional part."""
    a = "attention/"
    return (
        NameRule(f"{a}qkv_DGQC", tuple(f"{hub}{n}_proj.weight" for n in "qkv"), "qkv"),
        NameRule(f"{a}qkv_bias_GQC", tuple(f"{hub}{n}_proj.bias" for n in "qkv"), "qkv"),
        NameRule(f"{a}qk_DGQC", tuple(f"{hub}{n}_proj.weight" for n in "qk"), "query_key"),
        NameRule(f"{a}qk_bias_GQC", tuple(f"{hub}{n}_proj.bias" for n in "qk"), "query_key"),
        NameRule(f"{a}v_DGC", (f"{hub}v_proj.weight",), "from_rank"),
        NameRule(f"{a}v_bias_GC", (f"{hub}v_proj.bias",), "heads"),
        NameRule(f"{a}q_norm_C", (f"{hub}q_norm.weight",)),
        NameRule(f"{a}k_norm_C", (f"{hub}k_norm.weight",)),
        NameRule(f"{a}q_norm_HC", (f"{hub}q_norm.weight",), "heads"),
        NameRule(f"{a}k_norm_GC", (f"{hub}k_norm.weight",), "heads"),
        NameRule(f"{a}sinks_H", (f"{hub}sinks",)),
        NameRule(f"{a}out_HCD", (f"{hub}{out}.weight",), "out"),
        NameRule(f"{a}out_bias_D", (f"{hub}{out}.bias",)),
    )


def gated_rules(
    leaf: str, hub: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[NameRule, ...]:
    """Returns the rules of one gated feed-forward layer under a parameter path and a published prefix."""
    end = "_{e}" if "{e}" in hub else ""
    return (
        NameRule(f"{leaf}gate_up_D2F{end}", (f"{hub}{gate}.weight", f"{hub}{up}.weight"), "gate_up"),
        NameRule(f"{leaf}down_FD{end}", (f"{hub}{down}.weight",), "transpose"),
    )


def router_rules(hub: str, choice_bias: str | None = None) -> tuple[NameRule, ...]:
    """Returns the rules of a router and the bias of its choices."""
    bias = (NameRule("ffn/choice_bias_E", (choice_bias,)),) if choice_bias else ()
    return (NameRule("ffn/router_DE", (hub,), "transpose"), *bias)
