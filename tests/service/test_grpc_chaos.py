"""What happens to requests when processes are killed, stopped, restarted, and clients misbehave: one answer each, in time.

`make soak` runs the last test for 20 minutes (SOAK_S=1200); otherwise it takes 12 seconds, in the gate 60.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
from chaos import Family, Load, dawdle, family, get, vanish
from patience import PATIENCE_S, timed, until

pytestmark = pytest.mark.timeout(300)
SOAK_S = float(os.environ.get("SOAK_S", "12"))
FLAGS = ("--timeout-s", "5", "--silence-s", "1.5", "--slow-start-s", "2", "--drain-s", "5")
DEADLINE_S = 6.5


async def replaced(f: Family, name: str, old: int) -> None:
    """Until another process has that name and is ready."""

    def ready() -> bool:
        child = f.children().get(name)
        return child is not None and child.pid != old and f"{name} is ready, process {child.pid}" in f.text()

    await until(ready)


async def under_load(f: Family, clients: int, act, **more) -> Load:
    """Load before, during and after `act(load)`; everything that every test demands of it."""
    load = Load(f.port, DEADLINE_S, **more)
    running = asyncio.create_task(load.run(clients))
    await asyncio.sleep(0.5)
    try:
        await act(load)
        await asyncio.sleep(0.5)
        await carries_on(load, 50)
    finally:
        load.stop = True
        await running
    assert not load.wrong, f"{load.wrong}\n{load.outcomes}\n{f.text()[-3000:]}"
    assert load.slowest_s < DEADLINE_S
    return load


async def carries_on(load: Load, answers: int = 20) -> None:
    """Until so many more have been answered, however long this machine takes for them."""
    enough = load.outcomes["ok"] + answers
    await until(lambda: load.outcomes["ok"] > enough)


def failed(load: Load) -> int:
    return load.outcomes.total() - load.outcomes["ok"] - load.outcomes["excused"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    with family(tmp_path_factory.mktemp("family"), *FLAGS) as f:
        yield f


@timed
async def test_a_killed_engine_is_answered_for_by_the_other_and_restarted(home: Family):
    async def act(load: Load) -> None:
        old = home.children()["tulip-0"].pid
        os.kill(old, signal.SIGKILL)
        await replaced(home, "tulip-0", old)

    load = await under_load(home, 8, act)
    assert failed(load) == 0, load.outcomes
    assert load.slowest_s < 1.0, "failover takes less than a second"


@timed
async def test_a_stopped_engine_is_left_and_taken_back(home: Family):
    async def act(load: Load) -> None:
        pid = home.children()["tulip-1"].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(2.5)
            await carries_on(load)  # by the other replica
        finally:
            os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(0.5)

    load = await under_load(home, 8, act)
    assert failed(load) == 0, load.outcomes
    assert load.slowest_s < 3.5


async def test_a_killed_gateway_breaks_its_own_connections_only(home: Family):
    async def act(load: Load) -> None:
        load.broken_allowed = True
        old = home.children()["ivy-0"].pid
        os.kill(old, signal.SIGKILL)
        await replaced(home, "ivy-0", old)
        await asyncio.sleep(0.3)
        load.broken_allowed = False

    load = await under_load(home, 8, act)
    assert set(load.outcomes) <= {"ok", "broken", "excused"}
    assert load.outcomes["broken"] <= 16
    assert len(os.listdir(home.children()["ivy-0"].environ()["TMPDIR"])) == 1, "what the killed one has left is gone"


async def test_a_rolling_restart_loses_nothing(home: Family):
    async def act(load: Load) -> None:
        for name in ("tulip-0", "tulip-1"):
            old = home.children()[name].pid
            ups = home.text().count(f"/{name} is up")
            os.kill(old, signal.SIGTERM)
            await replaced(home, name, old)
            await until(lambda name=name, ups=ups: home.text().count(f"/{name} is up") >= ups + 2)  # both gateways

    load = await under_load(home, 8, act)
    assert failed(load) == 0, load.outcomes


async def test_sockets_that_are_deleted_come_back_and_cost_no_request(home: Family):
    """A cleaner of /tmp: a gateway that starts anew found nobody, and an engine that died never came back."""

    async def act(load: Load) -> None:
        found = re.search(r"replica unix:(\S+)/tulip-0 is up", home.text())
        assert found is not None
        shutil.rmtree(found[1])
        olds = {name: home.children()[name].pid for name in ("tulip-0", "tulip-1")}
        os.kill(olds["tulip-0"], signal.SIGKILL)
        for name, old in olds.items():
            await replaced(home, name, old)
        assert set(os.listdir(found[1])) >= set(olds)

    load = await under_load(home, 4, act)
    assert failed(load) == 0, load.outcomes


async def test_clients_that_vanish_or_dawdle_harm_nobody(home: Family):
    async def act(load: Load) -> None:
        rng = random.Random(1)
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(vanish(home.port, rng))
                group.create_task(dawdle(home.port, 1.0))

    load = await under_load(home, 4, act)
    assert failed(load) == 0, load.outcomes


@timed
@timed
async def test_both_engines_gone_is_a_clear_retryable_answer_at_once(tmp_path, monkeypatch):
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    secret = "secret-of-this-link"
    with family(tmp_path, *FLAGS, "--link-token", secret, gateways=1, replicas=1) as f:

        async def act(load: Load) -> None:
            for _ in range(2):
                old, told = f.children()["tulip-0"].pid, load.outcomes["not_ready"]
                f.process.send_signal(
                    signal.SIGSTOP
                )  # nobody starts it again, for as long as it takes to see that it is gone
                try:
                    os.kill(old, signal.SIGKILL)
                    await until(lambda told=told: load.outcomes["not_ready"] > told)
                finally:
                    f.process.send_signal(signal.SIGCONT)
                await replaced(f, "tulip-0", old)
                await carries_on(load)

        load = await under_load(f, 8, act)
        assert set(load.outcomes) <= {"ok", "not_ready", "excused"}
        assert load.slowest_s < 1.0
        # The children go when the supervisor is killed.
        children = list(f.children().values())
        f.process.kill()
        f.process.wait(PATIENCE_S)
        _, alive = psutil.wait_procs(children, PATIENCE_S)
        assert not alive
        # And nothing that was configured stays behind on the disk.
        left = [file for file in place.rglob("*") if file.is_file()]
        assert not [file for file in left if secret in file.read_text(errors="replace")], left
        assert not [file for file in left if file.suffix == ".toml"], left


def test_a_start_that_fails_has_one_clear_reason():
    """Wherever it is found: by the supervisor itself, or by two engines at once."""
    no_cert = ["demo", "--fake-delay-ms", "0", "--link-cert", "/nowhere", "--link-key", "/nowhere"]
    for flags, said in ((["/nowhere"], "/nowhere: no such folder"), (no_cert, "--link-cert /nowhere: No such file")):
        words = [sys.executable, "-m", "hortus.cli", "serve", *flags, "--replicas", "2", "--port", "0"]
        got = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        told = [line for line in got.stderr.splitlines() if line.startswith("hortus: ")]
        assert (got.returncode, len(told)) == (1, 1), got.stderr
        assert said in told[0]
        assert "Traceback" not in got.stderr


# --- everything at once, for long


async def kill_engine(f: Family, load: Load, rng: random.Random) -> None:
    pick(f, "tulip", rng)[1].kill()


async def end_engine(f: Family, load: Load, rng: random.Random) -> None:
    pick(f, "tulip", rng)[1].terminate()


async def stop_engine(f: Family, load: Load, rng: random.Random) -> None:
    _, engine = pick(f, "tulip", rng)
    engine.suspend()
    await asyncio.sleep(rng.uniform(0.5, 2.5))
    engine.resume()


async def kill_gateway(f: Family, load: Load, rng: random.Random) -> None:
    """Where the other is killed too before it is back, there is nobody to connect to."""
    name, gateway = pick(f, "ivy", rng)
    load.broken_allowed = True
    try:
        gateway.kill()
        await replaced(f, name, gateway.pid)
    finally:
        load.broken_allowed = False


async def bad_clients(f: Family, load: Load, rng: random.Random) -> None:
    await asyncio.gather(vanish(f.port, rng), dawdle(f.port, 0.5), return_exceptions=True)


def pick(f: Family, kind: str, rng: random.Random) -> tuple[str, psutil.Process]:
    return rng.choice(sorted((name, child) for name, child in f.children().items() if name.startswith(kind)))


@pytest.mark.timeout(SOAK_S + 120)
async def test_soak(tmp_path):
    rng = random.Random(int(os.environ.get("SOAK_SEED", "1")))
    with family(tmp_path, *FLAGS) as f:
        fresh = {name: child.memory_info().rss for name, child in f.children().items()}

        async def act(load: Load) -> None:
            end = time.monotonic() + SOAK_S
            while time.monotonic() < end:
                one = rng.choice((kill_engine, end_engine, stop_engine, kill_gateway, bad_clients))
                try:
                    await one(f, load, rng)
                except (psutil.NoSuchProcess, IndexError):
                    continue  # it had just ended
                await asyncio.sleep(rng.uniform(0.5, 3))
                await carries_on(load)  # after every one

        load = await under_load(f, 6, act, seed=rng.randrange(1000))
        assert set(load.outcomes) <= {"ok", "broken", "excused", "not_ready", "draining", "deadline_exceeded"}, (
            load.outcomes
        )

        # Afterwards all is as it was.
        async def as_it_was() -> bool:
            for _ in range(6):  # whichever gateway answers
                status, body = await get(f.port, "/metrics")
                assert status == 200
                if b"hortus_requests_in_flight 0.0" not in body or b"hortus_replicas_up 2.0" not in body:
                    return False
            return True

        async def settled() -> None:
            async with asyncio.timeout(PATIENCE_S):
                while len(f.children()) < 4 or not await as_it_was():  # noqa: ASYNC110 - other processes
                    await asyncio.sleep(0.1)

        await settled()
        quiet = Load(f.port, DEADLINE_S)
        running = asyncio.create_task(quiet.run(4, (1,)))
        await asyncio.sleep(1)
        quiet.stop = True
        await running
        assert set(quiet.outcomes) <= {"ok", "excused"}, quiet.outcomes
        await settled()
        for name, child in f.children().items():
            assert child.memory_info().rss < 1.5 * fresh[name] + 60e6, name
        print(f"\n{dict(load.outcomes)}, slowest {load.slowest_s:.2f} s")
