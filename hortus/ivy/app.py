"""The application: routes, and what every request has in common whatever its route.

A request here gets an id, a deadline, one answer, and a place in the metrics; whatever goes wrong becomes an error in OpenAI's
shape, by the table in errors.py. Does not know what the routes do, nor sockets.

States: starting (the port is open, no model yet) -> ready -> draining (finishing what is in flight).
"""

from __future__ import annotations

import asyncio
import difflib
import gzip
import itertools
import logging
import re
import secrets
import time
import zlib
from collections.abc import Awaitable, Callable

from hortus.config import IvyConfig
from hortus.deadlines import Deadlines
from hortus.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    EngineError,
    MethodNotAllowed,
    NotReady,
    RequestError,
    RouteNotFound,
    StartError,
    bare,
)
from hortus.folder import ModelFolder, readable
from hortus.ivy.access import Access
from hortus.ivy.body import reworded
from hortus.ivy.cohere import Cohere
from hortus.ivy.embed import Embedder
from hortus.ivy.exchange import Answer, Request, error_answer, takes_gzip
from hortus.ivy.health import Health, Probe, Readiness, probe_of
from hortus.ivy.http1 import Known
from hortus.ivy.journal import Journal
from hortus.ivy.openai import OpenAI
from hortus.ivy.openapi import Pages
from hortus.ivy.page import Page
from hortus.ivy.perplexity import Perplexity
from hortus.ivy.rerank import Rerank
from hortus.ivy.tei import Tei
from hortus.ivy.traces import Traces
from hortus.ivy.watch import Replica, Watch
from hortus.metrics import Metrics
from hortus.types import Encoder, ModelInfo

log = logging.getLogger("hortus.ivy")

Handler = Callable[[Request], Awaitable[Answer]]

GZIP_FROM_BYTES = 64 * 1024
"""Smaller answers cost more to compress than to send."""

_printable_id = re.compile(rb"[\x21-\x7e]{1,128}")


