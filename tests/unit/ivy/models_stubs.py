"""Gateways over models of every kind, and an encoder with rows for them."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from dataclasses import dataclass, field

import numpy as np
from ivy_stubs import Client

from hortus.config import IvyConfig
from hortus.folder import ModelFolder
from hortus.ivy.app import App
from hortus.metrics import Metrics
from hortus.tulip.fake import fake_rows
from hortus.types import ModelInfo, Result, Timings, TokenBatch


@dataclass
class FakeEncoder:
    """The fake engine's rows, at once; remembers the batches."""

    width: int
    batches: list[TokenBatch] = field(default_factory=list)
    nan_at: int | None = None

    async def encode(self, batch: TokenBatch, *, deadline: float | None = None) -> Result:
        self.batches.append(batch)
        await asyncio.sleep(0)
        rows = fake_rows(batch, self.width)
        if self.nan_at is not None:
            rows[self.nan_at] = np.nan
        return Result(rows, Timings(queue_ms=1.0, device_ms=2.0))


def client(folder: ModelFolder, *, kind: str = "embed", width: int = 16, **config: object) -> Client:
    """A gateway over a model of this kind. width: values a row; for classify the number of labels."""
    labels = tuple(f"label {i}" for i in range(width)) if kind == "classify" else ()
    limit = min(folder.max_tokens, 64)
    info = ModelInfo(
        name=folder.name,
        kind=kind,
        labels=labels,
        width=width,
        max_tokens=limit,
        vocab_size=folder.config["vocab_size"],
        normalize=not any(m.kind == "FlexibleQuantizer" for m in folder.modules) and kind == "embed",
        batch_tokens=256,
    )
    metrics, encoder = Metrics(), FakeEncoder(width)
    app = App(IvyConfig(**config), metrics)
    app.open(folder, info, encoder)
    return Client(app, encoder, metrics)


async def post(gateway: Client, path: str, **fields: object):
    reply = await gateway.request("POST", path, json.dumps(fields).encode())
    assert reply is not None
    return reply


def sequences(batch: TokenBatch) -> list[list[int]]:
    return [batch.ids[a:b].tolist() for a, b in itertools.pairwise(batch.cu_seqlens.tolist())]


def b64(text: str, kind: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text, validate=True), kind)


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)
