"""The openai package, unchanged, against a real port."""

from __future__ import annotations

import asyncio

import httpx
import numpy as np
import openai
import pytest

from hortus.tulip.fake import fake_rows
from hortus.types import TokenBatch


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def vectors(response) -> np.ndarray:
    return np.array([d.embedding for d in response.data]).astype(np.float32)


def test_default_format_equals_float_bit_for_bit(client):
    texts = ["The cat sits on the mat.", "", "joyeux noël 😀"]
    default = client.embeddings.create(model="mini", input=texts)
    numbers = client.embeddings.create(model="mini", input=texts, encoding_format="float")
    assert vectors(default).tobytes() == vectors(numbers).tobytes()
    assert vectors(default).shape == (3, 384)
    np.testing.assert_allclose(np.linalg.norm(vectors(default), axis=1), 1, rtol=1e-6)
    assert default.usage.prompt_tokens == default.usage.total_tokens > 0
    assert default.model == "mini"


def test_rows_are_those_of_the_engine(client):
    got = vectors(client.embeddings.create(model="mini", input=[[101, 7592, 102]]))
    row = fake_rows(TokenBatch.of([[101, 7592, 102]]), 384).astype(np.float64)
    np.testing.assert_allclose(got, row / np.linalg.norm(row), rtol=1e-6)


def test_order_survives_batching_and_splitting(client):
    texts = [f"text {i} " + "and so on " * (i % 40) for i in range(2100)]
    together = client.embeddings.create(model="mini", input=texts)
    assert [d.index for d in together.data] == list(range(2100))
    for i in range(0, 2100, 299):
        alone = client.embeddings.create(model="mini", input=texts[i])
        assert vectors(alone)[0].tobytes() == np.float32(together.data[i].embedding).tobytes()


async def test_async_and_concurrent(server):
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        answers = await asyncio.gather(
            *[client.embeddings.create(model="mini", input=f"text {i}", dimensions=8) for i in range(100)]
        )
        again = [await client.embeddings.create(model="mini", input=f"text {i}", dimensions=8) for i in (0, 50, 99)]
    assert [vectors(answers[i]).tobytes() for i in (0, 50, 99)] == [vectors(a).tobytes() for a in again]
    assert len({vectors(a).tobytes() for a in answers}) == 100


def test_flat_ids_are_one_input(client):
    assert len(client.embeddings.create(model="mini", input=[15339, 1917]).data) == 1


def test_extensions_travel_in_extra_body(client):
    long = "word " * 400
    with pytest.raises(openai.BadRequestError, match="402 tokens"):
        client.embeddings.create(model="mini", input=long)
    cut = client.embeddings.create(model="mini", input=long, extra_body={"truncate": True})
    assert cut.usage.prompt_tokens == 256


def test_errors_arrive_as_the_clients_own(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model="text-embedding-3-small", input="a")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    with pytest.raises(openai.BadRequestError, match=r"1 to 384") as caught:
        client.embeddings.create(model="mini", input="a", dimensions=4096)
    assert caught.value.type == "invalid_request_error"


def test_models(client):
    assert [m.id for m in client.models.list()] == ["mini"]
    assert client.models.retrieve("mini").owned_by == "hortus"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_timings_and_request_ids_come_as_headers(server):
    with httpx.Client(base_url=server.url) as client:
        reply = client.post("/v1/embeddings", json={"model": "mini", "input": "a"}, headers={"x-request-id": "r-1"})
    assert reply.headers["x-request-id"] == "r-1"
    tokenize, queue, device, total = (
        float(reply.headers[f"x-hortus-{n}-ms"]) for n in ("tokenize", "queue", "device", "total")
    )
    assert total >= max(tokenize, queue, device) >= 0
