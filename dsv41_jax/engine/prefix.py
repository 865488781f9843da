"""The prefix cache of one rank: snapshots at chunk boundaries and the full pages before them, least recently used first out.

An entry belongs to exact token ids: lookups hash them, then compare them. Its pages are shared by count, never copied.
"""

import collections
import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from dsv41_jax.engine.pages import PageAllocator


@dataclasses.dataclass
class Entry:
    """A prefix: its ids i32[n] (n a multiple of the page), the pages that hold it, and the state outside them."""

    ids: np.ndarray
    pages: tuple[int, ...]
    snapshot: object
    nbytes: int

    @property
    def length(self) -> int:
        return len(self.ids)


class PrefixCache:
    """At most `budget` bytes of snapshots; their pages count against the allocator, and go when requests need them."""

    def __init__(self, allocator: PageAllocator, budget: int):
        self._allocator, self.budget = allocator, budget
        self._entries: collections.OrderedDict[bytes, Entry] = collections.OrderedDict()  # oldest use first
        self._lengths: collections.Counter[int] = collections.Counter()
        self.nbytes = self.evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def pages(self) -> int:
        """Different pages that entries own."""
        return len({p for e in self._entries.values() for p in e.pages})

    def find(self, ids: Sequence[int]) -> Entry | None:
        """The longest entry that `ids` begin with and that leaves at least one of them to run."""
        ids, found = np.asarray(ids, np.int32), None
        for key, length in self._keys(ids, [n for n in sorted(self._lengths) if n < len(ids)]):
            entry = self._entries.get(key)
            if entry is not None and np.array_equal(entry.ids, ids[:length]):
                found = key
        return None if found is None else self._entries[found]

    def touch(self, entry: Entry) -> None:
        """Mark an entry as used now."""
        self._entries.move_to_end(self._key(entry.ids))

    def holds(self, ids: Sequence[int]) -> bool:
        """Whether exactly these ids have an entry."""
        return self._key(np.asarray(ids, np.int32)) in self._entries

    def add(self, ids: Sequence[int], pages: Sequence[int], snapshot, nbytes: int) -> Entry | None:
        """A new entry, which becomes an owner of its pages; older ones leave until it fits the budget. None if it never
        fits or is there already."""
        ids = np.array(ids, np.int32)
        key = self._key(ids)
        if key in self._entries or nbytes > self.budget:
            return None
        self._allocator.share(pages)
        entry = self._entries[key] = Entry(ids, tuple(pages), snapshot, nbytes)
        self._lengths[entry.length] += 1
        self.nbytes += nbytes
        while self.nbytes > self.budget:
            self._drop(next(iter(self._entries)))
        return entry

    def remove(self, entry: Entry) -> None:
        """Drop an entry if it is still there."""
        key = self._key(entry.ids)
        if self._entries.get(key) is entry:
            self._drop(key)

    def reclaim(self, pages: int) -> bool:
        """Evict until the allocator has `pages` free pages; entries that would free none stay. Whether it now has."""
        while self._allocator.free < pages:
            # the longest entry of a chain owns a page that the shorter ones do not, so this ends only when nothing is left
            useless = lambda e: all(self._allocator.owners(p) > 1 for p in e.pages)
            key = next((k for k, e in self._entries.items() if not useless(e)), None)
            if key is None:
                return False
            self._drop(key)
        return True

    def reclaimable(self, keep: Entry | None = None) -> int:
        """Pages that would be free if every entry left, those of `keep` not counted."""
        count = collections.Counter(p for e in self._entries.values() for p in e.pages)
        kept = set(keep.pages) if keep else ()
        return sum(self._allocator.owners(p) == n for p, n in count.items() if p not in kept)

    def clear(self) -> None:
        for key in list(self._entries):
            self._drop(key)

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        self._allocator.release(entry.pages)
        self._lengths -= collections.Counter([entry.length])
        self.nbytes -= entry.nbytes
        self.evicted += 1

    def _key(self, ids: np.ndarray) -> bytes:
        return hashlib.blake2b(ids.astype("<i4").tobytes(), digest_size=16).digest()

    def _keys(self, ids: np.ndarray, lengths: Sequence[int]):
        """(key, length) of every prefix, hashing each id once."""
        running, done = hashlib.blake2b(digest_size=16), 0
        raw = ids.astype("<i4")
        for n in lengths:
            running.update(raw[done:n].tobytes())
            done = n
            yield running.copy().digest(), n
