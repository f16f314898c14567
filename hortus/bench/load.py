"""The load generator: client processes that keep an HTTP server busy and say how long each answer took.

The clients are processes of their own, started once and used again, and tell the processor time they took. Who sends when
is pace.py's. Does not know JSON or any API.
"""

from __future__ import annotations

import multiprocessing
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection as Pipe
from types import TracebackType
from typing import Any

import httptools
import numpy as np

from hortus.bench.pace import (
    BROKEN,
    KEPT,
    PATIENCE_S,
    SHORT_BODY,
    Closed,
    Load,
    NoFigureError,
    Open,
    Plan,
    Seen,
    checked,
    drive,
)


def http_request(host: str, port: int, path: str, body: bytes, headers: Sequence[str] = ()) -> bytes:
    """A whole POST, as bytes. headers: lines such as `authorization: Bearer x`."""
    host = f"[{host}]" if ":" in host else host  # IPv6
    lines = [f"POST {path} HTTP/1.1", f"host: {host}:{port}", "content-type: application/json", *headers]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body


class _Peer:
    """One connection: what is still to be written, and the answer as it comes in."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.sock = socket.create_connection(address, timeout=30)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setblocking(False)
        self.parser, self.left = httptools.HttpResponseParser(self), memoryview(b"")
        self.complete = self.keep = False
        self.size, self.body, self.number = 0, bytearray(), 0
        """number: of the request on its way, among those that are used in turn."""
        self.begun = self.measured = False
        """measured: the head says how long the body is, or that it comes in chunks; otherwise it ends with the connection."""

    def on_header(self, name: bytes, value: bytes) -> None:
        self.measured = self.measured or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self.begun = True

    def on_body(self, data: bytes) -> None:
        self.size += len(data)
        if self.number < KEPT:
            self.body += data

    def on_message_complete(self) -> None:
        self.complete, self.keep = True, self.parser.should_keep_alive()  # the parser forgets it after this call

    def write(self) -> bool:
        """Send what is left as far as it goes; whether all is sent."""
        try:
            self.left = self.left[self.sock.send(self.left) :]
        except BlockingIOError:
            pass
        except OSError:  # the reading side will see the end of the connection
            self.left = self.left[:0]
        return not self.left

    def read(self) -> int | None:
        """The status of a complete answer, BROKEN at the end of the connection, None when more is to come."""
        try:
            data = self.sock.recv(262144)
        except BlockingIOError:
            return None
        except OSError:
            return BROKEN
        if not data:
            return int(self.parser.get_status_code()) if self.begun and not self.measured else BROKEN
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            return BROKEN
        return int(self.parser.get_status_code()) if self.complete else None


class HttpWire:
    """Connections to one server, kept alive, at most so many. Requests are whole HTTP messages, used in turn."""

    def __init__(self, address: tuple[str, int], requests: Sequence[bytes], connections: int, fine: bool) -> None:
        """fine: microseconds in poll()'s waiting, for open loops (epoll counts in milliseconds, select does not)."""
        self._address, self._requests, self._most = address, requests, connections
        self._selector: selectors.BaseSelector = (
            selectors.SelectSelector() if fine and connections < 900 else selectors.DefaultSelector()
        )
        self._free: list[_Peer] = []
        self._busy: dict[int, _Peer] = {}
        self._longest = 0
        self.answers: dict[int, bytes] = {}
        """The last whole answer to each of the first KEPT requests."""

    def connect(self, count: int) -> None:
        """Open connections before the clock runs."""
        self._free += [self._open() for _ in range(count)]

    def _open(self) -> _Peer:
        peer = _Peer(self._address)
        self._selector.register(peer.sock, selectors.EVENT_READ, peer)
        return peer

    def _drop(self, peer: _Peer) -> None:
        self._selector.unregister(peer.sock)
        peer.sock.close()

    def free(self) -> bool:
        return bool(self._free) or len(self._busy) < self._most

    def send(self, number: int) -> int:
        peer = self._free.pop() if self._free else self._open()
        peer.number = number % len(self._requests)
        peer.left, peer.complete, peer.keep = memoryview(self._requests[peer.number]), False, False
        peer.size, peer.body, peer.begun, peer.measured = 0, bytearray(), False, False
        self._busy[peer.sock.fileno()] = peer
        if not peer.write():
            self._selector.modify(peer.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)
        return peer.sock.fileno()

    def poll(self, timeout_s: float) -> Iterator[tuple[int, int]]:
        for key, events in self._selector.select(timeout_s):
            peer: _Peer = key.data
            if events & selectors.EVENT_WRITE and peer.write():
                self._selector.modify(peer.sock, selectors.EVENT_READ, peer)
            if not events & selectors.EVENT_READ:
                continue
            status = peer.read()
            if status is None:
                continue
            number = peer.sock.fileno()
            asked = self._busy.pop(number, None) is not None
            if not asked:  # an idle connection that the server closed, or on which it says what nobody asked
                self._free.remove(peer)
                self._drop(peer)
                continue
            if status != BROKEN and peer.keep:
                self._free.append(peer)
            else:
                self._drop(peer)
            yield number, self._judged(peer, status)

    def _judged(self, peer: _Peer, status: int) -> int:
        """The status, unless the body says otherwise: all that is asked on one wire has answers of about one length."""
        if status != 200:
            return status
        if peer.size < self._longest / 2:
            return SHORT_BODY
        self._longest = max(self._longest, peer.size)
        if peer.number < KEPT:
            self.answers[peer.number] = bytes(peer.body)
        return status

    def close(self) -> None:
        for peer in (*self._free, *self._busy.values()):
            peer.sock.close()
        self._selector.close()


