"""What can be measured, behind one small Protocol, and the words that name it on the command line.

A target is `[NAME=]KIND[:WHERE]`; NAME is what the tables call it, KIND if not given. Kinds in this process are in
inprocess.py, kinds that are servers in served.py; both are imported when chosen.
"""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from hortus.bench.load import Clients
from hortus.bench.pace import Load, Plan
from hortus.bench.texts import Inputs
from hortus.errors import StartError
from hortus.folder import ModelFolder
from hortus.types import Float32

KINDS = {
    "engine": "Hortus' engine in this process: ids to rows",
    "hortus": "Hortus in this process: texts to vectors, tokenising counted",
    "sentence-transformers": "its encode() in this process: texts to vectors, tokenising counted",
    "transformers": "its model in this process, eager: ids to vectors",
    "transformers-compile": "the same under torch.compile",
    "serve": "a `hortus serve` started here; WHERE: more flags for it, such as serve:--gateways 2",
    "infinity": "an Infinity server started here; WHERE: the python that has infinity-emb",
    "vllm": "a vLLM server started here; WHERE: the python that has vllm, then more flags for it",
    "openai": "any server with OpenAI's /v1/embeddings; WHERE: its base URL, as OpenAI clients take it",
    "tei": "any server with TEI's /embed; WHERE: its base URL",
}
IN_PROCESS = ("engine", "hortus", "sentence-transformers", "transformers", "transformers-compile")


class Target(Protocol):
    """Something that turns texts or ids into vectors."""

    name: str
    served: bool
    """Over HTTP: takes several clients at once. In process: one call after another."""
    about: str
    """What its figures contain, for the notes."""
    opened_s: float
    """Seconds from starting it to its being ready; 0 when it ran before."""
    elsewhere: str | None
    """The host of a server that was not started here."""
    in_format: bool
    """It computes in the run's number format. Of others none is claimed."""

    def vectors(self, inputs: Inputs) -> Float32:
        """[inputs, width] float32: one request, for the check. Raises what goes wrong."""

    def load(self, requests: Sequence[Inputs], plan: Plan) -> Load:
        """Timed: the requests in turn by this plan."""

    def rows(self, answer: Any) -> Float32:
        """The vectors of an answer in `Load.answers`. Raises when they cannot be read."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Spec:
    """A target as typed."""

    name: str
    kind: str
    where: str


def parse(text: str) -> Spec:
    """`[NAME=]KIND[:WHERE]` -> Spec. StartError names what is wrong. Pure."""
    head, colon, where = text.partition(":")
    name, equals, kind = head.rpartition("=")
    kind = kind.strip()
    if kind not in KINDS:
        raise StartError(f"--target {text!r}: no kind {kind!r}; kinds: {', '.join(KINDS)}")
    if kind in ("openai", "tei") and not where.startswith("http://"):
        raise StartError(f"--target {text!r}: {kind} needs its base URL, {kind}:http://HOST:PORT (TLS is not measured)")
    if kind in ("openai", "tei") and (wrong := _wrong_url(where)):
        raise StartError(f"--target {text!r}: {wrong}")
    if kind in IN_PROCESS and colon:
        raise StartError(f"--target {text!r}: {kind} runs in this process and takes nothing after the colon")
    try:
        words = shlex.split(where)
    except ValueError as e:
        raise StartError(f"--target {text!r}: {e}") from None
    if kind in ("infinity", "vllm") and not words:
        raise StartError(f"--target {text!r}: {kind} needs the python that it is installed for, {kind}:PATH")
    if equals and not name.strip():
        raise StartError(f"--target {text!r}: an empty name")
    return Spec(name.strip() or kind, kind, where.strip())


def _wrong_url(where: str) -> str | None:
    """What is wrong with a server's base URL."""
    try:
        url = urlsplit(where.strip())
        port = url.port
    except ValueError as e:
        return f"{where!r} is no URL ({e})"
    if not url.hostname or port == 0:
        return f"{where!r} names no {'port' if url.hostname else 'host'}"
    if url.username or url.password:
        return "a user in the URL is not sent; give --header 'authorization: ...'"
    if url.query or url.fragment:
        return f"a base URL has no {'?' if url.query else '#'}; put the path before /embeddings or /embed"
    return None


def missing(spec: Spec) -> str | None:
    """The program that a target started here would run, where there is none."""
    if spec.kind not in ("infinity", "vllm"):
        return None
    python = shlex.split(spec.where)[0]
    program = str(Path(python).parent / "infinity_emb") if spec.kind == "infinity" else python
    return None if shutil.which(program) else program


@dataclass(frozen=True, slots=True)
class Setting:
    """What all targets of a run share."""

    folder: ModelFolder
    dtype: str = "auto"
    threads: int | None = None
    attention: str = "auto"
    headers: tuple[str, ...] = ()
    """Header lines for servers, such as an authorization."""
    clients: Clients = field(default_factory=Clients)
    processes: int = 4
    """Client processes at most, for servers."""

    @property
    def path(self) -> Path:
        return self.folder.path


def open_target(spec: Spec, setting: Setting) -> Target:
    """Start or load it, until it is ready. StartError says why it cannot be had."""
    begin = time.perf_counter()
    try:
        if spec.kind in IN_PROCESS:
            from hortus.bench import inprocess

            target: Target = inprocess.make(spec, setting)
        else:
            from hortus.bench import served

            target = served.make(spec, setting)
    except ModuleNotFoundError as e:
        raise StartError(f"the package {e.name} is not installed") from None
    if spec.kind not in ("openai", "tei"):
        target.opened_s = time.perf_counter() - begin
    return target


def timed_calls(calls: Sequence[Callable[[], object]], seconds: float) -> tuple[list[float], float]:
    """(milliseconds of each call, seconds in all): the calls in turn, for so long, at least one."""
    ms: list[float] = []
    begin = now = time.perf_counter()
    while not ms or now - begin < seconds:
        calls[len(ms) % len(calls)]()
        after = time.perf_counter()
        ms.append((after - now) * 1000)
        now = after
    return ms, now - begin
