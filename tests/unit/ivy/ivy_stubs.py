"""An app over a stub encoder, called by a connection without a port."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
from dataclasses import dataclass, field

import numpy as np
from patience import PATIENCE_S

from hortus.config import IvyConfig
from hortus.folder import ModelFolder
from hortus.ivy import vocabulary
from hortus.ivy.app import App
from hortus.ivy.connection import Connection
from hortus.metrics import Metrics
from hortus.types import ModelInfo, Result, Timings, TokenBatch

WIDTH = 16
load_once = functools.cache(vocabulary.load)
"""A test that does not look into tokenising need not read the file again."""
INFO = ModelInfo(name="mini", width=WIDTH, max_tokens=32, vocab_size=30522, normalize=True, batch_tokens=64)


def rows_of(batch: TokenBatch) -> np.ndarray:
    """A row that depends on the ids of its own sequence alone."""
    seeds = [int(batch.ids[a:b].astype(np.int64) @ np.arange(1, b - a + 1)) for a, b in bounds(batch)]
    return np.stack([np.random.default_rng(s).standard_normal(WIDTH).astype(np.float32) for s in seeds])


def bounds(batch: TokenBatch) -> list[tuple[int, int]]:
    cu = batch.cu_seqlens.tolist()
    return list(itertools.pairwise(cu))


@dataclass
class StubEncoder:
    """Answers at once unless told otherwise; remembers what it was asked."""

    batches: list[TokenBatch] = field(default_factory=list)
    error: BaseException | None = None
    fail_on: int | None = None
    hold: asyncio.Event | None = None
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    outstanding: int = 0
    most_outstanding: int = 0
    cancelled: int = 0
    rows: np.ndarray | None = None

    async def encode(self, batch: TokenBatch, *, deadline: float | None = None) -> Result:
        number = len(self.batches)
        self.batches.append(batch)
        self.outstanding += 1
        self.asked.set()
        self.most_outstanding = max(self.most_outstanding, self.outstanding)
        try:
            await (self.hold.wait() if self.hold else asyncio.sleep(0))
            if self.error is not None and self.fail_on in (None, number):
                raise self.error
            return Result(rows_of(batch) if self.rows is None else self.rows, Timings(queue_ms=1.0, device_ms=2.0))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.outstanding -= 1


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict:
        return json.loads(self.body)

    @property
    def error(self) -> dict:
        told = self.json["error"]
        assert set(told) == {"message", "type", "param", "code"}
        return told


class Wire(asyncio.Transport):
    """A connection to the app, and what it has written to its client."""

    def __init__(self, app: App) -> None:
        super().__init__()
        self.written, self.wrote, self.lost = bytearray(), asyncio.Event(), False
        self.connection = Connection(app, set())
        self.connection.connection_made(self)

    def feed(self, data: bytes) -> None:
        self.connection.data_received(data)

    async def reply(self, method: str = "POST", gone: asyncio.Event | None = None) -> Reply | None:
        """The next answer; None once the client has `gone` or been cut off, and its task has ended."""
        if gone is not None:
            await gone.wait()
            self.close()
        while not self.lost and (reply := self._taken(method)) is None:
            self.wrote.clear()
            await self.wrote.wait()
        if self.lost and self.connection._task is not None:
            await asyncio.wait([self.connection._task])
        reply = self._taken(method)
        if reply is not None:
            self.written.clear()
        self.close()
        return reply

    def _taken(self, method: str) -> Reply | None:
        head, end, rest = bytes(self.written).partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        bodiless = method == "HEAD" or first.endswith(" 304 Not Modified")
        length = 0 if bodiless else int(headers.get("content-length", 0))
        return Reply(int(first.split()[1]), headers, rest) if end and len(rest) == length else None

    def write(self, data: bytes) -> None:
        self.written += data
        self.wrote.set()

    def writelines(self, datas: list[bytes]) -> None:
        self.write(b"".join(datas))

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def close(self) -> None:
        if not self.lost:
            self.lost = True
            self.connection.connection_lost(None)
        self.wrote.set()

    abort = close

    def can_write_eof(self) -> bool:
        return False


class Stream(Wire):
    """A transport that notes what it is told, and keeps answers in the order written."""

    def __init__(self, app) -> None:
        super().__init__(app)
        self.reading, self.unsent = True, 0

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def get_write_buffer_size(self) -> int:
        return self.unsent

    @property
    def statuses(self) -> list[int]:
        return [int(part[:3]) for part in bytes(self.written).split(b"HTTP/1.1 ")[1:]]

    async def until(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.statuses) < count:
                self.wrote.clear()
                await self.wrote.wait()


@dataclass
class Client:
    """Calls the app as a server would."""

    app: App
    encoder: StubEncoder
    metrics: Metrics

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        parts: list[bytes] | None = None,
        gone: asyncio.Event | None = None,
    ) -> Reply | None:
        """None when the app did not answer. `gone` set: the client has left."""
        wire = Wire(self.app)
        lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in (headers or {}).items())]
        lines.append("transfer-encoding: chunked" if parts else f"content-length: {len(body)}")
        wire.feed("\r\n".join([*lines, "", ""]).encode("latin-1"))
        if parts:
            for part in [p for p in parts if p] + [b""]:
                wire.feed(b"%x\r\n%b\r\n" % (len(part), part))
        elif body:
            wire.feed(body)
        return await wire.reply(method, gone)

    async def post(self, **fields: object) -> Reply:
        reply = await self.request("POST", "/v1/embeddings", json.dumps({"model": "mini", **fields}).encode())
        assert reply is not None
        return reply

    def count(self, code: str) -> float:
        return self.metrics.registry.get_sample_value("hortus_requests_total", {"code": code}) or 0


def make(folder: ModelFolder, info: ModelInfo = INFO, **config: object) -> Client:
    metrics, encoder = Metrics(), StubEncoder()
    app = App(IvyConfig(**config), metrics)
    app.open(folder, info, encoder)
    return Client(app, encoder, metrics)
