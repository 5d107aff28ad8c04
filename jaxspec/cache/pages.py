"""Allocation of pages of a shared pool; page 0 belongs to nobody and takes the writes of idle rows."""

from jaxspec.errors import CapacityError


class PageAllocator:
    """A free list of page ids, kept on the host."""

    def __init__(self, pages: int, page: int):
        if pages < 2 or page < 1:
            raise CapacityError(f"page pool: at least 2 pages of at least 1 token are needed, got {pages} of {page}")
        self.page, self.total = page, pages - 1
        self._free = list(range(pages - 1, 0, -1))

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """Returns how many pages so many tokens need."""
        return -(-tokens // self.page)

    def check(self, tokens: int) -> None:
        """Refuses tokens that could never be allocated.

        Raises:
          CapacityError: so many tokens need more pages than there are in all.
        """
        if self.needed(tokens) > self.total:
            raise CapacityError(
                f"page pool: {tokens} tokens (provisional ones too) need {self.needed(tokens)} pages of {self.page}, "
                f"the pool has {self.total}; raise num_kv_pages, or lower max_tokens or max_model_len"
            )

    def allocate(self, tokens: int) -> list[int] | None:
        """Takes pages for so many tokens; returns None if they are not free now.

        Raises:
          CapacityError: the pool could never hold them.
        """
        self.check(tokens)
        count = self.needed(tokens)
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def release(self, pages: list[int]) -> None:
        """Gives pages back."""
        self._free.extend(reversed(pages))
