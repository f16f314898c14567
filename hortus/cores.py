"""How many cores this process may use. Does not know for what."""

from __future__ import annotations

import math
import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""A container's: microseconds of processor time, and of how many (cgroup 2)."""


def usable_cores() -> int:
    """Cores of its affinity, and a container's quota where there is one; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = QUOTA.read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError, ZeroDivisionError):  # no cgroup 2, or no quota ("max")
        pass
    return max(cores, 1)
