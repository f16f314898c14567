"""The page's files: what they may load, who may read them, that they are small and cached."""

from __future__ import annotations

import gzip
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import hortus.ivy.page
from hortus.ivy.openapi import document
from hortus.ivy.page import KINDS, POLICY

HERE = Path(hortus.ivy.page.__file__).parent
FILES = ["/", *(f"/page/{name}" for name in KINDS)]


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.inline = ""

    def handle_starttag(self, tag, attrs) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.seen and self.seen[-1][0] in ("script", "style"):
            self.inline += data.strip()


def test_it_is_small_and_nothing_of_it_is_forgotten():
    files = {f.name: f.read_bytes() for f in HERE.iterdir() if f.suffix not in (".py", "") and f.is_file()}
    assert set(files) == set(KINDS)
    assert sum(map(len, files.values())) < 60_000


def test_it_loads_nothing_from_elsewhere_and_holds_nothing_inline():
    tags = Tags()
    tags.feed((HERE / "page.html").read_text())
    assert not tags.inline
    links = [a[k] for _, a in tags.seen for k in ("src", "href") if k in a]
    assert {link.removeprefix("page/") for link in links if link.startswith("page/")} <= set(KINDS)
    assert not [link for link in links if not re.match(r"page/|#|docs$", link)]
    assert not [k for _, a in tags.seen for k in a if k == "style" or k.startswith("on")]
    for name in KINDS:
        text = (HERE / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.findall(r"https?://|@import|\burl\([\"']?(?:\w+:|/)|//\w+\.\w+/", text), name
        assert not re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|cookie =|localStorage", text
        )


def test_every_id_that_the_scripts_ask_for_is_there():
    ids = set(re.findall(r'id="([\w-]+)"', (HERE / "page.html").read_text()))
    assert all(
        i in ids
        for name in KINDS
        if name.endswith("js")
        for i in re.findall(r'\$\("([\w-]+)"\)', (HERE / name).read_text())
    )


@pytest.mark.parametrize("path", FILES)
async def test_files_come_with_their_policy_packed_and_only_when_they_are_new(client, path):
    plain = await client.request("GET", path)
    assert plain.status == 200
    assert plain.body == (HERE / (path.removeprefix("/page/") if path != "/" else "page.html")).read_bytes()
    assert plain.headers["content-security-policy"].encode() == POLICY
    assert plain.headers["x-content-type-options"] == "nosniff"
    assert plain.headers["cache-control"] == "no-cache"
    assert "set-cookie" not in plain.headers
    packed = await client.request("GET", path, headers={"accept-encoding": "gzip, br"})
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed.body) == plain.body
    assert packed.headers["etag"] == plain.headers["etag"]
    for known in (plain.headers["etag"], f'"other", {plain.headers["etag"]}', "*"):
        again = await client.request("GET", path, headers={"if-none-match": known})
        assert (again.status, again.body, again.headers["content-length"]) == (304, b"", str(len(plain.body)))
    assert (await client.request("GET", path, headers={"if-none-match": '"other"'})).status == 200
    head = await client.request("HEAD", path)
    assert (head.status, head.body) == (200, b"")


async def test_another_file_is_not_found(client):
    for path in ("/page/", "/page/none.js", "/page/__init__.py", "/page/%2e%2e/app.py"):
        reply = await client.request("GET", path)
        assert (reply.status, reply.error["code"]) == (404, "route_not_found")


async def test_its_files_need_no_key_and_what_they_ask_for_does(made):
    client = made(api_keys="secret")
    for path in FILES:
        assert (await client.request("GET", path)).status == 200
    for method, path in (("GET", "/watch"), ("GET", "/info"), ("POST", "/"), ("POST", "/page/page.js")):
        assert (await client.request(method, path, b"{}")).status == 401


async def test_it_can_be_switched_off(made):
    client = made(no_page=True, api_keys="secret")
    for path, status in (("/", 405), ("/page/page.js", 404), ("/watch", 404)):
        assert (await client.request("GET", path)).status == 401
        assert (await client.request("GET", path, headers={"authorization": "Bearer secret"})).status == status
    told = (await client.request("GET", "/openapi.json", headers={"authorization": "Bearer secret"})).json
    assert set(document()["paths"]) - set(told["paths"]) == {"/page/{id}", "/watch"}
    assert set(told["paths"]["/"]) == {"post"}
    assert b"/watch" not in (await client.request("GET", "/docs", headers={"authorization": "Bearer secret"})).body
