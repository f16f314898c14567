"""`hortus serve`: Ivy, Tulip and ROSE wired together in one process. The only module that knows all three.

The port opens first, so that /health answers while the model loads; /ready follows once a probe has come back through the
engine. SIGTERM: /ready turns 503, requests in flight finish, the scheduler drains, the engine closes, exit status 0.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import shlex
import sys
import time
from contextlib import AsyncExitStack

from hortus import __version__
from hortus.config import Config
from hortus.engines import load_engine, open_model
from hortus.ivy.app import App
from hortus.ivy.server import serve as serve_http
from hortus.metrics import Metrics
from hortus.start import say
from hortus.tulip.scheduler import Scheduler
from hortus.types import ModelInfo

log = logging.getLogger("hortus")


def banner(info: ModelInfo, config: Config, address: str, seconds: float) -> str:
    """What a person wants to know at start, and a line to copy."""
    limits = (
        f"{info.max_tokens} tokens an input, {config.ivy.max_inputs} inputs and "
        f"{config.ivy.max_body_bytes / 2**20:g} MiB a request, "
        f"{config.tulip.max_batch_tokens or info.batch_tokens} tokens a step"
    )
    rows = {
        "model": f"{info.name} ({info.family}, {info.parameters / 1e6:.1f} M parameters)"
        + (f" at {info.revision}" if info.revision else ""),
        "rows": f"{info.kind}: {info.in_words()}",
        "engine": f"{info.dtype} on {info.device}",
        "attention": info.attention,
        "limits": limits,
        "address": f"{address}  (started in {seconds:.1f} s)",
    }
    pair = '"query": "Where is the cat?", "documents": ["The cat sits on the mat.", "It rains."]'
    route, body = {
        "sparse": ("/embed_sparse", '"inputs": "The cat sits on the mat."'),
        "tokens": ("/rerank", pair),
        "classify": ("/rerank", pair) if info.width == 1 else ("/predict", '"inputs": "The cat sits on the mat."'),
    }.get(info.kind, ("/v1/embeddings", '"input": "The cat sits on the mat."'))
    # Every line that can be copied works: with a key where one is asked for, and with a certificate that nobody else signed.
    more = "-k " if config.ivy.tls_cert else ""
    if config.ivy.api_keys or config.ivy.api_keys_file:
        more += "-H 'authorization: Bearer YOUR-KEY' "
    named = json.dumps(info.name, ensure_ascii=False)
    curl = f"curl {more}{address}{route} -H 'content-type: application/json' -d " + shlex.quote(
        f'{{"model": {named}, {body}}}'
    )
    lines = "\n".join(f"  {key:<10} {value}" for key, value in rows.items())
    page = "" if config.ivy.no_page else f"  open       {address}/ in a browser\n"
    return f"hortus {__version__}\n{lines}\n\n{page}  try        {curl}\n"


def serve(model: str, config: Config) -> int:
    """Run until SIGTERM or SIGINT. Returns the exit status; StartError when the port or the model cannot be had."""
    import uvloop

    # A thread that wants the GIL back from the event loop waits this long at most (the default is 5 ms, more than a
    # whole step takes): docs/scheduling.md has the measurement.
    sys.setswitchinterval(0.0005)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(model, config))


async def _serve(model: str, config: Config) -> int:
    begin = time.monotonic()
    metrics = Metrics()
    app = App(config.ivy, metrics)
    closing = AsyncExitStack()
    loaded = False
    if config.link.metrics_port is not None:
        metrics.serve(config.link.metrics_port)

    async def load(address: str) -> None:
        """Runs once the port is open; an exception from here stops the server."""
        nonlocal loaded
        folder = await asyncio.to_thread(
            open_model, model, config.ivy.served_model_name, config.rose, weights=config.tulip.fake_delay_ms is None
        )
        engine = await asyncio.to_thread(load_engine, folder, config, metrics)
        closing.callback(engine.close)
        scheduler = Scheduler(engine, config.tulip, metrics)
        await scheduler.start()
        closing.push_async_callback(scheduler.close)
        await asyncio.to_thread(app.open, folder, engine.info, scheduler, probe=scheduler.probe)  # reads the tokenizer
        loaded = True
        # What is there now stays: the collector need not walk it again, and need not look at a busy server's short-lived
        # objects every 700 of them.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)
        say(banner(engine.info, config, address, time.monotonic() - begin))

    async with closing:
        await serve_http(app, config.ivy, started=load)
    log.info("stopped")
    if not loaded:
        # A thread may still be downloading or reading weights: nothing of it is wanted, and nothing can interrupt it.
        logging.shutdown()
        os._exit(0)
    return 0
