"""The whole gateway without a port: answers, chunks, deadlines, clients that leave."""

from __future__ import annotations

import asyncio
import base64
import json

import numpy as np
import pytest
from ivy_stubs import WIDTH, Wire, load_once, rows_of

from hortus.config import IvyConfig
from hortus.errors import TABLE, Draining, EngineError, NotReady, OutOfMemory, Overloaded
from hortus.ivy import outputs
from hortus.ivy.app import App
from hortus.metrics import Metrics
from hortus.types import Result, Timings, Together, TokenBatch

LONG = "word " * 40  # 42 tokens, the model takes 32


def vectors(reply) -> np.ndarray:
    return np.array([d["embedding"] for d in reply.json["data"]]).astype(np.float32)


def decoded(reply) -> np.ndarray:
    return np.stack([np.frombuffer(base64.b64decode(d["embedding"], validate=True), "<f4") for d in reply.json["data"]])


@pytest.fixture(autouse=True)
def _tokenizer_read_once(monkeypatch):
    monkeypatch.setattr("hortus.ivy.vocabulary.load", load_once)


# --- answers


async def test_the_answer_is_openais_to_the_letter(client):
    reply = await client.post(input=["hello", "there you are"])
    assert reply.status == 200
    assert set(reply.json) == {"object", "data", "model", "usage"}
    assert reply.json["object"] == "list"
    assert reply.json["model"] == "mini"
    assert reply.json["usage"] == {"prompt_tokens": 8, "total_tokens": 8}
    for i, item in enumerate(reply.json["data"]):
        assert set(item) == {"object", "index", "embedding"}
        assert item["object"] == "embedding"
        assert item["index"] == i
        assert len(item["embedding"]) == WIDTH
    for name in ("tokenize", "queue", "device", "total"):
        assert float(reply.headers[f"x-hortus-{name}-ms"]) >= 0
    assert client.count("ok") == 1


@pytest.mark.parametrize(
    "given_input",
    ["hello", ["hello"], ["hello", "", "you", "hello"], [7592], [[7592]], [101, 7592, 102], [[5], [6, 7]]],
)
async def test_base64_and_float_agree_bit_for_bit(client, given_input):
    numbers = await client.post(input=given_input, encoding_format="float")
    packed = await client.post(input=given_input, encoding_format="base64")
    assert numbers.status == packed.status == 200
    assert vectors(numbers).tobytes() == decoded(packed).tobytes()


async def test_ids_give_the_vector_of_the_text_they_spell(client):
    text, ids, flat = [await client.post(input=i) for i in ("hello", [[101, 7592, 102]], [101, 7592, 102])]
    assert vectors(text).tobytes() == vectors(ids).tobytes() == vectors(flat).tobytes()
    assert len(flat.json["data"]) == 1


async def test_an_empty_text_is_its_special_tokens(client):
    reply = await client.post(input="")
    assert reply.status == 200
    assert reply.json["usage"]["total_tokens"] == 2


async def test_explicit_nulls_mean_the_default(client):
    fields = ("encoding_format", "dimensions", "user", "truncate", "prompt_name")
    reply = await client.post(input="a", **dict.fromkeys(fields))
    assert reply.status == 200


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_dimensions_cut_then_normalise(client, encoding):
    read = vectors if encoding == "float" else decoded
    full = read(await client.post(input="hello", encoding_format=encoding))
    cut = read(await client.post(input="hello", encoding_format=encoding, dimensions=5))
    assert cut.shape == (1, 5)
    np.testing.assert_allclose(cut, full[:, :5] / np.linalg.norm(full[:, :5]), rtol=1e-5)


async def test_without_normalisation_dimensions_are_the_first_values(made):
    client = made(info={"normalize": False})
    full, cut = [vectors(await client.post(input="hello", **d)) for d in ({}, {"dimensions": 5})]
    np.testing.assert_array_equal(full, rows_of(client.encoder.batches[0]))
    np.testing.assert_array_equal(cut, full[:, :5])


async def test_zero_vectors_stay_zero(client):
    client.encoder.rows = np.zeros((1, WIDTH), np.float32)
    assert not vectors(await client.post(input="a")).any()


