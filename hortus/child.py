"""What a supervised process and its supervisor (hortus/supervise.py) say to each other.

A child starts with a pipe to its supervisor as its standard output. There it says `ready ADDRESS`, or `failed REASON` before it
exits with status 1; what it writes to standard output otherwise (`--access-log -`) goes where the supervisor's own does. It ends
when its supervisor does, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

from hortus.start import say

_PR_SET_PDEATHSIG = 1

_supervisor = 1
"""Descriptor of the pipe."""


def announce(address: str, banner: str, *, supervised: bool) -> None:
    """Tell the supervisor, or a person, that requests are welcome."""
    if supervised:
        _tell(f"ready {address}")
    else:
        say(banner)


def fail(reason: str) -> None:
    """Tell the supervisor why there is no start."""
    _tell("failed " + " ".join(reason.split()))


def _tell(words: str) -> None:
    with contextlib.suppress(OSError):  # it has gone, and this process goes with it
        os.write(_supervisor, words.encode(errors="replace") + b"\n")


def tie_to_parent(parent: int, out: int) -> None:
    """Keep the pipe to the supervisor, and write to `out` from now on, a descriptor of what is its own standard output. Get
    SIGTERM when the parent process dies, and at once if it has died already. Linux only; elsewhere nothing of that."""
    global _supervisor
    _supervisor = os.dup(1)
    os.dup2(out, 1)
    os.close(out)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)
