"""`hortus serve --gateways N --replicas M`: N gateways on one port, M engines behind Unix sockets, watched by this process.

A child that dies is started again, after a pause that grows while it keeps dying. A child that cannot start at all ends
everything, with its one reason. SIGTERM: the gateways finish what they have, then the engines, exit status 0.

Knows processes. Does not know gRPC, HTTP or torch; loads no model.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hortus.config import SECTIONS, Config
from hortus.cores import usable_cores
from hortus.engines import open_model
from hortus.errors import StartError
from hortus.ivy.server import address_of, bind
from hortus.start import say
from hortus.stopping import Patience

log = logging.getLogger("hortus.supervise")

PAUSES_S = (0.1, 10.0)
"""First and longest pause before a dead child is started again."""
SETTLED_S = 30.0
"""A child that has run for this long starts its next life with the first pause again."""
_MOST_PORT = 65535
_MOST_SOCKET_NAME = 107
"""Bytes; one less than Linux's sun_path."""
_CONNECTED_S = 2.0
"""How long after it is ready an engine has all gateways again."""
_KILL_S = 5.0
"""How long after its own drain time a child that stays is killed."""


@dataclass(frozen=True, slots=True)
class Child:
    """One process to keep running."""

    name: str
    command: tuple[str, ...]
    """What follows `hortus`."""
    config: Config
    environ: Mapping[str, str] = field(default_factory=dict)
    """Beside what this process has."""


def pause(deaths: int) -> float:
    """Seconds to wait before a child that has died `deaths` times in a row is started again. Pure."""
    first, longest = PAUSES_S
    return min(longest, first * 2.0 ** min(deaths - 1, 30))


def gpus(environ: Mapping[str, str], devices: int) -> list[str]:
    """The GPUs to deal out: what CUDA_VISIBLE_DEVICES lists (perhaps one twice), else all `devices` of them. Pure."""
    given = environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return [str(i) for i in range(devices)]
    return [name.strip() for name in given.split(",") if name.strip() and name.strip() != "-1"]


