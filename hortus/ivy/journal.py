"""The access log: one JSON line a request, written by a thread, so that no request waits for a disk.

Does not know HTTP: it is given fields.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from queue import Empty, Full, Queue
from typing import Any, BinaryIO

import msgspec

from hortus.errors import StartError

log = logging.getLogger("hortus.ivy")

MOST_WAITING = 100_000
"""Lines that wait for the disk; more are dropped and counted, so that a full disk never fills the memory."""
MOST_AT_ONCE = 1000
"""Lines in one write."""


class Journal:
    """Lines in the order of `write`, on their own thread until `close`."""

    def __init__(self, file: str) -> None:
        """file: a path, appended to, or `-` for standard output. StartError when it cannot be opened."""
        self._file = file
        self._owned = file != "-"
        try:
            self._out: BinaryIO = self._opened() if self._owned else sys.stdout.buffer
        except OSError as e:
            raise StartError(f"--access-log {file}: {e.strerror or e}") from None
        self._waiting: Queue[tuple[float, dict[str, Any]] | None] = Queue(MOST_WAITING)
        self.dropped = 0
        """Lines lost because the disk did not keep up."""
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    def write(self, line: dict[str, Any]) -> None:
        """Take a line; never waits."""
        try:
            self._waiting.put_nowait((time.time(), line))
        except Full:
            self.dropped += 1

    def close(self) -> None:
        """Write what waits, for at most five seconds. Idempotent."""
        if self._thread.is_alive():
            try:
                self._waiting.put(None, timeout=5)
            except Full:
                return
            self._thread.join(5)
        if self.dropped:
            log.warning("the access log lost %d lines: its disk did not keep up", self.dropped)

    def _opened(self) -> BinaryIO:
        # Unbuffered appending: several gateways may share the file without cutting each other's lines.
        return open(self._file, "ab", buffering=0)

    def _moved(self) -> bool:
        """Whether the file is no longer where it was opened, and a new one is open: who rotates logs moves them away, and what is
        written to one that is then deleted is lost without a word."""
        with contextlib.suppress(FileNotFoundError):
            if not self._owned or os.path.samestat(os.stat(self._file), os.fstat(self._out.fileno())):
                return False
        old, self._out = self._out, self._opened()
        old.close()
        return True

    def _run(self) -> None:
        encode, broken, ended, torn = msgspec.json.Encoder().encode, False, False, False
        while not ended:
            lines = [self._waiting.get()]
            with contextlib.suppress(Empty):
                while len(lines) < MOST_AT_ONCE:
                    lines.append(self._waiting.get_nowait())
            ended = None in lines
            told = [line for line in lines if line is not None]
            text = b"".join([encode({"time": round(at, 6), **what}) + b"\n" for at, what in told])
            try:
                torn = not self._moved() and torn
                left = memoryview(b"\n" + text if torn else text)  # what is there may end in the middle of a line
                while left:  # a file that is unbuffered may take some and not all, a disk's last bytes
                    if not (taken := self._out.write(left)):
                        raise OSError("it takes nothing")
                    left = left[taken:]
                    torn = bool(left)
                self._out.flush()
                broken = False
            except (OSError, ValueError) as e:
                if not broken:
                    log.error("the access log cannot be written: %s", e)
                broken = True
                self.dropped += len(told)
        if self._owned:
            self._out.close()
