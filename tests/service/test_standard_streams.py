"""Standard streams that are full, closed, or wanted by a child: the real command, alone and as a family."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import PATIENCE_S, until_seen

pytestmark = pytest.mark.parametrize("gateways", [0, 1])


def asked(port: int, path: str, body: dict | None = None) -> int:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode() if body else None)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status
    except OSError:
        return 0


@contextlib.contextmanager
def serving(where: Path, gateways: int, *flags: str, redirect: str) -> Iterator[int]:
    """A fake model's server that a shell started with `redirect`; its port. It ends with status 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "hortus.start", "serve", "demo", "--fake-delay-ms", "0", "--port", str(port)]
    words += ["--gateways", str(gateways), *flags]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("HORTUS_")}
    process = subprocess.Popen(["sh", "-c", f'exec "$@" {redirect}', "sh", *words], cwd=where, env=environ)
    try:
        until_seen(lambda: process.poll() is not None or asked(port, "/ready") == 200, 120)
        assert process.poll() is None
        body = {"model": "all-MiniLM-L6-v2", "input": "a", "dimensions": 1}
        assert asked(port, "/v1/embeddings", body) == 200
        yield port
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()


def test_a_server_does_without_any_standard_stream(tmp_path: Path, gateways: int):
    with serving(tmp_path, gateways, "--access-log", "-", redirect="0<&- >&- 2>&-"):
        pass


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_banner_that_cannot_be_written_ends_no_server(tmp_path: Path, gateways: int):
    with serving(tmp_path, gateways, redirect=">/dev/full 2>log"):
        until_seen(lambda: "standard output cannot be written" in (tmp_path / "log").read_text())
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_the_access_log_on_standard_output_is_there_whoever_writes_it(tmp_path: Path, gateways: int):
    out = tmp_path / "out"
    with serving(tmp_path, gateways, "--access-log", "-", redirect=">out 2>log"):
        until_seen(lambda: '"path":"/v1/embeddings","status":200' in out.read_text())
        until_seen(lambda: "(started in" in out.read_text())
    assert "ready" not in [line.partition(" ")[0] for line in out.read_text().splitlines()]
