"""The scheduler over the fake engine: everyone gets their own answer once, whatever the engine or the clients do."""

import asyncio
import contextlib
import gc
import time
import weakref
from contextlib import asynccontextmanager

import numpy as np
import pytest
from patience import PATIENCE_S, timed, until

from hortus.config import TulipConfig
from hortus.errors import (
    DeadlineExceeded,
    Draining,
    EngineError,
    InvalidInput,
    NotReady,
    OutOfMemory,
    Overloaded,
    RequestError,
)
from hortus.metrics import Metrics
from hortus.tulip import scheduler
from hortus.tulip.fake import FakeEngine, fake_rows
from hortus.tulip.scheduler import Scheduler
from hortus.types import TokenBatch

ONE = TokenBatch.of([[1, 2, 3]])
WIDTH = 16


@asynccontextmanager
async def running(engine=None, **knobs):
    engine = engine or FakeEngine(width=WIDTH)
    tulip = Scheduler(engine, TulipConfig(**knobs), Metrics())
    await tulip.start()
    try:
        yield tulip, engine
    finally:
        engine.release()
        await tulip.close()
        assert not any(thread.is_alive() for thread in tulip._pump._threads)


def submit(tulip, batch=ONE, **options):
    return asyncio.create_task(tulip.encode(batch, **options))


def value(tulip, name, **labels):
    return tulip._metrics.registry.get_sample_value(f"hortus_{name}", labels)


@asynccontextmanager
async def busy(tulip, engine, flights=1):
    """The engine held with one-sequence batches running in it; released at the end, and those answered."""
    engine.hold()
    tasks = []
    for _ in range(flights):
        tasks.append(submit(tulip))
        begun = engine.steps + 1
        await until(lambda begun=begun: engine.steps == begun)
    yield tasks
    engine.release()
    await asyncio.gather(*tasks)


# Answers


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_many_tasks_each_get_their_own_rows(asynchronous):
    rng = np.random.default_rng(0)
    engine = FakeEngine(width=WIDTH, delay_s=0.0005, asynchronous=asynchronous)
    async with running(engine, max_batch_tokens=100, max_batch_sequences=20, overlap_sequences=4) as (tulip, _):

        async def client(seed):
            for _ in range(5):
                lengths = rng.integers(1, 30, rng.integers(1, 12))
                batch = TokenBatch.of([rng.integers(0, 1000, n).tolist() for n in lengths])
                result = await tulip.encode(batch, deadline=time.monotonic() + 60)
                np.testing.assert_array_equal(result.rows, fake_rows(batch, WIDTH))
                assert result.timings.queue_ms >= 0
                assert result.timings.device_ms >= 0.4
            return seed

        assert await asyncio.gather(*map(client, range(50))) == list(range(50))
        assert all(n <= 20 and (tokens <= 100 or n == 1) for n, tokens in engine.shapes)
        assert (value(tulip, "queue_tokens"), value(tulip, "queue_sequences")) == (0, 0)
        assert value(tulip, "batches_in_flight") == 0
        assert value(tulip, "batch_tokens_count") == len(engine.shapes)
        assert value(tulip, "queue_seconds_count") == 250


async def test_one_work_over_several_batches():
    async with running(max_batch_tokens=10) as (tulip, engine):
        batch = TokenBatch.of([[i] * (i % 5 + 1) for i in range(20)] + [[7] * 50])
        result = await tulip.encode(batch)
        np.testing.assert_array_equal(result.rows, fake_rows(batch, WIDTH))
        assert sum(n for n, _ in engine.shapes) == 21
        assert len(engine.shapes) > 5


async def test_no_sequences_no_step():
    async with running() as (tulip, engine):
        assert (await tulip.encode(TokenBatch.of([]))).rows.shape == (0, WIDTH)
        assert engine.steps == 0


async def test_token_types_reach_the_engine():
    async with running() as (tulip, _):
        typed = TokenBatch(ONE.ids, ONE.cu_seqlens, np.array([0, 1, 1], np.uint8))
        a, b = await asyncio.gather(tulip.encode(typed), tulip.encode(ONE))
        np.testing.assert_array_equal(a.rows, fake_rows(typed, WIDTH))
        np.testing.assert_array_equal(b.rows, fake_rows(ONE, WIDTH))


