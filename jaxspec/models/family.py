"""A model family as a row of data, and the one reader that turns a published config into an ArchSpec."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol

from jaxspec.errors import ConfigError
from jaxspec.models.arch import SUM, ArchSpec, LayerSpec, MixerSpec, NoMixer
from jaxspec.models.mixers.gqa import GqaRow
from jaxspec.models.mixers.hybrid import DENSE, HybridRow
from jaxspec.models.read import Config, Reader, Switch, short
from jaxspec.models.rotary import limit, reach
from jaxspec.models.rows import NORMED, FfnRow, HyperRow, JoinRow, MtpRow, ScaleRow
from jaxspec.nn.activations import activation_named
from jaxspec.nn.ffn import Activation, FfnSpec
from jaxspec.nn.moe import MoeSpec
from jaxspec.nn.router import RouterSpec


class MixerRow(Protocol):
    """Where a family's config keeps the numbers of its attention."""

    def spec(self, read: Reader, layer: int) -> MixerSpec:
        """Attention of one layer."""
        ...


@dataclass(frozen=True)
class MoeRow:
    """Where a family's config keeps its expert numbers; a value that is a string names a config key.

    Attributes:
      experts, top_k, hidden: keys of E, A and F, of several the first present one counts.
      router, score: kind of router; key of it, ``sigmoid`` or ``softmax``, where it says.
      renormalize: whether chosen weights are divided by their sum.
      scale: multiplies the weights.
      logit_bias, choice_bias: biases of the router, see ``RouterSpec``, or the key of whether.
      grouped: whether ``n_group`` and ``topk_group`` limit the choice to some groups of experts, or the key of whether:
        ``group_limited_greedy`` or ``greedy``.
      members: see ``RouterSpec``.
      exact: whether router logits are computed in float32.
      hash_layers: key of the number of first layers that are routed by token id.
      shared_hidden: keys of the shared expert's F; with ``shared_count`` the F of one of them.
      shared_count: keys of the number of shared experts, stored as one.
      shared_gate: whether the shared expert is gated.
      activation: kind that replaces the config's own, which must be ``silu``.
      limit, shared_limit: key of the bound of the hidden units, or the bound; key of the shared expert's own.
      late: whether they bound what the gate's function gives.
      bias: whether the routed experts' products have biases.
      sparse_step: whether ``decoder_sparse_step`` and ``mlp_only_layers`` leave some layers dense.
      first_dense: key of the number of first layers that are dense, where ``mlp_layer_types`` does not say, nor with
        ``sparse_step`` ``mlp_only_layers``.
      span: keys of the first and the last layer with experts, and of how many layers come to one of them.
      listed: keys of the numbers of the layers with experts, and of how many layers come to one of them where no list
        says.
      floor: added to the sum that weights are divided by.
      groups: keys of the number of groups, and the key of how many are kept.
      gated: whether the experts have gates.
      latent: key of the width that the routed experts' input is brought to.
      jitter: key of the ``sparse_mixer``'s, see ``RouterSpec``.
      soft_cap: key of what bounds the router's logits, see ``RouterSpec``.
      pattern: key of a list of 0 for dense layers and 1 for others, where ``mlp_layer_types`` does not say.
      weighs_input, apart: see ``MoeSpec``.
      switch: key that must be true for layers to have experts.
      identities: key of the number of further experts that return what they read.
    """

    experts: tuple[str, ...]
    top_k: str | tuple[str, ...] = "num_experts_per_tok"
    hidden: str = "moe_intermediate_size"
    router: Literal["softmax", "topk_softmax", "sigmoid", "sqrt_softplus", "sparse_mixer"] = "softmax"
    score: str | None = None
    renormalize: bool | str | tuple[str, ...] = True
    scale: float | str = 1.0
    logit_bias: bool = False
    choice_bias: bool | str = False
    grouped: bool | str = False
    members: int = 2
    exact: bool = False
    hash_layers: str | None = None
    shared_hidden: str | tuple[str, ...] | None = None
    shared_count: str | tuple[str, ...] | None = None
    shared_gate: bool = False
    activation: str | None = None
    limit: str | float | None = None
    shared_limit: str | None = None
    late: bool = False
    bias: bool = False
    sparse_step: bool = False
    first_dense: str | None = None
    span: tuple[str, str, str] | None = None
    listed: tuple[str, str] | None = None
    floor: float = 1e-20
    groups: tuple[tuple[str, ...], str] = (("n_group",), "topk_group")
    gated: bool = True
    latent: str | None = None
    jitter: str | None = None
    soft_cap: str | None = None
    pattern: str | None = None
    weighs_input: bool = False
    apart: bool = False
    switch: str | None = None
    identities: str | None = None


