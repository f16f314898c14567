"""hortus.Engine: how it ends, and that nobody waits for one that has ended."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import signal
import threading
import time

import pyarrow as pa
import pytest
from corpus_runs import texts
from patience import until

import hortus
from hortus.errors import NotReady


def test_who_waits_when_another_thread_closes_is_told_and_nobody_waits_for_ever():
    for delay_s in (0.0, 0.002, 0.01, 0.05):
        engine, told = hortus.Engine("demo", fake_delay_ms=2.0), []

        def ask(many: int, engine: hortus.Engine = engine, told: list[str] = told) -> None:
            try:
                while True:
                    engine.embed(texts(many))
            except NotReady as e:
                told.append(e.message)

        asking = [threading.Thread(target=ask, args=(many,), daemon=True) for many in (1, 1, 3000, 3000)]
        closing = [threading.Thread(target=engine.close, daemon=True) for _ in range(2)]
        for t in asking:
            t.start()
        time.sleep(delay_s)
        for t in closing:
            t.start()
        for t in asking + closing:
            t.join(60)
        assert not any(t.is_alive() for t in asking + closing + [engine._thread])
        assert len(told) == 4
        assert set(told) <= {"this engine has been closed", "this engine was closed before it had answered"}


async def test_a_coroutine_that_waits_when_the_engine_closes_is_told():
    engine = hortus.Engine("demo", fake_delay_ms=10_000.0)
    asking = asyncio.create_task(engine.aembed(["a"]))
    await until(lambda: bool(engine._asks))
    await asyncio.to_thread(engine.close)
    with pytest.raises(NotReady, match="closed before it had answered"):
        await asyncio.wait_for(asking, 60)


def test_a_close_that_is_broken_off_can_be_ended_by_another(monkeypatch: pytest.MonkeyPatch):
    engine = hortus.Engine("demo", fake_delay_ms=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(concurrent.futures.Future, "result", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.close()
    engine.close()
    assert not engine._thread.is_alive()


def test_an_engine_that_nobody_holds_ends_by_itself():
    engine = hortus.Engine("demo", fake_delay_ms=0.0)
    assert engine.embed(["a"]).shape == (1, 384)
    thread = engine._thread
    del engine
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_closed_is_told():
    engine = hortus.Engine("demo", fake_delay_ms=0.0)
    engine.close()
    engine.close()
    with pytest.raises(NotReady):
        engine.embed(["a"])
    with pytest.raises(NotReady), engine:
        pass


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_engine_refuses_every_call_at_once(fake: hortus.Engine):
    calls = [
        lambda: fake.embed(["a"]),
        lambda: asyncio.run(fake.aembed(["a"])),
        lambda: fake.rerank("q", ["a"]),
        lambda: fake.embed_table(pa.table({"text": ["a"]})),
        fake.close,
        fake.__enter__,
    ]
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a call that hangs ends so
        refused = 0
        try:
            for call in calls:
                try:
                    call()
                except RuntimeError as e:
                    refused += "fork" in str(e)
        finally:
            os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(calls)
    assert fake.embed(["a"]).shape == (1, 384)
