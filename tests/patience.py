"""Waiting and measuring on a machine that may stall for seconds, or take no time at all.

A test waits only for what stays once it has come (it holds the engine, or reads a count), with a deadline that costs nothing
when all is well. A claim about time is judged by the best of several tries.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

PATIENCE_S = 60.0
"""For whatever comes at once on a machine that is not held up."""

timed = pytest.mark.flaky(reruns=4, only_rerun=["AssertionError"])
"""What the code can do shows in the best of several tries; a stall of the machine only ever makes one worse."""


async def until(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Let the loop, the threads and other processes work until it holds."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is looked into sets no event
            await asyncio.sleep(0.005)


def until_seen(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """The same for a test without a loop."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)
