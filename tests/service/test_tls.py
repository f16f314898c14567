"""HTTPS with a certificate, and start errors for one that cannot be used."""

from __future__ import annotations

import asyncio
import ssl
import subprocess

import httpx
import pytest
from gateway_server import running

from hortus.config import IvyConfig
from hortus.errors import StartError
from hortus.ivy.app import App
from hortus.ivy.server import serve
from hortus.metrics import Metrics


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    where = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=where, check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    return str(where / "cert.pem"), str(where / "key.pem")


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
