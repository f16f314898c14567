"""Bodies that nobody wrote by hand: schemathesis over our own OpenAPI, hypothesis over JSON and over bytes. No answer is 5xx.

Each kind of model is served, because each opens other routes.
"""

from __future__ import annotations

import json

import httpx
import pytest
import schemathesis
from gateway_server import running
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_models import pplx_folder

from hortus.errors import TABLE
from hortus.ivy.openapi import ROUTES, document
from hortus.tulip.fake import FakeEngine

KINDS = {
    "embed": {},
    "reranker": {"kind": "classify", "labels": ("relevant",)},
    "classifier": {"kind": "classify", "labels": ("no", "yes")},
    "sparse": {"kind": "sparse"},
    "contextual": {},
}
BOUNDED = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture],
)
POSTED = [r for r in ROUTES if r.method == "POST"]


@pytest.fixture(scope="module", params=KINDS)
def http(request, tmp_path_factory):
    folder = pplx_folder(tmp_path_factory.mktemp("m"), name="mini", contextual=request.param == "contextual")
    more = {"width": 24, **KINDS[request.param]}
    engine = FakeEngine(name="mini", vocab_size=300, max_tokens=64, **more)
    with running(engine, folder=folder) as server, httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def check(reply: httpx.Response) -> None:
    """An answer by the rules: no 5xx, JSON, and errors in the one shape with a code of the table."""
    assert reply.status_code < 500, reply.text
    told = reply.json()
    if reply.status_code >= 400:
        error = told["error"]
        assert TABLE[error["code"]].http == reply.status_code
        assert error["message"]
        assert error["param"] is None or isinstance(error["param"], str)


schema = schemathesis.openapi.from_dict(document())


@pytest.mark.parametrize("route", POSTED, ids=lambda r: r.path)
def test_bodies_by_our_own_schema(http, route):
    """Valid by the schema: the routes' own checks are met."""

    @BOUNDED
    @given(schema[route.path]["POST"].as_strategy())
    def run(case):
        body = case.body if isinstance(case.body, dict) else {}
        if "model" in body:
            body = {**body, "model": "mini"}
        try:
            content = json.dumps(body).encode()
        except (TypeError, ValueError):
            return
        check(http.post(route.path, content=content))

    run()


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["END", "left", "float"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("route", [r for r in POSTED if r.body], ids=lambda r: r.path)
def test_any_value_in_any_field(http, route):
    """Examples with one or two fields replaced by whatever JSON can say."""

    @BOUNDED
    @given(st.dictionaries(st.sampled_from(list(route.body.__struct_fields__)), VALUES, min_size=1, max_size=2))
    def run(changes):
        body = {**route.example, **({"model": "mini"} if "model" in route.example else {}), **changes}
        check(http.post(route.path, content=json.dumps(body)))

    run()


@BOUNDED
@given(st.data())
def test_any_bytes(http, data):
    route = data.draw(st.sampled_from(POSTED))
    good = json.dumps(route.example or {"inputs": "a"}).encode()
    at = data.draw(st.integers(0, len(good)))
    check(
        http.post(
            route.path, content=good[:at] + data.draw(st.binary(max_size=8)) + good[at + data.draw(st.integers(0, 3)) :]
        )
    )
    check(http.post(route.path, content=data.draw(st.binary(max_size=200))))
