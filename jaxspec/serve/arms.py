"""What an engine can dispatch: a drafter for each topology, and the room that the largest of them needs."""

from collections.abc import Mapping, Sequence

from jaxspec.draft.lazy_observer import LazyObserver
from jaxspec.draft.null import NoDrafts
from jaxspec.protocol import Drafter
from jaxspec.pytree import replace
from jaxspec.topology import PLAIN, AnyTopology


def arms_of(drafter: Drafter, wanted: Sequence[AnyTopology]) -> dict[AnyTopology, Drafter]:
    """A drafter of each topology, plain decoding always among them; they share their weights and their state.

    Plain decoding drafts and observes nothing; only where it takes turns with a drafter that reads what the target
    computed, that is kept for it.
    """
    drafters: dict[AnyTopology, Drafter] = {PLAIN: NoDrafts()}
    if isinstance(drafter, LazyObserver):
        drafters[PLAIN] = replace(drafter, topology=PLAIN)
    return drafters | {arm: replace(drafter, topology=arm) for arm in wanted if arm.drafts}


def slack_of(drafters: Mapping[AnyTopology, Drafter], buckets: Sequence[int]) -> int:
    """Positions beyond a text that one forward of some arm, or a chunk of a prompt, may write."""
    return max(*buckets, *(arm.nodes for arm in drafters), *(drafter.slack for drafter in drafters.values()))
