"""When requests are sent, and what a client sees: pure, on any wire and clock. load.py has the real ones.

Two ways to ask. *Closed*: so many connections, each of which sends its next request when the last is answered: what a
server can do. *Open*: requests fall due at Poisson times, whatever the server does, and latency counts from the time a
request was due, so that a server that stalls cannot also stop the clock (coordinated omission): what a user sees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from hortus.errors import StartError

PATIENCE_S = 60.0
"""A server that answers nothing for so long is given up."""
BROKEN = 0
"""Status of a request whose connection ended before its answer."""
UNANSWERED = -1
"""Status of an open loop's request that had no answer when the run was over."""
SHORT_BODY = -2
"""Status of an answer with 200 that is less than half as long as others: no vectors can be in it."""


KEPT = 2
"""Of so many of the first requests the last answers are kept, to be compared."""


class NoFigureError(RuntimeError):
    """A load that gives no figure: what went wrong, in words for people."""


class RunError(StartError):
    """What went wrong is no target's doing: the run ends, and nobody is left out for it."""


Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Closed:
    """`clients` closed loops for so many seconds."""

    clients: int
    seconds: float

    def shares(self, processes: int) -> list[Closed]:
        """The same work over at most so many processes."""
        n = min(processes, self.clients)
        return [Closed(self.clients // n + (i < self.clients % n), self.seconds) for i in range(n)]

    def pace(self) -> Pace:
        return ClosedPace(self.seconds, self.clients)

    def lasted(self, seen: Seen) -> float:
        """Seconds that the answers are of."""
        return seen.seconds

    @property
    def connections(self) -> int:
        return self.clients


@dataclass(frozen=True, slots=True)
class Open:
    """Poisson arrivals at `rate` a second for so many seconds; the same times for the same seed."""

    rate: float
    seconds: float
    seed: int = 0
    connections: int = 500
    """Requests that may be outstanding a process; more wait in the client, and their clock runs."""

    def shares(self, processes: int) -> list[Open]:
        """Streams that together are the one: the sum of Poisson streams is a Poisson stream."""
        n = processes
        return [Open(self.rate / n, self.seconds, self.seed * 1000 + i, self.connections) for i in range(n)]

    def pace(self) -> Pace:
        return OpenPace(poisson(self.rate, self.seconds, self.seed), self.seconds)

    def lasted(self, seen: Seen) -> float:
        """Seconds that the answers are of: those in which requests fell due, and more where answers came later than any answer
        must. Waiting for what never came is none of them."""
        return max(self.seconds, seen.answered_s - min(seen.latencies_ms, default=0.0) / 1000)


Plan = Closed | Open


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Times of arrival in [0, seconds), with exponential gaps of mean 1 / rate."""
    rng, times, at = np.random.default_rng(seed), [], 0.0
    while (at := at + float(rng.exponential(1 / rate))) < seconds:
        times.append(at)
    return times


class Pace(Protocol):
    """When requests fall due, on a clock that starts at 0."""

    def take(self, now: float) -> float | None:
        """The time that the next request was due, which is then taken; None while none is."""

    def wait(self, now: float) -> float:
        """Seconds until one may be due."""

    def over(self, now: float) -> bool:
        """Nothing more will be due."""

    give_up: float
    """The time at which outstanding requests are no longer waited for."""


class ClosedPace:
    """A request is due whenever a connection is free, until the end."""

    def __init__(self, seconds: float, clients: int = 1) -> None:
        self._end, self.give_up, self._left = seconds, float("inf"), clients

    def take(self, now: float) -> float | None:
        if self.over(now):
            return None
        self._left -= 1
        return now

    def wait(self, now: float) -> float:
        return PATIENCE_S

    def over(self, now: float) -> bool:
        return now >= self._end and self._left <= 0  # a run shorter than one answer still gets one of each client


class OpenPace:
    """Requests are due at given times, in order. Those unanswered as long again after the last are given up."""

    def __init__(self, times: Sequence[float], seconds: float) -> None:
        self._times, self._at, self.give_up = times, 0, 2 * seconds + 1

    def take(self, now: float) -> float | None:
        if self._at < len(self._times) and self._times[self._at] <= now:
            self._at += 1
            return self._times[self._at - 1]
        return None

    def wait(self, now: float) -> float:
        return max(self._times[self._at] - now, 0.0) if self._at < len(self._times) else PATIENCE_S

    def over(self, now: float) -> bool:
        return self._at >= len(self._times)


class Wire(Protocol):
    """Where requests go. Keys name requests on their way."""

    def free(self) -> bool:
        """One more request may be sent now."""

    def send(self, number: int) -> int: ...

    def poll(self, timeout_s: float) -> Iterable[tuple[int, int]]:
        """(key, HTTP status or BROKEN) of each answer that is there, waiting for the first at most so long."""


@dataclass(slots=True)
class Seen:
    """What one client saw."""

    latencies_ms: list[float] = field(default_factory=list)
    """Of the answers with status 200, from when they were due."""
    late_ms: list[float] = field(default_factory=list)
    """How long after it was due each request was sent: the client's own lateness."""
    failed: Counter[int] = field(default_factory=Counter)
    """Other answers, by status."""
    seconds: float = 0.0
    answered_s: float = 0.0
    """When the last of them came."""
    cpu_s: float = 0.0
    answers: dict[int, bytes] = field(default_factory=dict)
    """The last whole answer to each of the first KEPT requests."""


def drive(pace: Pace, wire: Wire, clock: Callable[[], float]) -> Seen:
    """Send what is due while connections are free, and note each answer. `clock` starts at 0. Pure but for wire and clock."""
    seen, due, number = Seen(), dict[int, float](), 0

    def fill() -> None:
        nonlocal number
        while wire.free():
            now = clock()
            at = pace.take(now)
            if at is None:
                return
            due[wire.send(number)] = at
            seen.late_ms.append((now - at) * 1000)
            number += 1

    last = clock()
    while True:
        fill()
        now = clock()
        if not due and pace.over(now):
            break
        if now > pace.give_up:
            # What was never sent because all connections were busy is unanswered too.
            seen.failed[UNANSWERED] += len(due)
            while pace.take(now) is not None:
                seen.failed[UNANSWERED] += 1
            break
        timeout = min(pace.wait(now) if wire.free() else PATIENCE_S, PATIENCE_S, max(pace.give_up - now, 0.001))
        for key, status in wire.poll(timeout):
            last = clock()
            if status == 200:
                seen.answered_s = last
                seen.latencies_ms.append((last - due.pop(key)) * 1000)
            else:
                del due[key]
                seen.failed[status] += 1
            fill()
        if due and clock() - last > PATIENCE_S:
            raise TimeoutError(f"no answer for {PATIENCE_S:g} s with {len(due)} requests outstanding")
        if not due:
            last = clock()
    seen.seconds = clock()
    return seen


@dataclass(frozen=True, slots=True)
class Load:
    """What one run saw, all its clients together."""

    latencies_ms: Floats
    seconds: float
    client_cpu_s: float = 0.0
    """Processor seconds the clients themselves used."""
    failed: dict[int, int] = field(default_factory=dict)
    """Answers other than 200, by status; BROKEN and UNANSWERED among them."""
    late_ms: Floats = field(default_factory=lambda: np.zeros(0))
    target_cpu_s: float | None = None
    """Processor seconds the target used, where that can be told."""
    answers: tuple[tuple[int, Any], ...] = ()
    """The last answer that each client got to each of the first KEPT requests (its number before it), as the target knows to
    read it."""

    @property
    def requests_per_s(self) -> float:
        """Good answers a second."""
        return len(self.latencies_ms) / self.seconds if self.seconds else 0.0

    @staticmethod
    def join(loads: Sequence[Load], *, after_another: bool = False) -> Load:
        """Of clients that ran side by side, or of rounds one after another."""
        failed: Counter[int] = Counter()
        for load in loads:
            failed.update(load.failed)
        seconds = [load.seconds for load in loads]
        cpu = [load.target_cpu_s for load in loads if load.target_cpu_s is not None]
        return Load(
            np.concatenate([load.latencies_ms for load in loads]),
            sum(seconds) if after_another else max(seconds),
            sum(load.client_cpu_s for load in loads),
            dict(failed),
            np.concatenate([load.late_ms for load in loads]),
            sum(cpu) if len(cpu) == len(loads) else None,
            tuple(a for load in loads for a in load.answers),
        )


def checked(load: Load) -> Load:
    """The load of a closed loop, where every request must have been answered with 200. NoFigureError otherwise."""
    if load.failed or not len(load.latencies_ms):
        raise NoFigureError(f"{told(load.failed) or 'no answer'} beside {len(load.latencies_ms)} good answers")
    return load


_STATUS = {BROKEN: "a broken connection", UNANSWERED: "no answer", SHORT_BODY: "200 with too short a body"}


def told(failed: dict[int, int]) -> str:
    """`Load.failed` for people. Pure."""
    return ", ".join(f"{n} x {_STATUS.get(status, status)}" for status, n in failed.items())
