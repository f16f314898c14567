"""Many replicas as one Encoder: each chunk to the least busy one, and once more elsewhere when that one dies.

Knows links and a pure rule of choice. Does not know gRPC's calls, HTTP or text.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import time
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol, TypeVar

import numpy as np

from hortus.config import LinkConfig
from hortus.errors import HortusError, NotReady, RequestError, StartError, bare
from hortus.folder import ModelFolder, open_folder
from hortus.ivy.address import Place, Target, places, resolve
from hortus.ivy.link import Link, Lost, Refused, told_of_itself
from hortus.ivy.watch import Replica
from hortus.metrics import Metrics
from hortus.protocol import wire
from hortus.protocol.credentials import client_credentials
from hortus.protocol.wire import Description
from hortus.types import Result, Timings, TokenBatch

log = logging.getLogger(__name__)

REST_S = 1.0
"""How long a replica whose engine does not answer is passed over."""
_FETCH_PAUSE_S = 0.1
"""Before the model's files are asked for again."""
_LEAST_SHARE = 0.1
"""Of a full share, what a replica that has just come up gets."""


class Choosable(Protocol):
    """What the rule looks at."""

    up: bool
    draining: bool
    outstanding: int
    up_since: float
    rests_until: float


C = TypeVar("C", bound=Choosable)


def choose(links: Iterable[C], tokens: int, now: float, slow_start_s: float) -> C | None:
    """The link that would have the fewest tokens outstanding with these `tokens` added, None when none can take them. Pure.

    A replica that came up less than slow_start_s ago counts as if it had more: at first ten times as much, then ever less.
    One that rests is taken only when all do. Of equals the first.
    """
    best: C | None = None
    least = (True, float("inf"))
    for link in links:
        if not link.up or link.draining:
            continue
        age = now - link.up_since
        share = 1.0 if age >= slow_start_s else max(_LEAST_SHARE, age / slow_start_s)
        cost = (link.rests_until > now, (link.outstanding + tokens) / share)
        if best is None or cost < least:
            best, least = link, cost
    return best


def difference(ours: Description, theirs: Description) -> str | None:
    """Why a replica must not stand beside the first one, None when it may. Pure."""
    if theirs.version != ours.version:
        return f"it speaks protocol version {theirs.version}, not {ours.version}"
    a, b = ours.info, theirs.info
    for name in (
        "name",
        "revision",
        "kind",
        "width",
        "max_tokens",
        "vocab_size",
        "normalize",
        "pooling",
        "dtype",
        "labels",
    ):
        if getattr(a, name) != getattr(b, name):
            if name == "name":
                return f"its model is {b.name!r}, this gateway serves {a.name!r}"
            return f"its {name} of {b.name!r} is {getattr(b, name)!r}, this gateway serves {getattr(a, name)!r}"
    if ours.fingerprint != theirs.fingerprint:
        return (
            f"its files or weights of {b.name!r} are not the ones this gateway serves "
            f"({theirs.fingerprint[:12]}, not {ours.fingerprint[:12]})"
        )
    return None


def changes(have: Iterable[Target], wanted: Iterable[Target], up: Iterable[Target]) -> tuple[set[Target], set[Target]]:
    """(targets to add, targets to retire). up: those that take work now. None is retired before one that is wanted takes work: a
    name that moves at once must not leave a gateway without a replica while it connects. Pure."""
    have, wanted = set(have), set(wanted)
    return wanted - have, have - wanted if wanted & set(up) else set()


def _told(link: Link, now: float) -> Replica:
    why = link.why if link.losses or not link.up else None
    if not link.up:
        state = "down"
    elif link.draining:
        state = "draining"
    elif link.rests_until > now:
        state, why = "resting", "its engine did not answer; asked again in a moment"
    else:
        state = "up"
    return Replica(
        link.target.address,
        state,
        why,
        link.outstanding,
        round(now - link.up_since) if link.up else None,
        link.losses,
        round(now - link.lost_at) if link.losses else None,
    )


