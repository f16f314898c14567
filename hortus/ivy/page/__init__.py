"""The page at /: a few files, the same for everybody, under a policy that lets them load nothing but each other.

Knows the files. Does not know what they show: the page asks the API, as any client does, with the key of whoever looks.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

from hortus.errors import RouteNotFound
from hortus.ivy.exchange import Answer, Request, takes_gzip

KINDS = {
    "page.html": b"text/html; charset=utf-8",
    "page.css": b"text/css; charset=utf-8",
    "page.js": b"text/javascript; charset=utf-8",
    "api.js": b"text/javascript; charset=utf-8",
    "try.js": b"text/javascript; charset=utf-8",
    "watch.js": b"text/javascript; charset=utf-8",
    "plots.js": b"text/javascript; charset=utf-8",
    "icon.svg": b"image/svg+xml",
}
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Nothing from elsewhere, nothing inline, in no frame; and no text can become HTML or script, whatever it holds."""


@dataclass(frozen=True, slots=True)
class _File:
    plain: bytes
    packed: bytes
    kind: bytes
    tag: bytes


class Page:
    """The handlers. Files are read once, when this is made."""

    def __init__(self) -> None:
        here = Path(__file__).parent
        self._files = {name: _file((here / name).read_bytes(), kind) for name, kind in KINDS.items()}

    async def home(self, request: Request) -> Answer:
        """GET /"""
        return _answer(request, self._files["page.html"])

    async def file(self, request: Request) -> Answer:
        """GET /page/NAME. RouteNotFound."""
        file = self._files.get(request.tail)
        if file is None:
            raise RouteNotFound(f"no file {request.tail!r:.80} of the page; there are {', '.join(self._files)}")
        return _answer(request, file)


def _file(data: bytes, kind: bytes) -> _File:
    # The same tag for both encodings, hence weak.
    tag = b'W/"%b"' % hashlib.sha256(data).hexdigest()[:16].encode()
    return _File(data, gzip.compress(data, 9, mtime=0), kind, tag)


def _answer(request: Request, file: _File) -> Answer:
    # Keep it, but ask: an upgraded server may have another.
    headers = (
        b"content-security-policy: %b\r\nx-content-type-options: nosniff\r\nreferrer-policy: no-referrer\r\n"
        b"cross-origin-resource-policy: same-origin\r\ncache-control: no-cache\r\netag: %b\r\nvary: accept-encoding\r\n"
    ) % (POLICY, file.tag)
    body = file.plain
    if takes_gzip(request.headers.get(b"accept-encoding", b"")):
        body = file.packed
        headers += b"content-encoding: gzip\r\n"
    known = request.headers.get(b"if-none-match", b"")
    status = 304 if file.tag.removeprefix(b"W/") in known or known.strip() == b"*" else 200
    return Answer(body, status, headers, file.kind)