@dataclass(frozen=True, slots=True)
class Job:
    """Requests for one server by one plan, over so many client processes."""

    host: str
    port: int
    requests: Sequence[bytes]
    plan: Plan
    processes: int = 1


class Clients:
    """Client processes, started when first needed and used again until close()."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._idle: list[tuple[Any, Pipe]] = []

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for process, pipe in self._idle:
            pipe.close()
            process.join(5)
            if process.is_alive():
                process.kill()
        self._idle.clear()

    def _worker(self) -> tuple[Any, Pipe]:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_client, args=(there,), daemon=True)
        # Ctrl-C in a terminal reaches all processes there. A client is ended by this one, and starts with it held back for good.
        resource_tracker.ensure_running()  # or start() would start that, and let it through
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        there.close()
        return process, here

    def run(self, jobs: Sequence[Job], tick: Callable[[float], None] | None = None) -> list[Load]:
        """Run the jobs side by side, begun together; one Load each. NoFigureError when a client failed.

        tick: called about twice a second with the seconds since the beginning, while clients run.
        """
        shares = [(i, job, plan) for i, job in enumerate(jobs) for plan in job.plan.shares(job.processes)]
        while len(self._idle) < len(shares):
            self._idle.append(self._worker())
        pipes = [pipe for _, pipe in self._idle[: len(shares)]]
        try:
            for pipe, (_, job, plan) in zip(pipes, shares, strict=True):
                pipe.send((job.host, job.port, job.requests, plan))
            for pipe in pipes:
                _heard(pipe, PATIENCE_S)  # connected
            begin = time.perf_counter() + 0.02  # one clock on one machine: all start at the same time
            for pipe in pipes:
                pipe.send(begin)
            if tick is not None:
                while not all(pipe.poll() for pipe in pipes):
                    tick(time.perf_counter() - begin)
                    if pipes[0].poll(0.5):
                        time.sleep(0.1)  # this one is done, another is not
            longest = max(2 * job.plan.seconds for job in jobs) + 2 * PATIENCE_S
            answers: list[Seen] = [_heard(pipe, longest) for pipe in pipes]
        except BaseException:
            # Their pipes may hold answers to questions nobody asks any more.
            for process, _ in self._idle:
                process.kill()
            self.close()
            raise
        parts: list[list[Load]] = [[] for _ in jobs]
        for (i, _, plan), seen in zip(shares, answers, strict=True):
            parts[i].append(
                Load(
                    np.array(seen.latencies_ms), plan.lasted(seen), seen.cpu_s, dict(seen.failed), np.array(seen.late_ms),
                    answers=(*seen.answers.items(),),
                )
            )  # fmt: skip
        return [Load.join(loads) for loads in parts]


def _heard(pipe: Pipe, patience_s: float) -> Any:
    if not pipe.poll(patience_s):
        raise NoFigureError(f"a client process said nothing for {patience_s:g} s")
    try:
        value = pipe.recv()
    except EOFError:
        raise NoFigureError("a client process ended by itself") from None
    if isinstance(value, str):
        raise NoFigureError(value)
    return value


def _client(pipe: Pipe) -> None:
    """A client process: one job after another, until the other end closes."""
    while True:
        try:
            host, port, requests, plan = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            wire = HttpWire((host, port), requests, plan.connections, isinstance(plan, Open))
            try:
                wire.connect(min(plan.connections, plan.clients if isinstance(plan, Closed) else 16))
                pipe.send(True)
                begin: float = pipe.recv()
                time.sleep(max(begin - time.perf_counter(), 0))
                cpu = time.process_time()
                seen = drive(plan.pace(), wire, lambda: time.perf_counter() - begin)  # noqa: B023
                seen.cpu_s, seen.answers = time.process_time() - cpu, wire.answers
            finally:
                wire.close()
            pipe.send(seen)
        except Exception as e:  # noqa: BLE001  the parent must hear of any failure, or it would wait for ever
            with suppress(OSError):  # unless it is gone
                pipe.send(f"a client failed: {e!r}")


def closed_loop(
    host: str, port: int, path: str, body: bytes, *, clients: int, seconds: float, processes: int = 1
) -> Load:
    """Run `clients` closed loops over `processes` client processes; NoFigureError when any answer was not 200."""
    request = http_request(host, port, path, body)
    with Clients() as pool:
        [load] = pool.run([Job(host, port, [request], Closed(clients, seconds), processes)])
    return checked(load)
