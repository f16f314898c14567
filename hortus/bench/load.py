"""A small HTTP load generator: raw sockets in processes of their own, so that the client's cost stays out of the server's.

Closed loop: each connection sends its next request when the last is answered. Latency is taken from before the write to the
last byte of the answer. Every answer must be 200 and as long as the first one, or the run fails.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Load:
    """What one run saw."""

    latencies_ms: np.ndarray[Any, np.dtype[np.float64]]
    seconds: float
    client_cpu_s: float
    """Processor seconds the clients themselves used."""

    @property
    def requests_per_s(self) -> float:
        return len(self.latencies_ms) / self.seconds


def http_request(host: str, port: int, path: str, body: bytes) -> bytes:
    """A whole POST, as bytes."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def read_response(sock: socket.socket) -> tuple[int, bytes]:
    """(status, body) of one answer with a content-length."""
    data = b""
    while (end := data.find(b"\r\n\r\n")) < 0:
        part = sock.recv(65536)
        if not part:
            raise ConnectionError(f"closed in the middle of an answer: {data[:200]!r}")
        data += part
    head, body = data[:end].lower(), data[end + 4 :]
    at = head.index(b"content-length:") + 15
    length = int(head[at:].split(b"\r\n", 1)[0])
    chunks, have = [body], len(body)
    while have < length:
        part = sock.recv(262144)
        if not part:
            raise ConnectionError("closed in the middle of a body")
        chunks.append(part)
        have += len(part)
    return int(head.split(b" ", 2)[1]), b"".join(chunks)


def _connect(host: str, port: int) -> socket.socket:
    sock = socket.create_connection((host, port), timeout=30)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _client(host: str, port: int, request: bytes, connections: int, seconds: float, barrier: Any, out: Any) -> None:
    """One client process holding `connections` closed loops, driven by epoll."""
    import selectors

    selector = selectors.DefaultSelector()
    try:
        with socket.create_connection((host, port), timeout=30) as probe:
            probe.sendall(request)
            status, body = read_response(probe)
        if status != 200:
            raise RuntimeError(f"the server answered {status}: {body[:300]!r}")
        socks = [_connect(host, port) for _ in range(connections)]
        barrier.wait(60)
        latencies: list[float] = []
        cpu, begin = time.process_time(), time.perf_counter()
        end = begin + seconds
        sent: dict[int, float] = {}
        for s in socks:
            selector.register(s, selectors.EVENT_READ)
            sent[s.fileno()] = time.perf_counter()
            s.sendall(request)
        live = len(socks)
        while live:
            for key, _ in selector.select(30):
                assert isinstance(key.fileobj, socket.socket)
                s = key.fileobj
                status, answer = read_response(s)
                now = time.perf_counter()
                latencies.append((now - sent[s.fileno()]) * 1000)
                if status != 200 or len(answer) != len(body):
                    raise RuntimeError(f"the server answered {status}: {answer[:300]!r}")
                if now < end:
                    sent[s.fileno()] = now
                    s.sendall(request)
                else:
                    live -= 1
        out.put((latencies, time.perf_counter() - begin, time.process_time() - cpu))
        for s in socks:
            s.close()
    except Exception as e:  # noqa: BLE001  the parent must hear of any failure, or it would wait for ever
        barrier.abort()
        out.put(repr(e))
    finally:
        selector.close()


def closed_loop(
    host: str, port: int, path: str, body: bytes, *, clients: int, seconds: float, processes: int = 1
) -> Load:
    """Run `clients` closed loops over `processes` client processes; RuntimeError when any answer was wrong."""
    ctx = multiprocessing.get_context("spawn")
    processes = min(processes, clients)
    barrier, out = ctx.Barrier(processes), ctx.Queue()
    share = [clients // processes + (i < clients % processes) for i in range(processes)]
    request = http_request(host, port, path, body)
    workers = [
        ctx.Process(target=_client, args=(host, port, request, n, seconds, barrier, out), daemon=True) for n in share
    ]
    for w in workers:
        w.start()
    reports = [out.get(timeout=seconds + 120) for _ in workers]
    for w in workers:
        w.join(30)
    if bad := [r for r in reports if isinstance(r, str)]:
        raise RuntimeError(bad[0])
    return Load(
        np.concatenate([np.asarray(r[0]) for r in reports]), max(r[1] for r in reports), sum(r[2] for r in reports)
    )
