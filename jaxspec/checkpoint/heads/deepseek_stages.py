"""DSpark as DeepSeek-V4 publishes it: stages of the target's own kind of layers, in the target's own files."""

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from jaxspec.checkpoint.heads.layer_names import layer_rules
from jaxspec.checkpoint.names.table import NameRule
from jaxspec.checkpoint.names.tables.deepseek_v4 import TABLES
from jaxspec.errors import ConfigError
from jaxspec.models.arch import ArchSpec
from jaxspec.models.block_head import BlockSpec
from jaxspec.models.catalog import known_families
from jaxspec.models.family import arch_from_config
from jaxspec.protocol import CaptureSpec

FAMILY = "deepseek_v4"
STAGES, JOIN = "mtp.", "mtp.0.main_proj.weight"
MARKOV, CONFIDENCE = "markov_head.markov_w1.weight", "confidence_head.proj.weight"
# Sizes of a stage's experts where they are not the target's.
SIZES = {"dspark_n_routed_experts": "n_routed_experts", "dspark_num_experts_per_tok": "num_experts_per_tok"}
LAST = (
    NameRule("norm_D", ("norm.weight",)),
    *(rule for rule in TABLES[FAMILY].top if rule.leaf.startswith("hyper_head/")),
    NameRule("markov/markov_in_VR", (MARKOV,)),
    NameRule("markov/markov_out_RW", ("markov_head.markov_w2.weight",), "transpose"),
    NameRule("acceptance/confidence_X1", (CONFIDENCE,), "transpose"),
)


def is_staged(names: Container[str]) -> bool:
    """Whether tensors of these names have such stages among them."""
    return JOIN in names


def stages_in(names: Iterable[str]) -> int:
    """Counts them; ``num_nextn_predict_layers`` is not their number."""
    return 1 + max(int(name.split(".")[1]) for name in names if name.startswith(STAGES))


def staged_spec(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> BlockSpec:
    """Builds the spec of the stages.

    Their keys of earlier positions are projections of the target's streams, of each the mean; a row sees the window
    before its anchor and its whole block; the prediction of acceptance reads the hidden state before the last norm.

    Args:
      config: of the target, with the keys ``dspark_...``.
      shapes: of the tensors of the stages.

    Raises:
      ConfigError: keys are missing or contradict the tensors.
    """
    if config.get("model_type") != FAMILY:
        raise ConfigError(
            f"head: its files have stages of DSpark ({JOIN}), which are known of {FAMILY} alone; config.json is of "
            f"{config.get('model_type')!r}"
        )
    count, own = stages_in(shapes), {ours: config[key] for key, ours in SIZES.items() if config.get(key)}
    layers = arch_from_config({**config, **own, "num_nextn_predict_layers": 1}, known_families()[FAMILY])
    arch = replace(layers, layers=layers.mtp * count, mtp=(), tied=False)
    last = f"{STAGES}{count - 1}."
    rank = shapes[last + MARKOV][-1] if last + MARKOV in shapes else 0
    sure = shapes.get(last + CONFIDENCE)
    taps = _ids(config, "dspark_target_layer_ids")
    return BlockSpec(
        arch=arch,
        target_dim=arch.model_dim,
        reads=CaptureSpec(taps=tuple(y + 1 for y in taps)),
        block_size=_count(config, "dspark_block_size"),
        mask_token=_count(config, "dspark_noise_token_id", least=0),
        from_anchor=True,
        causal=(False,) * count,
        window_from_anchor=True,
        markov_rank=rank,
        confidence="none" if sure is None else "hidden" if sure[-1] == arch.model_dim else "markov",
        confidence_bias=sure is None,
    )


def _count(config: Mapping[str, Any], key: str, least: int = 1) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < least:
        raise ConfigError(f"head: config.json must state {key} as a whole number from {least}, got {value!r}")
    return value


def _ids(config: Mapping[str, Any], key: str) -> list[int]:
    value = config.get(key)
    if not (isinstance(value, list) and value and all(isinstance(y, int) for y in value)):
        raise ConfigError(f"head: config.json must state {key} as a list of layers, got {value!r}")
    return value


def stage_rules(arch: ArchSpec) -> Iterator[NameRule]:
    """Yields every rule of stages with these layers; rules whose parameter they lack do not apply."""
    table, last = TABLES[FAMILY], f"{STAGES}{len(arch.layers) - 1}."
    yield NameRule("fc_XD", (JOIN,), "transpose")
    yield NameRule("feature_norm_D", (f"{STAGES}0.main_norm.weight",))
    for rule in LAST:
        yield NameRule(rule.leaf, tuple(last + name for name in rule.hub), rule.pack)
    for y, layer in enumerate(arch.layers):
        yield from layer_rules(table.layer, f"layers_{y}/", f"{STAGES}{y}.", layer, table.expert)
