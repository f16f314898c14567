"""Texts that are slow to tokenise, beside short ones: the short ones must not wait for them."""

from __future__ import annotations

import base64
import statistics
import threading
import time

import httpx
import numpy as np
import pytest
from gateway_server import running
from patience import timed

SIZE = 200_000
TEXTS = {
    "one letter": "a" * SIZE,
    "base64": base64.b64encode(np.random.default_rng(0).bytes(SIZE * 3 // 4)).decode(),
    "minified code": "".join(f"function f{i}(a,b){{return a[{i}]+b.x{i}}};" for i in range(6000))[:SIZE],
}


def times_of(client: httpx.Client, count: int = 60) -> list[float]:
    times = []
    for i in range(count):
        begin = time.perf_counter()
        assert client.post("/embed", json={"inputs": f"short query {i}"}).status_code == 200
        times.append(time.perf_counter() - begin)
    return times


@pytest.mark.parametrize("name", TEXTS)
def test_short_texts_do_not_wait_for_slow_ones(name):
    """Medians, and the best of six: this machine may be busy with other things. A short text that waited for a slow one
    would take 50 ms and more. One letter is read in C in 4 ms, on whatever thread: there a short text only has to be quick,
    since alone it takes 1 ms, and three clients' 200 kB bodies in a loop take their part of the machine."""
    with running() as server, httpx.Client(base_url=server.url, timeout=60) as client:
        times_of(client)
        ratios, taken = [], []
        for _ in range(6):
            alone = statistics.median(times_of(client))
            ended, answered = threading.Event(), []

            def pest(ended=ended, answered=answered) -> None:
                with httpx.Client(base_url=server.url, timeout=60) as mine:
                    while not ended.is_set():
                        reply = mine.post("/embed", json={"inputs": TEXTS[name], "truncate": True})
                        answered.append(reply.status_code)

            pests = [threading.Thread(target=pest) for _ in range(3)]
            for thread in pests:
                thread.start()
            beside = statistics.median(times_of(client))
            ended.set()
            for thread in pests:
                thread.join()
            assert set(answered) == {200}
            taken.append(beside)
            ratios.append(beside / alone)
            if ratios[-1] < 2:
                break
        assert min(ratios) < 4 or (name == "one letter" and min(taken) < 0.01), (ratios, taken)


@timed
def test_the_time_of_one_text_is_bounded():
    with running(max_input_chars=SIZE) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        begin = time.perf_counter()
        told = client.post("/embed", json={"inputs": "a" * 20_000_000}).json()["error"]
        assert "--max-input-chars" in told["message"]
        assert client.post("/embed", json={"inputs": "b " * 5_000_000, "truncate": True}).status_code == 200
        assert time.perf_counter() - begin < 20
