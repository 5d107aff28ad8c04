"""The house's words: names that say something, docstrings that begin with what is done, American English."""

import pytest

from tests.house import language


@pytest.mark.parametrize("check", language.CHECKS, ids=lambda check: check.__name__)
def test_nothing_offends(check):
    assert check() == []
