"""An app over a stub encoder, called without a port."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
from dataclasses import dataclass, field

import numpy as np

from hortus.config import IvyConfig
from hortus.folder import ModelFolder
from hortus.ivy import vocabulary
from hortus.ivy.app import App
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
        sent: list[dict] = []
        waiting = list(parts if parts is not None else [body])
        heads = [(k.encode(), v.encode("latin-1")) for k, v in (headers or {}).items()]
        heads.append((b"transfer-encoding", b"chunked") if parts else (b"content-length", b"%d" % len(body)))

        async def receive() -> dict:
            if waiting:
                part = waiting.pop(0)
                return {"type": "http.request", "body": part, "more_body": bool(waiting)}
            await (gone or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: dict) -> None:
            sent.append(message)

        await self.app({"type": "http", "method": method, "path": path, "headers": heads}, receive, send)
        if not sent:
            return None
        return Reply(
            sent[0]["status"],
            {k.decode(): v.decode() for k, v in sent[0]["headers"]},
            b"".join(m.get("body", b"") for m in sent[1:]),
        )

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
