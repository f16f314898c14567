"""Models of every kind for the gateway's tests: folders with small tokenizers of their own, and an encoder with rows."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from ivy_stubs import Client
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from hortus.config import IvyConfig
from hortus.folder import ModelFolder, Module
from hortus.ivy.app import App
from hortus.metrics import Metrics
from hortus.tulip.fake import fake_rows
from hortus.types import ModelInfo, Result, Timings, TokenBatch

END = "<|endoftext|>"


def pplx_folder(path: Path, *, contextual: bool = True, name: str = "pplx") -> ModelFolder:
    """A byte for a token, nothing added around a text, one special token: pplx-embed's habits in small."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([END])
    path.mkdir(exist_ok=True)
    inner.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"sep_token": END, "eos_token": END}))
    suffix = "Contextual" if contextual else ""
    return ModelFolder(
        path=path,
        name=name,
        revision=None,
        transformer=path,
        config={"vocab_size": 300, "auto_map": {"AutoModel": f"modeling.PPLXQwen3{suffix}Model"}},
        modules=(Module("Transformer", path, {}), Module("FlexibleQuantizer", path, {})),
        max_tokens=64,
    )


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
