"""Targets behind HTTP: the requests and answers of OpenAI's and TEI's routes, asked of a server found or started (started.py).

Does not know what is measured.
"""

from __future__ import annotations

import base64
import http.client
import json
import re
import shlex
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from hortus.bench.load import Job, http_request
from hortus.bench.pace import PATIENCE_S, Closed, Load, NoFigureError, Plan, checked
from hortus.bench.started import PEER_ENVIRON, Running, free_port, hortus, infinity_words, started, vllm_words
from hortus.bench.targets import Setting, Spec
from hortus.bench.texts import Inputs
from hortus.errors import StartError
from hortus.types import Float32

FIRST_PATIENCE_S = 300.0
"""For an answer that is not timed: a server may compile kernels for the first of a size."""

# Routes: how a request is written and an answer read. Pure.


@dataclass(frozen=True, slots=True)
class Route:
    """One API's way to ask for vectors."""

    path: str
    body: Callable[[Sequence[str]], bytes]
    rows: Callable[[bytes], Float32]
    about: str


def openai_route(base: str, model: str, form: str) -> Route:
    """OpenAI's /embeddings under a base path. form: base64 or float."""

    def body(texts: Sequence[str]) -> bytes:
        one = texts[0] if len(texts) == 1 else list(texts)
        return json.dumps({"model": model, "input": one, "encoding_format": form}).encode()

    return Route(base + "/embeddings", body, openai_rows, form)


def openai_rows(answer: bytes) -> Float32:
    """[inputs, width] of an answer in OpenAI's shape, floats or base64, put in the order of `index`. ValueError."""
    try:
        data = sorted(json.loads(answer)["data"], key=lambda d: d["index"])
        rows = np.stack([_vector(d["embedding"]) for d in data])
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"no answer in OpenAI's shape ({type(e).__name__}: {e}): {answer[:200]!r}") from None
    if (found := [d["index"] for d in data]) != list(range(len(data))):
        raise ValueError(f"the indices of the answer are {found[:5]}..., not each of 0 to {len(data) - 1} once")
    return rows


def _vector(value: Any) -> Float32:
    if isinstance(value, str):
        return np.frombuffer(base64.b64decode(value), "<f4")
    return np.array(value, np.float32)


def tei_route(base: str) -> Route:
    """Text Embeddings Inference's own /embed."""

    def rows(answer: bytes) -> Float32:
        try:
            return np.array(json.loads(answer), np.float32)
        except (ValueError, TypeError) as e:
            raise ValueError(f"no answer in TEI's shape ({e}): {answer[:200]!r}") from None

    return Route(
        base + "/embed",
        lambda texts: json.dumps({"inputs": list(texts), "truncate": True}).encode(),
        rows,
        "TEI's /embed",
    )


class Served:
    """A Target behind one route of a server."""

    served = True

    def __init__(self, name: str, host: str, port: int, setting: Setting, closing: ExitStack | None = None) -> None:
        self.name, self.host, self.port, self.opened_s = name, host, port, 0.0
        self.setting, self._closing = setting, closing or ExitStack()
        self.running: Running | None = None
        self.elsewhere: str | None = None if closing else host
        self.in_format = False
        self.route: Route
        self.about = ""

    def use(self, route: Route) -> Served:
        self.route, self.about = route, f"texts to vectors over HTTP, {route.about}"
        return self

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """(status, body) of one exchange, for what is not timed. NoFigureError when there is no whole answer in time."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE_S)
        headers = {"content-type": "application/json"} | dict(line.split(":", 1) for line in self.setting.headers)
        expired = threading.Event()

        def give_up() -> None:
            expired.set()
            if connection.sock:
                connection.sock.shutdown(socket.SHUT_RDWR)

        # A socket's own limit starts again with each byte. The first answers may wait for kernels to be compiled.
        patience_s = FIRST_PATIENCE_S if body else PATIENCE_S
        timer = threading.Timer(patience_s, give_up)
        try:
            connection.connect()
        except OSError as e:
            raise NoFigureError(f"nothing answers at {self.host}:{self.port} ({e})") from None
        try:
            assert connection.sock
            connection.sock.settimeout(patience_s + 1)
            timer.start()
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as e:
            where = f"{self.host}:{self.port}{path}"
            if expired.is_set():
                raise NoFigureError(f"no whole answer from {where} within {patience_s:g} s") from None
            raise NoFigureError(f"no whole answer from {where} ({type(e).__name__}: {e})") from None
        finally:
            timer.cancel()
            connection.close()

    def vectors(self, inputs: Inputs) -> Float32:
        status, answer = self.ask("POST", self.route.path, self.route.body(inputs.texts))
        if status != 200:
            raise NoFigureError(f"{self.name} answered {status}: {answer[:300]!r}")
        return self.route.rows(answer)

    def rows(self, answer: bytes) -> Float32:
        return self.route.rows(answer)

    def job(self, requests: Sequence[Inputs], plan: Plan) -> Job:
        """The same requests for the load generator."""
        bodies = [self.route.body(r.texts) for r in requests]
        whole = [http_request(self.host, self.port, self.route.path, b, self.setting.headers) for b in bodies]
        busy = isinstance(plan, Closed) and plan.clients < 4
        return Job(self.host, self.port, whole, plan, 1 if busy else self.setting.processes)

    def load(self, requests: Sequence[Inputs], plan: Plan) -> Load:
        before = self.running.cpu_s() if self.running else 0.0
        [load] = self.setting.clients.run([self.job(requests, plan)])
        if self.running:
            load = replace(load, target_cpu_s=self.running.cpu_s() - before)
        return checked(load) if isinstance(plan, Closed) else load

    def graph_steps(self) -> dict[str, float] | None:
        """Steps by eager, capture and replay so far, from Hortus' /metrics; None where there are none."""
        try:
            status, text = self.ask("GET", "/metrics")
        except NoFigureError:  # whoever has no such page may answer as he likes
            return None
        return graph_counts(text.decode(errors="replace")) if status == 200 else None

    def close(self) -> None:
        self._closing.close()


