"""How many tokens a ``speculative_config`` drafts: always the same, by batch size, or chosen while running."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.errors import ConfigError
from jaxspec.topology import Topology, chain, tree

MAX_LENGTH = 16
AUTO_LENGTH = 5
AUTO = "auto"
LENGTH_KEYS = (
    "num_speculative_tokens", "max_num_speculative_tokens", "num_speculative_tokens_per_batch_size",
    "disable_by_batch_size", "speculative_token_tree",
)  # fmt: skip


@dataclass(frozen=True)
class Lengths:
    """What is drafted, and when.

    Attributes:
      topology: the longest chain, or the tree.
      adaptive: whether every dispatch chooses a length up to the topology's.
      ranges: lowest and highest number of requests and the length for them, None for the same length always.
      otherwise: the length outside of all ranges.
    """

    topology: Topology
    adaptive: bool = False
    ranges: tuple[tuple[int, int, int], ...] | None = None
    otherwise: int = 0


def parse_lengths(config: Mapping[str, Any]) -> Lengths:
    """Reads ``LENGTH_KEYS``.

    Args:
      config: ``num_speculative_tokens`` is a chain's length, or ``auto``: then every dispatch takes the length that
        pays most, up to ``max_num_speculative_tokens`` (5), or none at all. ``speculative_token_tree`` lists branching
        factors per level instead. ``num_speculative_tokens_per_batch_size`` is vLLM's ``[[lowest, highest, length],
        ...]``, for running and waiting requests together; ``disable_by_batch_size`` decodes plainly above that many.

    Raises:
      ConfigError: values are of the wrong kind or contradict each other.
    """
    levels, length = config.get("speculative_token_tree"), config.get("num_speculative_tokens")
    if levels is not None:
        return _tree(config, levels)
    if config.get("num_speculative_tokens_per_batch_size") is not None:
        return _by_batch_size(config)
    most = config.get("max_num_speculative_tokens")
    if length == AUTO:
        if config.get("disable_by_batch_size") is not None:
            raise ConfigError(f'speculative_config: num_speculative_tokens "{AUTO}" takes no disable_by_batch_size')
        most = AUTO_LENGTH if most is None else _length(most, "max_num_speculative_tokens")
        return Lengths(chain(most), adaptive=True)
    if most is not None:
        raise ConfigError(f'speculative_config: max_num_speculative_tokens needs num_speculative_tokens "{AUTO}"')
    return _disabled(config, chain(_length(length, "num_speculative_tokens")))


def _tree(config: Mapping[str, Any], levels: Any) -> Lengths:
    others = [key for key in LENGTH_KEYS[:3] if config.get(key) is not None]
    if others:
        raise ConfigError(f"speculative_config: give speculative_token_tree or {', '.join(others)}, not both")
    if not isinstance(levels, list | tuple) or not all(isinstance(n, int) for n in levels):
        raise ConfigError(f"speculative_config: speculative_token_tree lists branching factors, got {levels!r}")
    return _disabled(config, tree(tuple(levels)))


def _disabled(config: Mapping[str, Any], topology: Topology) -> Lengths:
    size = config.get("disable_by_batch_size")
    if size is None:
        return Lengths(topology)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(f"speculative_config: disable_by_batch_size must be an integer from 1, got {size!r}")
    return Lengths(topology, ranges=((1, size, topology.max_depth),))


def _by_batch_size(config: Mapping[str, Any]) -> Lengths:
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
    return Lengths(chain(longest), ranges=ranges, otherwise=otherwise)


def _length(value: Any, key: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_LENGTH:
        raise ConfigError(
            f"speculative_config: {key} must be an integer from 1 to {MAX_LENGTH}, got {value!r}; "
            "leave speculative_config out for plain decoding"
        )
    return value
