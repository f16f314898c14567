"""TLS and the token between Ivy and Tulip, and where the other side is: read from LinkConfig once, at start.

Knows gRPC's credentials. Does not know who listens and who calls beyond these two views of the same flags.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from hortus.config import LinkConfig
from hortus.errors import StartError
from hortus.protocol.wire import MAX_MESSAGE_BYTES

OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", 2 * MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    # A peer that a cut cable has silenced is found by these; one that is stopped, sooner, by the pings of the stream.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # A link is made anew after it broke: how long to wait is decided in one place, hortus/ivy/link.py.
    ("grpc.use_local_subchannel_pool", 1),
]


_MOST_TOKEN = 4096
"""Characters; gRPC takes 8 KiB of headers."""


def _read(flag: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as e:
        raise StartError(f"{flag} {path}: {e.strerror}") from None


def _pair(config: LinkConfig) -> tuple[bytes | None, bytes | None, bytes | None]:
    if (config.link_cert is None) != (config.link_key is None):
        raise StartError("--link-cert and --link-key belong together: give both, or neither")
    token = config.link_token or ""
    if not token.isascii() or len(token) > _MOST_TOKEN:
        raise StartError(f"--link-token: it goes into a header: ASCII characters, at most {_MOST_TOKEN} of them")
    return (
        _read("--link-ca", config.link_ca),
        _read("--link-cert", config.link_cert),
        _read("--link-key", config.link_key),
    )


def server_credentials(config: LinkConfig) -> Any:
    """grpc.ServerCredentials, or None for plain text. StartError names the flag."""
    ca, cert, key = _pair(config)
    if cert is None:
        if ca is not None:
            raise StartError("--link-ca on the scheduler's side needs --link-cert and --link-key too")
        return None
    return grpc.ssl_server_credentials([(key, cert)], root_certificates=ca, require_client_auth=ca is not None)


def client_credentials(config: LinkConfig) -> Any:
    """grpc.ChannelCredentials, or None for plain text. StartError names the flag."""
    ca, cert, key = _pair(config)
    if ca is None:
        if cert is not None:
            raise StartError("--link-cert on the gateway's side needs --link-ca too: the authority that signed Tulip's")
        return None
    return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)


def channel(target: str, host: str | None, credentials: Any) -> grpc.aio.Channel:
    """A channel to a resolved `target`. host: the name that a certificate must be for; None where there is none."""
    options: list[tuple[str, Any]] = list(OPTIONS)
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    if host is not None:
        options += [("grpc.ssl_target_name_override", host), ("grpc.default_authority", host)]
    return grpc.aio.secure_channel(target, credentials, options=options)


def shown(config: LinkConfig) -> tuple[tuple[str, str], ...]:
    """The metadata that a gateway sends with each call."""
    return () if config.link_token is None else (("authorization", f"Bearer {config.link_token}"),)


def allowed(config: LinkConfig, metadata: Sequence[tuple[str, str | bytes]]) -> bool:
    """Whether a call's metadata hold the token. Compared in constant time."""
    if config.link_token is None:
        return True
    given = next((value for key, value in metadata if key == "authorization"), "")
    wanted = f"Bearer {config.link_token}".encode()
    return hmac.compare_digest(given.encode() if isinstance(given, str) else given, wanted)
