"""Keys, CORS, time limits, gzip, the access log, traces."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging

import pytest
from ivy_stubs import load_once
from models_stubs import client, post
from patience import until_seen

from hortus.config import IvyConfig, load
from hortus.errors import StartError
from hortus.ivy.access import Access
from hortus.ivy.app import App
from hortus.ivy.exchange import takes_gzip
from hortus.metrics import Metrics


@pytest.fixture(autouse=True)
def _tokenizer_read_once(monkeypatch):
    monkeypatch.setattr("hortus.ivy.vocabulary.load", load_once)


BODY = json.dumps({"model": "mini", "input": "a"}).encode()


# --- keys


async def test_every_route_but_health_ready_and_the_pages_files_asks_for_a_key(folder, tmp_path):
    (tmp_path / "keys").write_text("# ours\nthird-key\n\n")
    gateway = client(folder, api_keys="first-key,second-key", api_keys_file=str(tmp_path / "keys"))
    routes = [(m, p) for p, ms in {**gateway.app._routes, **gateway.app._named_routes}.items() for m in ms]
    for method, path in [*routes, ("GET", "/nothing"), ("OPTIONS", "/embed"), ("HEAD", "/info")]:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "first-key"}, {"authorization": "Bearer "},
                        {"authorization": "Basic first-key"}):  # fmt: skip
            reply = await gateway.request(method, path, BODY, headers)
            if (method, path) in (("GET", "/"), ("GET", "/page/")):
                assert reply.status == (200 if path == "/" else 404)
            elif path in ("/health", "/ready"):
                assert reply.status == 200
            else:
                assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer"), path
                assert method == "HEAD" or reply.error["code"] == "unauthorized"
                assert "key" not in str(gateway.encoder.batches)
    assert len(gateway.encoder.batches) <= 1, "nobody without a key reaches the model, but for the probe of /ready"
    for key in ("first-key", "second-key", "third-key"):
        for scheme in ("Bearer", "bearer"):
            reply = await gateway.request("POST", "/v1/embeddings", BODY, {"authorization": f"{scheme} {key}"})
            assert reply.status == 200


@pytest.mark.parametrize("bad", ["a,,b", "with space", "ü", ""])
def test_keys_that_cannot_work_are_refused_at_start(bad):
    with pytest.raises(StartError, match="--api-keys"):
        Access(IvyConfig(api_keys=bad))


def test_a_key_file_that_cannot_work_is_refused_at_start(tmp_path):
    for text in (None, "", "# only\n"):
        if text is not None:
            (tmp_path / "keys").write_text(text)
        with pytest.raises(StartError, match="--api-keys-file"):
            Access(IvyConfig(api_keys_file=str(tmp_path / "keys")))


def test_a_bad_key_is_told_by_its_file_and_line_and_not_shown(tmp_path):
    (tmp_path / "keys").write_text("# ours\ngood\n\nwith space\n")
    with pytest.raises(StartError) as told:
        Access(IvyConfig(api_keys="fine", api_keys_file=str(tmp_path / "keys")))
    assert str(told.value).startswith(f"--api-keys-file {tmp_path / 'keys'}, line 4: ")
    assert "with space" not in str(told.value)


async def test_keys_are_never_shown(folder, caplog):
    caplog.set_level(logging.DEBUG)
    config = load(environ={"HORTUS_API_KEYS": "very-secret"})
    assert config.ivy.api_keys == "very-secret"
    assert "very-secret" not in repr(config)
    gateway = client(folder, api_keys="very-secret")
    reply = await gateway.request("POST", "/embed", b"{}", {"authorization": "Bearer very-wrong"})
    info = await gateway.request("GET", "/info", b"", {"authorization": "Bearer very-secret"})
    assert b"very-" not in reply.body + info.body
    assert "very-" not in caplog.text


# --- CORS


async def test_cors_for_the_origins_given(folder):
    gateway = client(folder, cors_origins="https://a.example,http://b.example:81", api_keys="k")
    ask = {"origin": "https://a.example", "access-control-request-method": "POST",
           "access-control-request-headers": "authorization,content-type"}  # fmt: skip
    told = await gateway.request("OPTIONS", "/v1/embeddings", b"", ask)
    assert told.status == 200
    assert told.headers["access-control-allow-origin"] == "https://a.example"
    assert "POST" in told.headers["access-control-allow-methods"]
    assert told.headers["access-control-allow-headers"] == "authorization,content-type"
    reply = await gateway.request(
        "POST", "/v1/embeddings", BODY, {"origin": "http://b.example:81", "authorization": "Bearer k"}
    )
    assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, "http://b.example:81")
    refused = await gateway.request("POST", "/v1/embeddings", BODY, {"origin": "https://a.example"})
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, "https://a.example")
    for origin in ("https://evil.example", "null"):
        other = await gateway.request("OPTIONS", "/v1/embeddings", b"", {**ask, "origin": origin})
        assert other.status == 401
        assert "access-control-allow-origin" not in other.headers


async def test_cors_for_all_and_for_none(folder):
    everyone, nobody = client(folder, cors_origins="*"), client(folder)
    for gateway, allowed in ((everyone, "*"), (nobody, None)):
        reply = await gateway.request("POST", "/v1/embeddings", BODY, {"origin": "https://x.example"})
        assert reply.headers.get("access-control-allow-origin") == allowed
    assert "access-control-allow-origin" not in (await everyone.request("POST", "/v1/embeddings", BODY)).headers
    for bad in ("example.org", "https://a.example/", "https://a.example/x", ""):
        with pytest.raises(StartError, match="--cors-origins"):
            Access(IvyConfig(cors_origins=bad))


# --- time


async def test_a_request_may_shorten_its_time(made):
    gateway = made()
    gateway.encoder.hold = asyncio.Event()
    reply = await gateway.request("POST", "/v1/embeddings", BODY, {"x-hortus-timeout-ms": "30"})
    assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
    assert "0.03 s" in reply.error["message"]
    assert "x-hortus-timeout-ms" in reply.error["message"]
    assert gateway.encoder.cancelled == 1


async def test_a_request_cannot_lengthen_its_time(made):
    gateway = made(timeout_s=0.03)
    gateway.encoder.hold = asyncio.Event()
    reply = await gateway.request("POST", "/v1/embeddings", BODY, {"x-hortus-timeout-ms": "60000"})
    assert reply.status == 504


@pytest.mark.parametrize("bad", ["", "x", "-1", "0", "nan", "inf", "1e999", "1_000", "+5", "1.5", "9" * 400])
async def test_nonsense_times_are_refused(made, bad):
    reply = await made().request("POST", "/v1/embeddings", BODY, {"x-hortus-timeout-ms": bad})
    assert reply.status == 400


# --- gzip


async def test_large_answers_are_compressed_for_who_takes_it(folder):
    gateway, plain = client(folder, gzip=True), client(folder)
    large = json.dumps({"inputs": [f"text {i}" for i in range(900)]}).encode()
    takes = {"accept-encoding": "gzip, deflate"}
    whole = await gateway.request("POST", "/embed", large)
    packed = await gateway.request("POST", "/embed", large, takes)
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.headers["vary"] == "accept-encoding"
    assert int(packed.headers["content-length"]) == len(packed.body) < len(whole.body) * 0.6
    assert gzip.decompress(packed.body) == whole.body
    assert "content-encoding" not in whole.headers
    assert whole.headers["vary"] == "accept-encoding"
    assert "content-encoding" not in (await gateway.request("POST", "/v1/embeddings", BODY, takes)).headers
    assert "content-encoding" not in (await plain.request("POST", "/embed", large, takes)).headers


@pytest.mark.parametrize(
    ("accepted", "taken"),
    [
        *(
            (a, True)
            for a in (b"gzip", b"GZIP", b"x-gzip", b"deflate, gzip;q=0.5", b"*", b"gzip ; q=1.0", b"*;q=0, gzip")
        ),
        *(
            (a, False)
            for a in (b"", b"identity", b"gzip;q=0", b"identity, gzip;q=0.0", b"gzip;q=0, *", b"*;q=0", b"gzip;q=x")
        ),
    ],
)
def test_gzip_goes_to_who_accepts_it(accepted, taken):
    assert takes_gzip(accepted) is taken


# --- the access log


async def test_the_access_log_has_a_line_a_request(folder, tmp_path):
    gateway = client(folder, access_log=str(tmp_path / "access.log"))
    await gateway.request("POST", "/v1/embeddings", BODY, {"x-request-id": "mine", "authorization": "Bearer hidden"})
    await post(gateway, "/embed", inputs=[])
    await gateway.request("GET", "/nothing")
    gateway.app.close()
    text = (tmp_path / "access.log").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [(x["method"], x["path"], x["status"], x["code"]) for x in lines] == [
        ("POST", "/v1/embeddings", 200, "ok"),
        ("POST", "/embed", 400, "invalid_input"),
        ("GET", "/nothing", 404, "route_not_found"),
    ]
    assert lines[0]["id"] == "mine"
    assert lines[0]["bytes_in"] == len(BODY)
    assert lines[0]["bytes_out"] > 50
    assert lines[0]["ms"] > 0
    assert "hidden" not in text
    gateway.app.close()


def test_a_log_that_cannot_be_opened_is_refused_at_start(tmp_path):
    with pytest.raises(StartError, match="--access-log"):
        App(IvyConfig(access_log=str(tmp_path)), Metrics())


def test_a_log_that_breaks_loses_lines_and_says_so(tmp_path, caplog):
    from hortus.ivy.journal import Journal

    journal = Journal(str(tmp_path / "log"))
    journal._out.close()
    journal.write({"a": 1})
    journal.close()
    assert journal.dropped == 1
    assert "cannot be written" in caplog.text


@pytest.mark.parametrize("away", ["moved", "moved, a new one made", "deleted", "emptied"])
def test_a_log_is_written_where_it_is_asked_for_whatever_becomes_of_the_file(tmp_path, away):
    from hortus.ivy.journal import Journal

    log = tmp_path / "log"

    def lines() -> list[int]:
        return [json.loads(line)["n"] for line in log.read_text().splitlines()] if log.exists() else []

    both = [Journal(str(log)), Journal(str(log))]  # two gateways
    for journal in both:
        journal.write({"n": 1})
    until_seen(lambda: lines() == [1, 1])
    if away.startswith("moved"):
        log.rename(tmp_path / "log.1")
    if away == "deleted":
        log.unlink()
    if away in ("emptied", "moved, a new one made"):
        log.write_bytes(b"")
    for journal in both:
        journal.write({"n": 2})
        journal.close()
        assert not journal.dropped
    assert lines() == [2, 2]


# --- traces


def test_a_disk_that_takes_half_a_line_spoils_no_other(tmp_path):
    from hortus.ivy.journal import Journal

    journal = Journal(str(tmp_path / "log"))
    file, room = journal._out, [100]

    class Full:
        """A file of so much room, which takes what fits, as a disk does."""

        def write(self, data: memoryview) -> int:
            if not room[0]:
                raise OSError(28, "No space left on device")
            room[0] -= (taken := min(len(data), room[0], 30))
            return file.write(data[:taken])

        def fileno(self) -> int:
            return file.fileno()

        def flush(self) -> None: ...

        def close(self) -> None:
            file.close()

    journal._out = Full()
    for n in range(5):
        journal.write({"n": n})
    until_seen(lambda: journal.dropped and journal._waiting.empty())
    room[0] = 10_000
    for n in range(5, 10):
        journal.write({"n": n})
    journal.close()
    lines = (tmp_path / "log").read_text().splitlines()
    whole = [json.loads(line)["n"] for line in lines if line.endswith("}")]
    assert whole[-5:] == [5, 6, 7, 8, 9]
    assert len(lines) - len(whole) == 1, "one was cut where the room ended"


async def test_traces_hold_the_timings_and_the_callers_context(folder, monkeypatch):
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    seen = []
    monkeypatch.setattr(OTLPSpanExporter, "export", lambda self, spans: seen.extend(spans))
    gateway = client(folder, otlp_endpoint="http://127.0.0.1:9/v1/traces")
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await gateway.request("POST", "/v1/embeddings", BODY, {"traceparent": parent, "x-request-id": "r1"})
    await gateway.request("POST", "/v1/embeddings", b"{", {"traceparent": "nonsense"})
    gateway.app.close()
    spans = {s.name: s for s in seen if s.parent is not None}
    root = spans["POST /v1/embeddings"]
    assert f"{root.context.trace_id:032x}" == parent.split("-")[1]
    assert f"{root.parent.span_id:016x}" == parent.split("-")[2]
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["hortus.request_id"] == "r1"
    device = spans["hortus.device"]
    assert device.parent.span_id == root.context.span_id
    assert root.start_time <= device.start_time <= device.end_time <= root.end_time
    assert {"hortus.tokenize", "hortus.queue"} <= set(spans)
    failed = next(s for s in seen if s.parent is None)
    assert failed.attributes["hortus.code"] == "invalid_input"


def test_traces_name_the_extra(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(StartError, match=r"hortus\[otel\]"):
        App(IvyConfig(otlp_endpoint="http://127.0.0.1:9"), Metrics())
