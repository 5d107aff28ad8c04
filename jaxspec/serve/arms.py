"""A drafter for each topology that an engine dispatches, and the positions that they write ahead."""

from collections.abc import Mapping, Sequence

from jaxspec.protocol import Drafter
from jaxspec.topology import PLAIN, AnyTopology


def arms_of(drafter: Drafter, wanted: Sequence[AnyTopology]) -> dict[AnyTopology, Drafter]:
    """Returns a drafter of each topology, plain decoding always among them; they share weights and state.

    Plain decoding drafts and observes nothing; only where it takes turns with a drafter that reads what the target
    computed, that is kept for it.
    """
    return {PLAIN: drafter.plain()} | {arm: drafter.with_topology(arm) for arm in wanted if arm.drafts}


def slack_of(drafters: Mapping[AnyTopology, Drafter], buckets: Sequence[int]) -> int:
    """Returns how many positions beyond a text one forward, or a chunk of a prompt, may write."""
    return max(*buckets, *(arm.nodes for arm in drafters), *(drafter.slack for drafter in drafters.values()))
