"""Tulip behind gRPC: describe, fetch, and encode as one stream a gateway; health and reflection beside them.

Knows gRPC and whose streams there are; what happens on one is stream.py's. Does not know text, HTTP or torch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from hortus.config import LinkConfig
from hortus.errors import StartError
from hortus.folder import ModelFolder, token_types
from hortus.protocol import wire
from hortus.protocol.credentials import OPTIONS, allowed, server_credentials
from hortus.protocol.places import split
from hortus.protocol.streams import GrpcStream, LocalStream, Stream, listen_local
from hortus.protocol.wire import Malformed
from hortus.tulip.describe import describe
from hortus.tulip.scheduler import Scheduler
from hortus.tulip.spans import Spans
from hortus.tulip.stream import GatewayStream
from hortus.types import ModelInfo

log = logging.getLogger(__name__)

PROBE_S = 5.0
FRESH_S = 1.0
_PIECE_BYTES = 2**20


class Server:
    """The gRPC server. start() opens the port, open() brings the model, drain() or close() ends it."""

    def __init__(self, config: LinkConfig, spans: Spans | None = None) -> None:
        """spans: where to tell of asks that are part of a trace."""
        self._config, self._spans = config, spans
        self._opened: _Opened | None = None
        self._streams: set[GatewayStream] = set()
        self._draining = self._closed = False
        self._server: Any = None
        self._local: asyncio.Server | None = None
        self._local_path = ""
        self._local_tasks: set[asyncio.Task[Any]] = set()
        self._health = _Health()

    async def start(self) -> str:
        """Listen; returns the address (of port 0: the one taken). StartError when it cannot be had."""
        place = split(self._config.listen, "--listen", least_port=0)
        interceptors = [_Token(self._config)] if self._config.link_token is not None else []
        options = [*OPTIONS, ("grpc.so_reuseport", 0)]
        server = self._server = grpc.aio.server(options=options, interceptors=interceptors)
        methods = {
            "Describe": grpc.unary_unary_rpc_method_handler(self._describe),
            "Fetch": grpc.unary_stream_rpc_method_handler(self._fetch),
            "Encode": grpc.stream_stream_rpc_method_handler(self._encode),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(wire.SERVICE, methods),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((wire.SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        credentials, listen = server_credentials(self._config), self._config.listen
        _clear_socket(listen)
        try:
            if credentials is None:
                port = server.add_insecure_port(listen)
            else:
                port = server.add_secure_port(listen, credentials)
        except RuntimeError as e:
            raise StartError(f"cannot listen on --listen {listen}: {_why_not(place, listen) or e}") from None
        await self._health.tell()
        await server.start()
        # A token could not be shown there, and a file's permissions already say who may connect.
        if listen.startswith("unix:") and credentials is None and self._config.link_token is None:
            await self._start_local(listen.removeprefix("unix:") + ".s")
        return listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{port}"

    async def _start_local(self, path: str) -> None:
        _clear_socket(f"unix:{path}")
        try:
            self._local = await listen_local(path, self._encode_local)
            self._local_path = path
        except OSError as e:
            log.warning("no stream beside gRPC on %s (%s): gateways of this machine take gRPC", path, e)

    async def open(self, scheduler: Scheduler, folder: ModelFolder, info: ModelInfo) -> None:
        """The model is there: take work. Reads the folder's small files (and samples of its weights) in a thread."""
        described, files = await asyncio.to_thread(describe, folder, info)
        types = (
            max(token_types(folder.config), 1 + len(folder.adapters)) if folder.adapters else token_types(folder.config)
        )
        self._opened = _Opened(scheduler, info, described, files, types)
        self._health.scheduler = scheduler
        await self._health.tell()

    async def drain(self, timeout_s: float) -> None:
        """Tell the gateways, refuse new work, finish and send what is in, then close()."""
        self._draining = True
        await self._health.drain()
        for stream in self._streams:
            stream.say_draining()
        if self._opened is not None:
            await self._opened.scheduler.drain(timeout_s)
        async with asyncio.TaskGroup() as group:
            for stream in set(self._streams):
                group.create_task(stream.flushed(2.0))
        await self.close()

    async def close(self) -> None:
        """End all streams. The scheduler stays the caller's."""
        self._closed = True  # a connection may have been taken whose stream only begins after this
        if self._local is not None:
            self._local.close()
        for task in self._local_tasks:
            task.cancel()
        if self._local_tasks:
            await asyncio.wait(set(self._local_tasks))
        if self._server is not None:
            await self._server.stop(0.2)

    # Methods

    async def _model(self, context: Any) -> _Opened:
        if self._opened is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the model is still loading")
        assert self._opened is not None, "abort raises"
        return self._opened

    async def _describe(self, data: bytes, context: Any) -> bytes:
        version = 0
        try:
            version = wire.read_describe(data)
        except Malformed as e:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(e))
        if version != wire.VERSION:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the gateway speaks protocol version {version}, this scheduler speaks {wire.VERSION}",
            )
        opened = await self._model(context)
        local = self._local_path if context.peer().startswith("unix:") else ""
        return wire.pack_description(
            dataclasses.replace(opened.described, draining=self._draining, stream_socket=local)
        )

    async def _fetch(self, data: bytes, context: Any) -> AsyncIterator[bytes]:
        files = (await self._model(context)).files
        try:
            whole = files.get(wire.read_fetch(data))
        except Malformed as e:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(e))
        if whole is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such file in the description")
            return
        for at in range(0, max(1, len(whole)), _PIECE_BYTES):
            yield wire.pack_piece(whole[at : at + _PIECE_BYTES])

    async def _encode(self, requests: object, context: Any) -> None:
        opened = await self._model(context)
        try:
            await self._serve(opened, GrpcStream(context), context.peer())
        except Malformed as e:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(e))

    async def _encode_local(self, stream: LocalStream) -> None:
        task = asyncio.current_task()
        assert task is not None, "every connection has a task"
        self._local_tasks.add(task)
        try:
            if self._opened is not None and not self._closed:
                await self._serve(self._opened, stream, self._local_path)
        except (Malformed, asyncio.CancelledError):
            pass  # told already; closing tells the gateway
        finally:
            self._local_tasks.discard(task)
            stream.close()

    async def _serve(self, opened: _Opened, messages: Stream, peer: str) -> None:
        """One gateway's stream, to its end. Raises Malformed."""
        stream = GatewayStream(opened.scheduler, opened.info, messages, self._spans, opened.types)
        self._streams.add(stream)
        if self._draining:
            stream.say_draining()
        try:
            await stream.run()
        except Malformed as e:
            log.warning("%s sent what is no message: %s", peer, e)
            raise
        except Exception as e:  # noqa: BLE001 - a link has many ways to say that a peer has gone
            log.info("the stream of %s broke: %r", peer, e)
        finally:
            self._streams.discard(stream)
            stream.close()


