"""What the page watches: GET /watch, a sample of this process's metrics every second, as server-sent events.

Samples are taken only while somebody looks, kept for the last minutes, and encoded once for all who look. A sample is made
of the metrics that there are anyway; only the times of single requests are noted beside them, so that p50 and p99 are exact.
Knows metrics and readiness. Does not know requests, models or HTTP's bytes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from hortus.errors import Draining, Overloaded, RequestError
from hortus.ivy.exchange import Answer, Request
from hortus.ivy.health import Readiness
from hortus.metrics import Metrics

log = logging.getLogger("hortus.ivy")

EVERY_S = 1.0
HISTORY = 300
"""Samples kept: five minutes."""
MOST_WATCHERS = 32
"""Each holds a connection."""
MOST_TIMES = 16384
"""Requests of one second whose time is noted; of more, the last so many."""
ASK_EVERY_S = 2.0
"""Between two questions whether the engine answers. While it answers real requests, it is not asked."""

COLUMNS = (
    "at",
    "tokens_per_s",
    "requests_per_s",
    "p50_ms",
    "p99_ms",
    "in_flight",
    "queue_short_tokens",
    "queue_bulk_tokens",
    "steps_per_s",
    "step_tokens",
    "step_sequences",
    "eager_per_s",
    "captures_per_s",
    "replays_per_s",
    "graphs",
    "memory_bytes",
    "errors_per_s",
)
"""Of a sample. `at` is in Unix seconds; `step_tokens` and `step_sequences` are means over the steps of that second, None
without any, as are `p50_ms` and `p99_ms` without requests; `errors_per_s` is a table by code, without zeros. What belongs to
an engine in another process is None."""


@dataclass(frozen=True, slots=True)
class Replica:
    """How one replica of a gateway is."""

    address: str
    state: str
    """up, draining, resting (its engine does not answer just now) or down."""
    why: str | None
    """Why it is not up; of one that is and was lost before, why."""
    outstanding_tokens: int
    """Sent to it and not answered."""
    up_s: int | None
    losses: int
    """How often it was lost: it may be back between two samples."""
    lost_s: int | None
    """Seconds since the last loss."""


def read(metrics: Metrics) -> dict[str, float]:
    """What samples are made of, by name and label value, buckets left out. Half a millisecond."""
    m = metrics
    families = itertools.chain(
        m.requests.collect(), m.requests_in_flight.collect(), m.request_tokens.collect(), m.batch_limit_tokens.collect(),
        m.batch_tokens.collect(), m.batch_sequences.collect(), m.queue_tokens.collect(), m.queue_bulk_tokens.collect(),
        m.graph_steps.collect(), m.graphs.collect(), m.device_memory_bytes.collect(), m.device_memory_total_bytes.collect(),
    )  # fmt: skip
    return {
        s.name + "".join(s.labels.values()): s.value
        for family in families
        for s in family.samples
        if not s.name.endswith("_bucket")
    }


def sample(
    before: Mapping[str, float], now: Mapping[str, float], elapsed_s: float, seconds: Sequence[float], at: float
) -> list[Any]:
    """One row of COLUMNS from two readings and the times of the requests answered between them. Pure."""

    def rate(name: str) -> float:
        return round((now[name] - before[name]) / elapsed_s, 3)

    def mean(name: str, steps: float) -> float | None:
        return round((now[name + "_sum"] - before[name + "_sum"]) / steps, 1) if steps else None

    outcomes = [name for name in now if name.startswith("hortus_requests_total")]
    rates = {name.removeprefix("hortus_requests_total"): rate(name) for name in outcomes}
    p50 = p99 = None
    if seconds:
        count = len(seconds)
        ranks = count // 2, min(count - 1, int(count * 0.99))
        times = np.partition(np.fromiter(seconds, np.float64, count), ranks)
        p50, p99 = (round(float(times[rank]) * 1e3, 3) for rank in ranks)
    known = {
        "at": round(at, 1),
        "tokens_per_s": rate("hortus_request_tokens_sum"),
        "requests_per_s": round(sum(rates.values()), 3),
        "p50_ms": p50,
        "p99_ms": p99,
        "in_flight": now["hortus_requests_in_flight"],
        "errors_per_s": {code: value for code, value in rates.items() if value and code != "ok"},
    }
    if now["hortus_batch_limit_tokens"]:  # the scheduler and its engine are in this process
        steps = now["hortus_batch_tokens_count"] - before["hortus_batch_tokens_count"]
        known |= {
            "tokens_per_s": rate("hortus_batch_tokens_sum"),
            "queue_short_tokens": now["hortus_queue_tokens"] - now["hortus_queue_bulk_tokens"],
            "queue_bulk_tokens": now["hortus_queue_bulk_tokens"],
            "steps_per_s": rate("hortus_batch_tokens_count"),
            "step_tokens": mean("hortus_batch_tokens", steps),
            "step_sequences": mean("hortus_batch_sequences", steps),
            "eager_per_s": rate("hortus_graph_steps_totaleager"),
            "captures_per_s": rate("hortus_graph_steps_totalcapture"),
            "replays_per_s": rate("hortus_graph_steps_totalreplay"),
            "graphs": now["hortus_graphs"],
            "memory_bytes": now["hortus_device_memory_bytes"],
        }
    return [_short(known.get(name)) for name in COLUMNS]


def _short(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Watch:
    """The history and who looks at it. Everything belongs to the event loop."""

    def __init__(
        self,
        metrics: Metrics,
        state: Callable[[], str],
        readiness: Callable[[], Readiness | None],
        replicas: Callable[[], list[Replica]] | None,
        *,
        shared_port: bool,
    ) -> None:
        """state: the app's, in one word. replicas: None where the engine is in this process. shared_port: other processes
        answer on it too, so what is seen here is not all."""
        self._metrics, self._state, self._readiness, self._replicas = metrics, state, readiness, replicas
        self._shared_port = shared_port
        self.seconds: deque[float] | None = None
        """Times of the requests answered since the last sample; None while nobody looks."""
        self.watchers = 0
        self._rows: deque[list[Any]] = deque(maxlen=HISTORY)
        self._taken = 0
        """Samples taken, ever."""
        self._news = asyncio.Event()
        """Set when there is a sample, or an end; then replaced."""
        self._latest = b""
        """The event of the last sample alone, for all who have those before it."""
        self._reading, self._read_at = read(metrics), time.monotonic()
        """The last, and when it was."""
        self._reason: str | None = None
        """Why the engine does not answer."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._over = False

    async def watch(self, request: Request) -> Answer:
        """GET /watch. Overloaded when too many look already, Draining when it is over."""
        if self._over:
            raise Draining("this server is shutting down")
        if self.watchers >= MOST_WATCHERS:
            raise Overloaded(f"{self.watchers} pages watch this server already, the most there may be; close one")
        headers = b"cache-control: no-store\r\nx-accel-buffering: no\r\n"
        return Answer(b"", headers=headers, content_type=b"text/event-stream", pieces=self._events())

    def end(self) -> None:
        """Tell those who look that it is over, and let them go."""
        self._over = True
        self._tell()

    async def _events(self) -> AsyncGenerator[bytes, None]:
        self._arrive()
        try:
            over, news, seen = self._over, self._news, self._taken
            yield self._event(len(self._rows), columns=True)
            while not over:
                await news.wait()
                missed = min(self._taken - seen, HISTORY)
                over, news, seen = self._over, self._news, self._taken
                yield self._latest if missed == 1 and not over else self._event(missed)
        finally:
            self._leave()

    def _event(self, rows: int, *, columns: bool = False) -> bytes:
        """The last so many samples, and how things are now."""
        first = max(0, len(self._rows) - rows)
        told = {
            "state": "failing" if self._state() == "ready" and self._reason else self._state(),
            "reason": self._reason,
            "replicas": None if self._replicas is None else self._replicas(),
            "process": os.getpid(),
            "shared_port": self._shared_port,
            "step_limit_tokens": _short(self._reading["hortus_batch_limit_tokens"]) or None,
            "memory_limit_bytes": _short(self._reading["hortus_device_memory_total_bytes"]) or None,
            "rows": [self._rows[i] for i in range(first, len(self._rows))],
        }
        if columns:
            told["columns"] = COLUMNS
        return b"data: %b\n\n" % msgspec.json.encode(told)

    def _arrive(self) -> None:
        self.watchers += 1
        if self.watchers > 1:
            return
        self.seconds = deque(maxlen=MOST_TIMES)
        self._reading, self._read_at = read(self._metrics), time.monotonic()
        oldest = time.time() - HISTORY * EVERY_S
        while self._rows and self._rows[0][0] < oldest:
            self._rows.popleft()
        loop = asyncio.get_running_loop()
        for part in (self._sample, self._ask):
            task = loop.create_task(part())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _leave(self) -> None:
        self.watchers -= 1
        if self.watchers == 0:
            self.seconds = None
            for task in self._tasks:
                task.cancel()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _sample(self) -> None:
        """A row a second, until nobody looks. On a beat: what a sample takes does not add up."""
        due = time.monotonic()
        while True:
            due = max(due + EVERY_S, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            try:
                self.take()
            except Exception:
                log.exception("no sample for the page: a fault in this server")
            self._tell()

    def take(self) -> None:
        """One row more, of the time since the last; its event, for all who look."""
        seconds, self.seconds = self.seconds or (), deque(maxlen=MOST_TIMES)
        at, now = time.monotonic(), read(self._metrics)
        self._rows.append(sample(self._reading, now, at - self._read_at, seconds, time.time()))
        self._reading, self._read_at = now, at
        self._taken += 1
        self._latest = self._event(1)

    async def _ask(self) -> None:
        """Whether the engine answers, every so often, until nobody looks."""
        while True:
            readiness = self._readiness()
            if readiness is not None:
                try:
                    await readiness.check()
                    self._reason = None
                except RequestError as e:
                    self._reason = e.message
            await asyncio.sleep(ASK_EVERY_S)
