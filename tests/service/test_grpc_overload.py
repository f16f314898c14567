"""More than a scheduler behind gRPC can do: refused at once, and no less done for it."""

from __future__ import annotations

import asyncio
import time

import numpy as np
from gateway_server import FOLDER
from grpc_pair import Garden, batch
from patience import PATIENCE_S, timed

from hortus import errors
from hortus.config import TulipConfig
from hortus.tulip.fake import FakeEngine


async def test_overload_is_told_at_once_with_its_flag(world: Garden):
    tulip = await world.tulip(tulip=TulipConfig(max_queue_tokens=9))
    tulip.engine.hold()
    replicas = await world.replicas(tulip.address)
    tasks = [asyncio.ensure_future(replicas.encode(batch(n))) for n in range(20)]
    # The engine is held: what is answered did not wait for it.
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE_S)
    assert any(task.done() for task in tasks)
    tulip.engine.release()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [r for r in results if isinstance(r, BaseException)]
    assert 0 < len(refused) < 20
    for error in refused:
        assert isinstance(error, errors.Overloaded)
        assert "--max-queue-tokens" in error.message
        assert error.retry_after_s >= 1
    assert all(r.rows.shape == (1, 384) for r in results if not isinstance(r, BaseException))


@timed
async def test_goodput_stays_at_three_times_the_load_and_recovers_at_once(world: Garden):
    """Slow steps, so that the machine that runs clients, gateway and scheduler in one process is not what is measured."""
    engine = FakeEngine.like(FOLDER, delay_s=0.04)
    tulip = await world.tulip(engine, tulip=TulipConfig(max_batch_sequences=4, max_queue_tokens=3 * 20))
    replicas = await world.replicas(tulip.address)
    seconds = 1.2

    async def rate(clients: int) -> tuple[float, list[float]]:
        """(answers a second, ms that refusals took) of so many clients, each asking again at once (50 ms after a refusal)."""
        good, refusals = 0, []
        begin = time.monotonic()

        async def client(n: int) -> None:
            nonlocal good
            while time.monotonic() < begin + seconds:
                sent = time.perf_counter()
                try:
                    await replicas.encode(batch(n % 100), deadline=time.monotonic() + 5)
                    good += time.monotonic() < begin + seconds
                except errors.Overloaded:
                    refusals.append((time.perf_counter() - sent) * 1000)
                    await asyncio.sleep(0.05)

        await asyncio.gather(*[client(n) for n in range(clients)])
        return good / seconds, refusals

    peak, none = await rate(16)
    loaded, refusals = await rate(56)
    after, _ = await rate(16)
    assert not none
    assert len(refusals) > 2 * seconds * peak, "three times as much is asked for"
    assert loaded > 0.9 * peak
    assert after > 0.9 * peak
    assert np.median(refusals) < 40, "a refusal comes at once, not after a step"
