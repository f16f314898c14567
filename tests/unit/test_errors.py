"""What errors hold: nothing that the cyclic collector would have to find."""

from __future__ import annotations

import asyncio
import gc
from types import FrameType

import pytest

from hortus.errors import DeadlineExceeded, bare, first_of


async def late(seconds: float) -> None:
    """A chunk whose own time is up as its request's is."""
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        raise DeadlineExceeded("late") from None
    raise DeadlineExceeded("early")


async def both(first_s: float) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(late(first_s))
            group.create_task(late(60))
    except BaseExceptionGroup as failures:
        raise first_of(failures) from None


async def answer(first_s: float) -> None:
    """As the gateway does: told, and bare."""
    with pytest.raises(DeadlineExceeded) as seen:
        await both(first_s)
    bare(seen.value)
    del seen


@pytest.mark.parametrize(("first_s", "cancelled"), [(60, True), (0, False), (0, True)])
async def test_a_group_that_is_cancelled_as_it_fails_leaves_no_ring(first_s, cancelled):
    gc.collect()
    gc.disable()
    try:
        task = asyncio.create_task(answer(first_s))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if cancelled:
            task.cancel()
        await task
        del task
        await asyncio.sleep(0)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert not [x for x in gc.garbage if isinstance(x, BaseException | FrameType)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
