"""Speculation settings, in vLLM's words, to a drafter."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxspec.draft.lengths import LENGTH_KEYS, Lengths, parse_lengths
from jaxspec.draft.mtp import MtpHeads
from jaxspec.draft.ngram import Ngram
from jaxspec.draft.null import NoDrafts
from jaxspec.draft.small_lm import SmallLm
from jaxspec.draft.synthetic import Synthetic
from jaxspec.errors import ConfigError
from jaxspec.models.arch import ArchSpec, LayerSpec
from jaxspec.models.mtp import Mtp
from jaxspec.models.transformer import Transformer
from jaxspec.protocol import Drafter
from jaxspec.shapes import Params
from jaxspec.topology import Topology, chain

RULES = {
    "match": "match", "standard": "reject", "reject": "reject", "block": "block",
    "probabilistic": "reject",
}  # fmt: skip


@dataclass(frozen=True)
class SpeculativeConfig:
    """A checked ``speculative_config``.

    Attributes:
      method: ``ngram``, ``draft_model``, ``mtp`` or ``none``.
      lengths: what is drafted, and when.
      rule: verification rule.
      model: directory of the draft model.
      lookup_max, lookup_min: suffix lengths of n-gram matches.
      survival: rates of synthetic acceptance, empty for none.
    """

    method: str
    lengths: Lengths
    rule: str = "match"
    model: str | None = None
    lookup_max: int = 4
    lookup_min: int = 2
    survival: tuple[float, ...] = ()

    @property
    def topology(self) -> Topology:
        """The longest chain, or the tree."""
        return self.lengths.topology


KEYS = {
    "method", "model", "rejection_sample_method", "prompt_lookup_max", "prompt_lookup_min", *LENGTH_KEYS,
}  # fmt: skip
METHODS = ("ngram", "draft_model", "mtp")
ALIASES = {"deepseek_mtp": "mtp", "glm4_moe_mtp": "mtp"}


def parse(config: Mapping[str, Any] | None) -> SpeculativeConfig:
    """Checks a ``speculative_config``.

    Args:
      config: vLLM's keys. Those of ``parse_lengths`` say what is drafted; ``rejection_sample_method`` is ``match``
        (default: the same text as without speculation), ``standard`` or ``block`` (the same distribution, higher
        acceptance when sampling).

    Raises:
      ConfigError: keys or values are unknown or contradict each other.
    """
    if config is None:
        return SpeculativeConfig("none", Lengths(chain(0)))
    if not isinstance(config, Mapping):
        raise ConfigError(f"speculative_config: a mapping is needed, got {type(config).__name__}")
    unknown = sorted(set(config) - KEYS)
    if unknown:
        raise ConfigError(f"speculative_config: unknown keys {unknown}; known are {sorted(KEYS)}")
    method = config.get("method") or ("draft_model" if config.get("model") else None)
    method = ALIASES.get(method, method) if isinstance(method, str) else method
    if method not in METHODS:
        raise ConfigError(f"speculative_config: method {method!r} is not known; known are {list(METHODS)}")
    rule, decreed = _rule(config)
    lengths = parse_lengths(config)
    topology = lengths.topology
    if rule == "block" and not topology.is_chain:
        raise ConfigError("speculative_config: block verification is for chains; leave speculative_token_tree out")
    longest, shortest = _lookup(config)
    if method != "draft_model" and config.get("model"):
        raise ConfigError(f'speculative_config: method "{method}" takes no "model"; leave one of them out')
    if method == "draft_model" and not config.get("model"):
        raise ConfigError('speculative_config: method "draft_model" needs "model", the directory of the draft model')
    survival = _survival(decreed, topology)
    return SpeculativeConfig(method, lengths, rule, config.get("model"), longest, shortest, survival)


def _rule(config: Mapping[str, Any]) -> tuple[str, Synthetic | None]:
    """The verification rule, and what is accepted instead of what it finds."""
    rule = config.get("rejection_sample_method", "match")
    if isinstance(rule, Synthetic):
        return "match", rule
    if rule == "synthetic":
        raise ConfigError(
            "speculative_config: synthetic acceptance gives text that is not the model's; only jaxspec bench has it "
            "(--synthetic-rates, --synthetic-length)"
        )
    if rule not in RULES:
        raise ConfigError(
            f"speculative_config: rejection_sample_method {rule!r} is not known; known are {sorted(RULES)}"
        )
    return RULES[rule], None


def _survival(decreed: Synthetic | None, topology: Topology) -> tuple[float, ...]:
    """Rates of synthetic acceptance, empty without it."""
    if decreed is None:
        return ()
    if not topology.is_chain:
        raise ConfigError("speculative_config: synthetic acceptance is for chains; leave speculative_token_tree out")
    return decreed.survival(topology.max_depth)


def _lookup(config: Mapping[str, Any]) -> tuple[int, int]:
    """Longest and shortest suffix that an n-gram drafter looks for."""
    given = {name: config[name] for name in ("prompt_lookup_min", "prompt_lookup_max") if name in config}
    if not all(isinstance(n, int) for n in given.values()):
        raise ConfigError(f"speculative_config: suffix lengths are integers from 1 to 16, got {given}")
    longest = given.get("prompt_lookup_max", max(4, given.get("prompt_lookup_min", 0)))
    shortest = given.get("prompt_lookup_min", min(2, longest))
    if not 1 <= shortest <= longest <= 16:
        raise ConfigError(
            f"speculative_config: 1 <= prompt_lookup_min <= prompt_lookup_max <= 16, got {shortest}, {longest}"
        )
    return longest, shortest


def build(
    config: SpeculativeConfig,
    target: tuple[Transformer, Params],
    block: int,
    model: tuple[Transformer | Mtp, Params] | None = None,
) -> Drafter:
    """The drafter of a checked config, ready for a target.

    Args:
      config: what is wanted.
      target: its network and parameters.
      block: positions that attention reads at a time.
      model: network and parameters that draft: of the draft model, or of the target's multi-token prediction.

    Raises:
      ConfigError: trees are wanted where attention cannot verify or draft them, or the draft model's vocabulary does
        not fit the target's.
    """
    net, params = target
    if config.method == "none":
        return NoDrafts()
    _check_tree(config, net.arch, net.arch.layers, "the target")
    if config.method == "ngram":
        return Ngram(config.topology, config.lookup_max, config.lookup_min)
    if model is None:
        raise AssertionError(f"method {config.method} drafts with a model")
    draft, weights = model
    if isinstance(draft, Mtp):
        _check_tree(config, draft.arch, draft.arch.mtp, "its multi-token prediction")
        return MtpHeads(weights, params, draft, net, config.topology, block)
    if draft.arch.vocab_size != net.arch.vocab_size:
        raise ConfigError(
            f"speculative_config: the draft has a vocabulary of {draft.arch.vocab_size}, the target of "
            f"{net.arch.vocab_size}; use a draft model trained with the target's tokenizer"
        )
    _check_tree(config, draft.arch, draft.arch.layers, "the draft model")
    return SmallLm(weights, draft, config.topology, block)


def _check_tree(config: SpeculativeConfig, arch: ArchSpec, layers: tuple[LayerSpec, ...], whose: str) -> None:
    """Refuses trees where a layer cannot run them."""
    why = replace(arch, layers=layers).chain_only
    if why and not config.topology.is_chain:
        raise ConfigError(
            f"speculative_config: speculative_token_tree is not possible for {whose} ({arch.family}): {why}; "
            "use num_speculative_tokens"
        )
