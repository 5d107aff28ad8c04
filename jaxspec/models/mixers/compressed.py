"""DeepSeek-V4's attention from a published config, in the hub's dialect or that of transformers 5."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxspec.errors import ConfigError
from jaxspec.models.read import Reader, checked_count, checked_real, short
from jaxspec.models.rotary import checked, scaled, theta_of
from jaxspec.nn.compressed_attention import CompressedSpec
from jaxspec.nn.compressor import CompressorSpec
from jaxspec.nn.entry_index import EntryIndexSpec
from jaxspec.nn.rope import RopeSpec

NEAR, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
SPARSE_RATIO = 4
RATES = {SPARSE: SPARSE_RATIO, HEAVY: 128}


@dataclass(frozen=True)
class CompressedRow:
    """Reads which layers compress, and how: ``compress_ratios``, or ``layer_types`` and ``compress_rates``."""

    def spec(self, read: Reader, layer: int) -> CompressedSpec:
        """Attention of one layer.

        Raises:
          ConfigError: a layer's kind is unknown, or heads, groups and rotated channels do not fit together.
        """
        heads, head_dim, groups = (read.count(key) for key in ("num_attention_heads", "head_dim", "o_groups"))
        part = read.get("partial_rotary_factor", default=None)
        part = None if part is None else int(head_dim * checked_real("partial_rotary_factor", part, most=1.0))
        turned = read.count("qk_rope_head_dim") if part is None else read.count("qk_rope_head_dim", default=part)
        if part not in (None, turned) and not read.missing:
            raise ConfigError(
                f"config: partial_rotary_factor says that {part} channels of {head_dim} turn, qk_rope_head_dim {turned}"
            )
        if heads % groups and not read.missing:
            raise ConfigError(f"config: {heads} attention heads cannot lie in o_groups {groups} equal groups")
        if (turned > head_dim or turned % 2) and not read.missing:
            raise ConfigError(f"config: qk_rope_head_dim must be even and at most head_dim {head_dim}, got {turned}")
        kind, ratio = _kind(read, layer)
        rope = _rope(read, kind, turned)
        sparse = kind == SPARSE
        read.asked |= {"index_head_dim", "index_n_heads", "index_topk", "compress_ratios", "compress_rope_theta"}
        return CompressedSpec(
            heads=heads,
            head_dim=head_dim,
            query_rank=read.count("q_lora_rank"),
            groups=groups,
            group_rank=read.count("o_lora_rank"),
            window=read.count("sliding_window"),
            rope=rope,
            compressor=CompressorSpec(ratio, head_dim, rope, overlaps=sparse) if kind != NEAR else None,
            index=_index(read, ratio, rope) if sparse else None,
        )


def _kind(read: Reader, layer: int) -> tuple[str, int]:
    """Kind of a layer and positions per entry; layers of multi-token prediction see the window alone.

    The published list goes on after the last layer, but not with the kinds of these layers.
    """
    count = read.count("num_hidden_layers")
    kinds, rates = read.get("layer_types", default=None), {**RATES, **read.mapping("compress_rates")}
    if kinds is None:
        ratios = read.get("compress_ratios")
        ratios = [0] * count if read.missing else ratios
        if not isinstance(ratios, list | tuple):
            raise ConfigError(f"config: compress_ratios must be a list of a number per layer, got {short(ratios)}")
        ratios = [checked_count("compress_ratios", ratio, least=0) for ratio in ratios]
        named = {0: NEAR, SPARSE_RATIO: SPARSE}
        kinds = [named.get(ratio, HEAVY) for ratio in ratios]
        pairs = list(zip(kinds, ratios, strict=True))
    else:
        listed = kinds if isinstance(kinds, list | tuple) and all(isinstance(kind, str) for kind in kinds) else []
        pairs = [(kind, rates.get(kind, 0)) for kind in listed]
    known = all(kind in (NEAR, *RATES) and isinstance(ratio, int) for kind, ratio in pairs)
    if len(pairs) < count or not known or any(ratio < 2 for kind, ratio in pairs if kind != NEAR):
        raise ConfigError(
            f"config: compress_ratios (0, or positions per entry, at least 2) or layer_types ({NEAR}, {SPARSE} or "
            f"{HEAVY}) must name a kind for each of the {count} layers; got {short(kinds)} with {short(rates)}"
        )
    return pairs[layer] if layer < count else (NEAR, 0)


def _index(read: Reader, ratio: int, rope: RopeSpec) -> EntryIndexSpec:
    dim = read.count("index_head_dim")
    if dim < rope.dim and not read.missing:
        raise ConfigError(f"config: index_head_dim is {dim}, less than the {rope.dim} rotated channels")
    compressor = CompressorSpec(ratio, dim, rope, overlaps=True)
    return EntryIndexSpec(read.count("index_n_heads"), read.count("index_topk"), compressor)


def _rope(read: Reader, kind: str, turned: int) -> RopeSpec:
    """Rotation of the last channels; where there are entries it has a base of its own, and an extended context.

    The extension never sharpens the scores, whatever the published settings say elsewhere.
    """
    nested, plain = read.mapping("rope_parameters"), read.mapping("rope_scaling")
    for name, settings in nested.items():
        if name not in ("main", "compress") or not isinstance(settings, Mapping | None):
            raise ConfigError(f"config: rope_parameters must be objects under main and compress, got {short(nested)}")
    if kind == NEAR:
        return RopeSpec(theta_of(read, checked(nested.get("main") or {})), turned, interleaved=True, last=True)
    settings = checked(nested.get("compress") or plain)
    theta = theta_of(read, settings, "compress_rope_theta", 160000.0)
    scaling = scaled(read, settings)
    scaling = replace(scaling, attention_factor=1.0) if scaling else None
    return RopeSpec(theta, turned, interleaved=True, last=True, scaling=scaling)
