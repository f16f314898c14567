"""Long texts, read in a process of their own: `python -m hortus.ivy.apart`, started by the thread that needs one.

The library lets go of the GIL while it reads a text, but not while it makes Python's numbers of what it has read, nor while it
throws that away: 5 to 10 ms for a text of 200,000 characters, in which this process answers nobody. In another process nobody
waits for that (docs/decisions/004-long-texts-apart.md).

Knows pipes and pickles. Does not know tokenizers, only an object made by a recipe and its methods.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

log = logging.getLogger("hortus.ivy")

Recipe = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""What to call in the other process, with what, for the object whose methods are asked for. Must be picklable."""

NICE = 10
"""Its priority: what a long text takes longer by, short ones do not wait."""
MOST_STARTS = 3
"""A process that keeps ending is not started for ever."""
_LENGTH = struct.Struct("<Q")


class Gone(Exception):
    """The process ended before it answered: what was asked has to be done elsewhere."""


class Apart:
    """One such process. Belongs to one thread; stop() may be called from any."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = self._stopped = False
        self._starts = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def ready(self, timeout_s: float = 0.0) -> bool:
        """Whether it can be asked. Starts it if there is none; making its object takes as long as here, so do not wait for it but
        do the work yourself meanwhile."""
        if self._is_ready or self._stopped:
            return self._is_ready
        if self._process is None:
            if self._starts == MOST_STARTS:
                return False
            self._starts += 1
            self._start()
        pipe = self._process.stdout if self._process is not None else None
        if pipe is None or not select.select([pipe], [], [], timeout_s)[0]:
            return False
        try:
            _read(pipe)
        except (EOFError, OSError):
            self._end("while starting")
            return False
        self._is_ready = True
        return True

    def call(self, method: str, *args: Any, **named: Any) -> Any:
        """What the method of its object returns; raises what that raises, and Gone. Only when ready()."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise Gone
        try:
            _write(process.stdin, (method, args, named))
            good, what = _read(process.stdout)
        except (EOFError, OSError) as e:
            self._end("with a text in its hands")
            raise Gone from e
        if not good:
            raise what
        return what

    def stop(self) -> None:
        """End it, whatever it is at."""
        self._stopped, self._is_ready = True, False
        process, self._process = self._process, None
        if process is not None:
            _end(process)

    def _start(self) -> None:
        words = [sys.executable, "-m", "hortus.ivy.apart"]
        try:
            process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert process.stdin is not None, "asked for"
            self._process = process
            _write(process.stdin, self._recipe)
        except OSError as e:
            self._end(str(e))

    def _end(self, when: str) -> None:
        process, self._process, self._is_ready = self._process, None, False
        status = None if process is None else _end(process)
        if not self._stopped:
            log.warning("a process that reads long texts ended %s (%s): they are read here", when, status)


def _end(process: subprocess.Popen[bytes]) -> int:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.01)  # one that has ended by itself tells how
    process.kill()
    status = process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    return status


def _write(pipe: BinaryIO | Any, what: Any) -> None:
    data = pickle.dumps(what, pickle.HIGHEST_PROTOCOL)
    pipe.write(_LENGTH.pack(len(data)))
    pipe.write(data)
    pipe.flush()


def _read(pipe: BinaryIO | Any) -> Any:
    (size,) = _LENGTH.unpack(_exactly(pipe, _LENGTH.size))
    return pickle.loads(_exactly(pipe, size))


def _exactly(pipe: BinaryIO | Any, size: int) -> bytes:
    data: bytes = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return data


def main() -> None:
    """The other process: makes the object, then answers until nobody asks any more."""
    os.nice(NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started this
    asks = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not get among the answers
    with contextlib.suppress(EOFError, BrokenPipeError):
        make, args, named = _read(asks)
        there = make(*args, **named)
        _write(answers, "ready")
        while True:
            method, args, named = _read(asks)
            try:
                answer = True, getattr(there, method)(*args, **named)
            except Exception as e:  # noqa: BLE001 - raised again where it was asked for
                answer = False, e
            _write(answers, answer)


if __name__ == "__main__":
    main()
