"""Start, readiness, overload, clients that leave: a real port under load."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from gateway_server import FOLDER, request
from patience import PATIENCE_S
from patience import until_seen as until

from hortus.config import IvyConfig, TulipConfig
from hortus.errors import StartError
from hortus.ivy.app import App
from hortus.ivy.server import bind, serve
from hortus.metrics import Metrics
from hortus.tulip.fake import FakeEngine


def get(server, path: str) -> tuple[int, dict]:
    status, body = server.raw(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path.encode())
    return status, json.loads(body)


# --- start


async def test_health_answers_while_the_model_loads():
    app, loading, stop = App(IvyConfig(port=0), Metrics()), asyncio.Event(), asyncio.Event()
    seen = []

    async def load(address: str) -> None:
        async with httpx.AsyncClient(base_url=address) as client:
            seen.extend(
                [await client.get("/health"), await client.get("/ready"), await client.post("/v1/embeddings", json={})]
            )
        loading.set()

    task = asyncio.create_task(serve(app, app.config, started=load, stop=stop))
    await asyncio.wait_for(loading.wait(), PATIENCE_S)
    stop.set()
    await asyncio.wait_for(task, PATIENCE_S)
    assert [r.status_code for r in seen] == [200, 503, 503]
    assert "loading" in seen[1].json()["error"]["message"]


async def test_a_load_that_fails_ends_the_server_with_its_error():
    async def load(address: str) -> None:
        raise StartError("no such model")

    app = App(IvyConfig(port=0), Metrics())
    with pytest.raises(StartError, match="no such model"):
        await asyncio.wait_for(serve(app, app.config, started=load), PATIENCE_S)


async def test_a_stop_during_the_load_cancels_it():
    stop, cancelled = asyncio.Event(), []

    async def load(address: str) -> None:
        stop.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    app = App(IvyConfig(port=0), Metrics())
    await asyncio.wait_for(serve(app, app.config, started=load, stop=stop), PATIENCE_S)
    assert cancelled


def test_a_taken_port_and_a_wrong_host_are_start_errors():
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(StartError, match=f"port {port}: address already in use .*--port"):
            bind("127.0.0.1", port)
    with pytest.raises(StartError, match="--host"):
        bind("no.such.host.invalid", 0)
    with pytest.raises(StartError, match="99999"):
        bind("127.0.0.1", 99999)


# --- readiness


def test_ready_tells_a_hung_engine_from_a_live_one(run, monkeypatch):
    monkeypatch.setattr("hortus.ivy.health.FRESH_S", 0.05)
    with run() as server:
        assert get(server, "/ready") == (200, {"status": "ready"})
        server.engine.hold()
        with monkeypatch.context() as patch:
            patch.setattr("hortus.ivy.health.PROBE_S", 0.3)
            time.sleep(0.1)  # what was asked before is fresh no more
            status, told = get(server, "/ready")
        assert status == 503
        assert "engine" in told["error"]["message"]
        assert get(server, "/health")[0] == 200
        server.engine.release()
        until(lambda: get(server, "/ready")[0] == 200)


def test_a_failing_step_fails_its_own_request_and_no_later_one(run):
    engine = FakeEngine.like(FOLDER)
    engine.fail_id = 7592  # hello
    with run(engine) as server:
        for text, status in ("one", 200), ("hello", 500), ("two", 200):
            got, body = server.raw(request(text))
            assert got == status
        assert "7592" not in body.decode()
        assert server.sample("hortus_requests_total", code="engine_error") == 1


# --- overload, and clients that leave


def test_overload_is_429_with_retry_after_and_ends(run):
    engine = FakeEngine.like(FOLDER)
    with run(engine, TulipConfig(max_queue_tokens=60, max_batch_tokens=20)) as server:
        engine.hold()
        with ThreadPoolExecutor(40) as pool:
            calls = [pool.submit(server.raw, request("one two three four five six seven eight")) for _ in range(40)]
            until(lambda: sum(c.done() for c in calls) >= 25)
            refused = [json.loads(c.result()[1])["error"] for c in calls if c.done()]
            engine.release()
            statuses = [c.result()[0] for c in calls]
        assert set(statuses) == {200, 429}
        assert {e["code"] for e in refused} == {"overloaded"}
        assert all("--max-queue-tokens" in e["message"] for e in refused)
        engine.hold()
        assert server.sample("hortus_requests_total", code="overloaded") == statuses.count(429)
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client, ThreadPoolExecutor(16) as pool:
            waiting = [pool.submit(server.raw, request("one two three four five six seven eight")) for _ in range(16)]
            until(lambda: server.sample("hortus_queue_tokens") >= 60 or any(w.done() for w in waiting))
            reply = client.post(
                "/v1/embeddings", json={"model": "mini", "input": "one two three four five six seven eight"}
            )
            assert reply.status_code == 429
            assert int(reply.headers["retry-after"]) >= 1
            engine.release()


def test_work_of_a_client_that_left_is_dropped(run):
    engine = FakeEngine.like(FOLDER)
    with run(engine, TulipConfig(max_batch_tokens=10)) as server:
        engine.hold()
        socks = [server.connect() for _ in range(20)]
        for sock in socks:
            sock.sendall(request("one two three four five six"))
        until(lambda: server.sample("hortus_requests_in_flight") == 20)
        for sock in socks:
            sock.close()
        until(lambda: server.sample("hortus_requests_total", code="cancelled") == 20)
        assert server.sample("hortus_queue_sequences") == 0
        assert server.sample("hortus_dropped_sequences_total", reason="cancelled") >= 10
        before = engine.steps
        engine.release()
        assert server.raw(request())[0] == 200
        assert engine.steps <= before + 2


def test_a_huge_request_lets_short_ones_through(run):
    class Stepped(FakeEngine):
        """A step comes to its end when it is let."""

        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            self.allowed = threading.Semaphore(0)

        def step(self, batch):
            assert self.allowed.acquire(timeout=PATIENCE_S)
            return super().step(batch)

    engine = Stepped.like(FOLDER, asynchronous=False)
    with run(engine, TulipConfig(max_batch_tokens=512)) as server:
        object.__setattr__(engine.info, "batch_tokens", 512)
        with ThreadPoolExecutor(2) as pool:
            huge = pool.submit(server.raw, request(["one two three four five six"] * 8000))
            until(lambda: server.sample("hortus_queue_tokens") > 0)
            for _ in range(5):
                in_flight = server.sample("hortus_requests_in_flight")
                short = pool.submit(server.raw, request())
                until(lambda f=in_flight: server.sample("hortus_requests_in_flight") > f)
                steps = engine.steps
                while not short.done():
                    engine.allowed.release()
                    begun = engine.steps
                    until(lambda b=begun, s=short: engine.steps > b or s.done())
                assert short.result()[0] == 200
                assert engine.steps - steps <= 6, "of 160 that the huge one takes"
                assert not huge.done()
            engine.allowed.release(10_000)
            status, body = huge.result()
        assert status == 200
        assert [d["index"] for d in json.loads(body)["data"]] == list(range(8000))


# --- metrics


def test_series_do_not_grow_with_traffic(run):
    with run() as server:

        def series() -> int:
            return sum(len(m.samples) for m in server.metrics.registry.collect())

        server.raw(request())
        before = series()
        for i in range(30):
            server.raw(request("word " * i))
            server.raw(request().replace(b"mini", b"m%03d" % i))
            server.raw(b"GET /x%d HTTP/1.1\r\nhost: x\r\n\r\n" % i)
        assert series() == before
        assert server.sample("hortus_requests_total", code="ok") >= 31
        until(lambda: server.sample("hortus_requests_in_flight") == 0)
