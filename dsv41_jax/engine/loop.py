"""The device side of an engine: the state, the steps in flight, what goes out and what comes back.

A step of the loop dispatches a prefill step and a decode step from the state on the device, then reads the tokens of the
step before. So reasons to stop are found one step late; what a request produced beyond its end is dropped.
"""

import collections
import dataclasses
import itertools
import time

import jax

from dsv41_jax.cache import init_state
from dsv41_jax.engine import snapshot as snapshots
from dsv41_jax.engine.batch import Batches
from dsv41_jax.engine.limits import Limits, smallest
from dsv41_jax.engine.metrics import EngineMetrics
from dsv41_jax.engine.request import FINISH_REASONS, Request, Status
from dsv41_jax.engine.scheduler import Scheduler, Seat
from dsv41_jax.model import Network
from dsv41_jax.params import Transformer
from dsv41_jax.step import StepOutput, Steps


@dataclasses.dataclass
class Flight:
    """A dispatched step: its output, the seats that get tokens from it by row, and whether it was a decode step."""

    out: StepOutput
    seats: list[Seat | None]
    decode: bool
    copies: list  # prefix entries whose copies to the host began before it


class Loop:
    """Steps one engine's requests. One thread at a time; no exception of a request's own leaves it.

    news(): called whenever tokens came or a request ended. reuse_batches: see `Batches`.
    """

    def __init__(self, params: Transformer, net: Network, limits: Limits, gamma: int, mesh, reuse_batches: bool, news):
        self.limits, self.gamma, self._news = limits, gamma, news
        self.steps, self.state, sharding = _prepare(net, params, gamma, mesh)
        self._ranks = 1 if mesh is None else mesh.size
        self.batches = Batches(net.config, limits.end_ids, limits.biases, sharding, reuse_batches, limits.greedy_steps)
        self.scheduler = Scheduler(limits, gamma, self._ranks, self.batches.words)
        self._snapshots = snapshots.Snapshots(net.config.sliding_window, mesh)
        self.snapshot_bytes = self._snapshots.nbytes(self.state)
        self.counts = EngineMetrics(finished=dict.fromkeys(FINISH_REASONS, 0), drafted=[0] * gamma, accepted=[0] * gamma)
        self.flights: collections.deque[Flight] = collections.deque()
        self.any_cancelled = False  # set by `Request.cancel`, so that a step need not look at every request
        self._copies: list = []  # prefix entries on their way to host memory

    @property
    def keeps_prefixes(self) -> bool:
        return self.snapshot_bytes <= self.limits.prefix_bytes

    @property
    def busy(self) -> bool:
        """Whether anything is waiting, seated or in flight."""
        s = self.scheduler
        return bool(s.queue or self.flights or any(r.seats for r in s.ranks))

    def requests(self) -> list[Request]:
        """Every request that has not ended."""
        return [*self.scheduler.queue, *(s.request for rank in self.scheduler.ranks for s in rank.seats)]

    def enqueue(self, request: Request) -> None:
        """Take a new request."""
        self.scheduler.enqueue(request)
        self.any_cancelled |= request.cancelled

    # one step -----------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One step; whether it did anything."""
        if self.any_cancelled:
            self.any_cancelled = False
            for request in self.requests():
                if request.cancelled:
                    self.end(request, "cancelled")
        worked = bool(self.flights)
        self.scheduler.grow(self.read_all)
        older = len(self.flights)
        self._admit()
        worked |= self._dispatch_prefill()
        worked |= self._dispatch_decode()
        for _ in range(older):
            self._read(self.flights.popleft())
        return worked

    def _admit(self) -> None:
        for seat, entry in self.scheduler.admit():
            if self.keeps_prefixes:
                self.counts.prefix_lookups += 1
            if entry is not None:
                self.counts.prefix_hits += 1
                self.counts.prefix_tokens += entry.length
                self.state = self._snapshots.put(self.state, entry.snapshot, seat.rank.number, seat.slot, entry.length)

    def _dispatch_prefill(self) -> bool:
        chosen = [self.scheduler.prefill_rows(rank) for rank in self.scheduler.ranks]
        most = max(map(len, chosen))
        if not most:
            return False
        size = smallest(self.limits.prefill_buckets, most)
        rows = [row for rank in chosen for row in [*rank, *[(None, None)] * (size - len(rank))]]
        seats, pieces = [s for s, _ in rows], [p for _, p in rows]
        batch = self.batches.prefill(seats, pieces, self._columns(seats), self.limits.chunk)
        self.state, out = self.steps.prefill(self.state, batch)
        self.counts.prefill_steps += 1
        for seat, piece in rows:
            if seat is None:
                continue
            seat.done += len(piece[0])
            self.counts.prefill_tokens += len(piece[0])
            self._keep_prefix(seat)
            if piece[2]:
                seat.request.status = Status.DECODE
                seat.unread += seat.known < 0
        # rows that bring a token: the ends of prompts whose next token is not known already
        self._fly(out, [s if s and p[2] and s.known < 0 else None for s, p in rows], decode=False)
        return True

    def _dispatch_decode(self) -> bool:
        chosen = [[s for s in rank.seats if self.scheduler.runs(s)] for rank in self.scheduler.ranks]
        most = max(map(len, chosen))
        if not most:
            return False
        size = smallest(self.limits.batch_buckets, most)
        seats = [s for rank in chosen for s in [*rank, *[None] * (size - len(rank))]]
        self.state, out = self.steps.decode(self.state, self.batches.decode(seats, self._columns(seats)))
        for seat in filter(None, seats):
            seat.reach += self.gamma + 1
            seat.unread += 1
        self.counts.decode_steps += 1
        self.counts.decode_rows += sum(map(len, chosen))
        self.counts.decode_rows_padded += len(seats)
        self._fly(out, seats, decode=True)
        return True

    def _columns(self, seats) -> int:
        return smallest(self.limits.context_columns(), max(len(s.pages) for s in seats if s is not None))

    def _keep_prefix(self, seat: Seat) -> None:
        if not self.keeps_prefixes or not self.scheduler.completes_prefix(seat):
            return
        snapshot = self._snapshots.take(self.state, seat.rank.number, seat.slot, seat.done)
        entry = self.scheduler.keep_prefix(seat, snapshot, self.snapshot_bytes)
        if entry and self.limits.prefix_on_host:
            snapshots.start_copy(snapshot)
            self._copies.append(entry)

    def _fly(self, out: StepOutput, seats, decode: bool) -> None:
        for x in (out.tokens, out.count, out.finite):
            x.copy_to_host_async()
        self.flights.append(Flight(out, seats, decode, self._copies))
        self._copies = []

    # what came back -----------------------------------------------------------------------------------------------------

    def read_all(self) -> None:
        """Wait for every step in flight and take its tokens."""
        while self.flights:
            self._read(self.flights.popleft())

    def _read(self, flight: Flight) -> None:
        began = time.perf_counter()
        tokens, counts, finite = jax.device_get((flight.out.tokens, flight.out.count, flight.out.finite))
        self.counts.wait_s += time.perf_counter() - began
        for row, seat in enumerate(flight.seats):
            if seat is None or seat.request.seat is not seat:
                continue  # its request has ended since, or sits elsewhere: nobody wants these tokens
            seat.unread -= 1
            count = int(counts[row])
            if flight.decode:
                seat.reach -= self.gamma + 1 - count
                seat.request.drafted += self.gamma
                seat.request.accepted += count - 1
                self.counts.count_drafts(count - 1)
            if seat.request.cancelled:
                self.end(seat.request, "cancelled")
            elif not finite[row]:
                for entry in seat.entries:
                    seat.rank.prefixes.remove(entry)
                error = FloatingPointError(f"request {seat.request.id}: a logit that decided a token was not finite")
                self.end(seat.request, "error", error)
            else:
                self._deliver(seat.request, tokens[row, :count].tolist())
        for entry in flight.copies:
            entry.snapshot = snapshots.on_host(entry.snapshot)
        self._news()

    def _deliver(self, request: Request, tokens: list[int]) -> None:
        new, now = request.take(tokens, self.limits.max_context), time.perf_counter()
        self.counts.output_tokens += len(new)
        if request.first_token_at is None:
            request.first_token_at = now
            self.counts.time_to_first_token.add(now - request.submitted_at)
        else:
            self.counts.inter_token.add((now - request.last_token_at) / len(new), len(new))
        request.last_token_at = now
        if request.on_token:
            try:
                request.on_token(request, new)
            except Exception as e:
                self.end(request, "error", e)
                return
        if request.finish_reason:
            self.end(request, request.finish_reason)

    def end(self, request: Request, reason: str, error: Exception | None = None) -> None:
        """The one way out: frees what the request holds, once."""
        if request.finished:
            return
        if request.seat is not None:
            self.scheduler.leave(request.seat)
        elif request.status is Status.WAITING:
            self.scheduler.queue.remove(request)
        request.finish_reason, request.error = reason, error
        request.close()
        self.counts.finished[reason] += 1
        if request.on_finish:
            try:
                request.on_finish(request)
            except Exception as e:
                request.error = request.error or e
        self._news()

    # programs -----------------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Run every program once with padding alone, twice over: the first results may differ from the initial state in
        how they are placed, which is part of a program's signature."""
        limits = self.limits
        for _, columns in itertools.product(range(2), limits.context_columns()):
            for rows in limits.batch_buckets:
                for batch in self.batches.variants(rows * self._ranks, columns):
                    self.state, out = self.steps.decode(self.state, batch)
            for rows in limits.prefill_buckets:
                blank = [None] * rows * self._ranks
                batch = self.batches.prefill(blank, blank, columns, limits.chunk)
                self.state, out = self.steps.prefill(self.state, batch)
            if self.keeps_prefixes:
                self.state = self._snapshots.warm_up(self.state)
        jax.block_until_ready(out)

    def reload(self, params: Transformer, recompute: bool) -> None:
        """Other weights from the next step on; see `Engine.reload`."""
        self.steps.reload(params)
        self.counts.reloads += 1
        self.read_all()
        self.scheduler.drop_prefixes()
        for seat in (s for rank in self.scheduler.ranks for s in rank.seats):
            seat.cacheable = False
        if recompute:
            self.scheduler.requeue_all()


def _prepare(net: Network, params: Transformer, gamma: int, mesh):
    """(steps, state, sharding of the batches) on one device or over a mesh."""
    if mesh is None:
        return Steps(net, params, gamma), init_state(net.config, net.geometry, net.precision), None
    from sharding.rules import batch_spec, init_sharded_state
    from sharding.step import ShardedSteps

    steps = ShardedSteps(net, params, mesh, gamma)
    state = init_sharded_state(net.config, net.geometry, net.precision, mesh)
    return steps, state, jax.sharding.NamedSharding(mesh, batch_spec())
