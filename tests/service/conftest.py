"""A server for every module of tests, and `run` for a test that needs one of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gateway_server import Server, running


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(max_body_bytes=1_000_000) as server:
        yield server


@pytest.fixture
def run():
    """run(engine, tulip, **ivy_settings): a server of the test's own."""
    return running