class App:
    """The gateway's application. Made before there is a model; `open` brings one, `drain` ends it."""

    def __init__(
        self, config: IvyConfig, metrics: Metrics, replicas: Callable[[], list[Replica]] | None = None
    ) -> None:
        """replicas: how those of a gateway apart from its engines are."""
        self.config, self._metrics = config, metrics
        self.heads: dict[bytes, Known] = {}
        self._embedder: Embedder | None = None
        self._readiness: Readiness | None = None
        self.draining = False
        """Nothing new is begun."""
        self.in_flight = 0
        """Requests being worked on, but for those that ask how things are."""
        self._access = Access(config)
        self._journal = None if config.access_log is None else Journal(config.access_log)
        self._traces = None if config.otlp_endpoint is None else Traces(config.otlp_endpoint)
        metrics.requests_in_flight.set_function(lambda: self.in_flight)
        self._counts = metrics.requests.counts
        self._deadlines: Deadlines[Request] = Deadlines(_expire)
        self._process, self._numbers = secrets.token_hex(6).encode(), itertools.count(1)

        openai, perplexity, cohere = OpenAI(self._model), Perplexity(self._model), Cohere(self._model)
        rerank, pages = Rerank(self._model), Pages(with_page=not config.no_page)
        tei = Tei(self._model, rerank)
        health = Health(self._model, lambda: self.state, lambda: self._readiness, config, metrics)
        self._watch = Watch(
            metrics, lambda: self.state, lambda: self._readiness, replicas, shared_port=config.reuse_port
        )
        # HEAD goes with GET; OPTIONS is answered for all of them.
        self._routes: dict[str, dict[str, Handler]] = {
            "/v1/embeddings": {"POST": openai.embeddings},
            "/embeddings": {"POST": openai.embeddings},
            "/v1/contextualizedembeddings": {"POST": perplexity.contextualized},
            "/v1/models": {"GET": openai.models},
            "/v2/embed": {"POST": cohere.embed},
            "/rerank": {"POST": rerank.rerank},
            "/v1/rerank": {"POST": rerank.rerank},
            "/v2/rerank": {"POST": rerank.rerank},
            "/score": {"POST": rerank.score},
            "/v1/score": {"POST": rerank.score},
            "/classify": {"POST": rerank.classify},
            "/": {"POST": tei.root},
            "/embed": {"POST": tei.embed},
            "/embed_all": {"POST": tei.embed_all},
            "/embed_sparse": {"POST": tei.embed_sparse},
            "/similarity": {"POST": tei.similarity},
            "/predict": {"POST": tei.predict},
            "/tokenize": {"POST": tei.tokenize},
            "/decode": {"POST": tei.decode},
            "/health": {"GET": health.health},
            "/ready": {"GET": health.ready},
            "/metrics": {"GET": health.metrics},
            "/info": {"GET": health.info},
            "/openapi.json": {"GET": pages.openapi},
            "/docs": {"GET": pages.docs},
        }
        self._named_routes: dict[str, dict[str, Handler]] = {"/v1/models/": {"GET": openai.one_model}}
        if not config.no_page:
            page = Page()
            self._routes["/"]["GET"] = page.home
            self._routes["/watch"] = {"GET": self._watch.watch}
            self._named_routes["/page/"] = {"GET": page.file}
        self._not_counted = {"/health", "/ready", "/metrics", "/watch"}

    @property
    def state(self) -> str:
        """starting, ready or draining."""
        return "draining" if self.draining else "starting" if self._embedder is None else "ready"

    def open(self, folder: ModelFolder, info: ModelInfo, encoder: Encoder, probe: Probe | None = None) -> None:
        """The model is there: take requests.

        probe: whether the engine answers (health.Probe); default: one token through `encoder`. Reads the tokenizer, which
        takes up to seconds for large vocabularies, so this may be called in a thread. StartError when the folder's
        tokenizer cannot serve.
        """
        with readable(folder.path):
            embedder = Embedder(folder, info, encoder, self.config, self._metrics)
        self._readiness = Readiness(probe or probe_of(embedder))
        self._embedder = embedder

    def drain(self) -> None:
        """Refuse what comes from now on (503), finish what is in flight. Whoever watches is told, and let go."""
        self.draining = True
        self._watch.end()

    def reload(self) -> None:
        """Read the templates file again, for requests that come from now on. A file that is wrong changes nothing."""
        if self._embedder is None:
            return
        try:
            self._embedder.prompts = self._embedder.read_prompts()
        except StartError as e:
            log.error("templates not reloaded: %s", e)
        else:
            log.info("templates reloaded: %d prompts", len(self._embedder.prompts.texts))

    def close(self) -> None:
        """Free the tokenizer's threads, write out logs and traces. After serving has ended."""
        for part in (self._embedder, self._journal, self._traces):
            if part is not None:
                part.close()

    def _model(self) -> Embedder:
        if self.draining:
            raise Draining("this server is shutting down; send the request to another, or again later")
        if self._embedder is None:
            raise NotReady("the model is still loading; /ready answers 200 once it is there")
        return self._embedder

    def admit(self, request: Request) -> None:
        """Judge a request by its head, before its body is read: gives it its handler, or the error that it ends with."""
        try:
            if request.method == "OPTIONS" and (told := self._access.preflight(request)) is not None:
                request.handler = _given(told)
                return
            self._access.check(request)
            request.handler = self._find(request)
            if request.method == "POST":
                if (limit := request.headers.get(b"x-hortus-timeout-ms")) is not None:
                    request.shorten(limit)
                request.check_body(self.config.max_body_bytes)
        except RequestError as e:
            bare(e)
            request.ended = e

    async def answer(self, request: Request) -> Answer | None:
        """One admitted request's answer, ready to send; None when its client has gone. Runs in a task of the request's own."""
        given = request.headers.get(b"x-request-id")
        if given is None or not _printable_id.fullmatch(given):
            given = b"%b-%x" % (self._process, next(self._numbers))
        request.name = given.decode("ascii")
        if self._traces is not None:
            self._traces.begin(request)
        counted = request.path not in self._not_counted
        self.in_flight += counted
        try:
            code, answer = await self._answer(request)
        finally:
            self.in_flight -= counted
        seconds = time.monotonic() - request.begun
        if self._journal is not None or self._traces is not None:
            self._tell(request, code, answer, seconds)
        if counted:
            self._counts[code] += 1
            self._metrics.request_seconds.observe(seconds)
            if self._watch.seconds is not None:
                self._watch.seconds.append(seconds)
        if answer is None:
            return None
        answer.headers += b"x-request-id: %b\r\n%b" % (given, self._access.headers(request))
        if self.config.gzip and answer.size >= GZIP_FROM_BYTES:
            await _compress(request, answer)
        return answer

    def refused(self, error: RequestError) -> Answer:
        """The answer to what is no request: bytes that are not HTTP, a connection too many. Counted as any other."""
        self._counts[error.code] += 1
        return error_answer(error)

    def _tell(self, request: Request, code: str, answer: Answer | None, seconds: float) -> None:
        """The request's line in the access log, and its trace."""
        if self._journal is not None:
            told = {
                "id": request.name,
                "client": request.client,
                "method": request.method,
                "path": request.path,
                "status": 499 if answer is None else answer.status,
                "code": code,
                "ms": round(seconds * 1e3, 3),
                "bytes_in": len(request.body),
                "bytes_out": 0 if answer is None else answer.size,
            }
            self._journal.write(told)
        if self._traces is not None:
            self._traces.record(request, code, answer, seconds)

    async def _answer(self, request: Request) -> tuple[str, Answer | None]:
        """(outcome code, answer); no answer when the client has gone."""
        error = request.ended
        if error is None:
            task = request.task = request.task or asyncio.current_task()
            assert task is not None, "every request runs in a task"
            assert request.handler is not None, "admit() comes first"
            self._deadlines.add(request, request.deadline)
            try:
                answer = await request.handler(request)
                if request.method == "POST" and self._readiness is not None:
                    self._readiness.answered()
                return "ok", answer
            except RequestError as e:
                error = reworded(e, request.names)
            except asyncio.CancelledError as e:
                if request.ended is not None:
                    task.uncancel()  # the cancellation was the request's own, and ends here
                    bare(e)
                    error = request.ended
                elif self.draining:
                    task.uncancel()
                    error = Draining("this server shut down before the request was finished (--drain-s); send it again")
                else:
                    raise
            except Exception as e:
                log.exception("request %s failed: a fault in this server", request.name)
                bare(e)
                error = EngineError(f"a fault in this server; its log tells more under request id {request.name}")
            finally:
                self._deadlines.discard(request)
        bare(error)
        return error.code, None if isinstance(error, Cancelled) else error_answer(error)

    def _find(self, request: Request) -> Handler:
        """The handler for a path and method; RouteNotFound and MethodNotAllowed say what there is instead."""
        methods = self._routes.get(request.path)
        if methods is None:
            for prefix, named in self._named_routes.items():
                if request.path.startswith(prefix):
                    methods, request.tail = named, request.path.removeprefix(prefix)
        if methods is None:
            near = [r for r in self._routes if r.endswith(request.path.rstrip("/") or "-")]
            near = near or difflib.get_close_matches(request.path, self._routes, 2, 0.75)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(self._routes)}"
            raise RouteNotFound(f"no route {request.path!r:.200}; {hint}")
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            allow = ", ".join([*methods, *(["HEAD"] if "GET" in methods else []), "OPTIONS"])
            if request.method == "OPTIONS":
                return _options(allow)
            raise MethodNotAllowed(f"{request.method} is not allowed for {request.path}; allowed: {allow}", allow=allow)
        return handler


