"""Where the command begins: signals first, then everything that takes time to import.

A server that is told to stop before it has anything to finish ends with 0, as it does later; one that is hung up on before
there is anything to read again goes on. Knows no commands but by the first word.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

SERVERS = ("serve", "tulip", "ivy")
"""Commands that SIGHUP does not end."""


def arm(words: list[str]) -> None:
    """The signals of a process that has begun nothing yet. `embed` and `bench` bring their own."""
    if words[:1] in (["embed"], ["bench"]):
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop_early)
    if words[:1] and words[0] in SERVERS:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _stop_early(number: int, frame: FrameType | None) -> None:
    os._exit(0)


def main() -> int:
    """The command `hortus`. Returns the exit status: 0 done, 1 could not start, 2 bad usage."""
    arm(sys.argv[1:])
    from hortus.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
