"""The scheduler over an engine that fails, hangs and comes back, and the probes that find out."""

import asyncio
import contextlib
import time

import numpy as np
import pytest
from patience import PATIENCE_S, timed, until
from scheduler_stubs import ONE, WIDTH, busy, running, submit, value

from hortus.errors import (
    EngineError,
    NotReady,
    OutOfMemory,
)
from hortus.tulip import scheduler
from hortus.tulip.fake import FakeEngine, fake_rows
from hortus.types import TokenBatch

# An engine that fails


@pytest.mark.parametrize("where", ["step_errors", "result_errors"])
@pytest.mark.parametrize("delay_s", [0.0, 0.001])
@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (ValueError("bad\nlong"), EngineError),
        (OutOfMemory("too big"), OutOfMemory),
        (SystemExit(3), EngineError),
        (KeyboardInterrupt(), EngineError),
    ],
)
async def test_a_failed_step_fails_its_own_requests_only(where, delay_s, error, seen):
    engine = FakeEngine(width=WIDTH, delay_s=delay_s)
    async with running(engine) as (tulip, _):
        getattr(engine, where)[0] = error
        results = await asyncio.gather(*[tulip.encode(ONE) for _ in range(3)], return_exceptions=True)
        assert [type(r) for r in results] == [seen] * 3
        assert len({id(r) for r in results}) == 3, "each task raises an exception of its own"
        assert all(r.__cause__ is error and "\n" not in r.message for r in results)
        np.testing.assert_array_equal((await tulip.encode(ONE)).rows, fake_rows(ONE, WIDTH))
        await until(lambda: engine.steps == 3)  # the probe that follows a failure
        assert tulip.healthy


@pytest.mark.parametrize("where", ["step_errors", "result_errors"])
@pytest.mark.parametrize("error", [ValueError("bad"), OutOfMemory("too big")])
async def test_a_failed_step_says_where_and_holds_no_frames(where, error):
    """In words, as often as it is asked: what raises holds the batch."""
    engine = FakeEngine(width=WIDTH)
    async with running(engine) as (tulip, _):
        for step in 0, 2:  # 1 is a probe
            await until(lambda step=step: engine.steps == step)
            getattr(engine, where)[step] = error
            with pytest.raises(type(error) if isinstance(error, OutOfMemory) else EngineError) as seen:
                await tulip.encode(ONE)
            (note,) = seen.value.__notes__
            assert note.startswith("Traceback (most recent call last):\n")
            assert "fake.py" in note
            assert note.endswith(str(error))
            assert seen.value.__cause__ is error
            assert error.__traceback__ is None
            assert "Traceback" not in seen.value.message


async def test_a_work_with_a_failed_slice_fails_once_and_its_rest_is_dropped():
    async with running(max_batch_tokens=10, in_flight=1) as (tulip, engine):
        engine.result_errors[1] = ValueError("slice")
        with pytest.raises(EngineError, match="ValueError: slice"):
            await tulip.encode(TokenBatch.of([[1] * 10] * 5))
        assert tulip._queue.tokens == 0
        assert value(tulip, "dropped_sequences_total", reason="engine_error") == 3
        await tulip.encode(ONE)


async def test_rows_of_a_wrong_shape_are_an_engine_error(monkeypatch):
    async with running() as (tulip, _):
        monkeypatch.setattr("hortus.tulip.fake.fake_rows", lambda batch, width: np.zeros((1, 3), np.float32))
        with pytest.raises(EngineError, match=r"rows of float32 \(1, 3\), not float32 \(1, 16\)"):
            await tulip.encode(ONE)


async def test_nan_rows_are_handed_on():
    """Tulip does not look into rows: ivy refuses what is not finite, for that input alone."""
    async with running() as (tulip, engine):
        engine.nan_id = 9
        rows = (await tulip.encode(TokenBatch.of([[1], [9]]))).rows
        assert np.isnan(rows).any(axis=1).tolist() == [False, True]


async def test_an_engine_that_keeps_failing_is_given_up_and_taken_back(monkeypatch):
    monkeypatch.setattr(scheduler, "_REPROBE_S", 0.01)
    async with running() as (tulip, engine):
        engine.step_errors = dict.fromkeys(range(1_000_000), RuntimeError("device lost"))
        with pytest.raises(EngineError, match="device lost"):
            await tulip.encode(ONE)
        await until(lambda: engine.steps > 3)  # a request and three probes
        assert not tulip.healthy
        with pytest.raises(NotReady, match=r"the engine fails: .*device lost"):
            await tulip.encode(ONE)
        assert value(tulip, "dropped_sequences_total", reason="not_ready") == 1
        engine.step_errors = {}
        await until(lambda: tulip.healthy)
        await tulip.encode(ONE)


