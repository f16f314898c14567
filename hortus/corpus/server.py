"""A window of texts to vectors, by running Hortus servers: OpenAI's route, base64, several servers, retried.

A window is sorted by length and cut into requests, a few outstanding a server. A server that is busy, starting or gone rests for
a while and its request goes to another; a text that a server refuses is told, and the others of its request are sent again.
Only when no server has answered anything for PATIENCE_S does the run end; one that does not answer at the start is left out of
it. Does not know files, rows or columns.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import logging
import re
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import orjson

from hortus.corpus.vectors import TYPES, Vectors, Wish, only_text, stored_values
from hortus.errors import EngineError, InvalidInput, NonFinite, NotReady, RequestError, StartError, TooLong, first_of
from hortus.ivy.split import cut

log = logging.getLogger("hortus.corpus")

OUTSTANDING = 4
"""Requests a server at once: enough that its queue is never empty."""
REQUEST_CHARS = 64 * 1024
"""Characters a request: some steps of a GPU, seconds of a CPU."""
REQUEST_TEXTS = 512
PATIENCE_S = 300.0
"""How long no server may have answered before the run ends."""
REST_S = (0.2, 10.0)
"""First and longest rest of a server that did not take a request."""
ANSWER_S = 120.0
"""How long an answer may take: longer than a server's own --timeout-s."""
CONNECT_S = 10.0
"""How long a connection may take, and the answer to what a server is: a machine that is off says nothing at all."""
FORMATS = {
    "float32": "base64",
    "float16": "base64",
    "int8": "base64_int8",
    "uint8": "uint8",
    "binary": "binary",
    "ubinary": "ubinary",
}
_AT = re.compile(r"input\[(\d+)\]")
_REFUSALS: dict[str, type[RequestError]] = {
    "context_length_exceeded": TooLong,
    "non_finite": NonFinite,
    "engine_error": EngineError,
}


@dataclass(slots=True)
class Server:
    """One server, as it looks from here."""

    url: str
    outstanding: int = 0
    rests_until: float = 0.0
    failures: int = 0
    """In a row."""
    lost: bool = False
    """It has been away since it said what it is, and may be another when it comes back."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back over HTTP."""

    status: int
    body: dict[str, Any]
    retry_after_s: float = 0.0


@dataclass(slots=True)
class Connections:
    """Keep-alive connections, those of each thread its own. Called from threads; blocks."""

    key: str | None = None
    _mine: threading.local = field(default_factory=threading.local)
    _all: set[http.client.HTTPConnection] = field(default_factory=set)

    def ask(self, url: str, method: str, path: str, body: bytes | None = None) -> Reply:
        """One exchange. OSError when there is none."""
        kept: dict[str, http.client.HTTPConnection] = self._mine.__dict__
        parts = urlsplit(url)
        headers = {"content-type": "application/json"}
        if self.key is not None:
            headers["authorization"] = f"Bearer {self.key}"
        for again in (True, False):
            connection, fresh = kept.get(url), False
            if connection is None:
                kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
                connection, fresh = kind(parts.hostname or "", parts.port, timeout=CONNECT_S), True
                kept[url] = connection
                self._all.add(connection)
            try:
                if connection.sock is None:
                    connection.connect()
                connection.sock.settimeout(CONNECT_S if method == "GET" else ANSWER_S)
                connection.request(method, parts.path.rstrip("/") + path, body, headers)
                answer = connection.getresponse()
                raw = answer.read()
                retry = answer.getheader("retry-after") or ""
                return Reply(answer.status, _object(raw), float(retry) if retry.isdigit() else 0.0)
            except (OSError, http.client.HTTPException) as e:
                connection.close()
                self._all.discard(connection)
                kept.pop(url, None)
                # A kept connection may have been closed by the other side while nobody looked: that says nothing.
                if fresh or not again or isinstance(e, TimeoutError):
                    raise OSError(f"{url}: {type(e).__name__}: {e}") from e
        raise AssertionError("the second round returns or raises")

    def interrupt(self) -> None:
        """What waits for an answer gets none."""
        for connection in list(self._all):
            with contextlib.suppress(OSError):
                if connection.sock is not None:
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """After the threads have ended."""
        for connection in self._all:
            connection.close()


def _object(raw: bytes) -> dict[str, Any]:
    try:
        told = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return {}
    return told if isinstance(told, dict) else {}