@dataclass(frozen=True)
class Family:
    """What distinguishes one ``model_type`` from another; a value that is a string names a config key.

    Attributes:
      model_type: of the published config.
      mixer: attention row.
      ffn: row of the dense feed-forward layers.
      moe: expert row, None for a dense family.
      norm: kind of normalization.
      norm_eps: key of its epsilon, or several, of which the first present one counts.
      norm_offset: see ``ArchSpec``.
      norm_first: key that is false where layers normalize what they add to; None where they never do.
      final_norm: key that is true where the last norm is left out; None where it never is.
      learned_positions: whether positions are learned.
      embed_dim: key of the width of the embedding.
      hyper: row of hyper-connections.
      mtp: row of the layers of multi-token prediction, None where none are read.
      longest: key of the longest context.
      head_bias: key of whether the head has a bias; None where it never has.
      tied: keys, of which the first present one is true where the head is the embedding.
      joins: how sub-layers join the stream, by ``ffn`` and by kinds of mixers, ``attention`` for all others.
      scales: row of multipliers.
      scaled: see ``LayerSpec``.
      shortcut: whether a second attention and dense feed-forward follow in every layer, see ``LayerSpec.second``.
      depth: key of the number of layers where it is another.
      one_each: whether a layer has a mixer or a feed-forward, as its kind says.
      inside: key under which the text model's config lies, where it is not the whole.
      text_type: the ``model_type`` that must be said there, where others are published in the same wrapper.
      defaults: config values that may be left out, as in transformers.
      implied: values that keys can only have in this family, for keys that nothing else reads; a tuple names several,
        an ellipsis all.
    """

    model_type: str
    mixer: MixerRow = field(default_factory=GqaRow)
    ffn: FfnRow = field(default_factory=FfnRow)
    moe: MoeRow | None = None
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: str | tuple[str, ...] = "rms_norm_eps"
    norm_offset: float = 0.0
    norm_first: str | None = None
    final_norm: str | None = None
    learned_positions: bool = False
    embed_dim: str | None = None
    hyper: HyperRow | None = None
    mtp: MtpRow | None = None
    longest: str | tuple[str, ...] = "max_position_embeddings"
    head_bias: str | None = None
    tied: tuple[str, ...] = ("tie_word_embeddings",)
    joins: Mapping[str, JoinRow] = field(default_factory=dict)
    scales: ScaleRow = field(default_factory=ScaleRow)
    scaled: bool = False
    shortcut: bool = False
    depth: str | None = None
    one_each: bool = False
    inside: str | None = None
    text_type: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)


def arch_from_config(config: Config, family: Family) -> ArchSpec:
    """Builds the architecture from a published ``config.json``.

    Raises:
      ConfigError: keys are missing (all listed) or values contradict each other.
    """
    return read_arch(reader_of(config, family), family)


def reader_of(config: Config, family: Family) -> Reader:
    """Reads the part of a config that is about the text model."""
    if family.inside and isinstance(config.get(family.inside), Mapping):
        kind = config[family.inside].get("model_type")
        if family.text_type not in (None, kind):
            wanted = f"{family.inside}.model_type must be {family.text_type} in {family.model_type}"
            raise ConfigError(f"config: {wanted}, got {short(kind)}")
        config = {**config, **config[family.inside]}
    if family.depth and family.depth in config:
        config = {**config, "num_hidden_layers": config[family.depth]}
    if isinstance(family.mixer, HybridRow) and config.get("num_hidden_layers") is None:
        listed = family.mixer.listed(config)
        config = config if listed is None else {**config, "num_hidden_layers": len(listed)}
    read = Reader(config, family.defaults)
    read.asked |= {family.depth} if family.depth else set()
    return read


def read_arch(read: Reader, family: Family) -> ArchSpec:
    """Builds the architecture; the reader then knows which keys counted.

    Raises:
      ConfigError: keys are missing (all listed) or values contradict each other.
    """
    dim, count = read.count("hidden_size"), read.count("num_hidden_layers")
    longest = read.count(*several(family.longest))
    width = read.count(family.embed_dim, default=dim) if family.embed_dim else dim
    norm_last = family.norm_first is not None and not read.flag(family.norm_first, default=True)
    read.asked |= _keys(family.ffn) | _keys(family.moe)  # also where no layer is of their kind
    layers = [_layer(read, family, layer) for layer in range(count)]
    if family.mtp:
        layers += [_mtp_layer(read, family, family.mtp, y) for y in family.mtp.layers(read, count)]
    ropes = [getattr(layer.attention, "rope", None) for layer in layers]
    spec = ArchSpec(
        family=family.model_type,
        vocab_size=read.count("vocab_size"),
        model_dim=dim,
        layers=tuple(layers[:count]),
        norm_eps=read.real(*several(family.norm_eps), default=1e-6, most=1.0),
        tied=read.flag(read.present(*family.tied)),
        max_position=min(max(longest, *map(reach, ropes)), *map(limit, ropes)),
        norm=family.norm,
        norm_offset=family.norm_offset,
        norm_last=norm_last,
        final_norm=not (norm_last or (family.final_norm is not None and read.flag(family.final_norm))),
        learned_positions=longest if family.learned_positions else 0,
        embed_dim=0 if width == dim else width,
        hyper=family.hyper.spec(read) if family.hyper else None,
        mtp=tuple(layers[count:]),
        mtp_form=family.mtp.form if family.mtp else NORMED,
        head_bias=family.head_bias is not None and read.flag(family.head_bias),
        **family.scales.numbers(read, dim),
    )
    if read.missing:
        raise ConfigError(f"config of {family.model_type}: missing {sorted(set(read.missing))}")
    return spec


