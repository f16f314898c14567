"""Short queries beside bulk, and works that must not share a step."""

import asyncio
import time

import numpy as np
from patience import timed
from scheduler_stubs import WIDTH, running

from hortus.config import TulipConfig
from hortus.metrics import Metrics
from hortus.tulip.fake import FakeEngine, fake_rows
from hortus.tulip.scheduler import Scheduler
from hortus.types import TokenBatch


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
