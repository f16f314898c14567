"""Long texts read in another process: the same tokens and the same errors, and a process that dies costs nobody an answer."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import os
import shutil
import signal
import threading
import time

import numpy as np
import psutil
import pytest

from hortus.errors import InvalidInput, TooLong
from hortus.ivy import apart, tokenize
from hortus.ivy.apart import Apart, Gone
from hortus.ivy.assemble import Truncate
from hortus.ivy.templates import Pair
from hortus.ivy.tokenize import Tokenizer

CUT = Truncate(True)
TEXTS = ["The cat sits on the mat. " * n for n in (1, 40, 300)] + ["a" * 30_000]


def waited(one: Apart) -> Apart:
    end = time.monotonic() + 60
    while not one.ready(1.0):
        assert time.monotonic() < end, "it never started"
    return one


@pytest.fixture(scope="module")
def both(folder):
    """(a tokenizer that reads everything in another process, one that reads here)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenize, "APART_CHARS", 0)
        there, here = (Tokenizer(folder, threads=1, inline_chars=0, apart=a) for a in (True, False))

        def start() -> None:
            there._of_thread.process = waited(Apart(there._recipe))
            there._apart.append(there._of_thread.process)

        there._threads.submit(start).result(60)
        yield there, here
        there.close()
        here.close()


def same(a, b) -> None:
    for name in ("ids", "cu_seqlens", "token_types", "spans", "span_counts"):
        one, two = getattr(a, name), getattr(b, name)
        assert (one is None) is (two is None)
        if one is not None:
            np.testing.assert_array_equal(one, two)
            assert one.dtype == two.dtype


PAIR = Pair(("{instruction} q {query} d {document} end",), "say")


@pytest.mark.parametrize(
    "ask",
    [
        lambda t: t.batch(TEXTS, truncate=CUT),
        lambda t: t.pairs(["a query"], TEXTS, truncate=CUT, most_right=100),
        lambda t: t.documents([["one", "two"], ["three"]]),
        lambda t: t.pieces([("q", "d " + x) for x in TEXTS], 1, TEXTS, truncate=CUT),
        lambda t: t.joined(["q"] * 4, TEXTS, functools.partial(PAIR.text, None), truncate=CUT),
    ],
    ids=["batch", "pairs", "documents", "pieces", "joined"],
)
async def test_the_tokens_are_the_same(both, ask):
    there, here = both
    calls = []
    process = there._apart[0]
    real, process.call = process.call, lambda *a, **k: (calls.append(a[0]), real(*a, **k))[1]
    try:
        same(await ask(there), await ask(here))
    finally:
        process.call = real
    assert calls, "it was read in the other process"


async def test_the_errors_are_the_same(both):
    for texts, kind in ((["a", "word " * 999], TooLong), (["x" * 2_000_000], TooLong)):
        told = []
        for tokenizer in both:
            with pytest.raises(kind) as e:
                await tokenizer.batch(texts, field="texts")
            told.append((e.value.message, e.value.param, e.value.code))
        assert told[0] == told[1]
    with pytest.raises(InvalidInput, match="`truncate_prompt_tokens` is 1;"):
        await both[0].batch(["a"], truncate=Truncate(True, 1))


async def test_a_process_that_dies_costs_no_answer(folder, monkeypatch, caplog):
    monkeypatch.setattr(tokenize, "APART_CHARS", 0)
    tokenizer = Tokenizer(folder, threads=1, inline_chars=0, apart=True)
    here = Tokenizer(folder)
    want = here.encode(TEXTS, truncate=CUT)
    same(await tokenizer.batch(TEXTS, truncate=CUT), want)  # at once: it is only being started
    process = tokenizer._apart[0]
    assert tokenizer._threads.submit(waited, process).result(60)
    first = process.pid
    os.kill(first, signal.SIGKILL)
    same(await tokenizer.batch(TEXTS, truncate=CUT), want)
    assert "ended with a text in its hands" in caplog.text
    same(await tokenizer.batch(TEXTS, truncate=CUT), want)
    assert tokenizer._threads.submit(waited, process).result(60)
    second = process.pid
    assert second != first
    tokenizer.close()
    tokenizer._threads.shutdown()
    assert not psutil.pid_exists(first)
    assert not psutil.pid_exists(second)
    here.close()


def test_stopping_ends_what_it_is_at():
    one = waited(Apart((threading.Event, (), {})))
    assert one.call("wait", 0) is False
    with pytest.raises(TypeError):
        one.call("wait", "for ever")
    assert one.call("is_set") is False
    outcome: list = []

    def work() -> None:
        try:
            one.call("wait", 60)
        except Gone as e:
            outcome.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.05)
    one.stop()
    thread.join(60)
    assert outcome
    assert not one.ready()
    with pytest.raises(Gone):
        one.call("wait", 0)


def test_one_that_cannot_start_is_given_up(monkeypatch, caplog):
    monkeypatch.setattr(apart.sys, "executable", "/nowhere")
    one = Apart((threading.Event, (), {}))
    assert [one.ready() for _ in range(5)] == [False] * 5
    assert caplog.text.count("they are read here") == apart.MOST_STARTS


async def test_short_texts_start_nothing(folder, monkeypatch):
    monkeypatch.setattr(tokenize, "APART_CHARS", 16 * 1024)  # another fixture lowers it
    tokenizer = Tokenizer(folder, inline_chars=10, apart=True)
    await asyncio.gather(*[tokenizer.batch(["word " * 100] * 10) for _ in range(10)])
    assert not tokenizer._apart
    tokenizer.close()


async def test_a_process_reads_the_files_that_the_server_has_read_or_none(folder, tmp_path, monkeypatch, capfd):
    """Else a text's tokens would depend on its length, once somebody has saved another model over the folder."""
    monkeypatch.setattr(tokenize, "APART_CHARS", 0)
    path = tmp_path / "own"
    shutil.copytree(folder.path, path, copy_function=shutil.copyfile)
    own = dataclasses.replace(folder, path=path, transformer=path)
    there = Tokenizer(own, threads=1, inline_chars=0, apart=True)
    want = await there.batch(TEXTS, truncate=CUT)
    told = json.loads((path / "tokenizer.json").read_text())
    words = told["model"]["vocab"]
    words["cat"], words["mat"] = words["mat"], words["cat"]
    (path / "tokenizer.json").write_text(json.dumps(told))
    later = Apart(there._recipe)
    for _ in range(apart.MOST_STARTS):
        assert not later.ready(60)
    assert not later.ready(60)
    assert "files have changed since" in capfd.readouterr().err
    there._of_thread = threading.local()  # what its thread had started before does not count
    for _ in range(3):
        same(await there.batch(TEXTS, truncate=CUT), want)
    there.close()
