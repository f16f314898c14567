"""The worker threads of PyTorch's OpenMP library (GNU's): whose they are, and how to be rid of them.

Each thread that computes gets workers of its own, which it keeps as long as it lives. As soon as all of them together are more
than the cores, the library no longer lets idle ones wait for the next loop, but puts them to sleep at the end of each, and a step
has hundreds. So a thread that opened a model and will not compute again must give its workers up, or steps on another take
up to twice as long (docs/decisions/002-cpu-path.md). Does not know engines.
"""

from __future__ import annotations

import ctypes
import logging
import re
from pathlib import Path

log = logging.getLogger(__name__)

_SOFT = 1
"""omp_pause_soft: what the program has set stays set."""


def give_up_workers() -> None:
    """End the calling thread's workers; its next loop makes new ones (0.1 ms). Nothing where the library is another."""
    maps = Path("/proc/self/maps")
    for path in sorted(set(re.findall(r"/\S*/libgomp\S*", maps.read_text()))) if maps.exists() else ():
        try:
            ctypes.CDLL(path).omp_pause_resource_all(_SOFT)
        except (OSError, AttributeError) as e:  # one from before OpenMP 5.0
            log.info("%s keeps its threads: %s", path, e)
