"""Which requests sit where and what runs next: slots, pages, admission, preemption. Host bookkeeping, no device arrays.

The host's knowledge lags: a dispatched step that has not been read may have moved a request by 1..gamma+1 positions. Pages
are therefore reserved for the furthest it can have come (`Seat.reach`) plus the rows of its next step.
"""

import bisect
import collections
import itertools

import numpy as np

from dsv41_jax.engine.limits import Limits
from dsv41_jax.engine.pages import PageAllocator, PagesExhausted
from dsv41_jax.engine.prefix import Entry, PrefixCache
from dsv41_jax.engine.request import Request, Status


class Seat:
    """A request's place: its slot and pages on a rank, and how far the dispatched steps have taken it.

    ids: what prefill runs, of which `done` tokens are dispatched. reach: the furthest position that the newest token can
    have, counting unread steps. unread: dispatched steps that will bring at least one token. words, table: its rows of the
    packed batch; version changes whenever one of them does.
    """

    _versions = itertools.count(1)

    def __init__(self, request: Request, rank: "Rank", slot: int, pages: list[int], ids: list[int], words, columns: int):
        self.request, self.rank, self.slot, self.pages, self.ids, self.words = request, rank, slot, pages, ids, words
        self.known = request.token_ids[-1] if request.token_ids else -1  # the token after ids, if it is known
        self.draws = not request.sampling.greedy
        self.done, self.reach, self.unread = 0, len(ids), 0
        self.table = np.zeros(columns, np.int32)
        self.entries: list[Entry] = []  # prefix entries made from this seat's caches
        self.cacheable = True  # whether more may be made
        self.write_table()

    def write_table(self) -> None:
        self.table[: len(self.pages)] = self.pages
        self.version = next(self._versions)


class Rank:
    """Slots, pages and prefixes of one rank, and the requests that sit on it in the order they were admitted."""

    def __init__(self, number: int, limits: Limits):
        self.number = number
        self.allocator = PageAllocator(limits.pages)
        self.prefixes = PrefixCache(self.allocator, limits.prefix_bytes)
        self.free_slots = list(range(limits.max_requests - 1, -1, -1))
        self.seats: list[Seat] = []

    def of(self, status: Status) -> list[Seat]:
        """Seats of requests in a status, longest admitted first."""
        return [s for s in self.seats if s.request.status is status]


