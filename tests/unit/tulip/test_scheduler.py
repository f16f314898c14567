"""The scheduler over the fake engine: everyone gets their own answer once, whatever the engine or the clients do."""

import asyncio
import gc
import time
import weakref

import numpy as np
import pytest
from patience import PATIENCE_S, until
from scheduler_stubs import ONE, WIDTH, busy, running, submit, value

from hortus.errors import (
    InvalidInput,
    Overloaded,
    RequestError,
)
from hortus.tulip.fake import FakeEngine, fake_rows
from hortus.types import TokenBatch, all_finite

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


async def test_rows_of_one_step_are_told_to_be_together():
    engine = FakeEngine(width=WIDTH)
    engine.nan_id = 9
    async with running(engine, max_batch_tokens=10) as (tulip, _):
        good, bad, cut = (TokenBatch.of(ids) for ids in ([[1, 2]], [[9]], [[1] * 4] * 5))
        assert (await tulip.encode(good)).together.once(all_finite)
        both = await asyncio.gather(tulip.encode(good), tulip.encode(bad))
        assert both[0].together is both[1].together
        assert not both[0].together.once(all_finite)
        assert [bool(np.isfinite(r.rows).all()) for r in both] == [True, False]
        assert (await tulip.encode(cut)).together is None  # of several steps


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
