"""`hortus bench beside`: its texts, its ratios, and the order of a round. Nothing is timed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from hortus.bench import PROGRAMS
from hortus.bench.beside import ALONE, SIZE, measure, ratios, slow_texts
from hortus.bench.pace import Closed, Load, Open


def load(*ms: float) -> Load:
    return Load(np.array(ms), 1.0)


def test_the_slow_texts_have_their_size_and_are_the_same_each_time():
    texts = slow_texts()
    assert {len(t) for t in texts.values()} == {SIZE}
    assert texts == slow_texts()
    assert len(texts) == 3
    assert "beside" in PROGRAMS


def test_a_ratio_is_of_one_round_and_the_median_over_rounds():
    alone = [load(1, 1, 1), load(10, 10, 10), load(2, 2, 2)]
    beside = [load(2, 2, 2), load(10, 10, 10), load(8, 8, 8)]  # the second round was slow for both
    assert ratios(beside, alone) == (2.0, 2.0)


class Noted:
    """Clients that answer at once, and remember what they were asked."""

    def __init__(self, failed: dict[int, int] | None = None) -> None:
        self.rounds: list[list[str]] = []
        self.failed = failed or {}

    def run(self, jobs: list) -> list[Load]:
        self.rounds.append([json.loads(job.requests[0].partition(b"\r\n\r\n")[2])["input"][:8] for job in jobs])
        assert isinstance(jobs[0].plan, Open)
        assert all(isinstance(job.plan, Closed) for job in jobs[1:])
        return [Load(np.array([1.0]), 1.0, 0.0, dict(self.failed)) for _ in jobs]


def test_each_round_takes_the_short_texts_alone_and_beside_each_kind():
    clients = Noted()
    short, slow = measure(SimpleNamespace(port=1), clients, "m", 10.0, 1.0, 2)
    assert list(short) == [ALONE, *slow_texts()]
    assert {len(loads) for loads in (*short.values(), *slow.values())} == {2}
    assert [len(jobs) for jobs in clients.rounds] == [1, 2, 2, 2] * 3  # the first round only warms up
    with pytest.raises(RuntimeError):
        measure(SimpleNamespace(port=1), Noted({500: 1}), "m", 10.0, 1.0, 1)