class Scheduler:
    """Moves requests between the queue and the seats of all ranks.

    queue: waiting requests, first come first served; a preempted request goes before younger ones.
    """

    def __init__(self, limits: Limits, gamma: int, ranks: int, words):
        self.limits, self.gamma, self._words = limits, gamma, words
        self.ranks = [Rank(r, limits) for r in range(ranks)]
        self.queue: collections.deque[Request] = collections.deque()
        self.preempted = 0
        self._blocked: Request | None = None  # the head of the queue, if nothing has changed since it found no room
        self._columns = limits.columns(limits.max_context)

    # what a request needs -----------------------------------------------------------------------------------------------

    def pages_for(self, tokens: int) -> int:
        """Pages for `tokens` positions and the rows of one step after them; positions past the context need none."""
        return self.limits.columns(min(tokens + self.gamma + 1, self.limits.max_context))

    def most_pages(self, request: Request) -> int:
        """The most pages that a request can come to need, steps in flight included."""
        most = min(len(request.prompt) + request.max_new_tokens, self.limits.max_context)
        return self.pages_for(most + self.gamma + 1)

    # queue to seat ------------------------------------------------------------------------------------------------------

    def enqueue(self, request: Request) -> None:
        """A new request, behind all others."""
        request.status = Status.WAITING
        self.queue.append(request)

    def admit(self) -> list[tuple[Seat, Entry | None]]:
        """Seat waiting requests in order while one finds room; with each, the prefix that it starts from."""
        seated = []
        while self.queue and self.queue[0] is not self._blocked:
            found = self._room(self.queue[0])
            if found is None:
                self._blocked = self.queue[0]
                break
            seated.append(self._seat(self.queue.popleft(), *found))
        return seated

    def _room(self, request: Request):
        """(rank, prefix entry or None, pages to take): the rank with the longest cached prefix, then the fewest requests."""
        ids, found = request.ids_to_run(), []
        for rank in self.ranks:
            if not rank.free_slots:
                continue
            entry = rank.prefixes.find(ids) if len(rank.prefixes) else None
            need = self.pages_for(len(ids)) - (len(entry.pages) if entry else 0)
            # and room for everybody who will grow to grow by a page: a request that drives out another at once, or is
            # driven out, only costs work
            room = rank.allocator.free - sum(len(s.pages) < self.most_pages(s.request) for s in rank.seats)
            if need <= room or need <= room + rank.prefixes.reclaimable(keep=entry):
                found.append((-(entry.length if entry else 0), len(rank.seats), rank.number, entry, need))
        if not found:
            return None
        _, _, number, entry, need = min(found, key=lambda f: f[:3])
        return self.ranks[number], entry, need

    def _seat(self, request: Request, rank: Rank, entry: Entry | None, need: int) -> tuple[Seat, Entry | None]:
        shared = list(entry.pages) if entry else []
        rank.allocator.share(shared)  # before anything is evicted for the rest
        if entry:
            rank.prefixes.touch(entry)
        rank.prefixes.reclaim(need)
        pages = shared + rank.allocator.take(need)
        seat = Seat(request, rank, rank.free_slots.pop(), pages, request.ids_to_run(),
                    self._words(request.sampling, len(request.prompt)), self._columns)  # fmt: skip
        seat.done = request.cached_tokens = entry.length if entry else 0
        request.seat, request.status = seat, Status.PREFILL
        rank.seats.append(seat)
        return seat, entry

    def keep_prefix(self, seat: Seat, snapshot, nbytes: int) -> Entry | None:
        """Cache the prefix that a seat has just completed, on the pages that hold it."""
        entry = seat.rank.prefixes.add(seat.ids[: seat.done], seat.pages[: self.limits.columns(seat.done)], snapshot, nbytes)
        if entry:
            seat.entries.append(entry)
            self._blocked = None
        return entry

    def completes_prefix(self, seat: Seat) -> bool:
        """Whether what has run of a seat's ids ends on a page and is not cached yet."""
        return (seat.cacheable and seat.done > 0 and seat.done % self.limits.page_tokens == 0
                and not seat.rank.prefixes.holds(seat.ids[: seat.done]))  # fmt: skip

    def drop_prefixes(self) -> None:
        """Forget every cached prefix; requests that share its pages keep them."""
        for rank in self.ranks:
            rank.prefixes.clear()

    # seat to queue or end -----------------------------------------------------------------------------------------------

    def leave(self, seat: Seat) -> None:
        """Free a seat. Steps in flight may still write to its slot and pages: whoever gets them next writes later, because
        every step consumes the state of the one before it."""
        seat.rank.allocator.release(seat.pages)
        seat.rank.free_slots.append(seat.slot)
        seat.rank.seats.remove(seat)
        seat.request.seat = self._blocked = None

    def preempt(self, seat: Seat) -> None:
        """Back to the queue, before younger requests; its tokens are kept, its caches recomputed when it is seated again: the
        same up to the rounding between a prefill and a decode step. Every step that brings it tokens must have been read."""
        seat.request.preemptions += 1
        self.preempted += 1
        self._requeue(seat)

    def requeue_all(self) -> None:
        """Every seated request back to the queue, in order of submission; their steps must have been read."""
        seats = [s for rank in self.ranks for s in rank.seats]
        for seat in sorted(seats, key=lambda s: -s.request.id):
            self._requeue(seat)

    def _requeue(self, seat: Seat) -> None:
        self.leave(seat)
        seat.request.status = Status.WAITING
        bisect.insort(self.queue, seat.request, key=lambda r: r.id)

    # growth -------------------------------------------------------------------------------------------------------------

    def grow(self, read_all) -> None:
        """Reserve the pages of every decoding request's next step, oldest first.

        Where pages run out: `read_all()` (tokens in flight may end requests), then cached prefixes go, then the newest
        request of the rank is preempted.
        """
        for rank in self.ranks:
            for seat in rank.of(Status.DECODE):
                while seat.request.seat is seat and self.runs(seat) and not self._grown(seat):
                    if any(s.unread for s in rank.seats):
                        read_all()
                    elif not rank.prefixes.reclaim(self._missing(seat)):
                        self.preempt(max(rank.seats, key=lambda s: s.request.id))

    def runs(self, seat: Seat) -> bool:
        """Whether another decode step can bring a token that counts: not if the unread ones end the request anyway."""
        r = seat.request
        if r.status is not Status.DECODE:
            return False
        sure = len(r.token_ids) + seat.unread
        return sure < r.max_new_tokens and len(r.prompt) + sure < self.limits.max_context

    def _missing(self, seat: Seat) -> int:
        return self.pages_for(seat.reach) - len(seat.pages)

    def _grown(self, seat: Seat) -> bool:
        missing = self._missing(seat)
        if missing > 0:
            try:
                seat.pages += seat.rank.allocator.take(missing)
            except PagesExhausted:
                return False
            seat.write_table()
        return True

    # what runs ----------------------------------------------------------------------------------------------------------

    def prefill_rows(self, rank: Rank) -> list[tuple[Seat, tuple]]:
        """[(seat, (tokens, start, last, next token or -1))]: the next chunks of a rank's prompts within the token budget."""
        decoding = sum(self.runs(s) for s in rank.seats)
        rest = self.limits.token_budget - decoding * (self.gamma + 1)
        rows = min(max(1, rest // self.limits.chunk), self.limits.prefill_buckets[-1])
        return [(seat, self._piece(seat)) for seat in rank.of(Status.PREFILL)[:rows]]

    def _piece(self, seat: Seat) -> tuple:
        start, left = seat.done, len(seat.ids) - seat.done
        count = min(left, self.limits.chunk)
        if count < left and self.limits.prefix_bytes:
            # a chunk that is not the last ends on a page where it can: there its prefix can be kept
            aligned = (start + count) // self.limits.page_tokens * self.limits.page_tokens - start
            count = aligned if aligned > 0 else count
        return seat.ids[start : start + count], start, count == left, seat.known if count == left else -1
