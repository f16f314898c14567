"""When things must have ended: one timer of the event loop for all, since one each costs as much as all other bookkeeping.

Knows the clock and the event loop. Does not know what ends, or how.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

EARLY_S = 0.001
"""The event loop's timers count in milliseconds, and may be early by as much."""


class Deadlines(Generic[K]):
    """What has a time by which it must end. All methods belong to one event loop."""

    def __init__(self, late: Callable[[K], None]) -> None:
        """late: called once for each that has not been discarded by its time."""
        self._late = late
        self._times: dict[K, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due = float("inf")
        """When the timer goes off; not later than any of the times."""

    def __len__(self) -> int:
        return len(self._times)

    def add(self, key: K, time_s: float) -> None:
        """time_s: time.monotonic() seconds."""
        self._times[key] = time_s
        if time_s < self._due:
            self._set(time_s)

    def discard(self, key: K) -> None:
        """It has ended. Harmless when it is not there."""
        self._times.pop(key, None)

    def _set(self, time_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = time_s
        self._timer = asyncio.get_running_loop().call_later(max(time_s - time.monotonic(), 0.0), self._ring)

    def _ring(self) -> None:
        self._timer, self._due = None, float("inf")
        now = time.monotonic() + EARLY_S
        for key in [key for key, time_s in self._times.items() if time_s <= now]:
            if self._times.pop(key, None) is not None:  # another's end may have been its end too
                self._late(key)
        if self._times:
            self._set(min(self._times.values()))
