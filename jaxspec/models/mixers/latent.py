"""Multi-head latent attention and its indexer from a published config."""

from dataclasses import dataclass, replace

from jaxspec.errors import ConfigError
from jaxspec.models.read import Reader, checked_real, short
from jaxspec.models.rotary import TEMPERATURE, reach, rope_of, scaled, scaling_of, yarn_scale
from jaxspec.nn.latent_attention import LatentSpec
from jaxspec.nn.rope import RopeSpec
from jaxspec.nn.sparse_index import IndexSpec
from jaxspec.nn.temperature import Temperature

KINDS = {"full": "full", "shared": "shared", "F": "full", "S": "shared"}


@dataclass(frozen=True)
class LatentRow:
    """What distinguishes the latent attention of one family.

    Attributes:
      indexed: whether an indexer limits what a query attends to.
      index_interleaved: layout of the indexer's rotation, where ``indexer_rope_interleave`` does not say.
      index_sharing: whether layers may use the selection of an earlier one.
      rotates, gated: see ``LatentSpec``.
      balanced: whether low-rank vectors are multiplied by the root of how much narrower they are than the stream, where
        ``mla_scale_q_lora`` and ``mla_scale_kv_lora`` do not say no.
    """

    indexed: bool = False
    index_interleaved: bool = False
    index_sharing: bool = False
    rotates: bool = True
    gated: bool = False
    balanced: bool = False

    def spec(self, read: Reader, layer: int) -> LatentSpec:
        """Attention of one layer.

        Raises:
          ConfigError: an indexer has nothing to read, or a layer shares a selection that there is not.
        """
        turned, plain = read.count("qk_rope_head_dim"), read.count("qk_nope_head_dim")
        # A partial factor speaks of the whole head.
        interleaved = read.flag("rope_interleave", default=True)
        rope = rope_of(read, turned, interleaved=interleaved, whole=True, known=(TEMPERATURE,))
        query_rank = read.count("q_lora_rank") if read.get("q_lora_rank", default=None) else None
        kinds = self._kinds(read, layer)
        index = self._index(read, rope, kinds) if kinds[0] == "full" else None
        if index and not query_rank and not read.missing:
            raise ConfigError("config: an indexer reads the low-rank queries, but q_lora_rank is null")
        rank = read.count("kv_lora_rank")
        return LatentSpec(
            heads=read.count("num_attention_heads"),
            plain_dim=plain,
            value_dim=read.count("v_head_dim"),
            rank=rank,
            rope=rope,
            scale=(plain + turned) ** -0.5 * _sharpened(read) * self._balance(read, "mla_scale_q_lora", query_rank),
            query_rank=query_rank,
            bias=read.flag("attention_bias"),
            index=index,
            reuses_selection=kinds[0] == "shared",
            rotates=self.rotates,
            gated=self.gated,
            latent_scale=self._balance(read, "mla_scale_kv_lora", rank),
            temperature=_temperature(read, rope),
        )

    def _balance(self, read: Reader, key: str, rank: int | None) -> float:
        if not self.balanced or not read.flag(key, default=True) or rank is None:
            return 1.0
        return (read.count("hidden_size") / rank) ** 0.5

    def _index(self, read: Reader, rope: RopeSpec, kinds: tuple[str, str]) -> IndexSpec:
        interleaved = read.flag("indexer_rope_interleave", default=self.index_interleaved)
        dim = read.count("index_head_dim")
        if dim < rope.dim and not read.missing:
            raise ConfigError(f"config: index_head_dim is {dim}, less than the {rope.dim} rotated channels")
        return IndexSpec(
            heads=read.count("index_n_heads"),
            head_dim=dim,
            top_k=read.count("index_topk"),
            rope=replace(rope, interleaved=interleaved),
            shares_selection=kinds[1] == "shared",
        )

    def _kinds(self, read: Reader, layer: int) -> tuple[str, str]:
        """Reads how a layer and the next one come to their selections: ``none``, ``full`` or ``shared``.

        Layers of multi-token prediction have indexers of their own.
        """
        if not self.indexed:
            return "none", "none"
        count = read.count("num_hidden_layers")
        if not self.index_sharing or layer >= count:
            return "full", "full"
        listed = read.get("indexer_types", "index_topk_pattern", default=None)
        freq = max(read.count("index_topk_freq", default=1, least=0), 1)
        offset = read.count("index_skip_topk_offset", default=2, least=0)
        if listed is None:
            listed = ["shared" if max(y - offset + 1, 0) % freq else "full" for y in range(count)]
        known = isinstance(listed, list | tuple | str) and all(
            isinstance(kind, str) and kind in KINDS for kind in listed
        )
        if not known or len(listed) < count or KINDS[listed[0]] == "shared":
            raise ConfigError(
                f"config: indexer_types must name full or shared for each of the {count} layers, the first one full; "
                f"got {short(listed)}"
            )
        kinds = [KINDS[kind] for kind in listed[:count]]
        return kinds[layer], ([*kinds, "full"])[layer + 1]


def _sharpened(read: Reader) -> float:
    """Returns the factor of the scores in an extended context (DeepSeek-V3's use of YaRN)."""
    scaling = scaling_of(read, known=(TEMPERATURE,))
    all_dim = scaling.get("mscale_all_dim")
    if scaled(read, scaling) is None or not all_dim:
        return 1.0
    return yarn_scale(scaling, all_dim) ** 2


def _temperature(read: Reader, rope: RopeSpec) -> Temperature | None:
    """Growth of the queries with their position (Mistral 4), None where the rotary settings do not ask for it."""
    scaling = scaling_of(read, known=(TEMPERATURE,))
    if not scaling.get(TEMPERATURE):
        return None
    step = scaling.get("original_max_position_embeddings") or read.count("original_max_position_embeddings")
    longest = max(read.count("max_position_embeddings"), reach(rope))
    return Temperature(checked_real(TEMPERATURE, scaling[TEMPERATURE], most=1e6), step, longest, first=0)