def _keys(row: FfnRow | MoeRow | None) -> set[str]:
    """Config keys that a row names, among other words."""
    values = [] if row is None else [getattr(row, one.name) for one in fields(row)]
    keys = {
        key for value in values for key in (value if isinstance(value, tuple) else (value,)) if isinstance(key, str)
    }
    if isinstance(row, MoeRow) and row.sparse_step:
        keys |= {"decoder_sparse_step", "mlp_only_layers"}
    return keys | {*row.groups[0], row.groups[1]} if isinstance(row, MoeRow) and row.grouped else keys


def _layer(read: Reader, family: Family, layer: int) -> LayerSpec:
    mixer = family.mixer.spec(read, layer)
    if family.one_each and not isinstance(mixer, NoMixer):
        return LayerSpec(mixer, None)
    ffn, joins = _ffn(read, family, layer), family.joins
    if family.shortcut and isinstance(ffn, MoeSpec):
        return LayerSpec(mixer, replace(ffn, deferred=True), second=LayerSpec(mixer, _dense(read, family.ffn, layer)))
    if not joins:
        return LayerSpec(mixer, ffn)
    kind = family.mixer.kind(read, layer) if isinstance(family.mixer, HybridRow) else ""
    rows = joins.get(kind, joins.get("attention")), joins.get("ffn")
    first, second = (SUM if row is None else row.join(read) for row in rows)
    return LayerSpec(mixer, ffn, (first, second), family.scaled)


def _mtp_layer(read: Reader, family: Family, row: MtpRow, layer: int) -> LayerSpec:
    if row.ffn == "next":
        return _layer(read, family, layer)
    if isinstance(family.mixer, HybridRow) and row.like is not None:
        mixer = family.mixer.spec_of(read, row.like)
    else:
        mixer = family.mixer.spec(row.reader(read, layer), layer)
    moe = None if row.ffn == "dense" else family.moe
    return LayerSpec(mixer, _dense(read, family.ffn, layer) if moe is None else _experts(read, family, moe, layer))


def _ffn(read: Reader, family: Family, layer: int) -> FfnSpec | MoeSpec:
    row = family.moe
    if row is None or _is_dense(read, family, row, layer):
        return _dense(read, family.ffn, layer)
    return _experts(read, family, row, layer)


def _experts(read: Reader, family: Family, row: MoeRow, layer: int) -> MoeSpec:
    activation = activation_named(read.get(family.ffn.activation, default="silu"))
    if row.activation is not None and activation != "silu":
        raise ConfigError(
            f"config: {family.ffn.activation} must be silu in {family.model_type}, whose experts have an activation of "
            f"their own, got {activation!r}"
        )
    experts, top_k = read.count(*row.experts), read.count_at(layer, *several(row.top_k))
    if row.router == "sparse_mixer" and top_k != 2 and not read.missing:
        raise ConfigError(f"config: {row.top_k} must be 2, which a sparse mixer chooses, got {top_k}")
    identities = read.count(row.identities, default=0, least=0) if row.identities else 0
    if top_k > experts + identities and not read.missing:
        raise ConfigError(f"config: {row.top_k} is {top_k}, but there are only {experts + identities} experts")
    shared = read.count(*several(row.shared_hidden), default=0, least=0) if row.shared_hidden else 0
    shared *= read.count(*several(row.shared_count), default=0, least=0) if row.shared_count else 1
    limit = read.bound_at(layer, row.limit) if isinstance(row.limit, str) else row.limit
    kind = row.activation or activation
    shared_limit = read.bound_at(layer, row.shared_limit) if row.shared_limit else limit
    router = _router(read, row, layer, experts)
    return MoeSpec(
        experts=experts,
        top_k=top_k,
        hidden=read.count(row.hidden),
        router=router,
        vocab_size=read.count("vocab_size") if router.kind == "hash" else 0,
        shared_hidden=shared,
        shared_gate=row.shared_gate,
        activation=Activation(kind, limit, row.gated, row.late),
        shared_activation=None if shared_limit == limit else Activation(kind, shared_limit, row.gated, row.late),
        bias=row.bias,
        latent=read.count(row.latent, default=0, least=0) if row.latent else 0,
        identities=identities,
        weighs_input=row.weighs_input,
        apart=row.apart,
    )


