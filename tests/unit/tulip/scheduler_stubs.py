"""A scheduler over the fake engine, and what its tests do with it."""

import asyncio
from contextlib import asynccontextmanager

from patience import until

from hortus.config import TulipConfig
from hortus.metrics import Metrics
from hortus.tulip.fake import FakeEngine
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
