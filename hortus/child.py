"""What a supervised process and its supervisor (hortus/supervise.py) say to each other.

On its standard output a child says `ready ADDRESS`, or `failed REASON` before it exits with status 1. It ends when its
supervisor does, however that ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def announce(address: str, banner: str, *, supervised: bool) -> None:
    """Tell the supervisor, or a person, that requests are welcome."""
    print(f"ready {address}" if supervised else banner, flush=True)  # noqa: T201


def fail(reason: str) -> None:
    """Tell the supervisor why there is no start."""
    print("failed " + " ".join(reason.split()), flush=True)  # noqa: T201


def tie_to_parent(parent: int) -> None:
    """Get SIGTERM when the parent process dies, and at once if it has died already. Linux only; elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)
