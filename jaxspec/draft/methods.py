"""The methods of speculation: a ``speculative_config`` in vLLM's words, checked, and the drafter that it asks for."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxspec.draft.corpus import LookupCorpus
from jaxspec.draft.draft_pruning import NO_PRUNING, PruningConfig, pruning_of
from jaxspec.draft.draft_vocab import DraftVocab
from jaxspec.draft.early_exit import first_layers
from jaxspec.draft.head_drafter import head_drafter
from jaxspec.draft.hybrid import Hybrid
from jaxspec.draft.mtp_drafter import MtpHeads
from jaxspec.draft.ngram import Ngram
from jaxspec.draft.small_lm import SmallLm
from jaxspec.draft.speculation_schedule import SpeculationSchedule, schedule_of
from jaxspec.draft.speculative_keys import DYNAMIC_KEYS, SpeculativeKeys, read_keys
from jaxspec.errors import ConfigError
from jaxspec.models.arch import ArchSpec, LayerSpec
from jaxspec.models.block_head import BlockHead
from jaxspec.models.medusa import Medusa
from jaxspec.models.mtp import Mtp
from jaxspec.models.trained_head import Head
from jaxspec.models.transformer import Transformer
from jaxspec.models.vocab import read_ids
from jaxspec.protocol import Drafter, NoDrafts, VerifyRule
from jaxspec.shapes import Params
from jaxspec.topology import PLAIN, AnyTopology, DynamicTree, Topology

RULE_NAMES = {
    "match": "match", "standard": "reject", "reject": "reject", "block": "block",
    "probabilistic": "reject",
}  # fmt: skip


@dataclass(frozen=True)
class SpeculativeConfig:
    """A checked ``speculative_config``.

    Attributes:
      method: one of ``METHODS``, or ``none``.
      schedule: chains and trees to draft, and when.
      rule: verification rule, by name, or an object of the laboratory's.
      model: directory or hub id of the draft model or head; for ``mtp`` none is the target's own layers.
      revision: branch, tag or commit of a hub id.
      quantization: how the weights of what drafts lie in memory, None as they are published.
      expected_length: tokens per pass that a head's model card promises, None where nothing was said.
      lookup_max, lookup_min: suffix lengths of n-gram matches.
      corpus: text files that are looked up, too.
      past_tokens: tokens of earlier requests that ``suffix`` looks up.
      spec_factor: its drafts per matched token, at most.
      exit_layer: layers of the target that draft, for ``early_exit``.
      pruning: which drafts are left out before they are drawn.
      token_map: file of the tokens that are drafted alone, None for all.
    """

    method: str
    schedule: SpeculationSchedule
    rule: str | VerifyRule = "match"
    model: str | None = None
    lookup_max: int = 4
    lookup_min: int = 2
    corpus: tuple[str, ...] = ()
    past_tokens: int = 0
    spec_factor: float = 0.0
    exit_layer: int = 0
    pruning: PruningConfig = NO_PRUNING
    revision: str | None = None
    quantization: str | None = None
    expected_length: float | None = None
    token_map: str | None = None

    @property
    def topology(self) -> AnyTopology:
        """The longest chain, or the tree."""
        return self.schedule.topology


BLOCKS = ("dflash", "dflash2", "dspark")
HEADS = ("eagle", "eagle3", "peagle", "medusa", "shared_expert", *BLOCKS)
TRAINED = (*HEADS, "mtp")  # what jaxspec train writes as a head
LOOKUP_LENGTH, SUFFIX_LENGTH, PAST_TOKENS = 4, 8, 16_384
WITH_MODEL = ("draft_model", "hybrid", *HEADS)
LOOKUP = ("ngram", "suffix", "hybrid")
PREDICTION = "its multi-token prediction"
METHODS = ("ngram", "suffix", "mtp", "early_exit", *WITH_MODEL)
# vLLM's older names.
MTP_NAMES = tuple(
    f"{family}_mtp"
    for family in (
        "deepseek", "glm4_moe", "glm4_moe_lite", "qwen3_next", "qwen3_5", "mimo_v2", "longcat_flash", "exaone_moe",
        "hy_v3", "nemotron_h", "ernie",
    )
)  # fmt: skip
ALIASES = {**dict.fromkeys(MTP_NAMES, "mtp"), "eagle2": "eagle", "p_eagle": "peagle"}


def parse(config: Mapping[str, Any] | None) -> SpeculativeConfig:
    """Checks a ``speculative_config``; None is plain decoding.

    Args:
      config: see ``SpeculativeKeys``.

    Raises:
      ConfigError: keys or values are unknown or contradict each other.
    """
    if config is None:
        return SpeculativeConfig("none", SpeculationSchedule(PLAIN))
    keys = read_keys(config)
    method = keys.method or ("draft_model" if keys.model else None)
    method = ALIASES.get(method, method) if isinstance(method, str) else method
    if method not in METHODS:
        raise ConfigError(f"speculative_config: method {method!r} is not known; known are {list(METHODS)}")
    schedule = schedule_of(keys)
    rule = _rule(keys.rejection_sample_method, schedule)
    if method in LOOKUP and any(isinstance(t, DynamicTree) for t in (schedule.topology, *schedule.trees)):
        raise ConfigError(
            f'speculative_config: method "{method}" grows no tree by confidence; leave {", ".join(DYNAMIC_KEYS)} out '
            "and give branching factors (speculative_token_tree) or num_speculative_tokens"
        )
    _check_model(keys, method)
    if (keys.expected_acceptance_length or 1) > schedule.topology.max_depth + 1:
        raise ConfigError(
            f"speculative_config: expected_acceptance_length counts drafts and the bonus token, at most "
            f"{schedule.topology.max_depth + 1} here; got {keys.expected_acceptance_length:g}"
        )
    lookup = _lookup(keys, method, schedule)
    pruning = pruning_of(keys, method, all_chains=schedule.all_chains, synthetic=isinstance(rule, VerifyRule))
    return SpeculativeConfig(
        method, schedule, rule, keys.model, **lookup, exit_layer=keys.exit_layer or 0, pruning=pruning,
        revision=keys.revision, quantization=keys.quantization, expected_length=keys.expected_acceptance_length,
        token_map=keys.speculative_token_map,
    )  # fmt: skip


def _check_model(keys: SpeculativeKeys, method: str) -> None:
    """Checks that there is what the method drafts with, and nothing else."""
    own = method == "mtp" and keys.model is None
    for key in keys.given("model", "revision", "quantization"):
        if own or method not in (*WITH_MODEL, "mtp"):
            raise ConfigError(f'speculative_config: method "{method}" takes no "{key}"; leave one of them out')
    if keys.speculative_token_map is not None and method in ("ngram", "suffix"):
        raise ConfigError(
            f'speculative_config: method "{method}" computes no vocabulary product; leave speculative_token_map out'
        )
    if method in WITH_MODEL and not keys.model:
        kind = "draft model" if method == "draft_model" else "head" if method in HEADS else "draft model or head"
        raise ConfigError(
            f'speculative_config: method "{method}" needs "model", the directory of the {kind} or a hub id'
        )
    if (length := keys.expected_acceptance_length) is not None and (own or method not in TRAINED):
        raise ConfigError(
            f"speculative_config: expected_acceptance_length is for draft heads ({', '.join(HEADS)}) and a trained "
            f'layer (mtp with "model"), got {length:g} for method "{method}"; leave it out'
        )
    if (method == "early_exit") != (keys.exit_layer is not None):
        raise ConfigError('speculative_config: method "early_exit" and "exit_layer" go together; give both or neither')


def _rule(rule: Any, schedule: SpeculationSchedule) -> str | VerifyRule:
    """Returns the verification rule."""
    if (rule == "block" or isinstance(rule, VerifyRule)) and not schedule.all_chains:
        kind = "block verification" if rule == "block" else "synthetic acceptance"
        raise ConfigError(f"speculative_config: {kind} is for chains; ask for num_speculative_tokens alone")
    if isinstance(rule, VerifyRule):
        return rule
    if rule == "synthetic":
        raise ConfigError(
            "speculative_config: synthetic acceptance gives text that is not the model's; only jaxspec bench has it "
            "(--synthetic)"
        )
    if rule not in RULE_NAMES:
        raise ConfigError(
            f"speculative_config: rejection_sample_method {rule!r} is not known; known are {sorted(RULE_NAMES)}"
        )
    return RULE_NAMES[rule]


def _lookup(keys: SpeculativeKeys, method: str, schedule: SpeculationSchedule) -> dict[str, Any]:
    """Returns what a lookup looks for, and where."""
    own = keys.given("suffix_decoding_cache_tokens", "suffix_decoding_max_spec_factor")
    if own and method != "suffix":
        raise ConfigError(f'speculative_config: {own[0]} is of method "suffix", got method "{method}"; leave it out')
    corpus = keys.prompt_lookup_corpus or ()
    corpus = (corpus,) if isinstance(corpus, str) else corpus
    if corpus and method not in LOOKUP:
        raise ConfigError(
            f'speculative_config: method "{method}" looks nothing up; leave prompt_lookup_corpus out, or take one of '
            f"{list(LOOKUP)}"
        )
    if (corpus or method == "suffix") and not schedule.all_chains:
        raise ConfigError(
            'speculative_config: method "suffix" and prompt_lookup_corpus draft chains; give num_speculative_tokens '
            "instead of a tree"
        )
    longest, shortest = _suffix_lengths(keys, usual=SUFFIX_LENGTH if method == "suffix" else LOOKUP_LENGTH)
    suffix = method == "suffix"
    return {
        "lookup_max": longest, "lookup_min": shortest, "corpus": corpus,
        "past_tokens": (keys.suffix_decoding_cache_tokens or PAST_TOKENS) if suffix else 0,
        "spec_factor": (keys.suffix_decoding_max_spec_factor or 1.0) if suffix else 0.0,
    }  # fmt: skip


def _suffix_lengths(keys: SpeculativeKeys, usual: int) -> tuple[int, int]:
    """Returns the longest and the shortest suffix that prompt lookup looks for."""
    longest = keys.prompt_lookup_max or max(usual, keys.prompt_lookup_min or 0)
    shortest = keys.prompt_lookup_min or min(2, longest)
    if shortest > longest:
        raise ConfigError(
            f"speculative_config: prompt_lookup_min must be at most prompt_lookup_max, got {shortest}, {longest}"
        )
    return longest, shortest


def build(
    config: SpeculativeConfig,
    target: tuple[Transformer, Params],
    block: int,
    model: tuple[Transformer | Mtp, Params] | Head | None = None,
    corpus: LookupCorpus | None = None,
) -> Drafter:
    """Builds the drafter of a checked config for a target.

    Args:
      config: says which.
      target: its network and parameters.
      block: positions that attention reads at a time.
      model: network and parameters of the draft model or of the target's multi-token prediction, or a head.
      corpus: what lookups look up besides.

    Raises:
      ConfigError: trees are asked for where attention cannot verify or draft them, the head is of another kind, or the
        token map cannot be read or used.
    """
    net, params = target
    if config.method == "none":
        return NoDrafts()
    _check_tree(config, net.arch, net.arch.layers, "the target")
    if config.method in ("ngram", "suffix"):
        return _lookup_drafter(config, corpus)
    if config.method == "early_exit":
        model = first_layers(net, params, config.exit_layer)
    if model is None:
        raise AssertionError(f"method {config.method} drafts with a model")
    if isinstance(model, Head):
        drafter = _head_drafter(config, target, model, block)
    else:
        drafter = _model_drafter(config, target, model, block)
    if config.token_map is not None:
        drafter = _of_some_tokens(config, drafter, config.token_map)
    if config.method != "hybrid":
        return drafter
    return Hybrid(_lookup_drafter(config, corpus), drafter)


def _lookup_drafter(config: SpeculativeConfig, corpus: LookupCorpus | None) -> Ngram:
    assert isinstance(config.topology, Topology), "refused by parse"
    lengths = config.lookup_max, config.lookup_min
    return Ngram(config.topology, *lengths, config.past_tokens, config.spec_factor, corpus)


def _head_drafter(config: SpeculativeConfig, target: tuple[Transformer, Params], head: Head, block: int) -> Drafter:
    topology = config.topology
    if config.method not in (head.kind, "hybrid"):
        raise ConfigError(
            f'speculative_config: {config.model} holds a head of kind "{head.kind}", not "{config.method}"; '
            f'give method "{head.kind}"'
        )
    deepest = max(t.max_depth for t in (topology, *config.schedule.trees))
    if isinstance(head.net, Medusa):
        if deepest > head.net.spec.heads:
            raise ConfigError(
                f"speculative_config: {config.model} has {head.net.spec.heads} Medusa heads and drafts as many tokens; "
                f"got a depth of {deepest}"
            )
    elif isinstance(head.net, BlockHead):
        if deepest > head.net.spec.drafts:
            raise ConfigError(
                f"speculative_config: {config.model} drafts blocks of {head.net.spec.drafts} tokens; got a depth of "
                f"{deepest}"
            )
    elif isinstance(head.net, Mtp):
        _check_tree(config, head.net.arch, head.net.arch.mtp, PREDICTION)
    else:
        _check_tree(config, head.net.spec.arch, head.net.spec.arch.layers, "the head")
    return head_drafter(head, target, topology, block)


def _model_drafter(
    config: SpeculativeConfig, target: tuple[Transformer, Params], model: tuple[Transformer | Mtp, Params], block: int
) -> Drafter:
    (net, params), (draft, weights) = target, model
    if isinstance(draft, Mtp):
        _check_tree(config, draft.arch, draft.arch.mtp, PREDICTION)
        return MtpHeads(weights, params, draft, net, config.topology, block)
    _check_tree(config, draft.arch, draft.arch.layers, "the draft model")
    other = draft.arch.vocab_size != net.arch.vocab_size
    return SmallLm(weights, draft, config.topology, block, net.arch.vocab_size if other else 0)


def _of_some_tokens(config: SpeculativeConfig, drafter: Any, file: str) -> Drafter:
    """Lets a drafter that uses a product over a whole vocabulary draft some of its tokens alone."""
    if drafter.own_product:
        raise ConfigError(
            f"speculative_config: speculative_token_map is for drafters that use the target's vocabulary product, but "
            f"{config.model or PREDICTION} has its own; leave it out"
        )
    size = drafter.vocab_size
    size = min(size, drafter.net.arch.vocab_size) if isinstance(drafter, SmallLm) else size
    try:
        ids_W = read_ids(file, size)
    except ConfigError as error:
        raise ConfigError(f"speculative_token_map: {error}") from error
    return drafter.with_vocab(DraftVocab.of(ids_W, drafter.vocab_size))


def _check_tree(config: SpeculativeConfig, arch: ArchSpec, layers: tuple[LayerSpec, ...], whose: str) -> None:
    """Refuses trees where a layer cannot run them."""
    why = replace(arch, layers=layers).chain_only
    if why and not config.schedule.all_chains:
        raise ConfigError(
            f"speculative_config: a tree is not possible for {whose} ({arch.family}): {why}; use "
            "num_speculative_tokens alone"
        )
