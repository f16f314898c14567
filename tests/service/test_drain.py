"""How a server ends, and what else signals do to it: nothing that was sent is lost."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from gateway_server import FOLDER, read_answer, request
from patience import PATIENCE_S
from patience import until_seen as until

from hortus.stopping import IMPATIENT_S
from hortus.tulip.fake import FakeEngine


def test_drain_under_load_loses_nothing(run):
    """Stop while 8 clients send: every request that was sent got 200, or 503 draining, or its connection refused."""
    engine = FakeEngine.like(FOLDER, delay_s=0.02)
    outcomes: list[str] = []
    with run(engine) as server:
        enough = threading.Semaphore(0)

        def client() -> None:
            while True:
                try:
                    with server.connect() as sock:
                        sock.sendall(request())
                        status, body = read_answer(sock)
                except ConnectionError:
                    outcomes.append("refused")
                    return
                outcomes.append(str(status) if status == 200 else json.loads(body)["error"]["code"])
                enough.release()
                if status != 200:
                    return

        threads = [threading.Thread(target=client) for _ in range(8)]
        for t in threads:
            t.start()
        for _ in range(40):
            assert enough.acquire(timeout=PATIENCE_S)
        server.stop()
        for t in threads:
            t.join(PATIENCE_S)
        server.join()
    assert set(outcomes) <= {"200", "draining", "refused"}
    assert outcomes.count("200") >= 40
    assert server.sample("hortus_requests_total", code="cancelled") == 0


def test_requests_in_flight_finish_and_the_connection_closes(run):
    engine = FakeEngine.like(FOLDER)
    with run(engine) as server:
        engine.hold()
        with server.connect() as sock, server.connect() as idle:
            sock.sendall(request())
            until(lambda: engine.steps == 1)
            server.stop()
            assert idle.recv(1) == b""  # idle connections are closed at once
            with pytest.raises(ConnectionError):
                server.raw(request())
            engine.release()
            assert read_answer(sock)[0] == 200
            assert sock.recv(1) == b""
        server.join()


def test_what_does_not_finish_in_drain_s_is_told_so(run):
    engine = FakeEngine.like(FOLDER)
    with run(engine, drain_s=0.2) as server:
        engine.hold()
        with server.connect() as sock:
            sock.sendall(request())
            until(lambda: engine.steps == 1)
            server.stop()
            status, body = read_answer(sock)
            assert status == 503
            assert json.loads(body)["error"]["code"] == "draining"
        engine.release()
        server.join()


PROGRAM = Path(__file__).with_name("gateway_program.py")


@contextlib.contextmanager
def program(*args: str, files: int = 1024) -> Iterator[tuple[subprocess.Popen, int]]:
    """(gateway_program.py, its port), with so many open files."""
    paths = os.pathsep.join([str(PROGRAM.parents[2]), str(PROGRAM.parents[1])])
    env = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    words = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", sys.executable, str(PROGRAM), *args]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as process:
        try:
            told = process.stdout.readline().decode().strip()
            assert told, process.stderr.read().decode()
            yield process, int(re.search(r":(\d+)$", told)[1])
        finally:
            process.kill()


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


@contextlib.contextmanager
def draining(number: int) -> Iterator[tuple[subprocess.Popen, socket.socket]]:
    """(process, connection): a request is in, the signal was sent and heeded, and the engine is held still."""
    with program() as (process, port), connected(port) as sock:
        sock.sendall(request())
        metrics = f"http://127.0.0.1:{port}/metrics"
        until(lambda: "\nhortus_requests_in_flight 1.0\n" in httpx.get(metrics, timeout=PATIENCE_S).text)
        process.send_signal(number)

        def refused() -> bool:
            try:
                connected(port).close()
            except ConnectionError:
                return True
            return False

        until(refused)
        yield process, sock


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_with_0(number):
    with draining(number) as (process, sock):
        process.send_signal(signal.SIGUSR1)
        assert read_answer(sock)[0] == 200
        assert process.wait(PATIENCE_S) == 0


def test_a_hang_up_reloads_templates_and_nothing_else(tmp_path):
    file = tmp_path / "templates.toml"
    file.write_text('[prompts]\nold = "old "\n')
    with (
        program(str(file)) as (process, port),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client,
    ):
        process.send_signal(signal.SIGUSR1)
        assert "old" in client.get("/info").json()["prompts"]
        file.write_text('[prompts]\nnew = "new "\n')
        process.send_signal(signal.SIGHUP)
        until(lambda: "new" in client.get("/info").json()["prompts"])
        assert client.post("/embed", json={"inputs": "a", "prompt_name": "new"}).status_code == 200
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("command", ["serve", "ivy", "tulip"])
def test_signals_before_anything_is_imported(command, number):
    """A hang-up is nothing to a server that has nothing to read again; a stop is success."""
    code = (
        "import os, signal, sys, hortus.start\n"
        f"hortus.start.arm(['{command}'])\n"
        "assert not {'hortus.cli', 'hortus.config', 'asyncio'} & {*sys.modules}\n"
        "os.kill(os.getpid(), signal.SIGHUP)\n"
        f"os.kill(os.getpid(), {int(number)})\n"
        "raise SystemExit('it goes on')\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_before_embed_has_begun(number):
    """The status that a signal always has there, and no traceback of an import."""
    code = (
        "import os, sys, hortus.start\n"
        "hortus.start.arm(['embed'])\n"
        "assert not {'hortus.cli', 'hortus.config', 'asyncio'} & {*sys.modules}\n"
        f"os.kill(os.getpid(), {int(number)})\n"
        "raise SystemExit('it goes on')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True)
    assert (done.returncode, done.stderr) == (128 + number, b"")


@pytest.mark.parametrize("flags", [(), ("--replicas", "1", "--gateways", "1")])
def test_hang_ups_during_the_start_do_no_harm(flags):
    words = ["serve", "demo", "--fake-delay-ms", "0", "--port", "0", "--no-page", *flags]
    with subprocess.Popen(
        [sys.executable, "-m", "hortus.start", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:

        def armed() -> bool:
            """A hang-up is ignored, or has a handler already."""
            status = Path(f"/proc/{process.pid}/status").read_text()
            return any(
                int(mask, 16) & 1 << (signal.SIGHUP - 1) for mask in re.findall(r"Sig(?:Ign|Cgt):\s*(\w+)", status)
            )

        until(armed)
        told = threading.Event()

        def hang_up() -> None:
            while not told.wait(0.02):
                process.send_signal(signal.SIGHUP)

        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(hang_up)
            try:
                assert process.stdout.readline().startswith(b"hortus")
            finally:
                told.set()
            done.result()
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


def test_a_second_signal_exits_at_once():
    """Not after --drain-s, when it would exit with 0."""
    with draining(signal.SIGTERM) as (process, _):
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)  # `timeout` sends two, one right after the other: that is no second thought
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(IMPATIENT_S / 2)
        time.sleep(IMPATIENT_S)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM


def test_more_clients_than_open_files_are_told_so():
    """With 192 open files in all, 128 of them kept for other things."""
    with program(files=192) as (process, port), contextlib.ExitStack() as open_:
        process.send_signal(signal.SIGUSR1)

        def connect() -> socket.socket:
            return open_.enter_context(connected(port))

        inside = [connect() for _ in range(64)]
        for sock in inside:
            sock.sendall(request())
            assert read_answer(sock)[0] == 200
        for _ in range(3):
            status, body = read_answer(connect())
            assert status == 429
            assert "ulimit -n" in json.loads(body)["error"]["message"]
        for sock in [connect() for _ in range(300)]:  # told so, or cut off; never left waiting
            try:
                while sock.recv(65536):
                    pass
            except ConnectionError:
                pass
        inside[0].close()

        def welcome() -> bool:
            sock = connect()
            try:
                sock.sendall(request())
                return read_answer(sock)[0] == 200
            except ConnectionError:
                return False

        until(welcome)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
        # Once in ten seconds at most, and there were more than three hundred.
        assert 1 <= process.stderr.read().count(b"ulimit -n") < 20


def test_a_start_that_fails_does_not_speak_of_stopping():
    words = [sys.executable, "-m", "hortus.cli", "serve", "/nowhere", "--port", "0", "--fake-delay-ms", "0"]
    got = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (got.returncode, got.stderr) == (
        1,
        "hortus: /nowhere: no such folder, and not a hub id (those look like org/name)\n",
    )
