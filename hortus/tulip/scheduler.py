"""The scheduler: takes token batches from many tasks, keeps the engine busy, and gives every one of them an answer.

One event loop owns all state; the pump's two threads do what may block.

    submit -> Queue -> _dispatch -> Pump [step thread, waiter thread] -> _answered -> everyone is told
              (pure)   one batch          engine.step, lazy.result       one call a batch

A step that fails, fails its own requests and is followed by a probe, a step of one token. A failed probe, or a step that
is not answered within --step-timeout-s, makes the scheduler unhealthy: everything gets NotReady at once until the engine
answers again. Does not know text, HTTP, gRPC or torch.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hortus.config import TulipConfig
from hortus.deadlines import Deadlines
from hortus.errors import DeadlineExceeded, Draining, EngineError, NotReady, OutOfMemory, Overloaded, RequestError, bare
from hortus.metrics import DROP_REASONS, Metrics
from hortus.tulip.pace import Pace
from hortus.tulip.pump import Flight, Pump
from hortus.tulip.queue import Queue, Taken, Work, decide
from hortus.types import Engine, Float32, Result, Timings, Together, TokenBatch

log = logging.getLogger(__name__)

_STOP_S = 5.0  # how long close() waits for a step that runs
_REPROBE_S = 1.0  # how long a failing engine is left alone between two probes


Tell = Callable[[Any, Result | RequestError], None]
"""Is called on the loop with a request's tag and its one answer. It must not raise."""


@dataclass(slots=True, eq=False)
class Asked(Work):
    """A work and who is owed its rows."""

    unanswered: int = 0
    """Sequences without a row yet."""
    tell: Tell | None = None
    """None once it has been answered, or nobody wants it any more."""
    tag: Any = None
    handed: float = 0.0
    """When its first batch was handed to the engine."""