async def test_prompts(made):
    client = made(folder_changes={"default_prompt_name": "query"})
    default, named, none = [
        await client.post(input="hi", **d) for d in ({}, {"prompt_name": "query"}, {"prompt_name": ""})
    ]
    ids = [b.ids.tolist() for b in client.encoder.batches]
    assert ids[0] == ids[1] == [101, 23032, 1024, 7632, 102]
    assert ids[2] == [101, 7632, 102]
    assert default.json["usage"]["total_tokens"] == 5
    assert (await client.post(input=[[7632]])).json["usage"]["total_tokens"] == 1  # ids never get a prompt
    assert (named.status, none.status) == (200, 200)


async def test_truncation_is_asked_for_or_configured(made, client):
    refused = await client.post(input=["ok", LONG])
    assert refused.status == 400
    assert refused.error["code"] == "context_length_exceeded"
    assert refused.error["param"] == "input[1]"
    cut = await client.post(input=["ok", LONG], truncate=True)
    assert cut.json["usage"]["total_tokens"] == 3 + 32
    auto = made(auto_truncate=True)
    assert (await auto.post(input=LONG)).status == 200
    assert (await auto.post(input=LONG, truncate=False)).status == 400


async def test_special_tokens_in_text_are_read_as_transformers_reads_them(client):
    await client.post(input="[CLS] hi [SEP]")
    assert client.encoder.batches[0].ids.tolist() == [101, 101, 7632, 102, 102]


# --- large requests


async def test_a_large_request_is_cut_ordered_and_shared_out(client):
    texts = [f"text {i}" for i in range(300)]
    reply = await client.post(input=texts)
    assert [d["index"] for d in reply.json["data"]] == list(range(300))
    assert all(b.total_tokens <= 64 for b in client.encoder.batches)
    assert len(client.encoder.batches) > 10
    assert client.encoder.most_outstanding == 3
    singles = [vectors(await client.post(input=t))[0] for t in texts[::37]]
    np.testing.assert_array_equal(vectors(reply)[::37], singles)


async def test_very_short_inputs_are_cut_by_number_too(made):
    client = made(info={"batch_tokens": 10**6})
    reply = await client.post(input=[[5]] * 6000)
    assert len(reply.json["data"]) == 6000
    assert max(len(b) for b in client.encoder.batches) == 512


async def test_one_failing_chunk_cancels_the_rest(client):
    client.encoder.error, client.encoder.fail_on = EngineError("no"), 4
    reply = await client.post(input=[f"text {i}" for i in range(300)])
    assert reply.status == 500
    assert reply.error["message"] == "no"
    assert client.encoder.outstanding == 0
    assert len(client.encoder.batches) <= 10
    assert (await client.post(input="still here")).status == 200


@pytest.mark.parametrize("encoding", ["float", "base64"])
@pytest.mark.parametrize("count", [1, 200])
async def test_nan_is_an_error_that_names_the_input_in_both_encodings(client, encoding, count):
    class Nan:
        async def encode(self, batch: TokenBatch, *, deadline=None):
            result = await client.encoder.encode(batch)
            hit = [
                i
                for i, (a, b) in enumerate(zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False))
                if 9 in batch.ids[a:b]
            ]
            result.rows[hit] = np.nan
            return result

    client.app._model().encoder = Nan()
    reply = await client.post(input=[[5]] * (count - 1) + [[9]], encoding_format=encoding)
    assert reply.status == 500
    assert reply.error["code"] == "non_finite"
    assert reply.error["param"] == f"input[{count - 1}]"


@pytest.mark.parametrize("bad", [None, 1])
async def test_what_is_made_of_the_rows_of_one_step_is_made_once(client, monkeypatch, bad):
    """Each answer is what it is alone, whoever shares its step; one that is not finite is its own request's error."""
    whole = np.random.default_rng(0).standard_normal((4, WIDTH)).astype(np.float32) * 1e3
    want = [outputs.finish(whole[i : i + 1], 5 if i == 3 else None, True) for i in range(4)]
    if bad is not None:
        whole[bad, 2] = np.inf
    together = Together(whole)

    class Sharing:
        async def encode(self, batch: TokenBatch, *, deadline=None):
            at = int(batch.ids[0])
            return Result(whole[at : at + 1], Timings(), together, at)

    client.app._model().encoder = Sharing()
    sizes = []
    finish = outputs.finish
    monkeypatch.setattr(outputs, "finish", lambda rows, *how: sizes.append(len(rows)) or finish(rows, *how))
    asked = [client.post(input=[i], **({"dimensions": 5} if i == 3 else {})) for i in range(4)]
    for i, reply in enumerate(await asyncio.gather(*asked)):
        if i == bad:
            assert reply.error["code"] == "non_finite"
        else:
            np.testing.assert_array_equal(vectors(reply), want[i])
    assert sizes == ([4, 1] if bad is None else [1, 1, 1])


