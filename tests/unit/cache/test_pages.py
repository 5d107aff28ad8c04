"""Pages of a shared pool: enough for every token, each given to one row at a time, page 0 to none."""

import pytest

from jaxspec.cache.pages import PageAllocator
from jaxspec.errors import CapacityError


@pytest.mark.parametrize(("tokens", "pages"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_the_last_page_may_be_part_full(tokens: int, pages: int):
    pool = PageAllocator(8, 4)
    taken = pool.allocate(tokens)
    assert taken is not None
    assert len(set(taken)) == len(taken) == pages == pool.needed(tokens)
    assert pool.free == pool.total - pages


def test_every_page_but_the_first_is_given_once_and_again_after_release():
    pool = PageAllocator(5, 4)
    first, second = pool.allocate(8), pool.allocate(8)
    assert first is not None
    assert second is not None
    assert sorted(first + second) == [1, 2, 3, 4]
    assert pool.allocate(1) is None
    pool.release(first)
    assert sorted(pool.allocate(7) or []) == sorted(first)


def test_what_could_never_fit_is_refused():
    with pytest.raises(CapacityError, match=r"17 tokens .* need 5 pages of 4, the pool has 4"):
        PageAllocator(5, 4).allocate(17)
