"""The engine: what a process embeds to serve requests (spec/serving.md).

    engine = Engine(params, config, max_requests=64, max_context=32768)
    requests = [engine.submit(ids, SamplingParams(temperature=0.7, seed=i)) for i, ids in enumerate(prompts)]
    engine.run()

Requests, threads and shutdown are here; `loop` has the steps, `scheduler` decides who runs.
"""

import collections
import concurrent.futures
import copy
import itertools
import threading
import time
from collections.abc import Callable, Sequence

import jax

from dsv41_jax.config import ModelConfig
from dsv41_jax.engine.limits import Limits
from dsv41_jax.engine.loop import Loop
from dsv41_jax.engine.metrics import EngineMetrics
from dsv41_jax.engine.request import Request
from dsv41_jax.model import Network
from dsv41_jax.options import DecodeOptions
from dsv41_jax.params import Transformer
from dsv41_jax.precision import precision as by_name
from dsv41_jax.sampling import SamplingParams

UNTIL_THE_CONTEXT = 2**30  # max_new_tokens of a request that does not say


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
        self._loop = Loop(params, net, self.limits, gamma, mesh, reuse_batches, self._notify)
        self._numbers = itertools.count()
        self._inbox: collections.deque[Request] = collections.deque()
        self._calls: collections.deque = collections.deque()  # (function, future) for the thread that runs the engine
        self._lock = threading.RLock()  # held by whoever steps
        self._news = threading.Condition()  # something was submitted, produced or ended
        self._stepper, self._runner, self._closing = None, None, None  # threads that step and run; how it shuts down

    # requests -----------------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        *,
        max_new_tokens: int = UNTIL_THE_CONTEXT,
        stop_strings: Sequence[str] = (),
        on_token: Callable[[Request, list[int]], None] | None = None,
        on_finish: Callable[[Request], None] | None = None,
    ) -> Request:
        """Queue a request. What is wrong with it becomes its error: it is returned finished, with reason "error".

        on_token(request, new ids) and on_finish(request) are called by the thread that steps the engine (by this one for a
        request that is refused); an exception in one becomes the request's error and reaches nobody else; one of on_finish leaves the finish reason as
        it was."""
        request = Request(self, next(self._numbers), prompt_ids, sampling, max_new_tokens, stop_strings, on_token, on_finish)
        self._loop.counts.submitted += 1
        try:
            if self._closing is not None:
                raise RuntimeError("engine: is shut down and takes no more requests")
            request.check(self.config, self.limits.max_context, self.limits.end_ids, self.limits.biases, self.tokenizer)
            most, held = self._loop.scheduler.most_pages(request), self.limits.pages - 1
            if most > held:
                raise ValueError(f"request: prompt and max_new_tokens expected to fit {held} pages, may need {most}")
        except Exception as e:  # a bad request never reaches the caller of others
            self._loop.end(request, "error", e)
            return request
        self._inbox.append(request)
        self._notify()
        return request

    # the loop -----------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Dispatch the next step and read the one before; whether anything is left to do.

        An exception from the device ends every unfinished request with it, shuts the engine down, and is raised."""
        with self._lock:
            self._refuse_in_callback("step()")
            self._stepper, began, counts = threading.get_ident(), time.perf_counter(), self._loop.counts
            try:
                self._answer_calls()
                while self._inbox:
                    self._loop.enqueue(self._inbox.popleft())
                if self._closing == "cancel":
                    for request in self._loop.requests():
                        request.cancel()
                worked = self._loop.step()
            except BaseException as e:
                self._fail(e)
                raise
            finally:
                self._stepper = None
            if worked:
                seconds = time.perf_counter() - began
                counts.steps += 1
                counts.busy_s += seconds
                counts.step.add(seconds)
            return self._busy()

    def run(self, forever: bool = False) -> None:
        """Step until no request is left; with `forever`, wait for more until `shutdown`. Raises RuntimeError if another
        thread runs the engine already."""
        if self._elsewhere():
            raise RuntimeError("engine: another thread runs it already")
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
        """Take no more requests; drain: finish those that are here, else cancel them. wait=False only says so, which is
        safe in a signal handler and a callback: whoever runs the engine carries it out at its next step.
        Raises RuntimeError, with nothing changed, for wait=True in a callback."""
        if wait:
            self._refuse_in_callback("shutdown(wait=True)")
        self._closing = "drain" if drain and self._closing != "cancel" else "cancel"
        while wait and self._busy():
            if self._elsewhere():
                self._wait(lambda: not self._busy())
            else:
                self.step()

    def warm_up(self) -> None:
        """Compile every program that serving can come to need: each bucket of both steps, and the prefix snapshots."""
        with self._lock:
            self._loop.warm_up()

    def reload(self, params: Transformer, recompute: bool = True) -> None:
        """Replace the weights between two steps; no request is lost and nothing compiles. Tokens that requests have stay.

        recompute: run prompts and tokens again through the new weights, so that the rest of each output is theirs alone;
        else caches of the old weights stay in use until their requests end. Cached prefixes are dropped.
        Raises ValueError, with nothing changed, for parameters of another shape; RuntimeError in a callback."""
        self._refuse_in_callback("reload()")
        self._call(lambda: self._loop.reload(params, recompute))

    def drop_prefixes(self) -> None:
        """Forget every cached prefix."""
        self._call(self._loop.scheduler.drop_prefixes)

    @property
    def metrics(self) -> EngineMetrics:
        """A copy of all counts, gauges as they are now."""
        return self._call(self._collect)

    def _collect(self) -> EngineMetrics:
        out, scheduler, batches = copy.deepcopy(self._loop.counts), self._loop.scheduler, self._loop.batches
        out.waiting = len(self._inbox) + len(scheduler.queue)
        out.running = sum(len(r.seats) for r in scheduler.ranks)
        out.preemptions = scheduler.preempted
        out.batches_built, out.batches_reused = batches.built, batches.reused
        out.pages_used = sum(r.allocator.used for r in scheduler.ranks)
        out.pages_cached = sum(r.prefixes.pages for r in scheduler.ranks)
        out.pages_total = sum(r.allocator.capacity for r in scheduler.ranks)
        out.prefix_entries = sum(len(r.prefixes) for r in scheduler.ranks)
        out.prefix_bytes = sum(r.prefixes.nbytes for r in scheduler.ranks)
        out.prefix_evicted = sum(r.prefixes.evicted for r in scheduler.ranks)
        return out

    # threads ------------------------------------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        """The state may be gone: nothing can go on. Finished output stays, everything else ends with the error."""
        self._closing = "cancel"
        self._loop.flights.clear()
        wrapped = error if isinstance(error, Exception) else RuntimeError(f"engine: interrupted ({type(error).__name__})")
        for request in [*self._loop.requests(), *self._inbox]:
            self._loop.end(request, "error", wrapped)
        self._inbox.clear()

    def _refuse_in_callback(self, what: str) -> None:
        if self._stepper == threading.get_ident():
            raise RuntimeError(f"engine: {what} expected outside of callbacks, called from one")

    def _busy(self) -> bool:
        return bool(self._inbox or self._calls or self._loop.busy)

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

    def _call(self, function):
        """The result of a function run between two steps, by the thread that steps; raises what it raises."""
        if self._elsewhere():
            future = concurrent.futures.Future()
            self._calls.append((function, future))
            self._notify()
            while not future.done():
                self._wait(future.done)
                if not self._elsewhere():  # the thread that ran the engine has gone
                    self._answer_calls()
            return future.result()
        with self._lock:
            return function()

    def _answer_calls(self) -> None:
        with self._lock:
            while self._calls:
                function, future = self._calls.popleft()
                try:
                    future.set_result(function())
                except Exception as e:
                    future.set_exception(e)