class Replicas:
    """Encoder over all replicas (see types.Encoder). start(), then describe(), encode(); close() at the end."""

    def __init__(self, config: LinkConfig, metrics: Metrics) -> None:
        """StartError when --replica is missing or wrong."""
        if config.replica is None:
            raise StartError("`hortus ivy` needs --replica: HOST:PORT or unix:PATH of a `hortus tulip`")
        self._config, self._metrics = config, metrics
        self._places = places(config.replica)
        self._known: dict[Place, set[Target]] = {}
        self.links: dict[Target, Link] = {}
        self._retired: set[Link] = set()
        self._described: asyncio.Future[Description] | None = None
        self._turn = itertools.count()
        self._resolvers: list[asyncio.Task[None]] = []
        metrics.replicas_up.set_function(lambda: sum(link.up and not link.draining for link in self.links.values()))

    async def start(self) -> None:
        """Look names up and begin to connect; does not wait for any replica, or for any name: each is looked up by itself, so
        that one that takes long keeps nobody from the others."""
        self._described = asyncio.get_running_loop().create_future()
        client_credentials(self._config)  # what is wrong with them is told now, not by each link
        for place in self._places:
            if place.fixed:
                await self._resolve(place)
            else:
                self._resolvers.append(asyncio.create_task(self._keep_resolving(place)))

    async def describe(self) -> Description:
        """What is served: the description of the first replica that came up. Waits for one."""
        assert self._described is not None, "start() comes first"
        return await asyncio.shield(self._described)

    async def folder(self, where: Path) -> ModelFolder:
        """The small files of the model's folder, fetched from a replica into `where` and opened there."""
        told = await self.describe()
        while True:
            link = next((link for link in self.links.values() if link.up), None)
            if link is None:
                await asyncio.sleep(_FETCH_PAUSE_S)  # it went again: the links are being made anew
                continue
            try:
                for file in told.files:
                    await self._fetch(link, file, where)
            except Lost as e:
                log.warning("fetching the model's files from %s: %s; trying again", link, e)
                await asyncio.sleep(_FETCH_PAUSE_S)
                continue
            return await asyncio.to_thread(
                open_folder, str(where), served_name=told.info.name, max_length=told.info.max_tokens
            )

    async def _fetch(self, link: Link, file: wire.File, where: Path) -> None:
        inside = PurePosixPath(file.path)
        if inside.is_absolute() or ".." in inside.parts:
            raise StartError(f"replica {link} names a file outside its folder: {file.path!r}")
        data = await link.fetch(file.path)
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise StartError(f"{file.path} of replica {link} is not what it described; has its folder been changed?")
        path = where / inside
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    async def close(self) -> None:
        """Break all links. What is outstanding gets NotReady."""
        for resolver in self._resolvers:
            resolver.cancel()
        if self._resolvers:
            await asyncio.wait(self._resolvers)
        for link in (*self.links.values(), *self._retired):
            await link.close()

    async def encode(self, batch: TokenBatch, *, deadline: float | None = None) -> Result:
        """Rows for every sequence. What a replica loses, or refuses for a reason of its own, goes once to another."""
        if self._described is not None and self._described.done():
            most = wire.MAX_MESSAGE_BYTES // (4 * self._described.result().info.width)
            if batch.rows > most and len(batch) > 1:  # rows that do not fit into one message: very wide ones
                middle = len(batch) // 2
                halves = [batch.slice(0, middle), batch.slice(middle, len(batch))]
                a, b = [await self.encode(half, deadline=deadline) for half in halves]
                timings = Timings(0.0, a.timings.queue_ms, a.timings.device_ms + b.timings.device_ms)
                return Result(np.concatenate([a.rows, b.rows]), timings)
        links = self._in_turn()
        first = choose(links, len(batch.ids), time.monotonic(), self._config.slow_start_s)
        if first is None:
            raise NotReady(f"no replica can take work: {self._why()}")
        try:
            return await first.encode(batch, deadline)
        except Lost as e:
            bare(e)
            failure: RequestError = NotReady(f"replica {first} was lost: {e}")
        except RequestError as e:
            if not told_of_itself(e):
                raise
            bare(e)  # it may be kept here, in a frame that it came through
            failure = e
            if e.code == "not_ready":
                first.rests_until = time.monotonic() + REST_S
        others = [link for link in self.links.values() if link is not first]
        second = choose(others, len(batch.ids), time.monotonic(), self._config.slow_start_s)
        if second is None:
            raise self._own(first, failure)
        self._metrics.replica_retries.inc()
        try:
            return await second.encode(batch, deadline)
        except Lost as e:
            raise NotReady(f"replica {second} was lost, after {first}: {e}") from None
        except RequestError as e:
            raise self._own(second, e) from None

    def _own(self, link: Link, error: RequestError) -> RequestError:
        """A replica that drains is not this gateway, which stays: its refusal in the gateway's words."""
        if error.code != "draining":
            return error
        return NotReady(f"no replica can take work: {link} is draining; send the request again")

    def told(self) -> list[Replica]:
        """How each replica is, for people."""
        now = time.monotonic()
        return [_told(link, now) for link in (*self.links.values(), *self._retired)]

    def _in_turn(self) -> Sequence[Link]:
        """All links, each time another one first, so that equals are used alike."""
        links = list(self.links.values())
        if len(links) > 1:
            at = next(self._turn) % len(links)
            links = links[at:] + links[:at]
        return links

    def _why(self) -> str:
        if not self.links:
            return f"{self._config.replica} stands for no address, so far (--replica)"
        told = [f"{link}: {'draining' if link.up else link.why}" for link in self.links.values()]
        return "; ".join(told[:3]) + (f"; and {len(told) - 3} more" if len(told) > 3 else "")

    # Who there is

    def _accept(self, told: Description) -> None:
        assert self._described is not None, "links start in start()"
        if not self._described.done():
            if told.version != wire.VERSION:
                raise Refused(f"it speaks protocol version {told.version}, this gateway speaks {wire.VERSION}")
            self._described.set_result(told)
        elif (why := difference(self._described.result(), told)) is not None:
            raise Refused(why)

    async def _keep_resolving(self, place: Place) -> None:
        while True:
            try:
                await self._resolve(place)
            except HortusError:
                log.exception("looking replicas up failed")
            await asyncio.sleep(self._config.resolve_s)

    async def _resolve(self, place: Place) -> None:
        found = await resolve(place)
        if found is not None:
            self._known[place] = found
        up = [target for target, link in self.links.items() if link.up and not link.draining]
        added, gone = changes(self.links, itertools.chain.from_iterable(self._known.values()), up)
        for target in added:
            link = self.links[target] = Link(target, self._config, self._metrics, self._accept)
            link.start()
        self._retired = {link for link in self._retired if link.outstanding}
        for target in gone:
            link = self.links.pop(target)
            log.info("replica %s is no longer listed", link)
            link.retire()
            self._retired.add(link)
