"""The configs of heads that draft blocks, whoever wrote them: DFlash, DFlash2 and DSpark."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jaxspec.checkpoint.heads.deepseek_stages import is_staged, staged_spec
from jaxspec.checkpoint.heads.layers import layers_of
from jaxspec.checkpoint.heads.tensors import MASK_EMBEDDING, HeadFiles
from jaxspec.errors import ConfigError
from jaxspec.models.arch import ArchSpec
from jaxspec.models.block_head import BlockSpec
from jaxspec.nn.attention import AttentionSpec
from jaxspec.protocol import CaptureSpec

Config = Mapping[str, Any]

METHODS = ("dflash", "dflash2", "dspark")  # of speculators
TITLES = ("DFlash", "DSpark", "MuseGlimmerAssistant")
NESTED = "dflash_config"
MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
# Where tap ids stand, and what makes layer boundaries of them.
TAP_KEYS = (
    ("eagle_aux_hidden_state_layer_ids", 0), ("aux_hidden_state_layer_ids", 0), ("dspark_target_layer_ids", 1),
    ("target_layer_ids", 1),
)  # fmt: skip
WINDOWS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
BLOCK_SIZE, BLOCK_SIZE_OF_SPECULATORS = 16, 8
SLIDING = "sliding_attention"
# Sizes by kind of layers that transformers leaves out of a file because they are the config's own.
DEFAULTS = {
    "qwen3": {
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "num_hidden_layers": 32,
        "hidden_size": 4096, "intermediate_size": 22016, "vocab_size": 151936, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
    },
}  # fmt: skip


def is_block(config: Config, titles: str) -> bool:
    """Whether a config is that of a head that drafts blocks."""
    stated = NESTED in config or config.get("speculators_model_type") in METHODS
    return stated or any(word in titles for word in TITLES)


@dataclass(frozen=True)
class BlockConfig:
    """A config, and what is asked of it more than once.

    Attributes:
      config: of the head.
      files: its tensors.
    """

    config: Config
    files: HeadFiles

    @property
    def method(self) -> str | None:
        """As speculators names it, None in other files."""
        return self.config.get("speculators_model_type")

    @property
    def titles(self) -> str:
        """Architectures and projector, in words."""
        return " ".join(map(str, (*(self.config.get("architectures") or ()), self.get("projector_type", ""))))

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a value of ``dflash_config``, or else of the top."""
        nested = self.config.get(NESTED) or {}
        value = nested.get(key) if nested.get(key) is not None else self.config.get(key)
        return default if value is None else value

    def size(self, key: str) -> int:
        """Returns a whole number above 0."""
        value = self.get(key)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"head: config.json must state {key} as a whole number from 1, got {value!r}")
        return value

    @cached_property
    def layers(self) -> Config:
        """The config of its layers."""
        if self.method is None:
            return self.config
        layers = self.config.get("transformer_layer_config")
        if not isinstance(layers, Mapping):
            raise ConfigError("head: config.json of speculators has no transformer_layer_config")
        return {**DEFAULTS.get(layers.get("model_type", "qwen3"), {}), **layers}

    @cached_property
    def is_dspark(self) -> bool:
        """Whether it is of DeepSeek's kind, whose anchor predicts unless the file says otherwise."""
        named = self.method == "dspark" or "dspark" in self.titles.lower()
        return named or "markov_head.markov_w1.weight" in self.files

    @property
    def from_anchor(self) -> bool:
        """Whether the anchor's row predicts the first draft."""
        return bool(self.get("sample_from_anchor", self.get("shift_label", self.is_dspark)))

    @property
    def mask_token(self) -> int:
        """The token of what is not drafted yet."""
        token = next((token for key in MASK_KEYS if (token := self.get(key)) is not None), None)
        if not isinstance(token, int):
            raise ConfigError(f"head: it drafts blocks of masks, but config.json names none; write {MASK_KEYS[0]}")
        return token

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """Positions that rows see in each layer, None for all; ``layer_types`` alone says where."""
        count, kinds = self._count, self.layers.get("layer_types")
        sliding = [kind == SLIDING for kind in kinds] if kinds else [bool(self.get("use_swa"))] * count
        if len(sliding) != count:
            raise ConfigError(f"head: {len(sliding)} layer_types, but {count} layers")
        window = self.get("swa_window_size", self.layers.get("sliding_window"))
        if any(sliding) and not (isinstance(window, int) and window > 0):
            raise ConfigError(f"head: it has layers of {SLIDING}, but config.json states no sliding_window")
        return tuple(window if slides else None for slides in sliding)

    @property
    def causal(self) -> tuple[bool, ...]:
        """Per layer, whether a row sees only those before it in its block."""
        slides = tuple(window is not None for window in self.windows)
        if self.method is not None:
            both = self.config.get("sliding_window_non_causal")
            both = self.method == "dflash2" if both is None else both
            return tuple(one and not both for one in slides)
        stated = self.config.get("is_causal")
        stated = (self.config.get(NESTED) or {}).get("causal") if stated is None else stated
        return slides if stated is None else (bool(stated),) * len(slides)

    @property
    def _count(self) -> int:
        count = self.layers.get("num_hidden_layers")
        if not isinstance(count, int) or count < 1:
            raise ConfigError(f"head: config.json must state num_hidden_layers, got {count!r}")
        return count

    def stated_taps(self) -> dict[str, tuple[int, ...]]:
        """Returns the layer boundaries that each place of the config means."""
        taps: dict[str, tuple[int, ...]] = {}
        for key, more in TAP_KEYS:
            for where, part in ((NESTED, self.config.get(NESTED) or {}), ("", self.config)):
                ids = part.get(key)
                if ids and not (isinstance(ids, list | tuple) and all(isinstance(x, int) for x in ids)):
                    raise ConfigError(f"head: {key} must be a list of whole numbers, got {ids!r}")
                if ids:
                    taps[f"{where}.{key}".lstrip(".")] = tuple(x + more for x in ids)
        return taps

    def taps(self, target: ArchSpec) -> tuple[int, ...]:
        """Returns the layer boundaries that it reads.

        Raises:
          ConfigError: two places of the config say different ones.
        """
        stated = self.stated_taps()
        if len(set(stated.values())) > 1:
            words = "; ".join(f"{key} means {list(taps)}" for key, taps in stated.items())
            raise ConfigError(
                f"head: config.json contradicts itself about the layer boundaries that it reads: {words}; write those "
                "that it was trained with, in target_layer_ids one less"
            )
        if stated:
            return next(iter(stated.values()))
        return default_taps(self._count, self.config.get("num_target_layers") or len(target.layers))

    def arch(self) -> ArchSpec:
        """Returns its layers, windows included."""
        names, layers = tuple(self.files), {k: v for k, v in self.layers.items() if k not in WINDOWS}
        arch = layers_of(layers, names)
        if not all(isinstance(y.attention, AttentionSpec) for y in arch.layers):
            raise ConfigError("head: layers that draft blocks have grouped-query attention")
        each = zip(arch.layers, self.windows, strict=True)
        changed: Any = (replace(y, attention=replace(y.attention, window=w)) for y, w in each)  # pyright: ignore
        return replace(arch, layers=tuple(changed))