class Servers:
    """Backend over running servers of one model. `open` comes first."""

    def __init__(self, urls: Sequence[str], wish: Wish, *, key: str | None = None) -> None:
        """StartError for what servers cannot do."""
        if wish.chunked:
            raise StartError("--chunk-tokens needs the model's tokenizer here: give --model in place of --server")
        for url in urls:
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise StartError(f"--server {url}: expected a URL such as http://10.0.0.5:8080")
        self._wish = wish
        self._servers = [Server(url.rstrip("/").removesuffix("/v1")) for url in urls]
        count = OUTSTANDING * len(self._servers)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="corpus-http")
        self._places = asyncio.Semaphore(count)
        self._connections = Connections(key)
        self._answered = time.monotonic()
        self.info: dict[str, Any] = {}
        """/info of the servers, which agree on the model."""
        self._dimensions = 0

    async def open(self) -> None:
        """Ask every server what it is, and go on with those that answer. StartError: none does, one refuses, or they differ."""
        replies = await asyncio.gather(*(self._ask(s, "GET", "/info") for s in self._servers), return_exceptions=True)
        there: list[tuple[Server, dict[str, Any]]] = []
        away: list[str] = []
        for server, reply in zip(self._servers, replies, strict=True):
            if isinstance(reply, OSError):
                away.append(str(reply))
            elif isinstance(reply, BaseException):
                raise reply
            elif reply.status in (429, 502, 503, 504):  # busy, or not up
                away.append(f"{server.url}: {_error(reply).message}")
            elif reply.status != 200:
                raise StartError(f"--server {server.url}: {_error(reply).message}")
            else:
                there.append((server, reply.body))
        if not there:
            raise StartError("--server " + "; ".join(away))
        for why in away:
            log.warning("going on without a server that does not answer: %s", why)
        self._servers = [server for server, _ in there]
        self.info = there[0][1]
        for server, info in there:
            if _model(info) != self.model:
                raise StartError(
                    f"--server {server.url} has {_model(info)}, {self._servers[0].url} {self.model}: not the same model"
                )
        width = int(self.info["model"]["width"])
        self._dimensions = self._wish.dimensions or width
        if not 1 <= self._dimensions <= width:
            raise StartError(f"--dimensions {self._dimensions}: this model can give 1 to {width}")
        for got in await self._all(["a"], {}):  # refuses at the start what it would refuse for every row
            if isinstance(got, RequestError):
                raise StartError(f"--server {self._servers[0].url}: {got.message}")

    @property
    def values(self) -> int:
        return stored_values(self._wish.precision, self._dimensions)

    @property
    def busy_s(self) -> float | None:
        return None

    @property
    def model(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        return _model(self.info)

    @property
    def engine(self) -> str:
        return f"{self.info['model']['dtype']} on {self.info['model']['device']}"

    def close(self) -> None:
        self._connections.interrupt()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._connections.close()

    async def vectors(self, texts: Sequence[object]) -> Vectors:
        """See Backend."""
        refused = only_text(texts)
        good = [i for i in range(len(texts)) if i not in refused]
        tokens = {"tokens": 0}
        found = await self._all([str(texts[i]) for i in good], tokens)
        rows = np.empty((len(good), self.values), TYPES[self._wish.precision])
        owners: list[int] = []
        for i, got in zip(good, found, strict=True):
            if isinstance(got, RequestError):
                refused[i] = got
            else:
                rows[len(owners)] = got
                owners.append(i)
        return Vectors(rows[: len(owners)], np.array(owners, np.int32), None, refused, tokens["tokens"])

    async def _all(self, texts: list[str], tokens: dict[str, int]) -> list[npt.NDArray[Any] | RequestError]:
        """A stored row, or what is wrong, for every text."""
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        found: list[npt.NDArray[Any] | RequestError] = [NotReady("not asked")] * len(texts)

        async def piece(which: list[int]) -> None:
            async with self._places:
                await self._piece(texts, which, found, tokens)

        most = min(REQUEST_TEXTS, int(self.info["limits"]["max_inputs"]))
        try:
            async with asyncio.TaskGroup() as group:
                for lo, hi in cut([len(texts[i]) for i in order], REQUEST_CHARS, most):
                    group.create_task(piece(order[lo:hi]))
        except BaseExceptionGroup as failures:
            raise first_of(failures) from None
        return found

    async def _piece(
        self, texts: list[str], which: list[int], found: list[npt.NDArray[Any] | RequestError], tokens: dict[str, int]
    ) -> None:
        """One request; cut where a text is refused, halved where it is too large or fails as a whole."""
        if not which:
            return
        reply = await self._send([texts[i] for i in which])
        if reply.status == 200:
            try:
                rows, used = self._rows(reply.body, len(which)), int(reply.body["usage"]["total_tokens"])
            except (LookupError, TypeError, ValueError, OverflowError):
                raise EngineError(f"a server answered something else than vectors: {reply.body!s:.200}") from None
            tokens["tokens"] = tokens.get("tokens", 0) + used
            for i, row in zip(which, rows, strict=True):
                found[i] = row
            return
        error = _error(reply)
        at = _AT.fullmatch(str((reply.body.get("error") or {}).get("param")))
        if reply.status in (400, 500) and at is not None and int(at[1]) < len(which):
            cut_at = int(at[1])
            found[which[cut_at]] = error
            halves = which[:cut_at], which[cut_at + 1 :]
        elif reply.status in (413, 500, 504) or (reply.status == 400 and len(which) > 1):
            if len(which) == 1:
                found[which[0]] = error
                return
            halves = which[: len(which) // 2], which[len(which) // 2 :]
        else:
            raise StartError(f"a server refuses the run's requests: {error.message}")
        for half in halves:
            await self._piece(texts, half, found, tokens)

    def _rows(self, body: dict[str, Any], count: int) -> list[npt.NDArray[Any]]:
        precision, rows = self._wish.precision, []
        for entry in body["data"]:
            told = entry["embedding"]
            if isinstance(told, str):
                kind = "<f4" if precision in ("float32", "float16") else TYPES[precision]
                row: npt.NDArray[Any] = np.frombuffer(base64.b64decode(told), kind)
            else:
                row = np.array(told, TYPES[precision])
            rows.append(row.astype(TYPES[precision]) if precision == "float16" else row)
        if len(rows) != count or any(row.shape != (self.values,) for row in rows):
            raise EngineError(f"a server answered {len(rows)} vectors of another shape than {count} x {self.values}")
        return rows

    async def _send(self, texts: list[str]) -> Reply:
        """An answer that means something, from whichever server gives it. NotReady when none does for PATIENCE_S."""
        wish, body = self._wish, {"model": self.info["model"]["name"], "input": texts}
        body |= {"encoding_format": FORMATS[wish.precision]}
        told = {"dimensions": wish.dimensions, "prompt_name": wish.prompt_name, "truncate": wish.truncate}
        body |= {name: value for name, value in told.items() if value is not None}
        data = orjson.dumps(body)
        why = "none was asked"
        while True:
            server = await self._next()
            try:
                server.outstanding += 1
                reply = await self._recognised(server) or await self._ask(server, "POST", "/v1/embeddings", data)
            except OSError as e:
                why, wait_s = str(e), 0.0
                server.lost = True
            else:
                server.lost = server.lost or reply.status in (502, 503)
                # A deadline that has passed says that the request is too large for the server's speed: it is halved.
                if reply.status not in (429, 502, 503) and not (reply.status == 504 and len(texts) == 1):
                    server.failures, self._answered = 0, time.monotonic()
                    return reply
                why, wait_s = f"{server.url}: {_error(reply).message}", reply.retry_after_s
                if reply.status == 429:  # it is alive and busy
                    self._answered = time.monotonic()
            finally:
                server.outstanding -= 1
            server.failures += 1
            first, most = REST_S
            server.rests_until = time.monotonic() + max(
                min(first * 2.0 ** (server.failures - 1), most), min(wait_s, most)
            )
            if time.monotonic() - self._answered > PATIENCE_S:
                raise NotReady(f"no server has answered for {PATIENCE_S:g} s; the last: {why}")

    async def _recognised(self, server: Server) -> Reply | None:
        """None when it is what it was when the run began; else what it says instead. StartError: another model by now."""
        if not server.lost:
            return None
        reply = await self._ask(server, "GET", "/info")
        if reply.status != 200:
            return reply if reply.status in (429, 502, 503) else Reply(503, reply.body)
        if (told := _model(reply.body)) != self.model:
            raise StartError(
                f"--server {server.url} has come back with {told}, the run began with {self.model}: not the same model"
            )
        server.lost = False
        return None

    async def _next(self) -> Server:
        """The server with the fewest requests of ours that does not rest; waits while all rest."""
        while True:
            now = time.monotonic()
            awake = [s for s in self._servers if s.rests_until <= now]
            if awake:
                return min(awake, key=lambda s: s.outstanding)
            await asyncio.sleep(min(s.rests_until for s in self._servers) - now)

    async def _ask(self, server: Server, method: str, path: str, data: bytes | None = None) -> Reply:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._connections.ask, server.url, method, path, data)


def _model(info: dict[str, Any]) -> dict[str, Any]:
    """What of /info makes the vectors."""
    names = ("name", "revision", "kind", "width", "max_tokens", "normalize", "pooling", "parameters")
    model = info.get("model")
    if not isinstance(model, dict) or model.get("kind") != "embed":
        raise StartError(f"a server is no Hortus server of an embedding model (/info: {info!s:.200})")
    return {name: model.get(name) for name in names} | {"prompts": info.get("prompts")}


def _error(reply: Reply) -> RequestError:
    """The error that a server told."""
    told = reply.body.get("error")
    told = told if isinstance(told, dict) else {}
    kind = _REFUSALS.get(str(told.get("code")), InvalidInput)
    message = str(told.get("message") or f"HTTP {reply.status}")
    return kind(re.sub(r"^input \d+ ", "the text ", message))
