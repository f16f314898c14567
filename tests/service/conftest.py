"""A server for every module of tests, and `run` for a test that needs one of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from gateway_server import Server, running
from grpc_pair import Garden, garden
from webdriver import Browser, driver, missing


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(max_body_bytes=1_000_000) as server:
        yield server


@pytest.fixture
def run():
    """run(engine, tulip, **ivy_settings): a server of the test's own."""
    return running


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Files of a certificate and its key."""
    where = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=where, check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    return str(where / "cert.pem"), str(where / "key.pem")


@pytest.fixture(params=["local", "grpc"])
async def world(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Garden]:
    """Schedulers and gateways' clients, over each kind of link."""
    async with garden(tmp_path, request.param) as g:
        yield g


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if why := missing():
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    with driver() as make:
        browser = make()
        browser.size(1200, 900)
        yield browser


@pytest.fixture
def page(browser: Browser) -> Iterator[Browser]:
    """The browser, back at nothing; the test may leave no complaint in its console but those it takes out itself."""
    browser.complaints()
    yield browser
    told = browser.complaints()
    browser.open("about:blank")
    browser.size(1200, 900)
    browser.scheme("light")
    assert not told
