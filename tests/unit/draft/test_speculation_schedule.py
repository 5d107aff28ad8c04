"""What a speculative_config says about how much is drafted."""

from typing import Any

import pytest

from jaxspec.bench.synthetic import Synthetic
from jaxspec.control.adaptive import Adaptive
from jaxspec.control.decision import ByBatchSize, Fixed
from jaxspec.draft.methods import parse
from jaxspec.draft.speculation_schedule import SpeculationSchedule, schedule_of
from jaxspec.draft.speculative_keys import read_keys
from jaxspec.errors import ConfigError
from jaxspec.serve.controls import control_of
from jaxspec.topology import PLAIN, DynamicTree, chain, tree

TABLE, TREES = "num_speculative_tokens_per_batch_size", "speculative_token_trees"


def grow(steps, top_k, nodes) -> dict[str, Any]:
    """A dynamic tree in SGLang's words."""
    return {
        "speculative_num_steps": steps, "speculative_eagle_topk": top_k, "speculative_num_draft_tokens": nodes,
    }  # fmt: skip


def chains(longest: int):
    """Arms of an adaptive choice without trees."""
    return tuple(chain(length) for length in range(longest + 1))


def auto(longest: int, *trees) -> dict[str, Any]:
    """An adaptive choice that has trees."""
    return {"num_speculative_tokens": "auto", "max_num_speculative_tokens": longest, TREES: list(trees)}


