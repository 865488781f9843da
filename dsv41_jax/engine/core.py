"""The engine: continuous batching around the jitted steps (spec/serving.md).

    engine = Engine(params, config, max_requests=64, max_context=32768)
    requests = [engine.submit(ids, SamplingParams(temperature=0.7, seed=i)) for i, ids in enumerate(prompts)]
    engine.run()

A step of the engine dispatches a prefill step and a decode step from the state on the device, then reads the tokens of the
engine step before. So reasons to stop are found one step late; what a request produced beyond its end is dropped.
"""

import collections
import concurrent.futures
import copy
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Sequence

import jax

from dsv41_jax.cache import init_state
from dsv41_jax.config import ModelConfig
from dsv41_jax.engine import snapshot as snapshots
from dsv41_jax.engine.batch import Batches
from dsv41_jax.engine.limits import Limits, smallest
from dsv41_jax.engine.metrics import EngineMetrics
from dsv41_jax.engine.request import Request, Status
from dsv41_jax.engine.scheduler import Scheduler, Seat
from dsv41_jax.model import Network
from dsv41_jax.options import DecodeOptions
from dsv41_jax.params import Transformer
from dsv41_jax.precision import precision as by_name
from dsv41_jax.sampling import SamplingParams
from dsv41_jax.step import StepOutput, Steps


@dataclasses.dataclass
class _Flight:
    """A dispatched step: its output, the seats that get tokens from it by row, and whether it was a decode step."""

    out: StepOutput
    seats: list[Seat | None]
    decode: bool
    copies: list = dataclasses.field(default_factory=list)  # prefix entries whose copies to the host began before it