class Scheduler:
    """Encoder over one engine in this process (see types.Encoder).

    All methods belong to the event loop that called start(). The engine stays the caller's: close it after close().
    Rows of a Result are the request's own: a view of its batch's rows, which nobody writes to again (so it keeps at most
    one batch alive), or an array of its own where the request was cut over several batches.
    """

    def __init__(self, engine: Engine, config: TulipConfig, metrics: Metrics, *, merge: bool = True) -> None:
        """merge: False makes each encode() steps of its own, in order of arrival, handed over at once: for callers whose
        batches are full already, and for whom a run repeated must give the same bits."""
        self.engine = engine
        self._width = engine.info.width
        self._max_batch_tokens = config.max_batch_tokens or engine.info.batch_tokens
        self._max_batch_sequences = config.max_batch_sequences
        self._max_in_flight = config.in_flight
        # A full batch is worth sending, also where a batch holds fewer sequences than the knob says.
        self._overlap_sequences = min(config.overlap_sequences, config.max_batch_sequences) if merge else 1
        self._step_timeout_s = config.step_timeout_s

        self._loop: asyncio.AbstractEventLoop
        self._started = False
        self._refusal: RequestError | None = NotReady("the scheduler has not started")
        self._queue: Queue[Asked] = Queue(
            config.max_queue_tokens, self._max_batch_tokens // 4 if config.lanes and merge else None, merge=merge
        )
        self._flights: dict[Flight[Asked], None] = {}  # in the order of handing over
        self._kicked = False
        self._front_since = 0.0  # when the oldest flight became the oldest
        self._pace = Pace(self._max_batch_tokens)
        self.busy_s = 0.0
        """Seconds in which the engine had something to do, since start."""
        self._watch: asyncio.TimerHandle | None = None
        self._reprobe: asyncio.TimerHandle | None = None
        self._deadlines: Deadlines[Asked] = Deadlines(self._expire)
        self._probes: set[asyncio.Future[bool]] = set()
        self._idle: asyncio.Event | None = None

        self._pump: Pump[Asked] = Pump(engine, self._answered)

        self._metrics = metrics
        self._dropped = {reason: metrics.dropped.labels(reason) for reason in DROP_REASONS}
        metrics.queue_tokens.set_function(lambda: self._queue.tokens)
        metrics.queue_bulk_tokens.set_function(lambda: self._queue.bulk_tokens)
        metrics.batch_limit_tokens.set(self._max_batch_tokens)
        metrics.queue_sequences.set_function(lambda: self._queue.sequences)
        metrics.batches_in_flight.set_function(lambda: len(self._flights))

    # Life

    async def start(self) -> None:
        """Start the threads; from here on encode() takes work."""
        self._loop = asyncio.get_running_loop()
        self._pump.start(self._loop)
        self._started = True
        self._refusal = None

    @property
    def healthy(self) -> bool:
        """False before start, after a hang or a failed probe (until the engine answers again), and when draining."""
        return self._refusal is None

    async def probe(self, timeout_s: float) -> bool:
        """Whether the engine answers within `timeout_s`: a step that runs now or, when none does, one of one token.

        A long step is no failure: while one runs, the engine counts as alive until --step-timeout-s says otherwise.
        """
        if not self._started or isinstance(self._refusal, Draining):
            return False
        answer: asyncio.Future[bool] = self._loop.create_future()
        self._probes.add(answer)
        if not self._flights:
            self._send_probe()
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            return self.healthy and any(flight.slices for flight in self._flights)
        finally:
            self._probes.discard(answer)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new work, finish what is in, then close(). What is left after `timeout_s` is refused as well."""
        self._refusal = Draining("shutting down: nothing more is taken")
        self._idle = asyncio.Event()
        self._tell_idle()
        if not self._idle.is_set():
            log.info("draining: %d sequences wait, %d batches run", self._queue.sequences, len(self._flights))
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            log.warning("not drained after %g s: %d sequences still wait", timeout_s, self._queue.sequences)
        await self.close()

    async def close(self) -> None:
        """Refuse what waits, let what runs finish (5 s at most), stop the threads. Idempotent."""
        self._refusal = Draining("shutting down: nothing more is taken")
        self._fail_waiting(self._refusal, "draining")
        for timer in (self._watch, self._reprobe):
            if timer is not None:
                timer.cancel()
        if not await asyncio.to_thread(self._pump.stop, _STOP_S):
            log.warning("the engine did not answer within %g s of closing; its threads are left behind", _STOP_S)
        self._fail_running(self._refusal, "draining")

    # A request

    async def encode(self, batch: TokenBatch, *, deadline: float | None = None) -> Result:
        """Rows for every sequence, in order. See types.Encoder; raises InvalidInput and NotReady besides."""
        work = self.submit(batch, deadline, _resolve, None)
        future: asyncio.Future[Result] = self._loop.create_future()
        work.tag = future
        try:
            return await future
        except asyncio.CancelledError:
            self.cancel(work)
            raise

    def submit(self, batch: TokenBatch, deadline: float | None, tell: Tell, tag: Any) -> Asked:
        """encode() for callers with many requests at once: no task and no future for each. Raises at once what encode raises
        before it waits; then tell(tag, answer) is called once, and later than this returns, unless it is cancelled."""
        sequences = len(batch.cu_seqlens) - 1
        if self._refusal is not None:
            self._dropped[self._refusal.code].inc(sequences)
            raise copy.copy(self._refusal)
        now = time.monotonic()
        if deadline is not None and deadline <= now:
            self._dropped["deadline_exceeded"].inc(sequences)
            raise DeadlineExceeded("the deadline had passed on arrival (--timeout-s, or the client's own)")
        work = Asked(batch, now, deadline, sequences, len(batch.ids), unanswered=sequences, tell=tell, tag=tag)
        if sequences == 0:
            self._loop.call_soon(self._tell, work, Result(np.zeros((0, self._width), np.float32)))
            return work
        try:
            self._queue.put(work)
        except Overloaded as e:
            self._dropped["overloaded"].inc(sequences)
            e.retry_after_s = self._pace.seconds(self._queue.tokens)
            raise
        # Not at once but when the loop comes round: requests that arrive together leave together.
        if not self._kicked and len(self._flights) < self._max_in_flight:
            self._kicked = True
            self._loop.call_soon(self._dispatch)
        if deadline is not None:
            self._deadlines.add(work, deadline)
        return work

    def cancel(self, work: Asked) -> None:
        """Nobody waits for what submit() returned: what of it has not been started is dropped, and nobody is told."""
        work.tell = None
        self._deadlines.discard(work)
        self._drop(work, "cancelled")

    def _tell(self, work: Asked, answer: Result | RequestError) -> None:
        """The one place where a request is answered, if it has not been."""
        if (tell := work.tell) is not None:
            work.tell = None
            self._deadlines.discard(work)
            tell(work.tag, answer)

    def _expire(self, work: Asked) -> None:
        waited_ms = (time.monotonic() - work.enqueued) * 1000
        where = "while it ran" if work.handed else f"in the queue, {self._queue.tokens} tokens wait"
        # A request may be older than this: its chunks come one after another.
        error = DeadlineExceeded(
            f"the request's time was up (--timeout-s, or the client's own limit) {waited_ms:.0f} ms after this part of it "
            f"had been queued: {where}"
        )
        self._fail(work, error, "deadline_exceeded")

    def _fail(self, work: Asked, error: RequestError, reason: str) -> None:
        self._tell(work, error)
        self._drop(work, reason)

    def _drop(self, work: Asked, reason: str) -> None:
        """What of it waits never runs; what runs is thrown away when it comes back."""
        if dropped := self._queue.drop(work):
            self._dropped[reason].inc(dropped)
        self._tell_idle()

    # A batch: out

    def _dispatch(self) -> None:
        """Hand over batches for as long as the rule says so."""
        self._kicked = False
        while self._queue.sequences and decide(
            in_flight=len(self._flights),
            waiting_sequences=self._queue.sequences,
            waiting_tokens=self._queue.tokens,
            max_in_flight=self._max_in_flight,
            max_batch_tokens=self._max_batch_tokens,
            overlap_sequences=self._overlap_sequences,
        ):
            now = time.monotonic()
            taken = self._queue.take(self._max_batch_tokens, self._max_batch_sequences, now)
            for work, sequences in taken.expired:
                self._dropped["deadline_exceeded"].inc(sequences)
                self._expire(work)
            if taken.slices:
                self._hand_over(taken, now)

    def _hand_over(self, taken: Taken[Asked], now: float) -> None:
        rows, cut, ends, waited = 0, False, [], []
        for work, lo, hi in taken.slices:
            if not work.handed:
                work.handed = now
                waited.append(now - work.enqueued)
            if hi - lo < len(work.batch.cu_seqlens) - 1:
                cut = True
                if work.rows is None:
                    try:
                        work.rows = np.empty((work.batch.rows, self._width), np.float32)
                    except MemoryError:
                        self._fail(work, OutOfMemory("no memory for the rows of this request"), "engine_error")
            first, end = (lo, hi) if work.batch.spans is None else work.batch.rows_of(lo, hi)
            rows += end - first
            ends.append(rows)
        self._send(Flight(taken.slices, ends, taken.sequences, rows, taken.tokens, now, cut))
        # Counted while the engine works.
        self._metrics.batch_tokens.observe(taken.tokens)
        self._metrics.batch_sequences.observe(taken.sequences)
        for seconds in waited:
            self._metrics.queue_seconds.observe(seconds)

    def _send(self, flight: Flight[Asked]) -> None:
        self._flights[flight] = None
        self._pump.send(flight)
        self._keep_watch()

    def _send_probe(self) -> None:
        self._send(Flight([], [], 1, 1, 1, time.monotonic()))

    # A batch: back

    def _answered(self, flight: Flight[Asked], rows: Float32 | None, error: BaseException | None, at: float) -> None:
        began = max(flight.handed, self._front_since)
        if next(iter(self._flights)) is flight:
            self._front_since = at
        del self._flights[flight]
        self.busy_s += at - began
        if rows is None:
            assert error is not None, "a batch comes back with rows or with an error"
            self._step_failed(flight, error)
        else:
            self._pace.note(flight.tokens, at - began)
            self._engine_lives()
        self._dispatch()  # before the answers, so that the engine works while they are read
        if rows is not None:
            self._give(flight, rows, at)
        self._metrics.step_seconds.observe(at - flight.handed)
        self._keep_watch()
        self._tell_idle()

    def _give(self, flight: Flight[Asked], rows: Float32, at: float) -> None:
        start, together = 0, Together(rows)
        for (work, lo, hi), end in zip(flight.slices, flight.ends, strict=True):
            work.unanswered -= hi - lo
            if work.unanswered == 0 and work.tell is not None:
                timings = Timings(0.0, (work.handed - work.enqueued) * 1000, (at - work.handed) * 1000)
                if work.rows is None:
                    result = Result(rows[start:end], timings, together, start)
                else:
                    result = Result(work.rows, timings)
                self._tell(work, result)
            start = end

    def _tell_idle(self) -> None:
        """When draining: nobody waits for an answer any more."""
        if self._idle is None or len(self._queue):
            return
        if all(work.tell is None for flight in self._flights for work, _, _ in flight.slices):
            self._idle.set()

    # Health

    def _engine_lives(self) -> None:
        if isinstance(self._refusal, NotReady):
            log.warning("the engine answers again")
            self._refusal = None
        if self._probes:
            self._tell_probes(True)

    def _step_failed(self, flight: Flight[Asked], error: BaseException) -> None:
        if flight.slices:
            log.error("a step of %d sequences, %d tokens failed", flight.sequences, flight.tokens, exc_info=error)
            # In words: the frames hold this batch, and may hold the one before.
            came = "".join(traceback.format_exception(error))
            bare(error)
            for work, _, _ in flight.slices:
                self._fail(work, _request_error(error, came), "engine_error")
            if all(other.slices for other in self._flights) and not isinstance(self._refusal, Draining):
                self._send_probe()
            return
        self._tell_probes(False)
        if isinstance(self._refusal, Draining):
            return
        if self._refusal is None:
            log.error("the engine failed a probe", exc_info=error)
        self._refusal = NotReady(f"the engine fails: {_request_error(error).message}")
        self._fail_waiting(self._refusal, "not_ready")
        self._reprobe = self._loop.call_later(_REPROBE_S, self._send_probe)

    def _tell_probes(self, alive: bool) -> None:
        for answer in self._probes:
            if not answer.done():
                answer.set_result(alive)

    def _keep_watch(self) -> None:
        """One timer for all flights, at least while there are any: hot path, so it is not moved with each batch."""
        if self._watch is None and self._flights:
            self._watch = self._loop.call_later(self._step_timeout_s, self._check_oldest)

    def _check_oldest(self) -> None:
        self._watch = None
        if not self._flights:
            return
        # A step waits for those before it: its own time runs from when it became the oldest.
        since = max(next(iter(self._flights)).handed, self._front_since)
        left = since + self._step_timeout_s - time.monotonic()
        if left > 0:
            self._watch = self._loop.call_later(left, self._check_oldest)
            return
        error = NotReady(f"the engine has not answered for {self._step_timeout_s:g} s (--step-timeout-s)")
        log.error("%s: requests are refused until it does", error.message)
        if not isinstance(self._refusal, Draining):
            self._refusal = error
        self._fail_waiting(error, "not_ready")
        self._fail_running(error, "not_ready")

    def _fail_waiting(self, error: RequestError, reason: str) -> None:
        for work in self._queue.works():
            self._fail(work, copy.copy(error), reason)

    def _fail_running(self, error: RequestError, reason: str) -> None:
        for flight in self._flights:
            for work, _, _ in flight.slices:
                self._fail(work, copy.copy(error), reason)


def _resolve(future: asyncio.Future[Result], answer: Result | RequestError) -> None:
    if future.done():  # cancelled, and its task has not run yet
        return
    if isinstance(answer, Result):
        future.set_result(answer)
    else:
        future.set_exception(answer)


def _request_error(error: BaseException, came: str = "") -> RequestError:
    """A fresh exception for one request: several tasks must not raise (and grow the traceback of) the same one.

    came: its traceback, which goes with it as a note. Whoever has the model in its own process sees it; answers do not tell it.
    """
    if isinstance(error, RequestError):
        fresh = copy.copy(error)
    else:
        first_line = str(error).partition("\n")[0]
        fresh = EngineError(f"the engine failed: {type(error).__name__}: {first_line}")
    fresh.__cause__ = error
    if came:
        fresh.add_note(came.rstrip())
    return fresh
