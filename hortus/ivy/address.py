"""Where replicas are: what --replica says, and which addresses a host name stands for just now. Knows DNS, nothing else."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from dataclasses import dataclass

from hortus.errors import StartError
from hortus.protocol.places import split

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """One entry of --replica."""

    text: str
    """As given."""
    host: str | None
    """None for a Unix socket."""
    port: int = 0

    @property
    def fixed(self) -> bool:
        """Nothing to look up: a Unix socket or a literal IP address."""
        return self.host is None or _literal(self.host) is not None


@dataclass(frozen=True, slots=True)
class Target:
    """One replica's address, as gRPC takes it."""

    address: str
    host: str | None
    """The name that its certificate must be for."""


def places(replica: str) -> list[Place]:
    """The entries of --replica. StartError says which one is wrong."""
    found = [_place(text.strip()) for text in replica.split(",") if text.strip()]
    if not found:
        raise StartError("--replica is empty; give HOST:PORT or unix:PATH of a `hortus tulip`")
    return list(dict.fromkeys(found))


def _place(text: str) -> Place:
    found = split(text, "--replica", least_port=1)
    return Place(text, None) if found is None else Place(text, *found)


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def target(address: str, host: str | None, port: int) -> Target:
    """An IP address and port in gRPC's words."""
    kind = "ipv6" if ":" in address else "ipv4"
    return Target(f"{kind}:[{address}]:{port}" if kind == "ipv6" else f"{kind}:{address}:{port}", host)


async def resolve(place: Place) -> set[Target] | None:
    """All replicas that an entry stands for now; None when the name cannot be looked up (keep what was known)."""
    if place.host is None:
        return {Target(place.text, None)}
    if place.fixed:
        return {target(place.host, place.host, place.port)}
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    except OSError as e:
        log.warning("--replica %s cannot be looked up: %s", place.text, e)
        return None
    return {target(str(address[0]), place.host, place.port) for _, _, _, _, address in found}
