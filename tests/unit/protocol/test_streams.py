"""Messages over a Unix socket: whole, in order, held up by whoever does not read, ended by whatever goes wrong."""

from __future__ import annotations

import asyncio
import struct
from collections import deque

import pytest
from patience import PATIENCE_S, until

from hortus.protocol import streams
from hortus.protocol.streams import LocalStream, connect_local, listen_local
from hortus.protocol.wire import MAX_MESSAGE_BYTES, Malformed


class End:
    """One end: what it got, what it has to send."""

    def __init__(self, stream: LocalStream) -> None:
        self.stream, self.got, self.unsent = stream, [], deque()
        self.fails: BaseException | None = None
        self.running = asyncio.ensure_future(stream.run(self._take, self._following))

    def send(self, *messages: bytes) -> None:
        self.unsent += messages
        self.stream.wake()

    def _take(self, data: bytes | None) -> None:
        if self.fails is not None:
            raise self.fails
        self.got.append(data)

    def _following(self) -> bytes | None:
        return self.unsent.popleft() if self.unsent else None

    async def error(self) -> BaseException:
        async with asyncio.timeout(PATIENCE_S):
            (outcome,) = await asyncio.gather(self.running, return_exceptions=True)
        return outcome


@pytest.fixture
async def ends(tmp_path):
    """Two of them."""
    accepted: asyncio.Future[LocalStream] = asyncio.get_running_loop().create_future()

    async def serve(stream: LocalStream) -> None:
        accepted.set_result(stream)

    server = await listen_local(f"{tmp_path}/s", serve)
    both = End(await connect_local(f"{tmp_path}/s")), End(await asyncio.wait_for(accepted, PATIENCE_S))
    yield both
    for end in both:
        end.stream.close()
        await end.error()
    server.close()


async def test_messages_of_any_size_come_whole_and_in_order(ends):
    here, there = ends
    messages = [b"", b"a", b"b" * 3_000_000, *(b"%d" % n * n for n in range(300)), b"c" * 5_000_000]
    here.send(*messages)
    there.send(b"x", b"y")
    await until(lambda: len(there.got) == len(messages) and len(here.got) == 2)
    assert there.got == messages
    assert here.got == [b"x", b"y"]


async def test_what_came_before_anyone_read_is_not_lost(tmp_path):
    accepted: asyncio.Future[LocalStream] = asyncio.get_running_loop().create_future()

    async def serve(stream: LocalStream) -> None:
        accepted.set_result(stream)

    server = await listen_local(f"{tmp_path}/s", serve)
    here = End(await connect_local(f"{tmp_path}/s"))
    here.send(b"early")
    stream = await asyncio.wait_for(accepted, PATIENCE_S)
    await until(lambda: bool(stream._unread))
    there = End(stream)
    await until(lambda: there.got == [b"early"])
    here.stream.close()
    assert isinstance(await there.error(), ConnectionResetError)
    assert isinstance(await here.error(), ConnectionResetError)
    server.close()


async def test_one_that_is_held_gets_nothing_and_then_everything(ends):
    here, there = ends
    there.stream.hold()
    here.send(*(b"m" * 1000 for _ in range(2000)))
    await until(lambda: not here.unsent or here.stream._full)
    assert there.got == []
    there.stream.release()
    await until(lambda: len(there.got) == 2000)


async def test_no_more_is_asked_for_than_the_other_side_takes(ends):
    here, there = ends
    there.stream.hold()
    here.send(*(b"m" * 2**20 for _ in range(64)))
    await until(lambda: here.stream._full)
    assert len(here.unsent) > 32
    there.stream.release()
    await until(lambda: len(there.got) == 64)


async def test_what_the_reader_raises_ends_both_sides(ends):
    here, there = ends
    there.fails = Malformed("on purpose")
    here.send(b"a", b"b")
    assert await there.error() is there.fails
    assert isinstance(await here.error(), ConnectionResetError)
    assert there.got == []


async def test_what_the_writer_raises_ends_it_too(ends):
    here, there = ends
    here.unsent = None  # a fault of ours
    here._following = lambda: 1 // 0
    here.stream._following = here._following
    here.stream.wake()
    assert isinstance(await here.error(), ZeroDivisionError)
    assert isinstance(await there.error(), ConnectionResetError)


async def test_a_length_beyond_the_limit_is_no_message(ends):
    here, there = ends
    here.stream._transport.write(struct.pack("<I", 2 * MAX_MESSAGE_BYTES + 1))
    assert isinstance(await there.error(), Malformed)


def test_the_length_is_little_endian():
    assert streams._LENGTH.pack(1) == b"\1\0\0\0"