def default_taps(layers: int, depth: int) -> tuple[int, ...]:
    """Returns the boundaries that z-lab's heads of so many layers read where nothing states them."""
    if layers == 1:
        return (depth // 2 + 1,)
    return tuple(round(1 + i * (depth - 4) / (layers - 1)) + 1 for i in range(layers))


def block_spec(config: Config, files: HeadFiles, target: ArchSpec) -> BlockSpec:
    """Builds the spec of a head that drafts blocks.

    Raises:
      ConfigError: keys are missing or contradict each other or the tensors.
    """
    if is_staged(files):
        return staged_spec(config, {name: tensor.shape for name, tensor in files.tensors.items()})
    c = BlockConfig(config, files)
    if "domino" in c.titles.lower():
        raise ConfigError("head: Domino's correction of drafts is not supported; DFlash, DFlash2 and DSpark are")
    arch = c.arch()
    convolves, selects = "layers.0.attention_conv.base_kernel" in files, any("candidate_selector" in n for n in files)
    vocab = config.get("draft_vocab_size") or arch.vocab_size
    rank, kind, confidence = _follow(c, arch.model_dim)
    return BlockSpec(
        arch=arch,
        target_dim=config.get("target_hidden_size") or arch.model_dim,
        reads=CaptureSpec(taps=c.taps(target)),
        block_size=c.get("block_size", BLOCK_SIZE if c.method is None else BLOCK_SIZE_OF_SPECULATORS),
        mask_token=c.mask_token,
        from_anchor=c.from_anchor,
        causal=c.causal,
        window_from_anchor=c.method is not None and any(c.windows),
        draft_vocab=vocab if "lm_head.weight" in files or vocab != arch.vocab_size else 0,
        own_embedding="embed_tokens.weight" in files,
        own_mask=_own_mask(files),
        embedding_scale=float(c.get("input_embedding_scale", 1.0)),
        output_scale=float(c.get("output_multiplier", config.get("logit_scale") or 1.0)),
        softcap=float(c.get("final_logit_softcapping", 0.0)),
        conv_taps=c.size("conv_kernel_size") if convolves else 0,
        conv_group=c.size("conv_group_size") if convolves else 0,
        selector_rank=c.size("selector_rank") if selects else 0,
        selector_top_k=c.size("selector_top_k") if selects else 0,
        markov_rank=rank,
        markov_kind=kind,
        confidence=confidence,
        confidence_bias=confidence == "none" or "confidence_head.proj.bias" in files,
    )


def _follow(c: BlockConfig, dim: int) -> tuple[int, Any, Any]:
    """Returns rank and kind of the Markov head, and what the confidence reads, as the tensors say."""
    name, sure = "markov_head.markov_w1.weight", "confidence_head.proj.weight"
    rank = c.files.tensors[name].shape[-1] if name in c.files else 0
    there = {"rnn": "markov_head.joint_proj.weight", "gated": "markov_head.gate_proj.weight"}
    kind = next((kind for kind, name in there.items() if name in c.files), "vanilla")
    stated = c.get("markov_head_type", kind)
    if rank and stated != kind:
        raise ConfigError(f"head: config.json says markov_head_type {stated!r}, but the tensors are those of {kind!r}")
    if sure not in c.files:
        return rank, kind, "none"
    return rank, kind, "hidden" if c.files.tensors[sure].shape[-1] == dim else "markov"


def _own_mask(files: HeadFiles) -> bool:
    if MASK_EMBEDDING not in files:
        return False
    shape = list(files.tensors[MASK_EMBEDDING].shape)
    if len(shape) != 1:
        raise ConfigError(
            f"head: {MASK_EMBEDDING} has the shape {shape}; one vector for all rows of a block is supported, one for "
            "each is not"
        )
    return True


def block_faults(spec: BlockSpec, target: ArchSpec) -> list[str]:
    """Lists what does not fit inside a head, or between it and its target."""
    count, taps, wrong = len(target.layers), spec.reads.taps, []
    if not 2 - spec.from_anchor <= spec.block_size:
        wrong.append(f"blocks of {spec.block_size} leave nothing to draft")
    if any(not 0 <= b <= count for b in taps):
        wrong.append(f"it reads the layer boundaries {list(taps)}, the target's go from 0 to {count}")
    if spec.conv_taps > spec.block_size or (spec.conv_taps and spec.arch.model_dim % spec.conv_group):
        wrong.append(f"its convolution of {spec.conv_taps} rows and groups of {spec.conv_group} does not fit its width")
    if spec.selector_rank and (spec.draft_vocab not in (0, spec.arch.vocab_size) or spec.from_anchor):
        wrong.append("its selector of candidates needs the whole vocabulary and an anchor that predicts nothing")
    if spec.selector_top_k > spec.arch.vocab_size:
        wrong.append(f"its selector has {spec.selector_top_k} candidates of {spec.arch.vocab_size} tokens")
    if spec.confidence == "markov" and not spec.markov_rank:
        wrong.append("its confidence reads the token before through a Markov head, which it lacks")
    return wrong
