"""One trace over HTTP, gRPC and the stream beside it: the caller's, the gateway's spans, the schedulers'."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import subprocess
import sys
import time

import pytest
from gateway_server import FOLDER
from grpc_pair import Garden
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from patience import timed

from hortus import traces
from hortus.config import IvyConfig, TulipConfig
from hortus.ivy.app import App
from hortus.ivy.exchange import Answer, Request
from hortus.metrics import Metrics
from hortus.tulip.spans import Spans

ENDPOINT = "http://127.0.0.1:9/v1/traces"
NUMBER, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def told(monkeypatch):
    """Spans as they are sent."""
    seen: list = []
    monkeypatch.setattr(OTLPSpanExporter, "export", lambda self, spans: seen.extend(spans))
    return seen


async def ask(app: App, texts: list[str], **headers: str) -> Answer:
    named = {name.encode(): value.encode() for name, value in headers.items()}
    request = Request("POST", "/v1/embeddings", named, 30.0, client="", keep_alive=True)
    app.admit(request)
    request.take(json.dumps({"model": "mini", "input": texts}).encode(), 10**6)
    request.finish()
    answer = await asyncio.create_task(app.answer(request))
    assert answer is not None
    return answer


async def opened(world: Garden, endpoint: str | None = ENDPOINT, **tulip: object) -> tuple[App, Spans]:
    spans = Spans(ENDPOINT)
    first = await world.tulip(spans=spans, **tulip)
    app = App(IvyConfig(otlp_endpoint=endpoint), Metrics())
    app.open(FOLDER, first.engine.info, await world.replicas(first.address))
    return app, spans


def close(app: App, spans: Spans) -> None:
    app.close()
    spans.close()


async def test_a_trace_goes_through_every_hop(world: Garden, told: list):
    app, spans = await opened(world)
    many = [f"text {i}" for i in range(300)]
    answers = await asyncio.gather(
        ask(app, ["a"], traceparent=f"00-{NUMBER}-{CALLER}-01", tracestate="x=1"), ask(app, ["b"]), ask(app, many)
    )
    assert [a.status for a in answers] == [200] * 3
    close(app, spans)
    by_number = {s.context.span_id: s for s in told}
    roots = [s for s in told if s.name == "POST /v1/embeddings"]
    assert len({s.context.trace_id for s in roots}) == 3
    (called,) = [s for s in roots if s.parent is not None]
    assert (f"{called.context.trace_id:032x}", f"{called.parent.span_id:016x}") == (NUMBER, CALLER)
    asks = [s for s in told if s.name == "hortus.encode"]
    assert {s.parent.span_id for s in asks} == {s.context.span_id for s in roots}, "each hangs on its own request"
    for each in asks:
        assert each.resource.attributes["service.name"] == "hortus-tulip"
        assert each.context.trace_id == by_number[each.parent.span_id].context.trace_id
        inside = {s.name: s for s in told if s.parent is not None and s.parent.span_id == each.context.span_id}
        assert set(inside) == {"hortus.tulip.queue", "hortus.tulip.device"}
        assert each.attributes["hortus.device_ms"] > 0
        assert each.start_time <= inside["hortus.tulip.device"].end_time <= each.end_time
    (root,) = [s for s in roots if s.attributes["http.request.body.size"] > 1000]
    parts = [s for s in asks if s.parent.span_id == root.context.span_id]
    assert sum(s.attributes["hortus.sequences"] for s in parts) == 300


async def test_what_is_refused_is_told_and_what_the_caller_does_not_trace_is_not(world: Garden, told: list):
    app, spans = await opened(world, tulip=TulipConfig(max_queue_tokens=2))
    assert (await ask(app, ["a b c d"])).status == 400
    assert (await ask(app, ["a b c d"], traceparent=f"00-{NUMBER}-{CALLER}-00")).status == 400
    close(app, spans)
    (refused,) = [s for s in told if s.name == "hortus.encode"]
    assert refused.attributes["hortus.code"] == "invalid_input"
    assert not refused.status.is_ok
    assert f"{refused.context.trace_id:032x}" != NUMBER


async def test_without_an_endpoint_nothing_is_traced(world: Garden, told: list):
    app, spans = await opened(world, None)
    assert (await ask(app, ["a"], traceparent=f"00-{NUMBER}-{CALLER}-01")).status == 200
    close(app, spans)
    assert not told


@timed
@pytest.mark.parametrize("collector", ["refuses", "is silent"])
def test_a_collector_that_is_away_holds_up_no_stop_and_fills_no_log(collector, caplog, monkeypatch):
    monkeypatch.setattr(traces, "CLOSE_S", 0.5)
    monkeypatch.setattr(traces._seldom, "_said", float("-inf"))
    with socket.create_server(("127.0.0.1", 0)) as door:  # takes connections, says nothing
        port = door.getsockname()[1] if collector == "is silent" else 9
        tracer = traces.Tracer(f"http://127.0.0.1:{port}/v1/traces", "hortus")
        for _ in range(2000):  # of several batches, each tried for ten seconds
            tracer.drawn(tracer.draw({}), {}, "a", time.time_ns(), {}).end()
        begin = time.monotonic()
        tracer.close()
        assert time.monotonic() - begin < 2
    time.sleep(0.5)
    assert (
        len([r for r in caplog.records if r.name.startswith("opentelemetry.exporter") and r.levelno >= logging.INFO])
        <= 1
    )


def test_opentelemetry_is_imported_for_an_endpoint_alone():
    code = (
        "import sys, hortus.serve_tulip, hortus.serve_ivy, hortus.serve\n"
        "from hortus.ivy.app import App; from hortus.config import IvyConfig; from hortus.metrics import Metrics\n"
        "App(IvyConfig(), Metrics())\n"
        "assert not any(m.startswith('opentelemetry') for m in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
