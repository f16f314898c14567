"""The chart's probe over mutual TLS, run as the kubelet runs it, against the real health service."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from chart_render import CHART

from hortus.config import LinkConfig
from hortus.protocol import wire
from hortus.tulip.server import Server

NAME = "embed-hortus-tulip.search.svc"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.crt, tls.crt and tls.key as in a Secret of cert-manager's."""
    where = tmp_path_factory.mktemp("tls")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=where, check=True, capture_output=True, timeout=120)

    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(*new, "-x509", "-days", "2", "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.crt")
    openssl(*new, "-subj", f"/CN={NAME}", "-keyout", "tls.key", "-out", "tls.csr")
    (where / "names").write_text(f"subjectAltName=DNS:{NAME}\n")
    signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
    openssl("x509", "-req", "-in", "tls.csr", *signed, "-out", "tls.crt")
    return where


async def probe(address: str, name: str, service: str, folder: Path) -> tuple[int, str]:
    words = (str(CHART / "files/probe.py"), address, name, service, str(folder))
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stderr=asyncio.subprocess.PIPE)
    _, told = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode is not None
    return process.returncode, told.decode()


async def test_probe_speaks_mutual_tls(folder: Path) -> None:
    tls = {
        f"link_{kind}": str(folder / file) for kind, file in (("ca", "ca.crt"), ("cert", "tls.crt"), ("key", "tls.key"))
    }
    server = Server(LinkConfig(listen="127.0.0.1:0", link_token="secret", **tls))
    address = await server.start()
    try:
        status, told = await probe(address, NAME, "", folder)
        assert (status, told) == (0, "")
        status, told = await probe(address, NAME, wire.SERVICE, folder)  # no model yet
        assert status == 1
        assert "not serving" in told
    finally:
        await server.close()