@pytest.mark.parametrize("max_batch_tokens", [10, 1000])
async def test_spans_give_a_row_each_also_over_several_batches(max_batch_tokens):
    plain = TokenBatch.of([[i] * (i % 5 + 1) for i in range(20)])
    spans = np.array([(j, j + 1) for j in range(plain.total_tokens)], np.int32)
    tokens = TokenBatch(plain.ids, plain.cu_seqlens, None, spans, plain.lengths)
    async with running(max_batch_tokens=max_batch_tokens) as (tulip, engine):
        answers = await asyncio.gather(tulip.encode(tokens), tulip.encode(plain), tulip.encode(tokens))
        for batch, result in zip((tokens, plain, tokens), answers, strict=True):
            np.testing.assert_array_equal(result.rows, fake_rows(batch, WIDTH))
        assert sum(n for n, _ in engine.shapes) == 60


async def test_an_idle_scheduler_keeps_no_batch_alive():
    async with running() as (tulip, _):
        result = await tulip.encode(TokenBatch.of([[1], [2]]))
        rows = weakref.ref(result.rows.base if result.rows.base is not None else result.rows)
        del result
        gc.collect()
        await until(lambda: rows() is None)


# The rule


async def test_what_arrives_together_leaves_together():
    async with running() as (tulip, engine):
        await asyncio.gather(*[tulip.encode(ONE) for _ in range(64)])
        assert list(engine.shapes) == [(64, 192)]


async def test_two_in_flight_and_the_second_only_when_it_is_worth_it():
    async with running(overlap_sequences=8, max_batch_tokens=100) as (tulip, engine), busy(tulip, engine):
        few = [submit(tulip) for _ in range(7)]
        await until(lambda: tulip._queue.sequences == 7)
        await asyncio.sleep(0)
        assert engine.steps == 1
        few.append(submit(tulip))
        await until(lambda: engine.steps == 2)
        more = [submit(tulip) for _ in range(30)]
        await until(lambda: tulip._queue.sequences == 30)
        await asyncio.sleep(0)
        assert engine.steps == 2
        assert value(tulip, "batches_in_flight") == 2
        engine.release()
        await asyncio.gather(*few, *more)
        assert list(engine.shapes) == [(1, 3), (8, 24), (30, 90)]


async def test_half_a_batch_of_tokens_is_worth_it_too():
    async with running(max_batch_tokens=100) as (tulip, engine), busy(tulip, engine):
        task = submit(tulip, TokenBatch.of([[1] * 50]))
        await until(lambda: engine.steps == 2)
        engine.release()
        await task


async def test_a_small_batch_limit_does_not_wait_for_the_knob():
    async with running(max_batch_sequences=2, overlap_sequences=32) as (tulip, engine), busy(tulip, engine):
        tasks = [submit(tulip) for _ in range(2)]
        await until(lambda: engine.steps == 2)
        engine.release()
        await asyncio.gather(*tasks)


async def test_batches_grow_dense_under_load():
    engine = FakeEngine(width=WIDTH, delay_s=0.002)
    async with running(engine) as (tulip, _):

        async def client():
            for _ in range(10):
                await tulip.encode(ONE)

        await asyncio.gather(*[client() for _ in range(64)])
        assert np.mean([n for n, _ in engine.shapes]) > 16


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


# Overload


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back():
    async with running(max_queue_tokens=10) as (tulip, engine), busy(tulip, engine):
        waiting = [submit(tulip) for _ in range(3)]
        await until(lambda: tulip._queue.tokens == 9)
        with pytest.raises(Overloaded, match="--max-queue-tokens") as refused:
            await tulip.encode(ONE)
        assert 1 <= refused.value.retry_after_s <= 60
        assert value(tulip, "dropped_sequences_total", reason="overloaded") == 1
        with pytest.raises(InvalidInput, match="--max-queue-tokens"):
            await tulip.encode(TokenBatch.of([[1] * 11]))
        engine.release()
        await asyncio.gather(*waiting)
        await tulip.encode(ONE)


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


# Chaos


