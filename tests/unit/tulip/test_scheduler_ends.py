"""Works that end early: clients who leave, deadlines, a scheduler that drains and closes."""

import asyncio
import time

import pytest
from patience import PATIENCE_S, timed, until
from scheduler_stubs import ONE, WIDTH, busy, running, submit, value

from hortus.config import TulipConfig
from hortus.errors import (
    DeadlineExceeded,
    Draining,
    NotReady,
)
from hortus.metrics import Metrics
from hortus.tulip import scheduler
from hortus.tulip.fake import FakeEngine
from hortus.tulip.scheduler import Scheduler
from hortus.types import TokenBatch

# Clients who leave


async def test_cancelled_before_it_starts_never_runs():
    async with running() as (tulip, engine), busy(tulip, engine):
        keep, drop = submit(tulip, TokenBatch.of([[1]])), submit(tulip, TokenBatch.of([[2], [3]]))
        await until(lambda: tulip._queue.sequences == 3)
        drop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drop
        assert (tulip._queue.sequences, tulip._queue.tokens) == (1, 1)
        assert value(tulip, "dropped_sequences_total", reason="cancelled") == 2
        engine.release()
        await keep
        assert list(engine.shapes) == [(1, 3), (1, 1)]


async def test_cancelled_while_it_runs_harms_nobody():
    async with running() as (tulip, engine):
        engine.hold()
        drop, keep = submit(tulip), submit(tulip)
        await until(lambda: engine.steps == 1)
        drop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drop
        engine.release()
        await keep
        assert engine.steps == 1


async def test_cancelled_halfway_the_rest_is_dropped():
    async with running(max_batch_tokens=10, in_flight=1) as (tulip, engine):
        engine.hold()
        task = submit(tulip, TokenBatch.of([[1] * 10] * 5))
        await until(lambda: engine.steps == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert tulip._queue.tokens == 0
        assert value(tulip, "dropped_sequences_total", reason="cancelled") == 4
        engine.release()
        await tulip.encode(ONE)
        assert engine.steps == 2


@timed
async def test_deadline_is_kept_while_the_engine_is_busy():
    async with running() as (tulip, engine), busy(tulip, engine):
        begin = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="in the queue"):
            await tulip.encode(ONE, deadline=begin + 0.03)
        assert 0.025 < time.monotonic() - begin < 1
        assert tulip._queue.tokens == 0
        assert value(tulip, "dropped_sequences_total", reason="deadline_exceeded") == 1
    assert engine.steps == 1


async def test_deadline_is_kept_while_it_runs():
    async with running() as (tulip, engine):
        engine.hold()
        with pytest.raises(DeadlineExceeded, match="while it ran"):
            await tulip.encode(ONE, deadline=time.monotonic() + 0.02)
        engine.release()
        await tulip.encode(ONE, deadline=time.monotonic() + 60)


async def test_deadline_passed_on_arrival():
    async with running() as (tulip, engine):
        with pytest.raises(DeadlineExceeded):
            await tulip.encode(ONE, deadline=time.monotonic() - 1)
        assert engine.steps == 0


async def test_deadline_found_by_the_queue_before_the_timer(monkeypatch):
    async with running() as (tulip, engine), busy(tulip, engine):
        task = submit(tulip, deadline=time.monotonic() + 3600)
        await until(lambda: tulip._queue.sequences == 1)
        later = time.monotonic() + 3601
        with monkeypatch.context() as patch:  # as if the loop had been held up, and its timer were late
            patch.setattr(time, "monotonic", lambda: later)
            tulip._flights, flights = {}, tulip._flights
            tulip._dispatch()
            tulip._flights = flights
        with pytest.raises(DeadlineExceeded):
            await task
        assert value(tulip, "dropped_sequences_total", reason="deadline_exceeded") == 1
        assert engine.steps == 1


# Life


async def test_before_start_and_after_close():
    engine = FakeEngine(width=WIDTH)
    tulip = Scheduler(engine, TulipConfig(), Metrics())
    assert not tulip.healthy
    assert not await tulip.probe(1)
    with pytest.raises(NotReady):
        await tulip.encode(ONE)
    await tulip.start()
    assert tulip.healthy
    await tulip.close()
    await tulip.close()
    with pytest.raises(Draining):
        await tulip.encode(ONE)
    assert not await tulip.probe(1)


async def test_close_without_start():
    tulip = Scheduler(FakeEngine(), TulipConfig(), Metrics())
    await tulip.close()
    with pytest.raises(Draining):
        await tulip.encode(ONE)


async def test_drain_finishes_what_is_in():
    async with running(FakeEngine(width=WIDTH, delay_s=0.002), max_batch_sequences=4) as (tulip, engine):
        engine.hold()
        tasks = [submit(tulip) for _ in range(20)]
        await until(lambda: tulip._queue.sequences > 0)
        drain = asyncio.create_task(tulip.drain(PATIENCE_S))
        await asyncio.sleep(0)
        with pytest.raises(Draining):
            await tulip.encode(ONE)
        assert not tulip.healthy
        engine.release()
        assert len(await asyncio.gather(*tasks)) == 20
        await drain
        assert value(tulip, "dropped_sequences_total", reason="draining") == 1


@timed
async def test_drain_of_an_idle_scheduler_is_immediate():
    async with running() as (tulip, _):
        begin = time.monotonic()
        await tulip.drain(30)
        assert time.monotonic() - begin < 2


async def test_drain_does_not_wait_for_those_who_leave():
    async with running(in_flight=1) as (tulip, engine):
        engine.hold()
        tasks = [submit(tulip), submit(tulip, TokenBatch.of([[1]]))]
        await until(lambda: engine.steps == 1)
        drain = asyncio.create_task(tulip.drain(30))
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await until(lambda: tulip._idle.is_set())
        engine.release()
        await drain


async def test_drain_gives_up_in_time_and_still_answers(monkeypatch):
    monkeypatch.setattr(scheduler, "_STOP_S", 0.05)
    async with running(in_flight=1) as (tulip, engine):
        engine.hold()
        first = submit(tulip)
        await until(lambda: engine.steps == 1)
        second = submit(tulip)
        await until(lambda: tulip._queue.sequences == 1)
        await tulip.drain(0.02)
        results = await asyncio.gather(first, second, return_exceptions=True)
        assert [type(r) for r in results] == [Draining] * 2


async def test_close_lets_the_running_step_answer():
    async with running() as (tulip, engine):
        engine.hold()
        first = submit(tulip)
        await until(lambda: engine.steps == 1)
        second = submit(tulip)
        await until(lambda: tulip._queue.sequences == 1)
        close = asyncio.create_task(tulip.close())
        with pytest.raises(Draining):
            await second
        engine.release()
        assert (await first).rows.shape == (1, WIDTH)
        await close


def test_a_batch_that_comes_back_to_a_closed_loop_is_let_go():
    engine = FakeEngine(width=WIDTH)
    tulip = Scheduler(engine, TulipConfig(), Metrics())

    async def leave_one_running():
        await tulip.start()
        engine.hold()
        task = submit(tulip)
        await until(lambda: engine.steps == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave_one_running())
    engine.release()
    assert tulip._pump.stop(5)
