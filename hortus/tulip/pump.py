"""The pump: batches go in on the event loop, rows or an error come back to it; two threads in between do what may block.

A step that its engine calls quick is enqueued on the loop itself. Any other goes to the *step thread* (an eager GPU step costs
its caller ~10 ms, a CPU step computes inside it). What is not finished then, the *waiter thread* waits for, in order and
without the GIL. Does not know the queue, deadlines or futures.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic

import numpy as np

from hortus.errors import EngineError
from hortus.tulip.queue import Slice, W
from hortus.types import Engine, Float32, LazyTensor, TokenBatch

log = logging.getLogger(__name__)

_PROBE = TokenBatch.of([[0]])


@dataclass(slots=True, eq=False)
class Flight(Generic[W]):
    """One batch on its way through the engine."""

    slices: list[Slice[W]]
    """Whose sequences it holds; none: a probe of one token."""
    ends: list[int]
    """Where the rows of each slice end."""
    sequences: int
    rows: int
    tokens: int
    handed: float
    """When it was handed to the pump, monotonic seconds."""
    cut: bool = False
    """Of some of the works it holds only a part."""


class Pump(Generic[W]):
    """The engine's two threads. `answered(flight, rows, error, at)` is called on the loop once for every flight.

    rows: [rows, width] of the whole batch, or None and the error; at: when they were on the host. The slices of
    works that are cut over several batches have been copied into `work.rows` by then.
    """

    def __init__(
        self,
        engine: Engine,
        answered: Callable[[Flight[W], Float32 | None, BaseException | None, float], None],
    ) -> None:
        self._engine = engine
        self._width = engine.info.width
        self._answered = answered
        self._loop: asyncio.AbstractEventLoop
        self._loop_thread = 0
        self._to_step: SimpleQueue[tuple[Flight[W], TokenBatch] | None] = SimpleQueue()
        self._sent, self._stepped = 0, 0
        """Flights given to the step thread, and those it is done with: the loop counts the one, the thread the other."""
        self._to_wait: SimpleQueue[tuple[Flight[W], LazyTensor] | None] = SimpleQueue()
        # Daemons, so that a hung device cannot keep the process from exiting.
        self._threads = [
            threading.Thread(target=self._run_steps, name="tulip-step", daemon=True),
            threading.Thread(target=self._run_waits, name="tulip-waiter", daemon=True),
        ]

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._loop_thread = loop, threading.get_ident()
        for thread in self._threads:
            thread.start()

    def send(self, flight: Flight[W]) -> None:
        try:
            parts = [work.batch.slice(lo, hi) if flight.cut else work.batch for work, lo, hi in flight.slices]
            batch = TokenBatch.merge(parts) if parts else _PROBE
            # Only one thread is ever inside the engine, and steps keep their order.
            quick = self._sent == self._stepped and self._engine.quick(batch)
        except Exception as e:  # noqa: BLE001 - whatever it is, these requests must hear of it
            self._post(flight, None, e)
            return
        if quick:
            self._settle(flight, self._step(batch))
            return
        self._sent += 1
        self._to_step.put((flight, batch))

    def stop(self, timeout_s: float) -> bool:
        """Finish what was sent, end the threads. Blocks; False when they are still at it after `timeout_s`."""
        end = time.monotonic() + timeout_s
        self._to_step.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # In the threads, or on the loop for a quick step. `del`: an idle thread must not keep its last batch alive.

    def _run_steps(self) -> None:
        while (sent := self._to_step.get()) is not None:
            stepped = self._step(sent[1])
            self._stepped += 1  # before the answer, which may bring the next step
            self._settle(sent[0], stepped)
            del sent, stepped
        self._to_wait.put(None)

    def _run_waits(self) -> None:
        while (waiting := self._to_wait.get()) is not None:
            self._finish(*waiting)
            del waiting

    def _step(self, batch: TokenBatch) -> LazyTensor | BaseException:
        try:
            return self._engine.step(batch)
        except BaseException as e:  # noqa: BLE001 - whatever it is, these requests must hear of it
            return e

    def _settle(self, flight: Flight[W], stepped: LazyTensor | BaseException) -> None:
        """Answer what is finished already; the rest is waited for."""
        if isinstance(stepped, BaseException):
            self._post(flight, None, stepped)
            return
        try:
            ready = stepped.ready()
        except BaseException as e:  # noqa: BLE001 - as above
            self._post(flight, None, e)
            return
        if ready:
            self._finish(flight, stepped)
        else:
            self._to_wait.put((flight, stepped))

    def _finish(self, flight: Flight[W], lazy: LazyTensor) -> None:
        try:
            rows = lazy.result()
            if rows.shape != (flight.rows, self._width) or rows.dtype != np.float32:
                wanted = f"float32 {(flight.rows, self._width)}"
                raise EngineError(f"the engine gave rows of {rows.dtype} {rows.shape}, not {wanted}")
            start = 0
            for (work, lo, hi), end in zip(flight.slices, flight.ends, strict=True) if flight.cut else ():
                if work.rows is not None:
                    first, last = work.batch.rows_of(lo, hi)
                    work.rows[first:last] = rows[start:end]
                start = end
        except BaseException as e:  # noqa: BLE001 - as above
            self._post(flight, None, e)
            return
        self._post(flight, rows, None)

    def _post(self, flight: Flight[W], rows: Float32 | None, error: BaseException | None) -> None:
        # Not called at once even here: the loop's turn goes to what has arrived meanwhile. Waking the loop from itself costs
        # a system call more.
        here = threading.get_ident() == self._loop_thread
        call = self._loop.call_soon if here else self._loop.call_soon_threadsafe
        try:
            call(self._answered, flight, rows, error, time.monotonic())
        except RuntimeError:
            log.debug("a batch came back after the event loop had closed")
