"""Who owns which page of the compressed pools (spec/serving.md, "Stopping, pages, short rows").

Pure host bookkeeping. A page has a count of owners: the request that writes it, requests that share it as part of their
prefix, and the prefix cache. It is free again when the last of them lets go.
"""

from collections.abc import Iterable


class PagesExhausted(RuntimeError):
    """Fewer pages are free than were asked for; nothing was taken."""


class PageAllocator:
    """Page ids 1..pages-1 of one rank; page 0 means "unallocated" and is never handed out.

    Raises ValueError for fewer than two pages.
    """

    def __init__(self, pages: int):
        if pages < 2:
            raise ValueError(f"pages: expected >= 2 (page 0 is never used), got {pages}")
        self.capacity = pages - 1
        self._owners = [0] * pages
        self._free = list(range(pages - 1, 0, -1))  # the page freed last is taken first: it is the likeliest in a cache

    @property
    def free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages with at least one owner."""
        return self.capacity - self.free

    def owners(self, page: int) -> int:
        """Owners of a page. Raises ValueError for an id outside the pool."""
        return self._owners[self._checked(page)]

    def take(self, count: int) -> list[int]:
        """`count` free pages, each with one owner. Raises PagesExhausted if there are not as many; ValueError for a
        negative count."""
        if count < 0:
            raise ValueError(f"pages: expected a count >= 0, got {count}")
        if count > self.free:
            raise PagesExhausted(f"pages: expected at most {self.free} (free of {self.capacity}), got {count}")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more owner for every page. Raises ValueError, before anything changes, for a page that nobody owns."""
        pages = list(pages)
        for page in pages:
            if not self._owners[self._checked(page)]:
                raise ValueError(f"pages: expected owned pages to share, page {page} is free")
        for page in pages:
            self._owners[page] += 1

    def release(self, pages: Iterable[int]) -> int:
        """One owner fewer for every page; returns how many became free. Raises ValueError, before anything changes, if
        that is more owners than a page has."""
        pages = list(pages)
        for page in set(pages):
            if self._owners[self._checked(page)] < pages.count(page):
                raise ValueError(f"pages: page {page} expected >= {pages.count(page)} owners to release, "
                                 f"got {self._owners[page]}")  # fmt: skip
        before = self.free
        for page in pages:
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)
        return self.free - before

    def _checked(self, page: int) -> int:
        if not 0 < page <= self.capacity:
            raise ValueError(f"pages: expected ids 1..{self.capacity}, got {page}")
        return page
