"""What a signal to stop means: the first to finish what is in, a later one to end at once.

Knows the clock alone; who is told, and how, is the caller's.
"""

from __future__ import annotations

import time

IMPATIENT_S = 1.0
"""A signal this long after the first means: at once. Some senders repeat themselves, and sooner: `timeout` signals a process and
then its group, a terminal the group of a wrapper that passes it on."""


class Patience:
    """Of whoever sends the signals."""

    def __init__(self) -> None:
        self._first: float | None = None

    def lost(self) -> bool:
        """Note a signal; whether it means: at once."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
        return now - self._first > IMPATIENT_S
