"""A gateway as a process of its own, for the tests of signals: prints its address; its engine is held until SIGUSR1."""

import asyncio
import signal
import sys

import uvloop
from gateway_server import FOLDER

from hortus.config import IvyConfig, TulipConfig
from hortus.ivy.app import App
from hortus.ivy.server import serve
from hortus.metrics import Metrics
from hortus.tulip.fake import FakeEngine
from hortus.tulip.scheduler import Scheduler


async def main(templates: str | None = None) -> None:
    metrics, config = Metrics(), IvyConfig(port=0, templates=templates)
    app, engine = App(config, metrics), FakeEngine.like(FOLDER)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, engine.release)
    scheduler = Scheduler(engine, TulipConfig(), metrics)

    async def load(address: str) -> None:
        await scheduler.start()
        engine.hold()
        app.open(FOLDER, engine.info, scheduler, probe=scheduler.probe)
        print(address, flush=True)

    await serve(app, config, started=load)
    await scheduler.close()


with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main(*sys.argv[1:]))
