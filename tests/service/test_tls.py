"""HTTPS with a certificate, and start errors for one that cannot be used."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

import httpx
import pytest
from gateway_server import running
from patience import PATIENCE_S

from hortus.config import IvyConfig
from hortus.errors import StartError
from hortus.ivy.app import App
from hortus.ivy.server import SELDOM_S, Seldom, serve
from hortus.metrics import Metrics


def test_https(pair):
    cert, key = pair
    with running(tls_cert=cert, tls_key=key, api_keys="secret") as server:
        url = server.url.replace("http:", "https:")
        with httpx.Client(verify=ssl.create_default_context(cafile=cert), base_url=url) as client:
            reply = client.post("/embed", json={"inputs": ["a"] * 500}, headers={"authorization": "Bearer secret"})
            assert reply.status_code == 200
            assert len(reply.json()) == 500
            assert client.post("/embed", json={"inputs": "a"}).status_code == 401
            assert client.get("/health").status_code == 200
        with pytest.raises(httpx.HTTPError), httpx.Client(base_url=server.url) as plain:
            plain.get("/health")
        with httpx.Client(verify=ssl.create_default_context(cafile=cert), base_url=url) as client:
            assert client.get("/health").status_code == 200


@pytest.mark.parametrize("which", ["no cert", "no key", "not a cert", "key alone"])
async def test_what_cannot_be_used_is_a_start_error(pair, tmp_path, which):
    cert, key = pair
    (tmp_path / "text").write_text("hello")
    given = {
        "no cert": (str(tmp_path / "none"), key),
        "no key": (cert, str(tmp_path / "none")),
        "not a cert": (str(tmp_path / "text"), key),
        "key alone": (None, key),
    }[which]
    config = IvyConfig(port=0, tls_cert=given[0], tls_key=given[1])
    with pytest.raises(StartError, match="--tls-cert"):
        await asyncio.wait_for(serve(App(config, Metrics()), config), 60)


def test_failed_handshakes_are_told_once_in_a_while(pair, caplog, monkeypatch):
    monkeypatch.setattr("hortus.ivy.server.SELDOM_S", 1e9)  # however long this test takes
    cert, key = pair
    with running(tls_cert=cert, tls_key=key) as server:
        for attempt in (
            b"GET /health HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.0\r\n\r\n",
            b"nonsense" * 9,
        ):
            with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as sock:
                sock.sendall(attempt)
                with contextlib.suppress(ConnectionError):
                    while sock.recv(100):  # an alert, perhaps, and the end
                        pass
        with httpx.Client(
            verify=ssl.create_default_context(cafile=cert), base_url=server.url.replace("http:", "https:")
        ) as client:
            assert client.get("/health").status_code == 200
    told = [r.getMessage() for r in caplog.records if "handshake" in r.getMessage()]
    assert len(told) == 1, told
    assert "plain HTTP" in told[0]
    assert "--tls-cert" in told[0]
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


def test_a_line_tells_how_many_had_none(monkeypatch):
    seldom, now = Seldom(), 0.0
    monkeypatch.setattr("hortus.ivy.server.time.monotonic", lambda: now)
    assert [seldom.now() for _ in range(5)] == [True, False, False, False, False]
    assert seldom.since == 4
    now = SELDOM_S
    assert seldom.now()