class Engine:
    """Serves requests with one network.

    max_requests, max_context, pages and everything in **limits: see `Limits`. gamma: drafts verified a step [the block
    size]. tokenizer: needed for stop strings only. mesh: serve over its ranks (`sharding`), params from `load_sharded`;
    requests are spread over the ranks. reuse_batches: keep decode batches that do not change on the device.

    One thread at a time steps an engine: whoever calls `step` or `run`, or iterates over a request while nobody runs it.
    `submit`, `Request.cancel`, `reload`, `metrics` and `shutdown` may be called from any thread.
    Raises ValueError (field, expected, got) before anything is allocated.
    """

    def __init__(self, params: Transformer, config: ModelConfig, options: DecodeOptions | None = None, max_requests: int = 8,
                 max_context: int | None = None, pages: int | None = None, *, gamma: int | None = None,
                 precision: str = "released", tokenizer=None, mesh: jax.sharding.Mesh | None = None,
                 reuse_batches: bool = True, **limits):  # fmt: skip
        most = config.dspark_block_size if config.has_draft else 0
        gamma = most if gamma is None else gamma
        wanted = Limits(max_requests=max_requests, max_context=max_context, pages=pages, **limits)
        self.limits = wanted.resolved(config, max(0, gamma))
        self.config, self.gamma, self.tokenizer = config, gamma, tokenizer
        net = Network(config, self.limits.geometry(gamma), by_name(precision), options or DecodeOptions())
        self.steps, self._state, sharding = _prepare(net, params, gamma, mesh)
        self._ranks = 1 if mesh is None else mesh.size
        self._batches = Batches(config, self.limits.end_ids, self.limits.biases, sharding, reuse_batches,
                                self.limits.greedy_steps)  # fmt: skip
        self._scheduler = Scheduler(self.limits, gamma, self._ranks, self._batches.words)
        self._snapshots = snapshots.Snapshots(config.sliding_window, mesh)
        self._snapshot_bytes = self._snapshots.nbytes(self._state)
        self._counts = EngineMetrics(drafted=[0] * gamma, accepted=[0] * gamma)
        self._flights: collections.deque[_Flight] = collections.deque()
        self._copies: list = []  # prefix entries on their way to host memory
        self._numbers = itertools.count()
        self._inbox: collections.deque[Request] = collections.deque()
        self._calls: collections.deque = collections.deque()  # (function, future) for the thread that runs the engine
        self._lock = threading.RLock()  # held by whoever steps
        self._news = threading.Condition()  # something was submitted, produced or ended
        self._stepping, self._runner, self._closing = False, None, None

    # requests -----------------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        *,
        max_new_tokens: int = 2**30,
        stop_strings: Sequence[str] = (),
        on_token: Callable[[Request, list[int]], None] | None = None,
        on_finish: Callable[[Request], None] | None = None,
    ) -> Request:
        """Queue a request. What is wrong with it becomes its error: it is returned finished, with reason "error".

        on_token(request, new ids) and on_finish(request) are called by the thread that steps the engine; an exception in
        one ends the request with that error and reaches nobody else."""
        request = Request(self, next(self._numbers), prompt_ids, sampling, max_new_tokens, stop_strings, on_token, on_finish)
        self._counts.submitted += 1
        try:
            if self._closing is not None:
                raise RuntimeError("engine: is shut down and takes no more requests")
            request.check(self.config, self.limits.max_context, self.limits.end_ids, self.limits.biases, self.tokenizer)
            most, held = self._scheduler.most_pages(request), self.limits.pages - 1
            if most > held:
                raise ValueError(f"request: prompt and max_new_tokens expected to fit {held} pages, may need {most}")
        except Exception as e:  # a bad request never reaches the caller of others
            self._end(request, "error", e)
            return request
        self._inbox.append(request)
        self._notify()
        return request

    # the loop -----------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Dispatch the next step and read the one before; whether anything is left to do.

        An exception from the device ends every unfinished request with it and is raised."""
        with self._lock:
            if self._stepping:
                raise RuntimeError("engine: step() expected outside of callbacks, called from one")
            self._stepping, began, waited = True, time.perf_counter(), self._counts.wait_s
            try:
                worked = self._step()
            except BaseException as e:
                self._fail(e)
                raise
            finally:
                self._stepping = False
            if worked:
                seconds = time.perf_counter() - began
                self._counts.steps += 1
                self._counts.busy_s += seconds
                self._counts.step.add(seconds)
            return self._busy()

    def run(self, forever: bool = False) -> None:
        """Step until no request is left; with `forever`, wait for more until `shutdown`."""
        self._runner = threading.get_ident()
        try:
            while True:
                if not self.step():
                    if self._closing is not None or not forever:
                        return
                    with self._news:
                        self._news.wait_for(lambda: self._inbox or self._calls or self._closing is not None, timeout=1.0)
        finally:
            self._runner = None
            self._answer_calls()
            self._notify()

    def shutdown(self, drain: bool = True, wait: bool = True) -> None:
        """Take no more requests; drain: finish those that are here, else cancel them. wait=False only says so (it is safe
        in a signal handler): whoever runs the engine carries it out at its next step."""
        self._closing = "drain" if drain and self._closing != "cancel" else "cancel"
        while wait and self._busy():
            if self._elsewhere():
                self._wait(lambda: not self._busy())
            else:
                self.step()

    def warm_up(self) -> None:
        """Compile every program that serving can come to need: each bucket of both steps, and the prefix snapshots. Twice
        over, since the first results may differ from the initial state in how they are placed."""
        limits = self.limits
        with self._lock:
            for _, columns in itertools.product(range(2), limits.context_columns()):
                for rows in limits.batch_buckets:
                    for batch in self._batches.variants(rows * self._ranks, columns):
                        self._state, out = self.steps.decode(self._state, batch)
                for rows in limits.prefill_buckets:
                    blank = [None] * rows * self._ranks
                    batch = self._batches.prefill(blank, blank, columns, limits.chunk)
                    self._state, out = self.steps.prefill(self._state, batch)
                if self._keeps_prefixes:
                    self._state = self._snapshots.warm_up(self._state)
            jax.block_until_ready(out)

    def reload(self, params: Transformer, recompute: bool = True) -> None:
        """Replace the weights between two steps; no request is lost and nothing compiles. Tokens that requests have stay.

        recompute: run prompts and tokens again through the new weights, so that the rest of each output is theirs alone;
        else caches of the old weights stay in use until their requests end. Cached prefixes are dropped.
        Raises ValueError, with nothing changed, for parameters of another shape."""

        def replace():
            self.steps.reload(params)
            self._counts.reloads += 1
            self._read_all()
            for rank in self._scheduler.ranks:
                rank.prefixes.clear()
                for seat in rank.seats:
                    seat.cacheable = False
            if recompute:
                self._scheduler.requeue_all()

        self._call(replace)

    @property
    def metrics(self) -> EngineMetrics:
        """A copy of all counts, gauges as they are now."""
        out, ranks = copy.deepcopy(self._counts), self._scheduler.ranks
        out.waiting = len(self._inbox) + len(self._scheduler.queue)
        out.running = sum(len(r.seats) for r in ranks)
        out.preemptions = self._scheduler.preempted
        out.batches_built, out.batches_reused = self._batches.built, self._batches.reused
        out.pages_used = sum(r.allocator.used for r in ranks)
        out.pages_cached = sum(r.prefixes.pages for r in ranks)
        out.pages_total = sum(r.allocator.capacity for r in ranks)
        out.prefix_entries = sum(len(r.prefixes) for r in ranks)
        out.prefix_bytes = sum(r.prefixes.nbytes for r in ranks)
        out.prefix_evicted = sum(r.prefixes.evicted for r in ranks)
        return out

    def drop_prefixes(self) -> None:
        """Forget every cached prefix."""
        self._call(lambda: [rank.prefixes.clear() for rank in self._scheduler.ranks])

    # one step -----------------------------------------------------------------------------------------------------------

    def _step(self) -> bool:
        self._answer_calls()
        while self._inbox:
            self._scheduler.queue.append(self._inbox.popleft())
        self._end_cancelled()
        older = len(self._flights)
        self._scheduler.grow(self._read_all)
        self._admit()
        dispatched = self._dispatch_prefill()
        dispatched |= self._dispatch_decode()
        for _ in range(min(older, len(self._flights))):
            self._read(self._flights.popleft())
        return dispatched or older > 0

    def _end_cancelled(self) -> None:
        queue, ranks = self._scheduler.queue, self._scheduler.ranks
        for request in [*queue, *(s.request for r in ranks for s in r.seats)]:
            if request.cancelled or self._closing == "cancel":
                self._end(request, "cancelled")

    def _admit(self) -> None:
        for seat, entry in self._scheduler.admit():
            if self._keeps_prefixes:
                self._counts.prefix_lookups += 1
            if entry is not None:
                self._counts.prefix_hits += 1
                self._counts.prefix_tokens += entry.length
                self._state = self._snapshots.put(self._state, entry.snapshot, seat.rank.number, seat.slot, entry.length)

    def _dispatch_prefill(self) -> bool:
        chosen = [self._scheduler.prefill_rows(rank) for rank in self._scheduler.ranks]
        most = max(map(len, chosen))
        if not most:
            return False
        size = smallest(self.limits.prefill_buckets, most)
        rows = [row for rank in chosen for row in [*rank, *[(None, None)] * (size - len(rank))]]
        seats, pieces = [s for s, _ in rows], [p for _, p in rows]
        batch = self._batches.prefill(seats, pieces, self._columns(seats), self.limits.chunk)
        self._state, out = self.steps.prefill(self._state, batch)
        self._counts.prefill_steps += 1
        for seat, piece in rows:
            if seat is None:
                continue
            seat.done += len(piece[0])
            self._counts.prefill_tokens += len(piece[0])
            self._keep_prefix(seat)
            if piece[2]:
                seat.request.status = Status.DECODE
                seat.unread += seat.known < 0
        # rows that bring a token: the ends of prompts whose next token is not known already
        self._fly(out, [s if s and p[2] and s.known < 0 else None for s, p in rows], decode=False)
        return True

    def _dispatch_decode(self) -> bool:
        chosen = [[s for s in rank.seats if self._scheduler.runs(s)] for rank in self._scheduler.ranks]
        most = max(map(len, chosen))
        if not most:
            return False
        size = smallest(self.limits.batch_buckets, most)
        seats = [s for rank in chosen for s in [*rank, *[None] * (size - len(rank))]]
        self._state, out = self.steps.decode(self._state, self._batches.decode(seats, self._columns(seats)))
        for seat in filter(None, seats):
            seat.reach += self.gamma + 1
            seat.unread += 1
        self._counts.decode_steps += 1
        self._counts.decode_rows += sum(map(len, chosen))
        self._counts.decode_rows_padded += len(seats)
        self._fly(out, seats, decode=True)
        return True

    def _columns(self, seats) -> int:
        return smallest(self.limits.context_columns(), max(len(s.pages) for s in seats if s is not None))

    @property
    def _keeps_prefixes(self) -> bool:
        return self._snapshot_bytes <= self.limits.prefix_bytes

    def _keep_prefix(self, seat: Seat) -> None:
        if not self._keeps_prefixes or not self._scheduler.completes_prefix(seat):
            return
        snapshot = self._snapshots.take(self._state, seat.rank.number, seat.slot, seat.done)
        entry = self._scheduler.keep_prefix(seat, snapshot, self._snapshot_bytes)
        if entry and self.limits.prefix_on_host:
            snapshots.start_copy(snapshot)
            self._copies.append(entry)

    def _fly(self, out: StepOutput, seats, decode: bool) -> None:
        for x in (out.tokens, out.count, out.finite):
            x.copy_to_host_async()
        self._flights.append(_Flight(out, seats, decode, self._copies))
        self._copies = []

    # what came back -----------------------------------------------------------------------------------------------------

    def _read_all(self) -> None:
        while self._flights:
            self._read(self._flights.popleft())

    def _read(self, flight: _Flight) -> None:
        began = time.perf_counter()
        tokens, counts, finite = jax.device_get((flight.out.tokens, flight.out.count, flight.out.finite))
        self._counts.wait_s += time.perf_counter() - began
        for row, seat in enumerate(flight.seats):
            if seat is None or seat.request.seat is not seat:
                continue  # its request has ended since, or sits elsewhere: nobody wants these tokens
            seat.unread -= 1
            count = int(counts[row])
            if flight.decode:
                seat.reach -= self.gamma + 1 - count
                seat.request.drafted += self.gamma
                seat.request.accepted += count - 1
                self._counts.count_drafts(count - 1)
            if seat.request.cancelled:
                self._end(seat.request, "cancelled")
            elif not finite[row]:
                for entry in seat.entries:
                    seat.rank.prefixes.remove(entry)
                error = FloatingPointError(f"request {seat.request.id}: a logit that decided a token was not finite")
                self._end(seat.request, "error", error)
            else:
                self._deliver(seat.request, tokens[row, :count].tolist())
        for entry in flight.copies:
            entry.snapshot = snapshots.on_host(entry.snapshot)
        self._notify()

    def _deliver(self, request: Request, tokens: list[int]) -> None:
        new, now = request.take(tokens, self.limits.max_context), time.perf_counter()
        self._counts.output_tokens += len(new)
        if request.first_token_at is None:
            request.first_token_at = now
            self._counts.time_to_first_token.add(now - request.submitted_at)
        else:
            self._counts.inter_token.add((now - request.last_token_at) / len(new), len(new))
        request.last_token_at = now
        if request.on_token:
            try:
                request.on_token(request, new)
            except Exception as e:
                self._end(request, "error", e)
                return
        if request.finish_reason:
            self._end(request, request.finish_reason)

    def _end(self, request: Request, reason: str, error: Exception | None = None) -> None:
        if request.finished:
            return
        if request.seat is not None:
            self._scheduler.leave(request.seat)
        else:
            for waiting in (self._scheduler.queue, self._inbox):
                if request in waiting:
                    waiting.remove(request)
        request.finish_reason, request.error = reason, error
        request.close()
        self._counts.finished[reason] = self._counts.finished.get(reason, 0) + 1
        if request.on_finish:
            try:
                request.on_finish(request)
            except Exception as e:
                request.error = request.error or e
        self._notify()

    def _fail(self, error: BaseException) -> None:
        """The state may be gone: nothing can go on. Finished output stays, everything else ends with the error."""
        self._closing = "cancel"
        self._flights.clear()
        wrapped = error if isinstance(error, Exception) else RuntimeError(f"engine: interrupted ({type(error).__name__})")
        everyone = [*self._inbox, *self._scheduler.queue, *(s.request for r in self._scheduler.ranks for s in r.seats)]
        for request in everyone:
            self._end(request, "error", wrapped)

    # threads ------------------------------------------------------------------------------------------------------------

    def _busy(self) -> bool:
        s = self._scheduler
        return bool(self._inbox or self._calls or s.queue or self._flights or any(r.seats for r in s.ranks))

    def _elsewhere(self) -> bool:
        """Whether another thread runs the engine."""
        return self._runner not in (None, threading.get_ident())

    def _notify(self) -> None:
        with self._news:
            self._news.notify_all()

    def _wait(self, ready) -> None:
        with self._news:
            self._news.wait_for(lambda: ready() or not self._elsewhere(), timeout=1.0)

    def _advance(self, request: Request, sent: int) -> None:
        """Until a request has more than `sent` tokens or is over: step, or wait for whoever steps."""
        if self._elsewhere():
            self._wait(lambda: len(request.token_ids) > sent or request.finished)
        else:
            self.step()

    def _call(self, function) -> None:
        """Run a function between two steps, in the thread that steps; raises what it raises."""
        if self._elsewhere():
            future = concurrent.futures.Future()
            self._calls.append((function, future))
            self._notify()
            future.result()
        else:
            with self._lock:
                function()

    def _answer_calls(self) -> None:
        while self._calls:
            function, future = self._calls.popleft()
            try:
                future.set_result(function())
            except Exception as e:
                future.set_exception(e)


def _prepare(net: Network, params: Transformer, gamma: int, mesh):
    """(steps, state, sharding of the batches) on one device or over a mesh."""
    if mesh is None:
        return Steps(net, params, gamma), init_state(net.config, net.geometry, net.precision), None
    from sharding.rules import batch_spec, init_sharded_state
    from sharding.step import ShardedSteps

    steps = ShardedSteps(net, params, mesh, gamma)
    state = init_sharded_state(net.config, net.geometry, net.precision, mesh)
    return steps, state, jax.sharding.NamedSharding(mesh, batch_spec())
