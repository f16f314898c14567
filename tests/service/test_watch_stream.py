"""GET /watch over real sockets: that it streams, and that whoever watches never keeps a server from ending."""

from __future__ import annotations

import json
import socket
import time

import pytest
from patience import timed, until_seen

DRAIN_S = 60


def opened(server, version: str = "1.1") -> socket.socket:
    sock = server.connect()
    sock.sendall(f"GET /watch HTTP/{version}\r\nhost: x\r\n\r\n".encode())
    return sock


def until_end(sock: socket.socket) -> bytes:
    data = b""
    while part := sock.recv(65536):
        data += part
    return data


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@timed
def test_a_server_that_stops_lets_watchers_go_at_once(run, version):
    with run(drain_s=DRAIN_S) as server, opened(server, version) as reads, opened(server) as does_not:
        head, _, first = reads.recv(65536).partition(b"\r\n\r\n")
        assert b"text/event-stream" in head.lower()
        assert b"content-length" not in head.lower()
        while b"\n\n" not in first:
            first += reads.recv(65536)
        assert json.loads(first.removeprefix(b"data: ").partition(b"\n\n")[0])["state"] == "ready"
        begin = time.monotonic()
        server.stop()
        last = until_end(reads).rstrip().rpartition(b"data: ")[2]
        assert json.loads(last)["state"] == "draining"
        server.thread.join(DRAIN_S / 2)
        assert not server.thread.is_alive()
        assert time.monotonic() - begin < DRAIN_S / 2
        assert until_end(does_not)
    assert server.sample("hortus_requests_total", code="ok") == 0  # watching is not counted


def test_a_watcher_that_leaves_is_noticed_and_one_that_stays_sees_samples(run):
    with run() as server:
        with opened(server) as sock:
            data = b""
            while data.count(b"data: ") < 3:
                data += sock.recv(65536)
            assert server.app._watch.watchers == 1
        until_seen(lambda: not server.app._watch.watchers)
        rows = [json.loads(e.partition(b"\n\n")[0])["rows"] for e in data.split(b"data: ")[1:]]
        assert [len(r) for r in rows[1:]] == [1] * (len(rows) - 1)
