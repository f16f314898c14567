"""What --listen and --replica say: HOST:PORT or unix:PATH. Pure; looks nothing up."""

from __future__ import annotations

import os

from hortus.errors import StartError

_MOST_PATH_BYTES = 107
"""One less than Linux's sun_path."""


def split(text: str, flag: str, *, least_port: int) -> tuple[str, int] | None:
    """(host, port), an IPv6 address without its brackets; None for unix:PATH. StartError names flag, entry and fault.

    Checked here because gRPC takes other things too, and otherwise than meant: a host without a port listens on 443, port 99999
    on 34463.
    """

    def refuse(why: str) -> StartError:
        return StartError(f"{flag} {text}: {why}")

    if text.startswith("unix:"):
        size = len(os.fsencode(text.removeprefix("unix:")))
        if size == 0:
            raise refuse("no path after unix:")
        if size > _MOST_PATH_BYTES:
            raise refuse(f"a socket's path has at most {_MOST_PATH_BYTES} bytes, this one has {size}")
        return None
    if "://" in text:
        raise refuse(f"expected HOST:PORT or unix:PATH, without {text.partition('://')[0]}://")
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal():
        raise refuse("expected HOST:PORT or unix:PATH")
    if not least_port <= int(port) < 65536:
        raise refuse(f"a port is {least_port} to 65535")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise refuse("write an IPv6 address in brackets, as in [::1]:50051")
    try:
        good = bool(host.encode("idna")) and not any(c.isspace() for c in host)
    except UnicodeError:  # as looking it up would raise
        good = False
    if not good:
        raise refuse(f"{host} is no name of a host")
    return host.strip("[]"), int(port)
