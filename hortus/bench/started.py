"""Servers started here for a run: their commands, their processes, and that nothing of them is left at the end.

Stopped at the end also when the run fails, and with it when that is stopped. Does not know what is asked of them.
"""

from __future__ import annotations

import http.client
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hortus.bench import ENVIRON
from hortus.errors import StartError

STOP_S = 40.0
"""From SIGTERM until a server is killed."""

PEER_ENVIRON = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"}


def infinity_words(python: str, model: Path, port: int) -> list[str]:
    """Stock settings, but for its cache of vectors, which would answer a repeated text without the model."""
    words = ["--model-id", str(model), "--host", "127.0.0.1", "--port", str(port), "--no-vector-disk-cache"]
    return [str(Path(python).parent / "infinity_emb"), "v2", *words, "--log-level", "warning"]


def vllm_words(python: str, model: Path, port: int) -> list[str]:
    """The settings of the figures in docs/benchmarks.md: a token budget of 65,536; a third of the GPU, which others share."""
    words = ["--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--runner", "pooling"]
    budget = ["--max-num-batched-tokens", "65536", "--no-enable-prefix-caching", "--gpu-memory-utilization", "0.35"]
    return [python, "-m", "vllm.entrypoints.openai.api_server", *words, *budget]


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def started(
    words: Sequence[str],
    port: int | None,
    environ: dict[str, str] | None = None,
    ready_s: float = 300,
    cores: Collection[int] = (),
) -> Iterator[Running]:
    """A server process, ready; SIGTERM at the end. port: None when it tells it itself, as Hortus does. cores: those that it and
    all under it run on; none: any. StartError."""
    clean = {k: v for k, v in ENVIRON.items() if not k.startswith("HORTUS_")}
    with tempfile.TemporaryFile() as log:
        process: subprocess.Popen[bytes] | None = None

        def told() -> str:
            log.seek(0)
            return log.read().decode(errors="replace")

        def found() -> int | None:
            match = re.search(r"http://[\d.]+:(\d+)[ \n]", told()) if port is None else None
            return int(match[1]) if match else port

        try:
            with unbroken(), bound(cores):
                # A group of its own: what it starts can be ended with it, and Ctrl-C reaches it through us, in order.
                try:
                    process = subprocess.Popen(
                        words,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=clean | (environ or {}),
                        process_group=0,
                    )
                except OSError as e:
                    raise StartError(f"{words[0]} cannot be started: {e}") from None
            end = time.monotonic() + ready_s
            ready = False
            while not ready:
                at = found()
                ready = at is not None and _ready(at, "/ready" if port is None else "/health")
                if process.poll() is not None:  # also when another server answers on that port
                    raise StartError(f"the server ended by itself ({shlex.join(words)}):\n{told()[-3000:]}")
                if not ready and time.monotonic() > end:
                    raise StartError(
                        f"the server was not ready in {ready_s:g} s ({shlex.join(words)}):\n{told()[-3000:]}"
                    )
                time.sleep(0 if ready else 0.05)
            assert at
            yield Running(at, process.pid)
        finally:
            if process is not None:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM; after STOP_S, or a second Ctrl-C, the end. What it started and left behind ends with it."""
    try:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def unbroken() -> Iterator[None]:
    """Inside, Ctrl-C, SIGTERM and SIGHUP wait: who starts a process must have it in hand before it can be stopped with it."""
    waiting: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {n: signal.signal(n, lambda number, frame: waiting.append(number)) for n in numbers}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        for number in waiting:
            signal.raise_signal(number)


@contextmanager
def bound(cores: Collection[int]) -> Iterator[None]:
    """Inside, this thread runs on these cores only, and so does whatever it starts, also later. None given: as it is."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass(frozen=True, slots=True)
class Running:
    """A server started here, ready."""

    port: int
    process: int

    def cpu_s(self) -> float:
        """Processor seconds so far, of the process and all under it that run. 0 where /proc does not tell."""
        total, todo = 0.0, [self.process]
        while todo:
            at = Path(f"/proc/{todo.pop()}")
            try:
                user, system = (at / "stat").read_text().rsplit(")", 1)[1].split()[11:13]
                total += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
                for task in (at / "task").iterdir():
                    todo += map(int, (task / "children").read_text().split())
            except OSError:  # it has ended, or this is no Linux
                continue
        return total

    def engine(self) -> int:
        """The first engine process; the server itself where it is one process."""
        children = Path(f"/proc/{self.process}/task/{self.process}/children").read_text().split()
        for child in (*children, str(self.process)):
            if not children or b"tulip" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                return int(child)
        raise RuntimeError("no engine process")

    def engine_cpu_s(self) -> float:
        """Its processor seconds so far."""
        user, system = Path(f"/proc/{self.engine()}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def bind_engine(self, cores: Collection[int]) -> None:
        """Let it run on these cores only."""
        for task in Path(f"/proc/{self.engine()}/task").iterdir():
            os.sched_setaffinity(int(task.name), cores)


@contextmanager
def hortus(model: str, *flags: str, cores: Collection[int] = ()) -> Iterator[Running]:
    """`hortus serve MODEL` with these flags, on a free port. cores: see `started`."""
    words = [sys.executable, "-m", "hortus.cli", "serve", model, "--port", "0", *flags]
    with started(words, None, cores=cores) as running:
        yield running


def _ready(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
