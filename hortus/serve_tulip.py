"""`hortus tulip`: Tulip and ROSE behind gRPC, for gateways in other processes or on other machines.

The port opens first: the health service answers while the model loads. SIGTERM: gateways are told, what is in is finished
and sent, the engine closes, exit status 0.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from contextlib import AsyncExitStack

from hortus.child import announce
from hortus.config import Config
from hortus.engines import load_engine, open_model
from hortus.metrics import Metrics
from hortus.stopping import Patience
from hortus.tulip.scheduler import Scheduler
from hortus.tulip.server import Server
from hortus.tulip.spans import Spans

log = logging.getLogger("hortus")


def serve_tulip(model: str, config: Config, *, supervised: bool = False) -> int:
    """Run until SIGTERM or SIGINT. Returns the exit status; StartError when the port or the model cannot be had."""
    import uvloop

    sys.setswitchinterval(0.0005)  # as in hortus/serve.py
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(model, config, supervised))


def stop_on_signals() -> asyncio.Event:
    """Set by SIGTERM and SIGINT; a second one (see stopping.py) ends the process at once, with the status that shells expect."""
    loop, stop, patience = asyncio.get_running_loop(), asyncio.Event(), Patience()

    def handle(number: int) -> None:
        if patience.lost():
            log.warning("second signal: exiting at once")
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number)
    return stop


async def _serve(model: str, config: Config, supervised: bool) -> int:
    begin = time.monotonic()
    spans = None if config.ivy.otlp_endpoint is None else Spans(config.ivy.otlp_endpoint)
    stop, metrics, server = stop_on_signals(), Metrics(), Server(config.link, spans)
    async with AsyncExitStack() as closing:
        if spans is not None:
            closing.push_async_callback(asyncio.to_thread, spans.close)
        address = await server.start()
        closing.push_async_callback(server.close)
        if config.link.metrics_port is not None:
            metrics.serve(config.link.metrics_port)

        async def load() -> None:
            weights = config.tulip.fake_delay_ms is None
            folder = await asyncio.to_thread(
                open_model, model, config.ivy.served_model_name, config.rose, weights=weights
            )
            engine = await asyncio.to_thread(load_engine, folder, config, metrics)
            closing.callback(engine.close)
            scheduler = Scheduler(engine, config.tulip, metrics)
            await scheduler.start()
            closing.push_async_callback(scheduler.close)
            await server.open(scheduler, folder, engine.info)
            info = engine.info
            announce(
                address,
                f"hortus tulip: {info.name} ({info.dtype} on {info.device}) on {address}, "
                f"started in {time.monotonic() - begin:.1f} s",
                supervised=supervised,
            )

        loading, stopping = asyncio.ensure_future(load()), asyncio.ensure_future(stop.wait())
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            await stopping
        loading.cancel()
        log.info("stopping: finishing what is in, at most %g s", config.ivy.drain_s)
        await server.drain(config.ivy.drain_s)
    log.info("stopped")
    return 0