@pytest.mark.parametrize(
    ("config", "lengths", "control"),
    [
        ({"num_speculative_tokens": 4}, SpeculationSchedule(chain(4)), Fixed(chain(4))),
        ({"speculative_token_tree": [2, 1]}, SpeculationSchedule(tree((2, 1))), Fixed(tree((2, 1)))),
        (grow(3, 4, 10), SpeculationSchedule(DynamicTree(4, 3, 10)), Fixed(DynamicTree(4, 3, 10))),
        (grow(3, 1, 4), SpeculationSchedule(chain(3)), Fixed(chain(3))),
        (
            grow(3, 4, 10) | {"disable_by_batch_size": 2},
            SpeculationSchedule(DynamicTree(4, 3, 10), ranges=((1, 2, DynamicTree(4, 3, 10)),)),
            ByBatchSize(((1, 2, DynamicTree(4, 3, 10)),), PLAIN),
        ),
        ({"num_speculative_tokens": "auto"}, SpeculationSchedule(chain(5), adaptive=True), Adaptive(chains(5))),
        (
            {"num_speculative_tokens": "auto", "max_num_speculative_tokens": 2},
            SpeculationSchedule(chain(2), adaptive=True),
            Adaptive(chains(2)),
        ),
        (
            auto(1, [2, 2, 1], grow(3, 4, 10)),
            SpeculationSchedule(chain(1), True, (tree((2, 2, 1)), DynamicTree(4, 3, 10))),
            Adaptive((*chains(1), tree((2, 2, 1)), DynamicTree(4, 3, 10))),
        ),
        ({"calibration": "c.json"}, SpeculationSchedule(chain(5), True, calibration="c.json"), Adaptive(chains(5))),
        (
            {"num_speculative_tokens": 3, "disable_by_batch_size": 8},
            SpeculationSchedule(chain(3), ranges=((1, 8, chain(3)),)),
            ByBatchSize(((1, 8, chain(3)),), PLAIN),
        ),
        (
            {TABLE: [[5, 16, 2], [1, 4, 6]]},
            SpeculationSchedule(chain(6), ranges=((1, 4, chain(6)), (5, 16, chain(2)))),
            ByBatchSize(((1, 4, chain(6)), (5, 16, chain(2))), PLAIN),
        ),
        (
            {TABLE: [[1, 4, 6]], "num_speculative_tokens": 1},
            SpeculationSchedule(chain(6), ranges=((1, 4, chain(6)),), otherwise=chain(1)),
            ByBatchSize(((1, 4, chain(6)),), chain(1)),
        ),
    ],
)
def test_lengths(config: dict[str, Any], lengths: SpeculationSchedule, control):
    assert schedule_of(read_keys(config)) == lengths
    assert control_of(lengths) == control
    assert parse({"method": "mtp", **config}).schedule == lengths


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "from 1 to 16, got None"),
        (
            {"calibration": "c.json", "num_speculative_tokens": 3},
            "calibration names a file, for .* alone; got 'c.json' and 3",
        ),
        (
            {"calibration": "c.json", "speculative_token_tree": [2]},
            r"alone; got 'c.json' and \['speculative_token_tree'\]",
        ),
        ({"num_speculative_tokens": 0}, "got 0"),
        ({"num_speculative_tokens": True}, "got True"),
        ({"num_speculative_tokens": "many"}, "got 'many'"),
        ({"num_speculative_tokens": 3, "speculative_token_tree": [2]}, "not both"),
        ({"num_speculative_tokens": 3, "max_num_speculative_tokens": 5}, 'needs num_speculative_tokens "auto"'),
        ({"num_speculative_tokens": "auto", "max_num_speculative_tokens": 17}, "got 17"),
        ({"num_speculative_tokens": "auto", "disable_by_batch_size": 4}, "takes no disable_by_batch_size"),
        ({"num_speculative_tokens": 3, "disable_by_batch_size": 0}, "from 1, got 0"),
        ({TABLE: [[1, 4]]}, r"got \[1, 4\]"),
        ({TABLE: [[4, 1, 2]]}, r"got \[4, 1, 2\]"),
        ({TABLE: [[1, 4, 2], [4, 8, 1]]}, "overlap"),
        ({TABLE: [[1, 4, 0]]}, "never drafts"),
        ({TABLE: 3}, "lists"),
        (grow(3, 4, None), "given together; got 3, 4, None"),
        (grow(3, 4.0, 10), "speculative_eagle_topk must be an integer from 1, got 4.0"),
        (grow(0, 4, 10), "speculative_num_steps must be an integer from 1 to 16, got 0"),
        (grow(17, 4, 40), "speculative_num_steps must be an integer from 1 to 16, got 17"),
        (grow(3, 4, 66), "66 nodes, but top 4 at 3 depths give 4 to 37"),
        (grow(3, 4, 3), "3 nodes, but"),
        (grow(3, 1, 5), "1 is a chain, .* got 5 and 3"),
        (grow(3, 4, 10) | {"num_speculative_tokens": 3}, "or num_speculative_tokens, not both"),
        (grow(3, 4, 10) | {"speculative_token_tree": [2, 2]}, "or speculative_token_tree, not both"),
        ({"num_speculative_tokens": 3, TREES: [[2]]}, f'{TREES} are for num_speculative_tokens "auto", .* got 3; give'),
        ({TREES: [[2]]}, "got None; give speculative_token_tree"),
        (auto(2, 2), "speculative_token_tree must be a list of branching factors, got 2"),
        (auto(2, [2, 2.5]), r"a list of branching factors, got \[2, 2\.5\]"),
        (auto(2, [2, 0]), "must be at least 1"),
        (auto(2, [99]), "more than 65 nodes"),
        (auto(2), r"lists trees, each as .* \[\[2, 2, 1\]\], .*; got \[\]"),
        (auto(2) | {TREES: 3}, "lists trees, .*; got 3"),
        (auto(2, [1, 1]), r"leave \[1, 1\] out .* chains are chosen among without being listed"),
        (auto(2, [2, 2], (2, 2)), "it is listed twice"),
        (auto(2, {"speculative_num_steps": 2}), r"has speculative_num_steps, .*; got \['speculative_num_steps'\]"),
        (auto(2, grow(3, 4, 66)), "66 nodes, but top 4"),
        (auto(2, grow(3, 4, 10)), "ngram.* grows no tree by confidence"),
        (auto(2, [2]) | {"rejection_sample_method": "block"}, "block verification is for chains; .* alone"),
        (
            auto(2, [2]) | {"method": "mtp", "verify_budget": "auto"},
            "verify_budget cuts chains, not trees; ask for num_speculative_tokens alone",
        ),
        (auto(2, [2]) | {"rejection_sample_method": Synthetic(length=2.0).rule}, "synthetic acceptance is for chains"),
        (grow(3, 4, 10), "ngram.* grows no tree by confidence; leave speculative_num_steps"),
    ],
)
def test_nonsense_is_refused(config: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        parse({"method": "ngram", **config})