def _dense(read: Reader, row: FfnRow, layer: int) -> FfnSpec:
    activation = activation_named(read.get(row.activation, default="silu"))
    limit = read.bound_at(layer, row.limit) if row.limit else None
    return FfnSpec(read.count(row.hidden), Activation(activation, limit, late=row.late), row.gated, read.flag(row.bias))


def _router(read: Reader, row: MoeRow, layer: int, experts: int) -> RouterSpec:
    hashed = row.hash_layers is not None and _is_hashed(read, row.hash_layers, layer)
    grouped = _is_grouped(read, row.grouped)
    groups = read.count(*row.groups[0], default=1) if grouped else 1
    kept = read.count(row.groups[1], default=1) if grouped else 1
    if (experts % groups or kept > groups) and not read.missing:
        raise ConfigError(f"config: {experts} experts cannot lie in {groups} equal groups of which {kept} are kept")
    return RouterSpec(
        kind="hash" if hashed else _router_kind(read, row),
        renormalize=read.flag(
            read.present(*row.renormalize) if isinstance(row.renormalize, tuple) else row.renormalize
        ),
        scale=read.number(row.scale),
        logit_bias=row.logit_bias,
        choice_bias=read.flag(row.choice_bias) and not hashed,
        groups=groups,
        kept_groups=kept,
        members=row.members,
        exact=row.exact,
        floor=row.floor,
        jitter=read.real(row.jitter, default=0.01, most=1.0) if row.jitter else 0.0,
        soft_cap=read.least(row.soft_cap, 0.0) if row.soft_cap else 0.0,
    )


def _router_kind(read: Reader, row: MoeRow) -> Any:
    kind = read.get(row.score, default=row.router) if row.score else row.router
    if row.score and kind not in ("sigmoid", "softmax"):
        raise ConfigError(f"config: {row.score} must be sigmoid or softmax, got {short(kind)}")
    return kind


def _is_grouped(read: Reader, grouped: Switch) -> bool:
    """Whether the choice is limited to groups: a fixed answer, or by the method that a key names."""
    if not isinstance(grouped, str):
        return grouped
    method = read.get(grouped, default="greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(f"config: {grouped} must be greedy or group_limited_greedy, got {short(method)}")
    return method == "group_limited_greedy"


def _is_hashed(read: Reader, key: str, layer: int) -> bool:
    """Whether a layer is routed by token id: the first ones, or those that transformers 5 lists."""
    kinds = read.kinds("mlp_layer_types", ("hash_moe", "moe"), read.count("num_hidden_layers"))
    first = read.count(key, default=0, least=0)
    return layer < first if kinds is None else "hash_moe" in kinds[layer : layer + 1]


def several(value: str | tuple[str, ...]) -> tuple[str, ...]:
    """Returns one key or several as several."""
    return (value,) if isinstance(value, str) else value


def _is_dense(read: Reader, family: Family, row: MoeRow, layer: int) -> bool:
    if family.one_each and isinstance(family.mixer, HybridRow):
        return family.mixer.kind(read, layer) == DENSE
    if row.switch is not None and not read.flag(row.switch):
        return True
    if row.first_dense is not None or row.listed is not None:
        kinds = read.kinds("mlp_layer_types", ("dense", "sparse"), read.count("num_hidden_layers"))
        if kinds is None and row.pattern is not None:
            kinds = read.pattern(row.pattern, "dense", "sparse")
        if kinds is not None:
            return "dense" in kinds[layer : layer + 1]
    if row.first_dense is not None and (not row.sparse_step or read.get("mlp_only_layers", default=None) is None):
        return layer < read.count(row.first_dense, default=0, least=0)
    if row.listed is not None:
        chosen, every = read.layers(row.listed[0]), read.count(row.listed[1], default=1)
        return (layer + 1) % every != 0 if chosen is None else layer not in chosen
    if row.span is not None:
        first, last, every = row.span
        stop = read.count(last, default=-1, least=-1)
        outside = layer < read.count(first, default=0, least=0) or 0 <= stop < layer
        return outside or (layer + 1) % read.count(every, default=1) != 0
    if not row.sparse_step:
        return False
    step, dense = read.count("decoder_sparse_step", default=1), read.layers("mlp_only_layers") or ()
    return layer in dense or (layer + 1) % step != 0
