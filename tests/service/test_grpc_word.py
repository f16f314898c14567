"""What a replica says of itself stays true: its files, its health, where it can be reached."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from gateway_server import FOLDER
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_pair import Garden, batch, garden, rows_of
from patience import until

from hortus.errors import InvalidInput
from hortus.folder import open_folder
from hortus.protocol import wire
from hortus.tulip import server
from hortus.types import TokenBatch

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Garden]:
    async with garden(tmp_path, "local") as g:
        yield g


async def test_a_gateway_starts_though_the_folder_has_changed(here: Garden, tmp_path: Path):
    """Its files are those that were described, not those of a later deployment."""
    shutil.copytree(FOLDER.path, tmp_path / "model")
    tulip = await here.tulip(folder=open_folder(str(tmp_path / "model"), served_name="mini"))
    (tmp_path / "model" / "tokenizer.json").unlink()
    (tmp_path / "model" / "config.json").write_text("{}")
    replicas = await here.replicas(tulip.address)
    folder = await asyncio.wait_for(replicas.folder(tmp_path / "gateway"), 10)
    assert folder.config == FOLDER.config


async def test_the_stream_is_to_the_replica_that_was_called(here: Garden, tmp_path: Path, monkeypatch):
    """Two listen on the same relative path, each in a folder of its own: a gateway goes by its own."""
    tulips = []
    for name in ("other", "called"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        tulips.append(await here.tulip(listen="unix:t"))
    monkeypatch.chdir(tmp_path / "other")
    other, called = tulips
    replicas = await here.replicas(f"unix:{tmp_path}/called/t")
    np.testing.assert_array_equal((await replicas.encode(batch(7))).rows, rows_of(batch(7)))
    assert (called.engine.steps, other.engine.steps) == (1, 0)


async def test_types_of_tokens_that_the_model_has_not_never_reach_the_engine(here: Garden):
    """They would fail the step that others are in, or read memory that is not the model's."""
    tulip = await here.tulip()
    replicas = await here.replicas(tulip.address)
    wrong = TokenBatch(np.ones(3, np.int32), np.array([0, 3], np.int32), np.array([0, 2, 0], np.uint8))
    with pytest.raises(InvalidInput, match="token type 2 of sequence 0"):
        await replicas.encode(wrong)
    assert tulip.engine.steps == 0


async def test_health_tells_of_an_engine_that_hangs_while_nothing_was_asked_of_it(here: Garden, monkeypatch):
    monkeypatch.setattr(server, "PROBE_S", 0.1)
    monkeypatch.setattr(server, "FRESH_S", 0.05)
    tulip = await here.tulip()
    async with grpc.aio.insecure_channel(tulip.address) as connection:
        health = health_pb2_grpc.HealthStub(connection)
        ask = health_pb2.HealthCheckRequest(service=wire.SERVICE)
        watch = health.Watch(ask)
        assert (await watch.read()).status == SERVING
        tulip.engine.hold()
        assert (await asyncio.wait_for(watch.read(), 10)).status == NOT_SERVING
        assert (await health.Check(ask)).status == NOT_SERVING
        tulip.engine.release()
        assert (await asyncio.wait_for(watch.read(), 10)).status == SERVING
        watch.cancel()
    await until(lambda: not tulip.server._health._watcher_count_by_service)