@dataclass(frozen=True, slots=True)
class _Opened:
    """The model, once it is there."""

    scheduler: Scheduler
    info: ModelInfo
    described: wire.Description
    files: dict[str, bytes]
    """As described: what is written over them later is for the next start."""
    types: int
    """Of tokens; see entry.faults."""


class _Health(health.aio.HealthServicer):  # type: ignore[misc]
    """grpc.health.v1: the server as a whole ("") lives; the service `hortus.v1.Tulip` is ready, which Check and Watch ask of the
    engine itself, at most once a second."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler: Scheduler | None = None
        self._asked = float("-inf")
        self._alive = True
        """What the engine's latest probe came to."""
        self._draining = False

    async def Check(self, request: Any, context: Any) -> Any:
        if request.service:
            await self._look()
        return await super().Check(request, context)

    async def Watch(self, request: Any, context: Any) -> None:
        looking = asyncio.create_task(self._keep_looking())
        try:
            await super().Watch(request, context)
        finally:
            looking.cancel()

    async def _look(self) -> None:
        if self.scheduler is not None and time.monotonic() - self._asked > FRESH_S:
            self._asked = time.monotonic()
            self._alive = await self.scheduler.probe(PROBE_S)
            await self.tell()

    async def _keep_looking(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(FRESH_S)

    async def tell(self) -> None:
        status = health_pb2.HealthCheckResponse
        ready = self.scheduler is not None and self.scheduler.healthy and self._alive and not self._draining
        await self.set("", status.SERVING)
        await self.set(wire.SERVICE, status.SERVING if ready else status.NOT_SERVING)

    async def drain(self) -> None:
        self._draining = True
        await self.tell()


class _Token(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without the token. Health stays open: the orchestrators' probes cannot show one."""

    def __init__(self, config: LinkConfig) -> None:
        self._config = config

        async def refuse(request: object, context: Any) -> None:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "the gateway's token is missing or wrong (--link-token)"
            )

        self._refuse = grpc.stream_stream_rpc_method_handler(refuse)

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        if details.method.startswith(f"/{health.SERVICE_NAME}/") or allowed(self._config, details.invocation_metadata):
            return await continuation(details)
        return self._refuse


def _clear_socket(listen: str) -> None:
    """A Unix socket's file outlives a killed process, and would keep the next one from listening. StartError when somebody
    listens there: gateways that connect later would come to another scheduler, and at its end to none."""
    if not listen.startswith("unix:"):
        return
    path = Path(listen.removeprefix("unix:"))
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as asking:
        asking.setblocking(False)  # the answer is there at once; one who is too busy for it says so
        try:
            asking.connect(str(path))
        except BlockingIOError:
            pass
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise StartError(f"cannot listen on --listen unix:{path}: address already in use")


def _why_not(place: tuple[str, int] | None, listen: str) -> str:
    """Why nobody can listen there, which gRPC tells its own log alone; empty when it seems to work just now."""
    try:
        if place is None:
            path = listen.removeprefix("unix:")
            with socket.socket(socket.AF_UNIX) as tried:
                tried.bind(path)
            Path(path).unlink()
            return ""
        family, _, _, _, address = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except OSError as e:
        return (e.strerror or str(e)).lower()
    return ""
