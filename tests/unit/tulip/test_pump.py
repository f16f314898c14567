"""Which thread calls the engine, and in what order."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from hortus.config import TulipConfig
from hortus.errors import EngineError
from hortus.metrics import Metrics
from hortus.tulip.fake import FakeEngine, fake_rows
from hortus.tulip.scheduler import Scheduler
from hortus.types import LazyTensor, TokenBatch


class Watched(FakeEngine):
    """Notes who calls `step`, with what; single tokens below 100 are quick."""

    def __init__(self) -> None:
        super().__init__(width=4)
        self.calls: list[tuple[int, str]] = []
        self.inside = threading.Lock()
        self.entered, self.gate = threading.Event(), threading.Event()
        self.gate.set()

    def quick(self, batch: TokenBatch) -> bool:
        return int(batch.ids[0]) < 100

    def step(self, batch: TokenBatch) -> LazyTensor:
        assert self.inside.acquire(blocking=False), "two threads in the engine at once"
        try:
            self.calls.append((int(batch.ids[0]), threading.current_thread().name))
            self.entered.set()
            self.gate.wait(10)
            return super().step(batch)
        finally:
            self.inside.release()


async def running(engine: Watched) -> Scheduler:
    tulip = Scheduler(engine, TulipConfig(max_batch_sequences=1, overlap_sequences=1), Metrics())
    await tulip.start()
    return tulip


async def test_a_quick_step_is_called_on_the_loop_and_others_are_not() -> None:
    engine = Watched()
    tulip = await running(engine)
    for token in (7, 700):
        batch = TokenBatch.of([[token]])
        result = await tulip.encode(batch)
        np.testing.assert_array_equal(result.rows, fake_rows(batch, 4))
    await tulip.close()
    assert engine.calls == [(7, threading.current_thread().name), (700, "tulip-step")]


async def test_a_quick_step_does_not_overtake_one_that_is_being_called() -> None:
    engine = Watched()
    tulip = await running(engine)
    engine.gate.clear()
    slow = asyncio.ensure_future(tulip.encode(TokenBatch.of([[700]])))
    assert await asyncio.to_thread(engine.entered.wait, 60)
    quick = asyncio.ensure_future(tulip.encode(TokenBatch.of([[7]])))
    await asyncio.sleep(0.01)
    assert [token for token, _ in engine.calls] == [700]
    engine.gate.set()
    await asyncio.wait_for(asyncio.gather(slow, quick), 60)
    assert engine.calls == [(700, "tulip-step"), (7, "tulip-step")]
    await asyncio.wait_for(tulip.encode(TokenBatch.of([[8]])), 60)
    assert engine.calls[-1] == (8, threading.current_thread().name)
    await tulip.close()


async def test_a_quick_step_that_fails_fails_only_its_own() -> None:
    engine = Watched()
    tulip = await running(engine)
    engine.step_errors[0] = RuntimeError("on purpose")
    with pytest.raises(EngineError, match="on purpose"):
        await tulip.encode(TokenBatch.of([[7]]))
    await tulip.encode(TokenBatch.of([[8]]))
    await tulip.close()


async def test_an_engine_that_cannot_say_whether_it_is_quick_fails_only_that_batch() -> None:
    engine = Watched()
    tulip = await running(engine)
    faults = iter([IndexError("on purpose")])

    def quick(batch: TokenBatch) -> bool:
        for fault in faults:
            raise fault
        return True

    engine.quick = quick  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="on purpose"):
        await tulip.encode(TokenBatch.of([[7]]))
    await tulip.encode(TokenBatch.of([[8]]))
    await tulip.close()
