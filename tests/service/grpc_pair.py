"""A scheduler behind gRPC and a gateway's client of it, in one event loop, over a Unix socket; engines are fakes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gateway_server import FOLDER
from patience import until

from hortus.config import LinkConfig, TulipConfig
from hortus.folder import ModelFolder
from hortus.ivy.replicas import Replicas
from hortus.metrics import Metrics
from hortus.tulip.fake import FakeEngine, fake_rows
from hortus.tulip.scheduler import Scheduler
from hortus.tulip.server import Server
from hortus.tulip.spans import Spans
from hortus.types import TokenBatch


@dataclass
class Tulip:
    """One running scheduler."""

    engine: FakeEngine
    scheduler: Scheduler
    server: Server
    address: str
    metrics: Metrics

    async def stop(self) -> None:
        """At once, as far as gateways can see."""
        self.engine.release()
        await self.server.close()
        await self.scheduler.close()


def batch(*ids: int) -> TokenBatch:
    """One sequence for each id, of that id three times."""
    return TokenBatch.of([[i] * 3 for i in ids])


def rows_of(b: TokenBatch) -> np.ndarray:
    """[rows, 384]: what the fake engine answers."""
    return fake_rows(b, 384)


async def start_tulip(
    listen: str, engine: FakeEngine | None = None, tulip: TulipConfig | None = None, folder: ModelFolder = FOLDER,
    spans: Spans | None = None, **link: object,
) -> Tulip:  # fmt: skip
    engine = engine or FakeEngine.like(folder)
    metrics = Metrics()
    scheduler = Scheduler(engine, tulip or TulipConfig(), metrics)
    await scheduler.start()
    server = Server(LinkConfig(listen=listen, **link), spans)
    address = await server.start()
    await server.open(scheduler, folder, engine.info)
    return Tulip(engine, scheduler, server, address, metrics)


class Garden:
    """Starts schedulers and gateways' clients for a test, and ends them all."""

    def __init__(self, where: Path, kind: str) -> None:
        self.where, self.kind = where, kind
        self._closing = contextlib.AsyncExitStack()
        self._count = 0

    async def tulip(self, engine: FakeEngine | None = None, listen: str | None = None, **more: object) -> Tulip:
        self._count += 1
        tulip = await start_tulip(listen or self._free(), engine, **more)
        self._closing.push_async_callback(tulip.stop)
        return tulip

    def _free(self) -> str:
        return f"unix:{self.where}/t{self._count}" if self.kind == "local" else "127.0.0.1:0"

    async def replicas(self, *addresses: str, up: int | None = None, **link: object) -> Replicas:
        link.setdefault("slow_start_s", 0.0)
        replicas = Replicas(LinkConfig(replica=",".join(addresses), **link), Metrics())
        self._closing.push_async_callback(replicas.close)
        await replicas.start()
        wanted = len(addresses) if up is None else up
        await until(lambda: sum(link.up for link in replicas.links.values()) >= wanted)
        return replicas

    async def close(self) -> None:
        await self._closing.aclose()


@contextlib.asynccontextmanager
async def garden(where: Path, kind: str) -> AsyncIterator[Garden]:
    """kind: `local` (a Unix socket, Encode beside gRPC) or `grpc` (a TCP port)."""
    g = Garden(where, kind)
    try:
        yield g
    finally:
        await g.close()
