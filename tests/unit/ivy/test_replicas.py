"""The pure half of many replicas: who gets a chunk, who may stand beside whom, what --replica says."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest

from hortus.config import LinkConfig
from hortus.errors import Draining, NotReady, StartError
from hortus.ivy.address import Target, places, resolve, target
from hortus.ivy.replicas import Replicas, changes, choose, difference
from hortus.metrics import Metrics
from hortus.protocol.wire import Description
from hortus.types import ModelInfo, Result, TokenBatch


@dataclass
class Seen:
    outstanding: int = 0
    up: bool = True
    draining: bool = False
    up_since: float = 0.0
    rests_until: float = 0.0


def chosen(links: list[Seen], tokens: int = 10, now: float = 100.0, slow: float = 10.0) -> int | None:
    got = choose(links, tokens, now, slow)
    return None if got is None else next(i for i, x in enumerate(links) if x is got)


def test_least_outstanding_of_those_that_can():
    assert chosen([Seen(5), Seen(3), Seen(4)]) == 1
    assert chosen([Seen(5), Seen(3, up=False), Seen(4, draining=True)]) == 0
    assert chosen([Seen(1, up=False), Seen(1, draining=True)]) is None
    assert chosen([]) is None
    assert chosen([Seen(2), Seen(2)]) == 0, "of equals the first: the caller turns the list"


def test_resting_only_when_all_rest():
    assert chosen([Seen(0, rests_until=101), Seen(900)]) == 1
    assert chosen([Seen(5, rests_until=101), Seen(4, rests_until=101)]) == 1
    assert chosen([Seen(0, rests_until=99), Seen(900)]) == 0


def test_slow_start_gives_a_growing_share():
    def shares(age: float) -> float:
        old, new = Seen(), Seen(up_since=100 - age)
        got = [0, 0]
        for _ in range(1000):
            i = chosen([old, new], 1)
            (old, new)[i].outstanding += 1
            got[i] += 1
        return got[1] / got[0]

    assert shares(0) == pytest.approx(0.1, rel=0.1)
    assert shares(5) == pytest.approx(0.5, rel=0.1)
    assert shares(10) == pytest.approx(1.0, rel=0.01)
    assert chosen([Seen(0, up_since=100)], slow=0.0) == 0


INFO = ModelInfo(name="a", revision="r1", width=4, max_tokens=8, vocab_size=100)
ONE = Description(INFO, "f1", ())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "b"}, "its model is 'b', this gateway serves 'a'"),
        ({"revision": "r2"}, "its revision of 'a' is 'r2', this gateway serves 'r1'"),
        ({"dtype": "bfloat16"}, "its dtype"),
        ({"width": 5}, "its width"),
        ({"max_tokens": 9}, "its max_tokens"),
    ],
)
def test_another_model_is_refused_by_name(change, said):
    why = difference(ONE, dataclasses.replace(ONE, info=dataclasses.replace(INFO, **change)))
    assert why is not None
    assert said in why


def test_other_weights_or_protocol_are_refused_and_another_device_is_not():
    assert "f2" in (difference(ONE, dataclasses.replace(ONE, fingerprint="f2")) or "")
    assert "version 2" in (difference(ONE, dataclasses.replace(ONE, version=2)) or "")
    other = dataclasses.replace(INFO, device="cuda:1", attention="x", batch_tokens=7)
    assert difference(ONE, dataclasses.replace(ONE, info=other)) is None


def test_changes():
    a, b, c = (Target(x, None) for x in "abc")
    assert changes([a, b], [b, c], [a, b]) == ({c}, {a})
    assert changes([a, b], [c], [a, b]) == ({c}, set()), "nobody else takes work yet"
    assert changes([a, b, c], [c], [a, b, c]) == (set(), {a, b})


@dataclass
class Answers(Seen):
    """A link whose replica says that it drains, or answers."""

    drains: bool = True

    async def encode(self, batch, deadline):
        if self.drains:
            raise Draining("the server is shutting down")
        return Result(np.zeros((1, 4), np.float32))


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_replicas_that_drain_do_not_speak_for_the_gateway(count):
    """It stays: another replica answers, or it says in its own words that none can."""
    replicas = Replicas(LinkConfig(replica="unix:/x"), Metrics())
    batch = TokenBatch(np.ones(1, np.int32), np.array([0, 1], np.int32))
    replicas.links = {Target(str(i), None): Answers() for i in range(count)}
    with pytest.raises(NotReady, match=r"no replica can take work.*draining"):
        await replicas.encode(batch)
    if count > 1:
        replicas.links = {Target("a", None): Answers(), Target("b", None): Answers(drains=False)}
        for _ in range(2):
            assert (await replicas.encode(batch)).rows.shape == (1, 4)


def test_places():
    got = places("unix:/a/b, host:1,[::1]:2,10.0.0.1:3,host:1")
    assert [(p.host, p.port, p.fixed) for p in got] == [
        (None, 0, True),
        ("host", 1, False),
        ("::1", 2, True),
        ("10.0.0.1", 3, True),
    ]
    assert target("::1", "h", 2).address == "ipv6:[::1]:2"


WRONG = [
    "",
    " , ",
    "host",
    "host:",
    ":1",
    "host:0",
    "host:70000",
    "::1:5",
    "host:x",
    "unix:",
    "a..b:1",
    "h ost:1",
    "http://h:1",
]


@pytest.mark.parametrize("wrong", [*WRONG, f"{'x' * 70}:1", f"unix:/{'x' * 107}"])
def test_wrong_places_are_refused(wrong):
    with pytest.raises(StartError, match="--replica"):
        places(wrong)


async def test_resolve():
    [unix, ip, name, nowhere] = places("unix:/x,127.0.0.1:5,localhost:6,does-not-exist.invalid:7")
    assert await resolve(unix) == {Target("unix:/x", None)}
    assert await resolve(ip) == {Target("ipv4:127.0.0.1:5", "127.0.0.1")}
    assert Target("ipv4:127.0.0.1:6", "localhost") in (await resolve(name) or set())
    assert await resolve(nowhere) is None
