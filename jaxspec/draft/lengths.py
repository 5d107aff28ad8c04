"""What a ``speculative_config`` drafts: chains of one length, by batch size or chosen while running, and trees."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from jaxspec.errors import ConfigError
from jaxspec.topology import DynamicTree, Topology, chain, tree

MAX_LENGTH = 16
AUTO_LENGTH = 5
AUTO = "auto"
CHAIN_KEYS = ("num_speculative_tokens", "max_num_speculative_tokens", "num_speculative_tokens_per_batch_size")
DYNAMIC_KEYS = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
LENGTH_KEYS = (*CHAIN_KEYS, "disable_by_batch_size", "speculative_token_tree", *DYNAMIC_KEYS, "calibration")


@dataclass(frozen=True)
class Lengths:
    """What is drafted, and when.

    Attributes:
      topology: the longest chain, or the tree.
      adaptive: whether every dispatch chooses a length up to the topology's.
      ranges: lowest and highest number of requests and the length for them, None for the same length always.
      otherwise: the length outside of all ranges.
      calibration: file of measured step times that an adaptive choice starts from.
    """

    topology: Topology | DynamicTree
    adaptive: bool = False
    ranges: tuple[tuple[int, int, int], ...] | None = None
    otherwise: int = 0
    calibration: str | None = None


def parse_lengths(config: Mapping[str, Any]) -> Lengths:
    """Reads ``LENGTH_KEYS``.

    Args:
      config: ``num_speculative_tokens`` is a chain's length, or ``auto``: then every dispatch takes the length that
        pays most, up to ``max_num_speculative_tokens`` (5), or none at all. ``speculative_token_tree`` lists branching
        factors per level instead; SGLang's ``speculative_num_steps``, ``speculative_eagle_topk`` and
        ``speculative_num_draft_tokens``, which counts the anchor, make a dynamic tree.
        ``num_speculative_tokens_per_batch_size`` is vLLM's ``[[lowest, highest, length], ...]``, for running and
        waiting requests together; ``disable_by_batch_size`` decodes plainly above that many. ``calibration`` names what
        ``jaxspec calibrate`` wrote for this target and drafter; with it ``auto`` is the default.

    Raises:
      ConfigError: values are of the wrong kind or contradict each other.
    """
    levels, length = config.get("speculative_token_tree"), config.get("num_speculative_tokens")
    calibration = config.get("calibration")
    if calibration is not None:
        length = AUTO if length is None else length
        given = [key for key in ("speculative_token_tree", CHAIN_KEYS[2], *DYNAMIC_KEYS) if config.get(key) is not None]
        if length != AUTO or given or not isinstance(calibration, str):
            raise ConfigError(
                f'speculative_config: calibration names a file, for num_speculative_tokens "{AUTO}" alone; got '
                f"{calibration!r} and {given or length!r}"
            )
    if any(config.get(key) is not None for key in DYNAMIC_KEYS):
        return _dynamic(config)
    if levels is not None:
        return _tree(config, levels)
    if config.get("num_speculative_tokens_per_batch_size") is not None:
        return _by_batch_size(config)
    most = config.get("max_num_speculative_tokens")
    if length == AUTO:
        if config.get("disable_by_batch_size") is not None:
            raise ConfigError(f'speculative_config: num_speculative_tokens "{AUTO}" takes no disable_by_batch_size')
        most = AUTO_LENGTH if most is None else _length(most, "max_num_speculative_tokens")
        return Lengths(chain(most), adaptive=True, calibration=calibration)
    if most is not None:
        raise ConfigError(f'speculative_config: max_num_speculative_tokens needs num_speculative_tokens "{AUTO}"')
    return _disabled(config, chain(_length(length, "num_speculative_tokens")))


def _alone(config: Mapping[str, Any], tree_key: str, others: tuple[str, ...]) -> None:
    """Refuses a tree next to other ways to say what is drafted."""
    given = [key for key in others if config.get(key) is not None]
    if given:
        raise ConfigError(f"speculative_config: give {tree_key} or {', '.join(given)}, not both")


def _dynamic(config: Mapping[str, Any]) -> Lengths:
    _alone(config, ", ".join(DYNAMIC_KEYS), (*CHAIN_KEYS, "speculative_token_tree"))
    steps, top_k, nodes = (config.get(key) for key in DYNAMIC_KEYS)
    if not (_whole(steps) and _whole(top_k) and _whole(nodes)):
        raise ConfigError(
            f"speculative_config: {', '.join(DYNAMIC_KEYS)} are given together, integers from 1; got {steps!r}, "
            f"{top_k!r}, {nodes!r}"
        )
    steps = _length(steps, DYNAMIC_KEYS[0])
    if top_k > 1:
        return _disabled(config, DynamicTree(top_k, steps, nodes))
    if nodes != steps + 1:
        raise ConfigError(
            f"speculative_config: {DYNAMIC_KEYS[1]} 1 is a chain, whose {DYNAMIC_KEYS[2]} is {DYNAMIC_KEYS[0]} + 1; "
            f"got {nodes} and {steps}"
        )
    return _disabled(config, chain(steps))


def _whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _tree(config: Mapping[str, Any], levels: Any) -> Lengths:
    _alone(config, "speculative_token_tree", CHAIN_KEYS)
    if not isinstance(levels, list | tuple) or not all(isinstance(n, int) for n in levels):
        raise ConfigError(f"speculative_config: speculative_token_tree lists branching factors, got {levels!r}")
    return _disabled(config, tree(tuple(levels)))


def _disabled(config: Mapping[str, Any], topology: Topology | DynamicTree) -> Lengths:
    size = config.get("disable_by_batch_size")
    if size is None:
        return Lengths(topology)
    if not _whole(size):
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
