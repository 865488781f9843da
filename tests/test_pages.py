"""The page allocator against a model that counts owners, over thousands of random operations."""

import collections

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41_jax.engine.pages import PageAllocator, PagesExhausted

OPERATIONS = st.lists(st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(0, 9), st.integers(0, 2**16)),
                      max_size=120)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(pages=st.integers(2, 24), operations=OPERATIONS)
def test_no_page_is_lost_or_owned_twice(pages, operations):
    """Holdings are lists of pages of one owner each: what the allocator says must be what their sum says."""
    allocator, holdings = PageAllocator(pages), []
    for kind, n, pick in operations:
        if kind == "take":
            free = allocator.free
            if n > free:
                with pytest.raises(PagesExhausted):
                    allocator.take(n)
                assert allocator.free == free
            else:
                owned = {p for h in holdings for p in h}
                got = allocator.take(n)
                assert len(set(got)) == n and not owned & set(got) and 0 not in got
                holdings.append(got)
        elif holdings:
            chosen = holdings[pick % len(holdings)]
            if kind == "share":
                shared = chosen[:n]
                allocator.share(shared)
                holdings.append(list(shared))
            else:
                holdings.remove(chosen)
                gone = set(chosen) - {p for h in holdings for p in h}
                assert allocator.release(chosen) == len(gone)
        count = collections.Counter(p for h in holdings for p in h)
        assert [allocator.owners(p) for p in range(1, pages)] == [count[p] for p in range(1, pages)]
        assert (allocator.used, allocator.free) == (len(count), pages - 1 - len(count))
    for held in holdings:
        allocator.release(held)
    assert allocator.free == allocator.capacity == pages - 1
    assert sorted(allocator.take(pages - 1)) == list(range(1, pages))


def test_mistakes_change_nothing():
    allocator = PageAllocator(4)
    held = allocator.take(2)
    other = ({1, 2, 3} - set(held)).pop()
    for bad in (lambda: allocator.share([held[0], other]), lambda: allocator.release([held[0], other]),
                lambda: allocator.release([held[1], held[1]]), lambda: allocator.release([held[0], 0]),
                lambda: allocator.share([4]), lambda: allocator.take(-1)):  # fmt: skip
        with pytest.raises(ValueError):
            bad()
        assert [allocator.owners(p) for p in held] == [1, 1] and allocator.free == 1
    with pytest.raises(ValueError, match="expected >= 2"):
        PageAllocator(1)
