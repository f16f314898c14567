"""Who may ask: bearer keys, and browsers of other origins (CORS). Does not know routes' meaning, only their paths.

Keys are kept as digests, compared in constant time, and never written to a log.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from hortus.config import IvyConfig
from hortus.errors import StartError, Unauthorized
from hortus.ivy.exchange import Answer, Request

OPEN_PATHS = frozenset({"/health", "/ready"})
"""What an orchestrator asks: never needs a key."""
_EXPOSED = b"x-request-id, retry-after, x-hortus-tokenize-ms, x-hortus-queue-ms, x-hortus-device-ms, x-hortus-total-ms"


def is_page(request: Request) -> bool:
    """Whether it asks for one of the page's own files: the same for everybody."""
    return request.method in ("GET", "HEAD") and (request.path == "/" or request.path.startswith("/page/"))


def read_keys(config: IvyConfig) -> list[str]:
    """The keys of --api-keys and --api-keys-file. StartError for a file that cannot be read or holds none."""
    keys = [] if config.api_keys is None else [("--api-keys", key.strip()) for key in config.api_keys.split(",")]
    if config.api_keys_file is not None:
        flag = f"--api-keys-file {config.api_keys_file}"
        try:
            found = Path(config.api_keys_file).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as e:
            raise StartError(f"{flag}: {e}") from None
        lines = [(at, line.strip()) for at, line in enumerate(found, 1)]
        keys += [(f"{flag}, line {at}", line) for at, line in lines if line and not line.startswith("#")]
        if not keys:
            raise StartError(f"{flag}: holds no keys")
    for where, key in keys:
        # A key with a typo in it would lock everybody out, an empty one would let everybody in.
        if not (key and key.isascii() and key.isprintable() and " " not in key):
            raise StartError(f"{where}: a key is empty, or holds spaces or characters that a header cannot carry")
    return [key for _, key in keys]


class Access:
    """The rules, read once. StartError when they make no sense."""

    def __init__(self, config: IvyConfig) -> None:
        self._page = not config.no_page
        self._digests = [hashlib.sha256(k.encode()).digest() for k in read_keys(config)]
        origins = [] if config.cors_origins is None else [o.strip() for o in config.cors_origins.split(",")]
        for origin in origins:
            if origin != "*" and not (origin.startswith(("http://", "https://")) and origin.count("/") == 2):
                raise StartError(f"--cors-origins: {origin!r} is not an origin such as https://example.org, nor *")
        self._origins = frozenset(o.encode("latin-1", "replace") for o in origins)

    def check(self, request: Request) -> None:
        """Raise Unauthorized unless the request shows a key, where keys are asked for."""
        if not self._digests or request.path in OPEN_PATHS:
            return
        if self._page and is_page(request):  # it asks for the key itself, and shows nothing without
            return
        scheme, _, key = request.headers.get(b"authorization", b"").partition(b" ")
        shown = hashlib.sha256(key.strip()).digest()
        # All are compared, whichever fits: time tells nothing of which, or how far.
        fits = sum([hmac.compare_digest(shown, digest) for digest in self._digests])
        if scheme.lower() != b"bearer" or not fits:
            raise Unauthorized(
                "this server asks for a key: `Authorization: Bearer KEY`"
                if not key
                else "the key is not one of this server's"
            )

    def preflight(self, request: Request) -> Answer | None:
        """The answer to a browser's question before its request; None when it is no such question, or not allowed."""
        if b"access-control-request-method" not in request.headers or not self._allowed(request):
            return None
        asked = request.headers.get(b"access-control-request-headers", b"authorization, content-type")
        headers = (
            b"access-control-allow-methods: GET, POST, OPTIONS\r\n"
            b"access-control-allow-headers: %b\r\n"
            b"access-control-max-age: 600\r\n" % asked
        )
        return Answer(b"", headers=headers)

    def headers(self, request: Request) -> bytes:
        """What lets a page of an allowed origin read the answer."""
        if not self._origins or not (origin := self._allowed(request)):
            return b""
        return b"access-control-allow-origin: %b\r\naccess-control-expose-headers: %b\r\nvary: origin\r\n" % (
            origin,
            _EXPOSED,
        )

    def _allowed(self, request: Request) -> bytes:
        """What to answer the request's origin with; empty when there is none or it may not."""
        origin = request.headers.get(b"origin", b"")
        if b"*" in self._origins:
            return b"*" if origin else b""
        return origin if origin in self._origins else b""
