"""Where the command begins: standard streams and signals first, then everything that takes time to import.

A server that is told to stop before it has anything to finish ends with 0, as it does later; one that is hung up on before
there is anything to read again goes on. `hortus embed` ends with the status that a signal always has there. Knows no commands
but by the first word.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType
from typing import TextIO

SERVERS = ("serve", "tulip", "ivy")
"""Commands that SIGHUP does not end."""


def arm(words: list[str]) -> None:
    """Streams and signals of a process that has begun nothing yet; what it begins brings its own. `bench` is left as it is."""
    _fill_streams()
    if words[:1] == ["bench"]:
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop_embed_early if words[:1] == ["embed"] else _stop_early)
    if words[:1] and words[0] in SERVERS:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _fill_streams() -> None:
    """Nothing in the place of a standard stream that is closed (`hortus serve >&-`). Else the first sockets and files would
    get its number: what a library tells there would be sent to a client, and libuv ends a process that closes one."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            os.set_inheritable(number, True)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - as long as the process
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def say(text: str) -> bool:
    """A line for whoever started this process; whether it was taken. A full disk, or a reader that has gone, ends no server."""
    try:
        print(text, flush=True)  # noqa: T201
        return True
    except OSError as e:
        import logging  # not before the signals

        logging.getLogger("hortus").warning("standard output cannot be written: %s; it would have said:\n%s", e, text)
        spill(sys.stdout)
        return False


def spill(stream: TextIO) -> None:
    """Let go of what could not be written to a stream: it would be tried again at exit, and fail there."""
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def _stop_early(number: int, frame: FrameType | None) -> None:
    os._exit(0)


def _stop_embed_early(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def main() -> int:
    """The command `hortus`. Returns the exit status: 0 done, 1 could not start, 2 bad usage."""
    arm(sys.argv[1:])
    from hortus.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
