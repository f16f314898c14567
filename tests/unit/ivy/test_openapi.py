"""The documentation that the server makes of itself, against its routes."""

from __future__ import annotations

import json
import re

import jsonschema
import msgspec
import pytest
from models_stubs import client as client_of

from hortus.errors import TABLE
from hortus.ivy.openapi import ROUTES, document, field_docs, page


def test_every_route_and_no_other_is_documented(client):
    app = client.app
    there = {(m, p) for p, ms in app._routes.items() for m in ms}
    there |= {(m, p + "{id}") for p, ms in app._named_routes.items() for m in ms}
    assert {(r.method, r.path) for r in ROUTES} == there
    assert len(ROUTES) == len(there)


def test_every_field_says_what_it_is_or_is_plain():
    for route in ROUTES:
        if route.body is not None:
            assert set(field_docs(route.body)) <= set(route.body.__struct_fields__)
    told = document()["components"]["schemas"]["openai.EmbeddingsRequest"]["properties"]
    assert all("description" in t for name, t in told.items() if name != "model")


def test_the_document_stands_by_itself():
    text = json.dumps(document())
    names = set(document()["components"]["schemas"])
    assert set(re.findall(r"#/components/schemas/([\w.]+)", text)) <= names
    assert document()["openapi"].startswith("3.1")
    assert document()["components"]["schemas"]["Error"]["properties"]["error"]["properties"]["code"]["enum"] == list(
        TABLE
    )


@pytest.mark.parametrize("route", [r for r in ROUTES if r.body], ids=lambda r: r.path)
def test_examples_are_valid_by_both(route):
    msgspec.json.decode(msgspec.json.encode(route.example), type=route.body)
    whole = document()
    reference = whole["paths"][route.path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    jsonschema.validate(route.example, {**reference, "components": whole["components"]})


async def test_the_pages_are_served_and_need_nothing_from_elsewhere(folder):
    gateway = client_of(folder)
    reply = await gateway.request("GET", "/docs")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.findall(rb"(?:src|href)=[\"']?(?:https?:)?//", reply.body)
    assert b"<script" not in reply.body
    for route in ROUTES:
        assert f"<code>{route.path}</code>".encode() in page()
    assert (await gateway.request("GET", "/openapi.json")).json == document()
