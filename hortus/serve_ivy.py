"""`hortus ivy`: a gateway alone; its Encoder is every replica named by --replica.

The port opens first; the model (its limits, prompts and tokenizer) is fetched from the first replica that comes up, and
until then /ready says so.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from hortus.child import announce
from hortus.config import Config
from hortus.ivy.app import App
from hortus.ivy.replicas import Replicas
from hortus.ivy.server import serve as serve_http
from hortus.metrics import Metrics

log = logging.getLogger("hortus")


def serve_ivy(config: Config, *, supervised: bool = False) -> int:
    """Run until SIGTERM or SIGINT. Returns the exit status; StartError when the port cannot be had or a flag is wrong."""
    import uvloop

    sys.setswitchinterval(0.0005)  # as in hortus/serve.py
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, supervised))


async def _serve(config: Config, supervised: bool) -> int:
    metrics = Metrics()
    replicas = Replicas(config.link, metrics)
    app = App(config.ivy, metrics, replicas.told)
    async with AsyncExitStack() as closing:
        where = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="hortus-")))
        closing.push_async_callback(replicas.close)
        if config.link.metrics_port is not None:
            metrics.serve(config.link.metrics_port)

        async def load(address: str) -> None:
            await replicas.start()
            told = await replicas.describe()
            folder = await replicas.folder(where)
            app.open(folder, told.info, replicas)
            announce(address, f"hortus ivy: {told.info.name} on {address}", supervised=supervised)

        await serve_http(app, config.ivy, started=load)
    log.info("stopped")
    return 0
