"""What a speculative_config says about how much is drafted."""

from typing import Any

import pytest

from jaxspec.draft.catalog import parse
from jaxspec.draft.lengths import Lengths, parse_lengths
from jaxspec.errors import ConfigError
from jaxspec.serve.control import Adaptive, ByBatchSize, Fixed, control_of
from jaxspec.topology import chain, tree

TABLE = "num_speculative_tokens_per_batch_size"


@pytest.mark.parametrize(
    ("config", "lengths", "control"),
    [
        ({"num_speculative_tokens": 4}, Lengths(chain(4)), Fixed(4)),
        ({"speculative_token_tree": [2, 1]}, Lengths(tree((2, 1))), Fixed(2)),
        ({"num_speculative_tokens": "auto"}, Lengths(chain(5), adaptive=True), Adaptive((0, 1, 2, 3, 4, 5))),
        (
            {"num_speculative_tokens": "auto", "max_num_speculative_tokens": 2},
            Lengths(chain(2), adaptive=True),
            Adaptive((0, 1, 2)),
        ),
        (
            {"num_speculative_tokens": 3, "disable_by_batch_size": 8},
            Lengths(chain(3), ranges=((1, 8, 3),)),
            ByBatchSize(((1, 8, 3),), 0),
        ),
        (
            {TABLE: [[5, 16, 2], [1, 4, 6]]},
            Lengths(chain(6), ranges=((1, 4, 6), (5, 16, 2))),
            ByBatchSize(((1, 4, 6), (5, 16, 2)), 0),
        ),
        (
            {TABLE: [[1, 4, 6]], "num_speculative_tokens": 1},
            Lengths(chain(6), ranges=((1, 4, 6),), otherwise=1),
            ByBatchSize(((1, 4, 6),), 1),
        ),
    ],
)
def test_lengths(config: dict[str, Any], lengths: Lengths, control):
    assert parse_lengths(config) == lengths
    assert control_of(lengths) == control
    assert parse({"method": "ngram", **config}).lengths == lengths


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "from 1 to 16, got None"),
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
    ],
)
def test_nonsense_is_refused(config: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        parse({"method": "ngram", **config})
