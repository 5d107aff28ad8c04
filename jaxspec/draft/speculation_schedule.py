"""What a ``speculative_config`` drafts: a chain or a tree, by batch size, or whichever pays while running."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from jaxspec.errors import ConfigError
from jaxspec.topology import PLAIN, AnyTopology, DynamicTree, chain, tree

MAX_LENGTH = 16
AUTO_LENGTH = 5
AUTO = "auto"
CHAIN_KEYS = ("num_speculative_tokens", "max_num_speculative_tokens", "num_speculative_tokens_per_batch_size")
DYNAMIC_KEYS = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
TREES = "speculative_token_trees"
SCHEDULE_KEYS = (*CHAIN_KEYS, "disable_by_batch_size", "speculative_token_tree", TREES, *DYNAMIC_KEYS, "calibration")


@dataclass(frozen=True)
class SpeculationSchedule:
    """What is drafted, and when.

    Attributes:
      topology: the longest chain, or the tree.
      adaptive: whether every dispatch chooses among plain decoding, chains up to the topology's length, and ``trees``.
      trees: of an adaptive choice.
      ranges: lowest and highest number of requests and what is drafted for them, None for always the same.
      otherwise: what is drafted outside of all ranges.
      calibration: file of measured step times that an adaptive choice starts from.
    """

    topology: AnyTopology
    adaptive: bool = False
    trees: tuple[AnyTopology, ...] = ()
    ranges: tuple[tuple[int, int, AnyTopology], ...] | None = None
    otherwise: AnyTopology = PLAIN
    calibration: str | None = None

    @property
    def all_chains(self) -> bool:
        """Whether no tree is ever drafted."""
        return self.topology.is_chain and not self.trees


def parse_schedule(config: Mapping[str, Any]) -> SpeculationSchedule:
    """Reads ``SCHEDULE_KEYS``.

    Args:
      config: ``num_speculative_tokens`` is a chain's length, or ``auto``: then every dispatch takes the length that
        pays most, up to ``max_num_speculative_tokens`` (5), or none at all, or one of ``speculative_token_trees``, each
        of them a list or a mapping of what follows. ``speculative_token_tree`` lists branching factors per level
        instead of a length; SGLang's ``speculative_num_steps``, ``speculative_eagle_topk`` and
        ``speculative_num_draft_tokens``, which counts the anchor, make a dynamic tree.
        ``num_speculative_tokens_per_batch_size`` is vLLM's ``[[lowest, highest, length], ...]``, for running and
        waiting requests together; ``disable_by_batch_size`` decodes plainly above that many. ``calibration`` names what
        ``jaxspec calibrate`` wrote for this target and drafter; with it ``auto`` is the default.

    Raises:
      ConfigError: values are of the wrong kind or contradict each other.
    """
    levels, length, trees = (config.get(k) for k in ("speculative_token_tree", "num_speculative_tokens", TREES))
    calibration = config.get("calibration")
    if calibration is not None:
        length = AUTO if length is None else length
        given = [key for key in ("speculative_token_tree", CHAIN_KEYS[2], *DYNAMIC_KEYS) if config.get(key) is not None]
        if length != AUTO or given or not isinstance(calibration, str):
            raise ConfigError(
                f'speculative_config: calibration names a file, for num_speculative_tokens "{AUTO}" alone; got '
                f"{calibration!r} and {given or length!r}"
            )
    if trees is not None and length != AUTO:
        raise ConfigError(
            f'speculative_config: {TREES} are for num_speculative_tokens "{AUTO}", which chooses among them; got '
            f"{length!r}; give speculative_token_tree to draft one tree always"
        )
    if any(config.get(key) is not None for key in DYNAMIC_KEYS):
        _alone(config, ", ".join(DYNAMIC_KEYS), (*CHAIN_KEYS, "speculative_token_tree"))
        return _disabled(config, _dynamic(config))
    if levels is not None:
        _alone(config, "speculative_token_tree", CHAIN_KEYS)
        return _disabled(config, _tree(levels, "speculative_token_tree"))
    if config.get("num_speculative_tokens_per_batch_size") is not None:
        return _by_batch_size(config)
    most = config.get("max_num_speculative_tokens")
    if length == AUTO:
        if config.get("disable_by_batch_size") is not None:
            raise ConfigError(f'speculative_config: num_speculative_tokens "{AUTO}" takes no disable_by_batch_size')
        most = AUTO_LENGTH if most is None else _length(most, "max_num_speculative_tokens")
        return SpeculationSchedule(chain(most), True, () if trees is None else _trees(trees), calibration=calibration)
    if most is not None:
        raise ConfigError(f'speculative_config: max_num_speculative_tokens needs num_speculative_tokens "{AUTO}"')
    return _disabled(config, chain(_length(length, "num_speculative_tokens")))


def _alone(config: Mapping[str, Any], tree_key: str, others: tuple[str, ...]) -> None:
    """Refuses a tree next to other ways to say what is drafted."""
    given = [key for key in others if config.get(key) is not None]
    if given:
        raise ConfigError(f"speculative_config: give {tree_key} or {', '.join(given)}, not both")


def _dynamic(config: Mapping[str, Any]) -> AnyTopology:
    steps, top_k, nodes = (config.get(key) for key in DYNAMIC_KEYS)
    if not (_whole(steps) and _whole(top_k) and _whole(nodes)):
        raise ConfigError(
            f"speculative_config: {', '.join(DYNAMIC_KEYS)} are given together, integers from 1; got {steps!r}, "
            f"{top_k!r}, {nodes!r}"
        )
    steps = _length(steps, DYNAMIC_KEYS[0])
    if top_k > 1:
        return DynamicTree(top_k, steps, nodes)
    if nodes != steps + 1:
        raise ConfigError(
            f"speculative_config: {DYNAMIC_KEYS[1]} 1 is a chain, whose {DYNAMIC_KEYS[2]} is {DYNAMIC_KEYS[0]} + 1; "
            f"got {nodes} and {steps}"
        )
    return chain(steps)


def _whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _tree(levels: Any, key: str) -> AnyTopology:
    if not isinstance(levels, list | tuple) or not all(type(n) is int for n in levels):
        raise ConfigError(f"speculative_config: {key} lists branching factors, got {levels!r}")
    return tree(tuple(levels))


def _trees(entries: Any) -> tuple[AnyTopology, ...]:
    """Trees next to the chains of an adaptive choice."""
    if not isinstance(entries, list | tuple) or not entries:
        raise ConfigError(
            f"speculative_config: {TREES} lists trees, each as branching factors per level, for example [[2, 2, 1]], "
            f"or as a mapping with {', '.join(DYNAMIC_KEYS)}; got {entries!r}"
        )
    found: list[AnyTopology] = []
    for entry in entries:
        if isinstance(entry, Mapping) and set(entry) != set(DYNAMIC_KEYS):
            raise ConfigError(
                f"speculative_config: a mapping in {TREES} has {', '.join(DYNAMIC_KEYS)}; got {sorted(map(str, entry))}"
            )
        topology = _dynamic(entry) if isinstance(entry, Mapping) else _tree(entry, f"each of {TREES}")
        if topology.is_chain or topology in found:
            why = "chains are chosen among without being listed" if topology.is_chain else "it is listed twice"
            raise ConfigError(f"speculative_config: leave {entry!r} out of {TREES}: {why}")
        found.append(topology)
    return tuple(found)


def _disabled(config: Mapping[str, Any], topology: AnyTopology) -> SpeculationSchedule:
    size = config.get("disable_by_batch_size")
    if size is None:
        return SpeculationSchedule(topology)
    if not _whole(size):
        raise ConfigError(f"speculative_config: disable_by_batch_size must be an integer from 1, got {size!r}")
    return SpeculationSchedule(topology, ranges=((1, size, topology),))


def _by_batch_size(config: Mapping[str, Any]) -> SpeculationSchedule:
    key, table = "num_speculative_tokens_per_batch_size", config["num_speculative_tokens_per_batch_size"]
    if config.get("disable_by_batch_size") is not None or config.get("max_num_speculative_tokens") is not None:
        raise ConfigError(f"speculative_config: {key} takes neither disable_by_batch_size nor a maximum")
    rows = table if isinstance(table, list | tuple) else [table]
    for row in rows:
        whole = isinstance(row, list | tuple) and len(row) == 3 and all(type(n) is int for n in row)
        if not whole or not (1 <= row[0] <= row[1] and 0 <= row[2] <= MAX_LENGTH):
            raise ConfigError(
                f"speculative_config: {key} lists [lowest, highest, length] with 1 <= lowest <= highest and a length "
                f"from 0 to {MAX_LENGTH}, got {row!r}"
            )
    ranges = tuple(sorted((low, high, length) for low, high, length in rows))
    overlap = [pair for pair in itertools.pairwise(ranges) if pair[1][0] <= pair[0][1]]
    if overlap:
        raise ConfigError(f"speculative_config: {key} has ranges that overlap: {overlap[0]}")
    given = config.get("num_speculative_tokens")
    otherwise = 0 if given is None else _length(given, "num_speculative_tokens")
    longest = max([otherwise, *(length for _, _, length in ranges)])
    if not longest:
        raise ConfigError(f"speculative_config: {key} never drafts; leave speculative_config out for plain decoding")
    chains = tuple((low, high, chain(length)) for low, high, length in ranges)
    return SpeculationSchedule(chain(longest), ranges=chains, otherwise=chain(otherwise))


def _length(value: Any, key: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_LENGTH:
        raise ConfigError(
            f"speculative_config: {key} must be an integer from 1 to {MAX_LENGTH}, got {value!r}; "
            "leave speculative_config out for plain decoding"
        )
    return value