async def test_what_waits_when_the_engine_dies_is_answered():
    async with running(in_flight=1) as (tulip, engine):
        engine.hold()
        engine.result_errors[0] = RuntimeError("device lost")
        engine.step_errors = dict.fromkeys(range(1, 10_000), RuntimeError("device lost"))
        running_ = submit(tulip)
        await until(lambda: engine.steps == 1)
        waiting = [submit(tulip) for _ in range(5)]
        await until(lambda: tulip._queue.sequences == 5)
        engine.release()
        results = await asyncio.gather(running_, *waiting, return_exceptions=True)
        assert all(isinstance(r, EngineError | NotReady) for r in results)
        await until(lambda: not tulip.healthy)


@pytest.mark.parametrize("asynchronous", [True, False])
@timed
async def test_a_hung_engine_is_not_waited_for_and_comes_back(asynchronous):
    engine = FakeEngine(width=WIDTH, asynchronous=asynchronous)
    async with running(engine, step_timeout_s=0.05) as (tulip, _):
        engine.hold()
        stuck = submit(tulip)
        await until(lambda: engine.steps == 1)
        waiting = [submit(tulip) for _ in range(3)]
        begin = time.monotonic()
        results = await asyncio.gather(stuck, *waiting, return_exceptions=True)
        assert time.monotonic() - begin < 2
        assert [type(r) for r in results] == [NotReady] * 4
        assert "--step-timeout-s" in str(results[0])
        assert not tulip.healthy
        with pytest.raises(NotReady):
            await tulip.encode(ONE)
        assert not await tulip.probe(0.01)
        engine.release()
        result = None
        async with asyncio.timeout(PATIENCE_S):
            while result is None:
                await until(lambda: tulip.healthy)
                with contextlib.suppress(NotReady):  # so short a limit, and the machine was held up
                    result = await tulip.encode(ONE)
        np.testing.assert_array_equal(result.rows, fake_rows(ONE, WIDTH))
        # and a second time: the watch is kept again
        engine.hold()
        with pytest.raises(NotReady):
            await tulip.encode(ONE)


@timed
async def test_slow_is_not_hung():
    """Each step may take the timeout: the fourth in flight is answered after 0.48 s, but each ran for 0.12 s."""
    engine = FakeEngine(width=WIDTH, delay_s=0.12, asynchronous=False)
    knobs = {"step_timeout_s": 0.35, "max_batch_sequences": 1, "in_flight": 4}
    async with running(engine, **knobs) as (tulip, _):
        results = await asyncio.gather(*[tulip.encode(ONE) for _ in range(4)], return_exceptions=True)
        assert not [r for r in results if isinstance(r, BaseException)]
        assert results[-1].timings.device_ms > 350
        assert tulip.healthy


# Probes


async def test_probe():
    async with running() as (tulip, engine):
        assert await tulip.probe(PATIENCE_S)
        assert list(engine.shapes) == [(1, 1)]
        engine.step_errors[1] = RuntimeError("dead")
        assert not await tulip.probe(PATIENCE_S)
        assert not tulip.healthy
        assert await tulip.probe(PATIENCE_S)
        assert tulip.healthy


async def test_probe_of_a_busy_engine_is_the_step_that_runs():
    async with running() as (tulip, engine), busy(tulip, engine):
        probes = [asyncio.create_task(tulip.probe(PATIENCE_S)) for _ in range(3)]
        await until(lambda: len(tulip._probes) == 3)
        assert engine.steps == 1
        engine.release()
        assert await asyncio.gather(*probes) == [True] * 3


async def test_probe_of_a_long_step_waits_for_the_step_timeout():
    async with running() as (tulip, engine), busy(tulip, engine):
        assert await tulip.probe(0.01)


async def test_probe_of_an_idle_engine_that_hangs():
    async with running() as (tulip, engine):
        engine.hold()
        assert not await tulip.probe(0.01)
        assert not await tulip.probe(0.01)
        assert engine.steps == 1, "one probe at a time"


async def test_no_memory_for_the_rows_of_a_request_fails_it_alone(monkeypatch):
    """It needs an array of its own, being cut over several batches."""
    async with running(max_batch_tokens=10) as (tulip, _):
        with monkeypatch.context() as patch:
            patch.setattr(scheduler.np, "empty", raise_memory_error)
            large = submit(tulip, TokenBatch.of([[i] * 4 for i in range(9)]))
            small = TokenBatch.of([[7]])
            np.testing.assert_array_equal((await tulip.encode(small)).rows, fake_rows(small, WIDTH))
            with pytest.raises(OutOfMemory):
                await large
        assert (await tulip.encode(ONE)).rows.shape == (1, WIDTH)


def raise_memory_error(*args, **named):
    raise MemoryError