def _expire(request: Request) -> None:
    """The request's time is up."""
    if request.ended is None and request.task is not None:
        request.ended = DeadlineExceeded(
            f"not finished after {request.timeout_s:g} s (--timeout-s, or the request's x-hortus-timeout-ms)"
        )
        request.task.cancel()


def _given(answer: Answer) -> Handler:
    async def give(request: Request) -> Answer:
        return answer

    return give


def _options(allow: str) -> Handler:
    return _given(Answer(b"", headers=b"allow: %b\r\n" % allow.encode()))


async def _compress(request: Request, answer: Answer) -> None:
    """gzip for a client that takes it, in a thread: zlib lets go of the GIL."""
    answer.headers += b"vary: accept-encoding\r\n"
    if not takes_gzip(request.headers.get(b"accept-encoding", b"")):
        return
    body = answer.body
    answer.body = (
        await asyncio.to_thread(_gzipped, body)
        if isinstance(body, list)
        else await asyncio.to_thread(gzip.compress, body, 1)
    )
    answer.headers += b"content-encoding: gzip\r\n"


def _gzipped(parts: list[bytes]) -> list[bytes]:
    packer = zlib.compressobj(1, zlib.DEFLATED, 16 + zlib.MAX_WBITS)  # with gzip's header
    return [*map(packer.compress, parts), packer.flush()]
