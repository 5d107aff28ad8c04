"""What a ``speculative_config`` drafts: a chain or a tree, by batch size, or whichever pays while running."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.draft.speculative_keys import (
    AUTO,
    CHAIN_KEYS,
    DYNAMIC_KEYS,
    MAX_LENGTH,
    TREES,
    SpeculativeKeys,
    read_keys,
)
from jaxspec.errors import ConfigError
from jaxspec.topology import PLAIN, AnyTopology, DynamicTree, chain, tree

AUTO_LENGTH = 5


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


def schedule_of(keys: SpeculativeKeys) -> SpeculationSchedule:
    """Reads ``SCHEDULE_KEYS``.

    Raises:
      ConfigError: they contradict each other.
    """
    length = keys.num_speculative_tokens
    if keys.calibration is not None:
        length = AUTO if length is None else length
        others = keys.given("speculative_token_tree", CHAIN_KEYS[2], *DYNAMIC_KEYS)
        if length != AUTO or others:
            raise ConfigError(
                f'speculative_config: calibration names a file, for num_speculative_tokens "{AUTO}" alone; got '
                f"{keys.calibration!r} and {others or length!r}"
            )
    if keys.speculative_token_trees is not None and length != AUTO:
        raise ConfigError(
            f'speculative_config: {TREES} are for num_speculative_tokens "{AUTO}", which chooses among them; got '
            f"{length!r}; give speculative_token_tree to draft one tree always"
        )
    if keys.given(*DYNAMIC_KEYS):
        _alone(keys, ", ".join(DYNAMIC_KEYS), (*CHAIN_KEYS, "speculative_token_tree"))
        return _fixed(keys, _dynamic(keys))
    if keys.speculative_token_tree is not None:
        _alone(keys, "speculative_token_tree", CHAIN_KEYS)
        return _fixed(keys, tree(keys.speculative_token_tree))
    if keys.num_speculative_tokens_per_batch_size is not None:
        return _by_batch_size(keys)
    if length == AUTO:
        return _adaptive(keys)
    if keys.max_num_speculative_tokens is not None:
        raise ConfigError(f'speculative_config: max_num_speculative_tokens needs num_speculative_tokens "{AUTO}"')
    if not isinstance(length, int):
        raise ConfigError(
            f'speculative_config: num_speculative_tokens must be "{AUTO}" or an integer from 1 to {MAX_LENGTH}, got '
            "None; leave speculative_config out for plain decoding"
        )
    return _fixed(keys, chain(length))


def _alone(keys: SpeculativeKeys, tree_key: str, others: tuple[str, ...]) -> None:
    """Refuses a tree next to other ways to say what is drafted."""
    if others := tuple(keys.given(*others)):
        raise ConfigError(f"speculative_config: give {tree_key} or {', '.join(others)}, not both")


def _fixed(keys: SpeculativeKeys, topology: AnyTopology) -> SpeculationSchedule:
    size = keys.disable_by_batch_size
    return SpeculationSchedule(topology, ranges=None if size is None else ((1, size, topology),))


def _adaptive(keys: SpeculativeKeys) -> SpeculationSchedule:
    if keys.disable_by_batch_size is not None:
        raise ConfigError(f'speculative_config: num_speculative_tokens "{AUTO}" takes no disable_by_batch_size')
    longest = chain(keys.max_num_speculative_tokens or AUTO_LENGTH)
    trees = () if keys.speculative_token_trees is None else _trees(keys.speculative_token_trees)
    return SpeculationSchedule(longest, True, trees, calibration=keys.calibration)


def _dynamic(keys: SpeculativeKeys) -> AnyTopology:
    steps, top_k, nodes = keys.speculative_num_steps, keys.speculative_eagle_topk, keys.speculative_num_draft_tokens
    if steps is None or top_k is None or nodes is None:
        raise ConfigError(
            f"speculative_config: {', '.join(DYNAMIC_KEYS)} are given together; got {steps}, {top_k}, {nodes}"
        )
    if top_k > 1:
        return DynamicTree(top_k, steps, nodes)
    if nodes != steps + 1:
        raise ConfigError(
            f"speculative_config: {DYNAMIC_KEYS[1]} 1 is a chain, whose {DYNAMIC_KEYS[2]} is {DYNAMIC_KEYS[0]} + 1; "
            f"got {nodes} and {steps}"
        )
    return chain(steps)


def _trees(entries: Any) -> tuple[AnyTopology, ...]:
    """Reads the trees next to the chains of an adaptive choice."""
    if not isinstance(entries, list | tuple) or not entries:
        raise ConfigError(
            f"speculative_config: {TREES} lists trees, each as branching factors per level, for example [[2, 2, 1]], "
            f"or as a mapping with {', '.join(DYNAMIC_KEYS)}; got {entries!r}"
        )
    trees: list[AnyTopology] = []
    for entry in entries:
        topology = _one_tree(entry)
        if topology.is_chain or topology in trees:
            why = "chains are chosen among without being listed" if topology.is_chain else "it is listed twice"
            raise ConfigError(f"speculative_config: leave {entry!r} out of {TREES}: {why}")
        trees.append(topology)
    return tuple(trees)


def _one_tree(entry: Any) -> AnyTopology:
    if not isinstance(entry, Mapping):
        return tree(read_keys({"speculative_token_tree": entry}).speculative_token_tree or ())
    if set(entry) != set(DYNAMIC_KEYS):
        raise ConfigError(
            f"speculative_config: a mapping in {TREES} has {', '.join(DYNAMIC_KEYS)}; got {sorted(map(str, entry))}"
        )
    return _dynamic(read_keys(entry))


def _by_batch_size(keys: SpeculativeKeys) -> SpeculationSchedule:
    key, table = CHAIN_KEYS[2], keys.num_speculative_tokens_per_batch_size
    if keys.given("disable_by_batch_size", "max_num_speculative_tokens"):
        raise ConfigError(f"speculative_config: {key} takes neither disable_by_batch_size nor a maximum")
    if keys.num_speculative_tokens == AUTO:
        raise ConfigError(f'speculative_config: {key} takes no num_speculative_tokens "{AUTO}"; give one of them')
    for row in table if isinstance(table, list | tuple) else [table]:
        whole = isinstance(row, list | tuple) and len(row) == 3 and all(type(n) is int for n in row)
        if not whole or not (1 <= row[0] <= row[1] and 0 <= row[2] <= MAX_LENGTH):
            raise ConfigError(
                f"speculative_config: {key} lists [lowest, highest, length] with 1 <= lowest <= highest and a length "
                f"from 0 to {MAX_LENGTH}, got {row!r}"
            )
    ranges = sorted((low, high, length) for low, high, length in table)
    overlap = [pair for pair in itertools.pairwise(ranges) if pair[1][0] <= pair[0][1]]
    if overlap:
        raise ConfigError(f"speculative_config: {key} has ranges that overlap: {overlap[0]}")
    otherwise = keys.num_speculative_tokens or 0
    longest = max([otherwise, *(length for _, _, length in ranges)])
    if not longest:
        raise ConfigError(f"speculative_config: {key} never drafts; leave speculative_config out for plain decoding")
    chains = tuple((low, high, chain(length)) for low, high, length in ranges)
    return SpeculationSchedule(chain(longest), ranges=chains, otherwise=chain(otherwise))