def plan(model: str, config: Config, *, where: Path, port: int, visible: list[str], cores: int) -> list[Child]:
    """All children, engines first. Pure.

    where: a folder for the sockets and gateways' files. port: of all gateways. visible: GPUs, one an engine; none or --device
    cpu: the engines share `cores`. StartError when there are fewer GPUs than engines, or no room for the ports of metrics.
    """
    count, link = config.link.replicas, config.link
    on_gpu = bool(visible) and config.rose.device != "cpu" and config.tulip.fake_delay_ms is None
    if on_gpu and count > len(visible):
        raise StartError(
            f"--replicas {count}: there are {len(visible)} GPUs ({', '.join(visible)}); to put several engines on one, name "
            "it several times, as in CUDA_VISIBLE_DEVICES=0,0"
        )
    sockets = [f"unix:{where}/tulip-{i}" for i in range(count)]
    _check_metrics_ports(link.metrics_port, count + max(1, link.gateways), port)
    children = []
    for i, listen in enumerate(sockets):
        rose = config.rose
        if not on_gpu and rose.threads is None and count > 1:
            rose = dataclasses.replace(rose, threads=max(1, cores // count))
        own = dataclasses.replace(link, listen=listen, metrics_port=_shifted(link.metrics_port, i))
        environ = {"CUDA_VISIBLE_DEVICES": visible[i]} if on_gpu else {}
        children.append(
            Child(f"tulip-{i}", ("tulip", model), dataclasses.replace(config, rose=rose, link=own), environ)
        )
    for i in range(max(1, link.gateways)):
        ivy = dataclasses.replace(config.ivy, port=port, reuse_port=True)
        own = dataclasses.replace(link, replica=",".join(sockets), metrics_port=_shifted(link.metrics_port, count + i))
        temporary = {"TMPDIR": f"{where}/ivy-{i}"}  # for its copy of the model's small files, which a kill would leave
        children.append(Child(f"ivy-{i}", ("ivy",), dataclasses.replace(config, ivy=ivy, link=own), temporary))
    return children


def _check_metrics_ports(first: int | None, count: int, port: int) -> None:
    if not first:
        return
    last = first + count - 1
    if last > _MOST_PORT:
        raise StartError(
            f"--metrics-port {first}: {count} processes take the ports {first} to {last}, beyond {_MOST_PORT}"
        )
    if first <= port <= last:
        raise StartError(
            f"--metrics-port {first}: {count} processes take the ports {first} to {last}, and {port} is --port"
        )


def _shifted(port: int | None, by: int) -> int | None:
    return port + by if port else port


def as_toml(config: Config) -> str:
    """The whole configuration as what --config reads. Pure."""
    lines = []
    for section in SECTIONS:
        values = getattr(config, section)
        lines.append(f"[{section}]")
        for f in dataclasses.fields(values):
            value = getattr(values, f.name)
            if value is not None:
                # JSON's numbers, booleans and strings are TOML's too, but for DEL, which no setting holds, and for pairs of
                # escapes, in which JSON writes an emoji.
                lines.append(f"{f.name} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def supervise(model: str, config: Config) -> int:
    """Run until SIGTERM or SIGINT. Returns the exit status; StartError when a child cannot start."""
    open_model(model, config.ivy.served_model_name, config.rose, weights=config.tulip.fake_delay_ms is None)
    with _sockets() as where, _reserved(config) as sock:
        children = plan(
            model,
            config,
            where=where,
            port=sock.getsockname()[1],
            visible=gpus(os.environ, len([*Path("/dev").glob("nvidia[0-9]*")])),
            cores=usable_cores(),
        )
        return asyncio.run(
            _Family(children, address_of(sock, "https" if config.ivy.tls_cert else "http"), config.ivy.drain_s).run()
        )


@contextlib.contextmanager
def _sockets() -> Iterator[Path]:
    """A folder for the sockets between the processes. StartError when there is none whose names a socket can have."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="hortus-")
    except OSError as e:
        raise StartError(f"the sockets between the processes need a temporary folder (TMPDIR): {e}") from None
    with folder as where:
        longest = len(os.fsencode(where)) + len("/tulip-9999.s")
        if longest > _MOST_SOCKET_NAME:
            raise StartError(
                f"{where}: the sockets between the processes are here, and their names are too long ({longest} bytes, at most "
                f"{_MOST_SOCKET_NAME}): set TMPDIR to a folder with a shorter name"
            )
        yield Path(where)


@contextlib.contextmanager
def _reserved(config: Config) -> Iterator[socket.socket]:
    """The port of all gateways, bound but not listening: it is ours, and no connection ever comes to this process.

    StartError when somebody else listens there. Gateways share a port with whoever else does that, also those of another
    model, and then the kernel would deal clients out among them: only --reuse-port asks for it.
    """
    if not config.ivy.reuse_port:
        bind(config.ivy.host, config.ivy.port).close()
    sock = bind(config.ivy.host, config.ivy.port, reuse_port=True, listen=False)
    try:
        yield sock
    finally:
        sock.close()


class _Family:
    """All children, from their start to their end."""

    def __init__(self, children: list[Child], address: str, drain_s: float) -> None:
        self._children, self._address, self._drain_s = children, address, drain_s
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._ready: set[str] = set()
        """Have been ready at least once."""
        self._up: dict[str, float] = {}
        """Those that are ready in the life that they have now, and since when (time.monotonic())."""
        self._failed: asyncio.Future[str]
        self._stopping = asyncio.Event()
        self._told = False
        self._out = os.dup(1)
        """What children write to: their own standard output is a pipe to here, for words between them and this process."""
        self._patience = Patience()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._failed = loop.create_future()
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, stop)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        begin = time.monotonic()
        keepers = [asyncio.create_task(self._keep(child, begin)) for child in self._children]
        stopping = asyncio.ensure_future(stop.wait())
        ends: list[asyncio.Future[Any]] = [stopping, self._failed, *keepers]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        self._stopping.set()
        failed = self._failed.done()
        # Gateways first: what they have in flight still needs the engines. Nobody waits for anything after a failed start.
        for kind in ("ivy", "tulip"):
            await self._stop([c.name for c in self._children if c.command[0] == kind], 0.0 if failed else self._drain_s)
        stopping.cancel()
        for keeper in keepers:
            keeper.cancel()
        await asyncio.wait([stopping, *keepers])
        if failed:
            raise StartError(self._failed.result())
        for keeper in keepers:
            if not keeper.cancelled() and (fault := keeper.exception()):
                raise fault
        log.info("stopped")
        return 0

    def _signalled(self, stop: asyncio.Event) -> None:
        stop.set()
        if self._patience.lost():
            for process in self._processes.values():
                with contextlib.suppress(ProcessLookupError):
                    process.kill()

    def _reload(self) -> None:
        """Pass SIGHUP on to the gateways, which read their templates again."""
        for child in self._children:
            process = self._processes.get(child.name)
            if child.command[0] == "ivy" and child.name in self._ready and process is not None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGHUP)

    async def _keep(self, child: Child, begin: float) -> None:
        deaths = 0
        while True:
            born = time.monotonic()
            try:
                status = await self._live(child, begin)
                how = f"ended with {_how(status)}"
            except OSError as e:  # no process, no descriptor or no space left, perhaps only for now
                status, how = 1, f"cannot be started: {e}"
            if self._stopping.is_set():
                log.info("%s %s", child.name, how)
                return
            if child.name not in self._ready:
                self._fail(f"{child.name} {how} before it was ready")
                return
            # Status 0: somebody has asked it to end, to have it started anew.
            deaths = 1 if status == 0 or time.monotonic() - born > SETTLED_S else deaths + 1
            wait = pause(deaths)
            log.warning("%s %s; starting it again in %.1f s", child.name, how, wait)
            await asyncio.sleep(wait)
            if self._stopping.is_set():  # those of its kind may have been told to end already
                return
            if child.command[0] == "ivy":
                self._renew_unreachable()

    async def _live(self, child: Child, begin: float) -> int:
        """One life of a child; its exit status. OSError when it cannot begin."""
        _make_room(child)
        environ = {k: v for k, v in os.environ.items() if not k.startswith("HORTUS_")} | dict(child.environ)
        ours = f"{child.name}@{os.getpid()}:{self._out}"
        words = (*child.command, "--config", "/dev/stdin", "--supervised", ours)
        # A group of its own: Ctrl-C comes to this process, which ends the others in order.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "hortus.start", *words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env=environ, process_group=0, pass_fds=(self._out,),
        )  # fmt: skip
        self._processes[child.name] = process
        assert process.stdin is not None, "stdin was asked for"
        assert process.stdout is not None, "stdout was asked for"
        # Through a pipe: there may be keys in it, and a file would outlive a supervisor that is killed.
        process.stdin.write(as_toml(child.config).encode())
        process.stdin.close()
        async for line in process.stdout:
            word, _, rest = line.decode(errors="replace").strip().partition(" ")
            if word == "ready":
                log.info("%s is ready, process %d", child.name, process.pid)
                self._ready.add(child.name)
                self._up[child.name] = time.monotonic()
                if len(self._ready) == len(self._children):
                    self._tell(time.monotonic() - begin)
                    if child.command[0] == "tulip":
                        asyncio.get_running_loop().call_later(_CONNECTED_S, self._renew_unreachable)
            elif word == "failed" and child.name not in self._ready:
                self._fail(rest)
            elif word == "failed":
                log.error("%s cannot start: %s", child.name, rest)
        self._up.pop(child.name, None)
        return await process.wait()

    def _renew_unreachable(self) -> None:
        """An engine whose socket has been deleted serves the gateways that it has, and no other: it is started anew. One at a
        time, and not before gateways have all the others."""
        now, engines = time.monotonic(), [c for c in self._children if c.command[0] == "tulip"]
        lost = [c for c in engines if c.name in self._up and not _socket_of(c).exists()]
        settled = all(c in lost or now - self._up.get(c.name, now) > 0.9 * _CONNECTED_S for c in engines)
        if lost and settled and not self._stopping.is_set():
            log.warning("%s has lost its socket, where gateways reach it: it is started anew", lost[0].name)
            with contextlib.suppress(ProcessLookupError):
                self._processes[lost[0].name].terminate()

    def _tell(self, seconds: float) -> None:
        if not self._told:
            self._told = True
            engines = sum(c.command[0] == "tulip" for c in self._children)
            say(
                f"hortus: {engines} engines and {len(self._children) - engines} gateways on {self._address} "
                f"(started in {seconds:.1f} s)"
            )

    def _fail(self, reason: str) -> None:
        if not self._failed.done():
            self._failed.set_result(reason)

    async def _stop(self, names: list[str], drain_s: float) -> None:
        processes = [p for name in names if (p := self._processes.get(name)) is not None and p.returncode is None]
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        if not processes:
            return
        waits = [asyncio.ensure_future(p.wait()) for p in processes]
        _, late = await asyncio.wait(waits, timeout=drain_s + _KILL_S)
        if late:
            log.warning("%d processes stay after %g s; killing them", len(late), drain_s + _KILL_S)
            for process in processes:
                if process.returncode is None:
                    process.kill()
            await asyncio.wait(waits)


def _make_room(child: Child) -> None:
    """The folder that a child works in: whoever tidies up temporary files may have taken it, and a gateway that was killed has
    left its copy of the model's small files there.
    """
    own = _socket_of(child) if child.command[0] == "tulip" else Path(child.environ["TMPDIR"])
    own.parent.mkdir(mode=0o700, exist_ok=True)
    if child.command[0] == "ivy":
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir(mode=0o700, exist_ok=True)


def _socket_of(engine: Child) -> Path:
    """Where gateways reach it."""
    return Path(engine.config.link.listen.removeprefix("unix:"))


def _how(status: int) -> str:
    return f"status {status}" if status >= 0 else f"signal {-status}"
