"""docs/http-api.md against the code it describes."""

import json
import re
from pathlib import Path

from hortus.errors import TABLE
from hortus.ivy.app import App
from hortus.ivy.body import decoder
from hortus.ivy.openai import EmbeddingsRequest

TEXT = (Path(__file__).parents[3] / "docs" / "http-api.md").read_text()


def test_the_error_table_is_the_codes():
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| `(\w+)` \| (yes|no) \|", TEXT, re.M)
    assert {c: (int(h), t, r == "yes") for c, h, t, r in rows} == {
        c: (w.http, w.type, w.retryable) for c, w in TABLE.items()
    }


def test_every_field_is_described():
    assert re.findall(r"^\| `(\w+)`(?: \(ours\))? \|", TEXT, re.M)[: len(EmbeddingsRequest.__struct_fields__)] == list(
        EmbeddingsRequest.__struct_fields__
    )


def test_every_route_is_described(client):
    app: App = client.app
    for path, methods in {**app._routes, **app._named_routes}.items():
        for method in methods:
            assert f"`{method} {path}" in TEXT


def test_the_request_to_copy_is_valid_and_the_headers_are_sent():
    for body in re.findall(r"-d '(.*)'", TEXT):
        decoder(EmbeddingsRequest)(body.encode())
    for block in re.findall(r"```json\n(.*?)```", TEXT, re.S):
        json.loads(block)


async def test_every_header_is_sent(client):
    reply = await client.post(input="a")
    for name in re.findall(r"^\| `(x-[\w-]+)` \|", TEXT, re.M):
        assert name in reply.headers