def graph_counts(text: str) -> dict[str, float] | None:
    """hortus_graph_steps_total by `how` from a page of metrics; None when no step ran under graphs. Pure."""
    found = re.findall(r'^hortus_graph_steps_total\{how="(\w+)"\} (\d+(?:\.\d*)?(?:e[+-]?\d+)?)$', text, re.M)
    return {how: float(value) for how, value in found} or None


def make(spec: Spec, setting: Setting) -> Served:
    """One of the kinds that are servers: found, or started and waited for. StartError."""
    if spec.kind in ("openai", "tei"):
        url = urlsplit(spec.where)
        target = Served(spec.name, url.hostname or "127.0.0.1", url.port or 80, setting)
        base = url.path.rstrip("/")
        return _tei(target, base) if spec.kind == "tei" else _openai(target, base)
    closing = ExitStack()
    try:
        if spec.kind == "serve":
            flags = shlex.split(spec.where)
            if setting.dtype != "auto":
                flags += ["--dtype", setting.dtype]
            if setting.threads:
                flags += ["--threads", str(setting.threads)]
            server = closing.enter_context(
                hortus(str(setting.path), *flags, "--served-model-name", setting.folder.name)
            )
            ours = Served(spec.name, "127.0.0.1", server.port, setting, closing)
            ours.in_format = "--dtype" not in spec.where
            return _openai(ours, "/v1", server)
        port, python, *more = free_port(), *shlex.split(spec.where)
        words = (infinity_words if spec.kind == "infinity" else vllm_words)(python, setting.path, port)
        environ = PEER_ENVIRON | ({"OMP_NUM_THREADS": str(setting.threads)} if setting.threads else {})
        server = closing.enter_context(started([*words, *more], port, environ))
        return _openai(Served(spec.name, "127.0.0.1", port, setting, closing), "", server)
    except BaseException:
        closing.close()
        raise


def _openai(target: Served, base: str, running: Running | None = None) -> Served:
    """The model's name from /models, and base64 where the server has it, for all that it saves its clients."""
    wrong = []
    for path in [base] if base else ["/v1", ""]:
        status, answer = _asked(target, "GET", path + "/models")
        if status == 200:
            break
        wrong.append(f"{path}/models answered {status}: {answer[:200]!r}")
    else:
        raise StartError("; ".join(wrong))
    try:
        models = [str(model["id"]) for model in json.loads(answer)["data"]]
    except (ValueError, KeyError, TypeError):
        models = []
    if not models:
        raise StartError(f"{path}/models lists no model: {answer[:200]!r}")
    name = target.setting.folder.name
    model = name if name in models else models[0]
    route = openai_route(path, model, "base64")
    status, answer = _asked(target, "POST", route.path, route.body(["a"]))
    if status != 200:
        route = openai_route(path, model, "float")
        status, answer = _asked(target, "POST", route.path, route.body(["a"]))
    if status != 200:
        raise StartError(f"{route.path} answered {status}: {answer[:300]!r}")
    if route.about == "base64" and _floats(answer):
        route = replace(route, about="floats where base64 was asked for")
    if model != name:
        route = replace(route, about=f"{route.about}, as its model {model}")
    target.running = running
    return target.use(route)


def _floats(answer: bytes) -> bool:
    """The vectors are lists of numbers, which take longer to write and to read. Pure."""
    try:
        return isinstance(json.loads(answer)["data"][0]["embedding"], list)
    except (ValueError, LookupError, TypeError):
        return False


def _tei(target: Served, base: str) -> Served:
    route = tei_route(base)
    status, answer = _asked(target, "POST", route.path, route.body(["a"]))
    if status != 200:
        raise StartError(f"{route.path} answered {status}: {answer[:300]!r}")
    return target.use(route)


def _asked(target: Served, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    try:
        return target.ask(method, path, body)
    except NoFigureError as e:
        raise StartError(str(e)) from None
