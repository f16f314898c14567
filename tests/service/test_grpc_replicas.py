"""Several schedulers behind one gateway, over real gRPC: shared work, lost replicas, draining, other models."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time

import numpy as np
import pytest
from gateway_server import FOLDER
from grpc_pair import Garden, batch, rows_of, start_tulip
from patience import PATIENCE_S, timed, until

from hortus import errors
from hortus.config import TulipConfig
from hortus.protocol.streams import connect_local
from hortus.tulip.fake import FakeEngine


@timed
async def test_work_is_shared_out(world: Garden):
    tulips = [await world.tulip(FakeEngine.like(FOLDER, delay_s=0.002)) for _ in range(3)]
    replicas = await world.replicas(*[t.address for t in tulips])
    await asyncio.gather(*[replicas.encode(batch(n)) for n in range(300)])
    run = [sum(s for s, _ in t.engine.shapes) for t in tulips]
    assert sum(run) == 300
    assert min(run) >= 80


@timed
async def test_a_lost_replica_s_work_is_answered_by_another_once(world: Garden):
    a, b = [await world.tulip() for _ in range(2)]
    a.engine.hold()
    b.engine.hold()
    replicas = await world.replicas(a.address, b.address)
    tasks = [asyncio.ensure_future(replicas.encode(batch(n))) for n in range(20)]
    await until(lambda: a.engine.steps and b.engine.steps)
    begin = time.monotonic()
    await a.server.close()
    b.engine.release()
    results = await asyncio.gather(*tasks)
    assert time.monotonic() - begin < 1
    for n, result in enumerate(results):
        np.testing.assert_array_equal(result.rows, rows_of(batch(n)))
    retries = replicas._metrics.registry.get_sample_value("hortus_replica_retries_total")
    assert 0 < retries <= 10


async def test_with_no_replica_left_the_answer_is_clear_and_at_once(world: Garden):
    a = await world.tulip()
    replicas = await world.replicas(a.address)
    a.engine.hold()
    task = asyncio.ensure_future(replicas.encode(batch(1)))
    await until(lambda: a.engine.steps)
    await a.server.close()
    with pytest.raises(errors.NotReady, match="was lost"):
        await asyncio.wait_for(task, PATIENCE_S)
    took = []
    for _ in range(5):
        begin = time.monotonic()
        with pytest.raises(errors.NotReady, match="no replica can take work: "):
            await asyncio.wait_for(replicas.encode(batch(1)), PATIENCE_S)
        took.append(time.monotonic() - begin)
    assert min(took) < 0.5


async def test_a_replica_comes_back(world: Garden):
    a = await world.tulip()
    replicas = await world.replicas(a.address)
    await a.stop()
    await until(lambda: not next(iter(replicas.links.values())).up)
    await world.tulip(listen=a.address)
    await until(lambda: next(iter(replicas.links.values())).up)
    assert (await replicas.encode(batch(1))).rows.shape == (1, 384)


async def test_a_scheduler_that_ends_lets_go_of_those_who_have_just_come(tmp_path):
    """Taken by the system, and their streams not begun: nobody would tell them that it has ended."""
    for turns in range(1, 7):  # before that asyncio has not made a connection of it, and loses it (Python 3.11)
        tulip = await start_tulip(f"unix:{tmp_path}/t{turns}")
        stream = await connect_local(f"{tmp_path}/t{turns}.s")
        for _ in range(turns):
            await asyncio.sleep(0)
        await tulip.stop()
        async with asyncio.timeout(60):
            with contextlib.suppress(OSError):
                await stream.run(lambda data: None, lambda: None)
        stream.close()


async def test_another_model_is_refused_by_name(world: Garden, caplog):
    caplog.set_level("INFO")
    a = await world.tulip()
    b = await world.tulip(FakeEngine(name="other", width=384), folder=dataclasses.replace(FOLDER, name="other"))
    replicas = await world.replicas(a.address)
    both = await world.replicas(a.address, b.address, up=1)
    await until(lambda: "its model is" in caplog.text)
    serving = (await both.describe()).info.name
    for n in range(5):
        assert (await both.encode(batch(n))).rows.shape == (1, 384)
    refused = next(link for link in both.links.values() if not link.up)
    await until(lambda: f"this gateway serves {serving!r}" in refused.why)
    assert (await replicas.describe()).info.name == "mini"


async def test_draining_finishes_what_is_in_and_sends_the_rest_elsewhere(world: Garden):
    a, b = [await world.tulip(FakeEngine.like(FOLDER, delay_s=0.02)) for _ in range(2)]
    replicas = await world.replicas(a.address, b.address)
    tasks = [asyncio.ensure_future(replicas.encode(batch(n))) for n in range(50)]
    await until(lambda: a.engine.steps)
    draining = asyncio.ensure_future(a.server.drain(PATIENCE_S))
    for n in range(50, 100):
        tasks.append(asyncio.ensure_future(replicas.encode(batch(n))))
        await asyncio.sleep(0.001)
    results = await asyncio.gather(*tasks)
    await draining
    for n, result in enumerate(results):
        np.testing.assert_array_equal(result.rows, rows_of(batch(n)))
    assert replicas._metrics.registry.get_sample_value("hortus_replica_losses_total") <= 1


async def test_an_engine_that_hangs_is_passed_over(world: Garden):
    a, b = await world.tulip(tulip=TulipConfig(step_timeout_s=0.2)), await world.tulip()
    replicas = await world.replicas(a.address, b.address)
    a.engine.hold()
    results = await asyncio.gather(*[replicas.encode(batch(n)) for n in range(20)])
    assert len(results) == 20
    before = b.engine.steps
    for n in range(10):
        await replicas.encode(batch(n))
    assert b.engine.steps >= before + 10


async def test_a_name_that_takes_long_to_look_up_keeps_nobody_from_the_others(world: Garden, monkeypatch):
    from hortus.ivy import replicas as module
    from hortus.ivy.address import resolve

    a, b = [await world.tulip(listen="127.0.0.1:0") for _ in range(2)]

    async def slow(place):
        if place.host == "slow.example":
            await asyncio.sleep(3600)
        return await resolve(place)

    monkeypatch.setattr(module, "resolve", slow)
    named = b.address.replace("127.0.0.1", "localhost")
    replicas = await world.replicas("slow.example:1", named, a.address, up=2)
    assert (await asyncio.wait_for(replicas.encode(batch(1)), PATIENCE_S)).rows.shape == (1, 384)


async def test_unlisted_replicas_finish_and_go(world: Garden, monkeypatch):
    from hortus.ivy import replicas as module
    from hortus.ivy.address import Target

    a, b = [await world.tulip(FakeEngine.like(FOLDER, delay_s=0.05)) for _ in range(2)]
    listed = [a.address]

    async def resolve(place):
        return {Target(address, None) for address in listed}

    monkeypatch.setattr(module, "resolve", resolve)
    replicas = await world.replicas("many.example:1", resolve_s=0.1, up=1)
    task = asyncio.ensure_future(replicas.encode(batch(1)))
    await asyncio.sleep(0.02)
    listed[:] = [b.address]
    await until(lambda: [t.address for t, link in replicas.links.items() if link.up] == [b.address])
    assert (await task).rows.shape == (1, 384)
    steps = a.engine.steps
    await replicas.encode(batch(2))
    assert (a.engine.steps, b.engine.steps) == (steps, 1)
    await until(lambda: not a.server._streams)