async def test_everyone_is_answered_once_whatever_happens():
    """Clients that cancel, deadlines, a full queue, steps that fail: only known errors, right rows, nothing left over."""
    rng = np.random.default_rng(1)
    engine = FakeEngine(width=WIDTH, delay_s=0.0002)
    for n in range(5, 4000, 7):
        (engine.step_errors if n % 2 else engine.result_errors)[n] = RuntimeError("chaos")
    async with running(engine, max_batch_tokens=64, max_queue_tokens=1500, overlap_sequences=4) as (tulip, _):
        outcomes = {}

        async def client():
            for _ in range(6):
                batch = TokenBatch.of(
                    [rng.integers(0, 99, n).tolist() for n in rng.integers(1, 20, rng.integers(1, 9))]
                )
                deadline = time.monotonic() + rng.choice([0.001, 0.01, 60])
                task = submit(tulip, batch, deadline=deadline)
                if rng.random() < 0.2:
                    asyncio.get_running_loop().call_later(rng.random() * 0.005, task.cancel)
                try:
                    rows = (await task).rows
                    np.testing.assert_array_equal(rows, fake_rows(batch, WIDTH))
                    outcome = "ok"
                except RequestError as e:
                    outcome = e.code
                except asyncio.CancelledError:
                    outcome = "cancelled"
                outcomes[outcome] = outcomes.get(outcome, 0) + 1

        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*[client() for _ in range(80)])
        assert sum(outcomes.values()) == 480
        assert outcomes["ok"] > 50, outcomes
        await until(lambda: not tulip._flights)
        assert (len(tulip._queue), tulip._queue.tokens, tulip._queue.sequences) == (0, 0, 0)


# --- lanes


async def bulk_beside_short(lanes: bool) -> tuple[float, float, float]:
    """(p90 of single short queries in ms, bulk tokens/s, ms of a full step) under 4 clients of bulk; time follows tokens."""
    budget, per_token_s = 4096, 5e-6
    engine = FakeEngine(width=WIDTH, per_token_s=per_token_s)
    async with running(engine, max_batch_tokens=budget, lanes=lanes) as (tulip, _):
        chunk, short = TokenBatch.of([[1] * 512] * 8), TokenBatch.of([[2] * 16])
        latencies, done = [], 0
        begin = time.monotonic()

        async def bulk():
            nonlocal done
            while time.monotonic() < begin + 1.5:
                await tulip.encode(chunk)
                done += chunk.total_tokens

        async def queries():
            await asyncio.sleep(0.1)
            for n in range(40):
                sent = time.perf_counter()
                await tulip.encode(short)
                latencies.append((time.perf_counter() - sent) * 1000)
                await asyncio.sleep(0.001 + 0.0007 * (n % 13))

        await asyncio.gather(*[bulk() for _ in range(12)], queries())
        return float(np.percentile(latencies, 90)), done / (time.monotonic() - begin), budget * per_token_s * 1000


@timed
async def test_bulk_does_not_push_short_queries_beyond_two_steps_nor_starve():
    with_lanes, rate, step_ms = await bulk_beside_short(True)
    without, full_rate, _ = await bulk_beside_short(False)
    assert with_lanes <= 2 * step_ms + 5, f"{with_lanes:.1f} ms; a step takes {step_ms:.1f} ms"
    assert without > 2 * with_lanes
    assert rate > 0.8 * full_rate


async def test_unmerged_works_are_steps_of_their_own_in_order():
    """For corpora: what is in a step must not hang on what else waits."""
    engine = FakeEngine(width=8, batch_tokens=16, delay_s=0.001)
    scheduler = Scheduler(engine, TulipConfig(), Metrics(), merge=False)
    await scheduler.start()
    sizes = [1, 16, 3, 2, 15, 1, 4]
    batches = [TokenBatch.of([[n] * n]) for n in sizes]
    results = await asyncio.gather(*(scheduler.encode(b) for b in batches))
    assert [tokens for _, tokens in engine.shapes] == sizes
    assert all(np.array_equal(r.rows, fake_rows(b, 8)) for r, b in zip(results, batches, strict=True))
    assert scheduler.busy_s > 0
    await scheduler.close()
