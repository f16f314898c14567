"""Links that go dead without closing, and names that come to stand for other machines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from grpc_pair import Garden, batch, garden
from patience import PATIENCE_S, until

from hortus import errors
from hortus.tulip.fake import fake_rows


@pytest.fixture
async def world(tmp_path):
    async with garden(tmp_path, "grpc") as g:
        yield g


class Wire:
    """A way to a port that can be cut: nothing passes any more, and neither end is told. Connections are taken even then, as
    by a machine whose processes are stopped."""

    def __init__(self, to: str) -> None:
        self._host, _, port = to.rpartition(":")
        self._port = int(port)
        self.open = {"asks": asyncio.Event(), "answers": asyncio.Event()}
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = 0
        self.mend()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self, *ways: str) -> None:
        for way in ways or self.open:
            self.open[way].clear()

    def mend(self) -> None:
        for gate in self.open.values():
            gate.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        async with asyncio.TaskGroup() as group:
            for way, source, sink in (("asks", reader, far_writer), ("answers", far_reader, writer)):
                self._tasks.add(group.create_task(self._carry(self.open[way], source, sink)))

    async def _carry(self, gate: asyncio.Event, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                while data := await source.read(65536):
                    await gate.wait()
                    sink.write(data)
                    await sink.drain()
            await gate.wait()
        finally:
            sink.close()

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def wire(to: str):
    one = Wire(to)
    try:
        yield one, await one.start()
    finally:
        await one.close()


async def answered(replicas, count: int) -> float:
    """Ask so many at once; every one is answered rightly. Returns how often one was asked of a second replica."""

    def retries() -> float:
        return replicas._metrics.registry.get_sample_value("hortus_replica_retries_total")

    before, deadline = retries(), time.monotonic() + PATIENCE_S
    results = await asyncio.gather(*[replicas.encode(batch(n), deadline=deadline) for n in range(count)])
    for n, result in enumerate(results):
        np.testing.assert_array_equal(result.rows, fake_rows(batch(n), 384))
    return retries() - before


@pytest.mark.parametrize("ways", [("asks",), ("answers",), ("asks", "answers")])
async def test_what_a_dead_link_holds_is_answered_elsewhere(world: Garden, ways):
    """Whichever way is cut: where only answers are lost the work is done twice, and answered once."""
    a, b = [await world.tulip() for _ in range(2)]
    async with wire(a.address) as (line, through):
        replicas = await world.replicas(through, b.address, silence_s=0.6)
        links = {link.target.address: link for link in replicas.links.values()}
        behind = next(link for address, link in links.items() if address.endswith(through))
        assert await answered(replicas, 50) == 0
        line.cut(*ways)
        assert await answered(replicas, 50) > 0, "what the link held went to the other"
        assert not behind.up
        assert await answered(replicas, 50) == 0, "from then on nothing waits for it"
        assert behind.outstanding == 0
        line.mend()
        await until(lambda: behind.up)
        assert await answered(replicas, 50) == 0
        assert a.scheduler.healthy


async def test_with_every_link_dead_requests_are_told_so_in_time(world: Garden):
    a = await world.tulip()
    async with wire(a.address) as (line, through):
        replicas = await world.replicas(through, silence_s=0.6)
        await answered(replicas, 10)
        line.cut()
        deadline = time.monotonic() + PATIENCE_S
        tasks = [asyncio.ensure_future(replicas.encode(batch(n), deadline=deadline)) for n in range(20)]
        outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE_S)
        assert {type(o) for o in outcomes} == {errors.NotReady}
        assert "silent for" in outcomes[0].message
        # Nothing mends the line meanwhile: an answer at all is one that waited for no replica.
        with pytest.raises(errors.NotReady, match="no replica can take work"):
            await asyncio.wait_for(replicas.encode(batch(1)), PATIENCE_S)
        # A deadline that comes before the silence is long enough is kept as well.
        line.mend()
        patient = await world.replicas(through, silence_s=100.0)
        line.cut("answers")
        with pytest.raises(errors.DeadlineExceeded):
            await asyncio.wait_for(patient.encode(batch(1), deadline=time.monotonic() + 0.1), PATIENCE_S)


# --- names


NAME = "tulips.example"
LOOK_UP = """
import asyncio, socket, sys, uvloop
uvloop.new_event_loop = asyncio.new_event_loop  # uvloop asks the system itself
real = socket.getaddrinfo
def look_up(host, port, *args, **named):
    if host != {name!r}:
        return real(host, port, *args, **named)
    found = [line.split()[0] for line in open({hosts!r}) if host in line.split()[1:]]
    if not found:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return [entry for address in found for entry in real(address, port, *args, **named)]
socket.getaddrinfo = look_up
from hortus.cli import main
sys.exit(main(sys.argv[1:]))
"""


def gateway(hosts: Path, *words: str) -> list[str]:
    """A command line of `hortus` for which the file is /etc/hosts: in a mount namespace of its own where that is allowed, so that
    the system's own resolver reads it; else by a stand-in for it."""
    mount = f"mount --bind {hosts} /etc/hosts"
    with contextlib.suppress(OSError):
        if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, check=False).returncode == 0:
            program = " ".join([sys.executable, "-m", "hortus.cli", *words])
            return ["unshare", "-m", "sh", "-c", f"{mount} && exec {program}"]
    return [sys.executable, "-c", LOOK_UP.format(name=NAME, hosts=str(hosts)), *words]


async def test_a_name_is_looked_up_again(world: Garden, tmp_path):
    """A deployment that grows, moves and loses its name, under requests, through the system's resolver."""
    first = await world.tulip()
    port = first.address.rpartition(":")[2]
    second = await world.tulip(listen=f"127.0.0.2:{port}")
    hosts = tmp_path / "hosts"

    def name(*addresses: str) -> None:  # in place: a mount is of the file, not of its name
        with hosts.open("r+" if hosts.exists() else "w") as file:
            file.truncate()
            file.write("127.0.0.1 localhost\n" + "".join(f"{a} {NAME}\n" for a in addresses))

    name("127.0.0.1")
    words = ["ivy", "--replica", f"{NAME}:{port}", "--resolve-s", "0.1", "--slow-start-s", "0", "--port", "0"]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("HORTUS_")}
    process = await asyncio.create_subprocess_exec(*gateway(hosts, *words), env=environ, stdout=asyncio.subprocess.PIPE)
    try:
        told = await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)
        assert b"hortus ivy: mini" in told
        url = re.search(rb"http://\S+", told)[0].decode()
        async with asyncio.timeout(100), httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:

            async def run() -> tuple[int, int]:
                """How many of 20 requests each of the two has run."""
                before = first.engine.steps, second.engine.steps
                for i in range(20):
                    reply = await client.post("/v1/embeddings", json={"model": "mini", "input": f"text {i}"})
                    assert reply.status_code == 200, reply.text
                return first.engine.steps - before[0], second.engine.steps - before[1]

            async def becomes(wanted) -> None:
                while not wanted(await run()):  # noqa: ASYNC110 - what is waited for is another process
                    await asyncio.sleep(0.05)

            await becomes(lambda ran: ran[0] >= 20 and not ran[1])
            name("127.0.0.1", "127.0.0.2")
            await becomes(all)
            name("127.0.0.2")
            await becomes(lambda ran: ran[1] >= 20 and not ran[0])
            name()  # no such name any more: what was known is kept
            await asyncio.sleep(0.3)
            assert (await run())[0] == 0
            name("127.0.0.1")
            await becomes(lambda ran: ran[0] >= 20 and not ran[1])
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
        await process.stdout.read()