# --- other routes


async def test_models(client):
    listed = (await client.request("GET", "/v1/models")).json
    assert listed["object"] == "list"
    assert listed["data"] == [(await client.request("GET", "/v1/models/mini")).json]
    assert listed["data"][0]["id"] == "mini"
    assert listed["data"][0]["object"] == "model"


async def test_names_with_slashes_have_a_model_page(made):
    client = made(info={"name": "some/name"})
    assert (await client.request("GET", "/v1/models/some/name")).json["id"] == "some/name"


async def test_unknown_routes_list_near_ones(client):
    for path in "/embedding", "/v1/embedding", "/v1/embeddings/":
        reply = await client.request("POST", path, b"{}")
        assert reply.status == 404
        assert "/v1/embeddings" in reply.error["message"]
    reply = await client.request("GET", "/nothing")
    assert reply.status == 404
    assert "/v1/embeddings" in reply.error["message"]


async def test_wrong_methods_say_what_is_allowed(client):
    reply = await client.request("GET", "/v1/embeddings")
    assert (reply.status, reply.headers["allow"]) == (405, "POST, OPTIONS")
    reply = await client.request("POST", "/v1/models")
    assert (reply.status, reply.headers["allow"]) == (405, "GET, HEAD, OPTIONS")
    assert (await client.request("OPTIONS", "/v1/embeddings")).headers["allow"] == "POST, OPTIONS"
    assert (await client.request("HEAD", "/health")).status == 200


async def test_compressed_bodies_are_refused_and_any_content_type_is_json(client):
    reply = await client.request("POST", "/v1/embeddings", b"\x1f\x8b", {"content-encoding": "gzip"})
    assert reply.status == 400
    assert "gzip" in reply.error["message"]
    body = json.dumps({"model": "mini", "input": "a"}).encode()
    for kind in "text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-8":
        assert (await client.request("POST", "/v1/embeddings", body, {"content-type": kind})).status == 200


async def test_request_ids_are_echoed_or_made(client):
    async def sent(value):
        return (await client.request("GET", "/health", headers={"x-request-id": value})).headers["x-request-id"]

    assert await sent("abc-1") == "abc-1"
    for odd in "", "a b", "a\tb", "é", "x" * 129:
        assert await sent(odd) != odd
    assert await sent("") != await sent("")


async def test_info_shows_limits_and_prompts(client):
    told = (await client.request("GET", "/info")).json
    assert told["model"]["name"] == "mini"
    assert told["limits"]["max_tokens"] == 32
    assert set(told["prompts"]) == {"query", "plain"}


async def test_every_error_code_is_a_series_from_the_start(client):
    text = (await client.request("GET", "/metrics")).body.decode()
    for code in ("ok", *TABLE):
        assert f'hortus_requests_total{{code="{code}"}} 0.0' in text


@pytest.mark.parametrize("path", ["/metrics", "/health", "/ready"])
async def test_who_asks_how_things_are_is_not_in_flight(client, path):
    seen = []
    answer = client.app._answer

    async def spy(request):
        seen.append(client.app.in_flight)
        return await answer(request)

    client.app._answer = spy
    await client.request("GET", path)
    assert seen == [0]
    assert "hortus_requests_in_flight 0.0" in (await client.request("GET", "/metrics")).body.decode()
    await client.request("GET", "/info")
    assert seen[-1] == 1


# --- what the engine says, time, and clients that leave


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (Overloaded("full", retry_after_s=2.4), 429, "3"),
        (Overloaded("full", retry_after_s=0.1), 429, "1"),
        (NotReady("gone"), 503, "1"),
        (Draining("bye"), 503, "1"),
        (OutOfMemory("big"), 503, "1"),
        (EngineError("bug"), 500, None),
        (RuntimeError("unforeseen"), 500, None),
    ],
)
async def test_the_encoders_errors_are_answered(client, error, status, retry, caplog):
    client.encoder.error = error
    reply = await client.post(input="a")
    assert reply.status == status
    assert reply.headers.get("retry-after") == retry
    code = getattr(error, "code", "engine_error")
    assert reply.error["code"] == code
    assert client.count(code) == 1
    assert "unforeseen" not in reply.error["message"]
    client.encoder.error = None
    assert (await client.post(input="a")).status == 200


