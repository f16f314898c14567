"""A gateway's stream apart from what carries it: how much may wait for a gateway that does not read."""

from __future__ import annotations

from hortus.config import TulipConfig
from hortus.metrics import Metrics
from hortus.protocol import wire
from hortus.tulip.fake import FakeEngine
from hortus.tulip.scheduler import Scheduler
from hortus.tulip.stream import GatewayStream
from hortus.types import TokenBatch


class Carrier:
    """A Stream that carries nothing by itself."""

    def __init__(self) -> None:
        self.held = False

    async def run(self, taken, following) -> None: ...

    def wake(self) -> None: ...

    def hold(self) -> None:
        self.held = True

    def release(self) -> None:
        self.held = False

    def close(self) -> None: ...


async def test_refusals_wait_in_bounds_as_rows_do_and_each_comes_once(monkeypatch):
    monkeypatch.setattr("hortus.tulip.stream._UNSENT_BYTES", 2**20)
    monkeypatch.setattr("hortus.tulip.stream.GOOD_MESSAGE_BYTES", 2**17)
    engine, carrier = FakeEngine(), Carrier()
    scheduler = Scheduler(engine, TulipConfig(), Metrics())
    await scheduler.start()
    stream = GatewayStream(scheduler, engine.info, carrier)
    sent, wrong = 0, TokenBatch.of([[-1]])
    while not carrier.held and sent < 100_000:
        stream._take(wire.pack_asks(wire.Asks([wire.Ask(sent + n, wrong) for n in range(100)])))
        sent += 100
    assert sent < 2**20 / 500
    got: list[int] = []
    messages = 0
    while (data := stream._following()) is not None:
        got += [number for number, _ in wire.read_replies(data).failures]
        messages += 1
    assert got == list(range(sent))
    assert messages > 4, "and they go in messages of a good size"
    assert not carrier.held
    await scheduler.close()
