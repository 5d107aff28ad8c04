"""The house's words: names that say something, docstrings that begin with what is done, American English."""

import pytest

from tests.house import language

GREEN = (language.behind_for_after, language.british_spellings, language.methods_without_a_docstring)


@pytest.mark.parametrize("check", GREEN, ids=lambda check: check.__name__)
def test_nothing_offends(check):
    assert check() == []