@pytest.mark.parametrize("texts", [1, 300])
async def test_a_request_without_answer_in_time_is_504(made, texts):
    client = made(timeout_s=0.05)
    client.encoder.hold = asyncio.Event()
    reply = await client.post(input=["a"] * texts)
    assert reply.status == 504
    assert reply.error["code"] == "deadline_exceeded"
    assert "--timeout-s" in reply.error["message"]
    assert client.encoder.outstanding == 0
    assert client.encoder.cancelled == min(texts, 3)


async def test_a_body_that_does_not_come_is_504(made):
    client = made(timeout_s=0.05)
    wire = Wire(client.app)
    wire.feed(b"POST /v1/embeddings HTTP/1.1\r\ncontent-length: 10\r\n\r\n12345")
    reply = await asyncio.wait_for(wire.reply(), 5)
    assert reply.status == 504
    assert "--timeout-s" in reply.error["message"]


@pytest.mark.parametrize("texts", [1, 300])
async def test_a_client_that_leaves_takes_its_work_with_it(client, texts):
    client.encoder.hold, gone = asyncio.Event(), asyncio.Event()
    body = json.dumps({"model": "mini", "input": ["a"] * texts}).encode()
    call = asyncio.ensure_future(client.request("POST", "/v1/embeddings", body, gone=gone))
    async with asyncio.timeout(60):
        await client.encoder.asked.wait()
        gone.set()
        assert await call is None
    assert client.encoder.outstanding == 0
    assert client.encoder.cancelled == min(texts, 3)
    assert client.count("cancelled") == 1
    client.encoder.hold = None
    assert (await client.post(input="a")).status == 200


# --- states


async def test_starting_then_ready_then_draining(folder, client):
    app = App(IvyConfig(), Metrics())
    client.app, opened = app, client.app._model()
    assert (await client.request("GET", "/health")).json == {"status": "ok", "state": "starting"}
    for method, path in ("GET", "/ready"), ("GET", "/v1/models"), ("GET", "/info"), ("POST", "/v1/embeddings"):
        reply = await client.request(method, path, b"{}" if method == "POST" else b"")
        assert reply.status == 503
        assert reply.error["code"] == "not_ready"
        assert reply.headers["retry-after"] == "1"
    app.open(folder, opened.info, client.encoder)
    assert (await client.request("GET", "/ready")).status == 200
    app.drain()
    reply = await client.post(input="a")
    assert (reply.status, reply.error["code"], reply.headers["connection"]) == (503, "draining", "close")
    assert (await client.request("GET", "/ready")).status == 503
    assert (await client.request("GET", "/health")).json["state"] == "draining"
    app.close()


async def test_ready_follows_the_engine(client, monkeypatch):
    client.encoder.error = EngineError("the device is lost")
    reply = await client.request("GET", "/ready")
    assert reply.status == 503
    assert "the device is lost" in reply.error["message"]
    client.encoder.error, client.encoder.rows = None, np.full((1, WIDTH), np.nan, np.float32)
    client.app._readiness._last_failure = (float("-inf"), "")  # as if a second had passed
    assert "NaN" in (await client.request("GET", "/ready")).error["message"]
    assert len(client.encoder.batches) == 2
    assert (await client.request("GET", "/ready")).status == 503  # the same answer for a second, without a probe
    assert len(client.encoder.batches) == 2
    client.encoder.rows = None
    await client.post(input="a")  # a real answer is as good as a probe
    assert (await client.request("GET", "/ready")).status == 200
    assert len(client.encoder.batches) == 3


async def test_a_hung_engine_is_not_ready(client, monkeypatch):
    monkeypatch.setattr("hortus.ivy.health.PROBE_S", 0.05)
    client.encoder.hold = asyncio.Event()
    replies = await asyncio.gather(*[client.request("GET", "/ready") for _ in range(5)])
    assert {r.status for r in replies} == {503}
    assert len(client.encoder.batches) == 1
