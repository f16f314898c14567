"""Bodies that are refused, without a port: wrong values by name, bytes that are no body, limits with their flags."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ivy_stubs import load_once

from hortus.errors import TABLE

LONG = "word " * 40  # 42 tokens, the model takes 32


@pytest.fixture(autouse=True)
def _tokenizer_read_once(monkeypatch):
    monkeypatch.setattr("hortus.ivy.vocabulary.load", load_once)


# (fields, param, words of the message)
REFUSED = [
    ({"input": []}, "input", "empty list"),
    ({"input": [[]]}, "input[0]", "empty list"),
    ({"input": [[1], []]}, "input[1]", "empty list"),
    ({"input": None}, "input", "null"),
    ({"input": 5}, "input", "int"),
    ({"input": {"a": 1}}, "input", "object"),
    ({"input": ["a", 1]}, "input[1]", "same kind"),
    ({"input": ["a", ["b"]]}, "input[1][0]", "int"),
    ({"input": ["a", None]}, "input[1]", "null"),
    ({"input": [1, "a"]}, "input[1]", "same kind"),
    ({"input": [[1], 2]}, "input[1]", "same kind"),
    ({"input": [True]}, "input[0]", "bool"),
    ({"input": [[1, False]]}, "input[0][1]", "bool"),
    ({"input": [1.5]}, "input[0]", "float"),
    ({"input": [[1.0]]}, "input[0][0]", "float"),
    ({"input": [-1]}, "input[0]", "vocabulary"),
    ({"input": [[-1]]}, "input[0][0]", "vocabulary"),
    ({"input": [[5], [30522]]}, "input[1][0]", "0 to 30521"),
    ({"input": [[10**30]]}, "input[0][0]", "vocabulary"),
    ({"input": "a", "encoding_format": "BASE64"}, "encoding_format", "float, base64"),
    ({"input": "a", "encoding_format": ""}, "encoding_format", "float, base64"),
    ({"input": "a", "encoding_format": 1}, "encoding_format", "int"),
    ({"input": "a", "dimensions": 0}, "dimensions", "1 to 16"),
    ({"input": "a", "dimensions": -1}, "dimensions", "1 to 16"),
    ({"input": "a", "dimensions": 17}, "dimensions", "1 to 16"),
    ({"input": "a", "dimensions": True}, "dimensions", "bool"),
    ({"input": "a", "dimensions": "8"}, "dimensions", "str"),
    ({"input": "a", "dimensions": 10**40}, "dimensions", ""),
    ({"input": "a", "truncate": 1}, "truncate", "int"),
    ({"input": "a", "prompt_name": "nope"}, "prompt_name", "plain, query"),
    ({"input": [5], "prompt_name": "query"}, "prompt_name", "token ids"),
    ({"input": "a", "user": 5}, "user", "int"),
    ({"input": "a", "model": None}, "model", "null"),
    ({"input": "a", "inputs": "a"}, "inputs", "known: input, model"),
    ({}, "input", "required"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED, ids=lambda x: json.dumps(x)[:40])
async def test_wrong_values_are_refused_by_name(client, fields, param, words):
    reply = await client.post(**fields)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    assert reply.error["code"] == "invalid_input"
    assert reply.error["param"] == param
    assert words in reply.error["message"]
    assert not client.encoder.batches
    assert client.count("invalid_input") == 1


BODIES = [
    b"",
    b"{",
    b"[]",
    b'"text"',
    b"null",
    b"nan",
    b'{"input":"a"}',
    b'{"input":"a","model":"mini"} x',
    b'\xef\xbb\xbf{"input":"a","model":"mini"}',
    b'{"input":"a\xff","model":"mini"}',
    b'{"input":"\xed\xa0\xbd","model":"mini"}',
    rb'{"input":"x \ud83d","model":"mini"}',
    rb'{"input":"\udbc0","model":"mini"}',
    rb'{"input":"\udc00 low","model":"mini"}',
    rb'{"input":["a","\ud83dx"],"model":"mini"}',
    rb'{"input":"a","model":"mini","user":"\ud83d"}',
    rb'{"input":"a","model":"mini","\ud83d":1}',
    b'{"input":' + b"[" * 200_000,
    b'{"input":"a","model":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    b'{"x":' * 100_000,
    b'{"input":[1e999],"model":"mini"}',
    b'{"input":[' + b"9" * 5000 + b'],"model":"mini"}',
    b'{"input":"a","model":"mini","dimensions":' + b"9" * 5000 + b"}",
    b'{"input":"a","model":"mini","dimensions":NaN}',
    b"model=mini&input=a",
]


@pytest.mark.parametrize("body", BODIES, ids=lambda b: repr(b[:40]))
async def test_broken_bodies_are_400_and_hurt_nothing_else(client, body):
    bad, good = await asyncio.gather(client.request("POST", "/v1/embeddings", body), client.post(input="fine"))
    assert bad.status == 400
    assert bad.error["code"] == "invalid_input"
    assert good.status == 200


async def test_nul_and_pairs_of_surrogates_are_text(client):
    for body in rb'{"input":"a\u0000b","model":"mini"}', rb'{"input":"\ud83d\ude00","model":"mini"}':
        assert (await client.request("POST", "/v1/embeddings", body)).status == 200


async def test_of_a_key_given_twice_the_last_counts(client):
    await client.request("POST", "/v1/embeddings", b'{"input":"a","input":"hi","model":"mini"}')
    assert client.encoder.batches[0].ids.tolist() == [101, 7632, 102]


_fields = st.sampled_from(["input", "model", "encoding_format", "dimensions", "user", "truncate", "prompt_name", "x"])
_leaves = (
    st.none()
    | st.booleans()
    | st.integers(-3, 40000)
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["mini", "float", "base64", "query", LONG])
)
_values = st.recursive(_leaves, lambda x: st.lists(x, max_size=5) | st.dictionaries(st.text(max_size=3), x, max_size=3))
_likely = st.lists(st.text(max_size=8), max_size=4) | st.lists(st.lists(st.integers(0, 40000), max_size=4), max_size=3)
_bodies = st.one_of(
    st.binary(max_size=60),
    st.dictionaries(_fields, _values).map(lambda d: json.dumps(d).encode()),
    st.tuples(_likely, st.dictionaries(_fields, _values, max_size=2)).map(
        lambda t: json.dumps({"model": "mini", **t[1], "input": t[0]}).encode()
    ),
)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(_bodies)
async def test_no_body_is_the_servers_fault(client, body):
    reply = await client.request("POST", "/v1/embeddings", body)
    assert reply.status in (200, 400, 404)
    assert reply.status == 200 or reply.error["code"] in TABLE


async def test_limits_name_their_flags(made):
    client = made(max_inputs=3, max_body_bytes=2000)
    many = await client.post(input=["a"] * 4)
    assert many.status == 400
    assert "4 inputs" in many.error["message"]
    assert "--max-inputs" in many.error["message"]
    body = b"x" * 2001
    for parts in None, [body[:1500], body[1500:], b""], [body]:
        large = await client.request("POST", "/v1/embeddings", body, parts=parts)
        assert large.status == 413
        assert large.error["code"] == "body_too_large"
        assert "2000" in large.error["message"]
        assert "--max-body-bytes" in large.error["message"]


async def test_model_names_are_checked(client):
    reply = await client.post(input="a", model="other")
    assert reply.status == 404
    assert reply.error["code"] == "model_not_found"
    assert "'mini'" in reply.error["message"]
    assert (await client.request("GET", "/v1/models/other/one")).status == 404
