"""Large requests on every route that makes much of little: others get their turn meanwhile, and an answer has its bound."""

import asyncio
import json
import time

import pytest
from ivy_stubs import load_once
from models_stubs import client, post
from patience import timed


@pytest.fixture(autouse=True)
def _tokenizer_read_once(monkeypatch):
    monkeypatch.setattr("hortus.ivy.vocabulary.load", load_once)


async def largest_gap(gaps: list[float]) -> None:
    """By this thread's own processor time: what the machine does meanwhile is not held against the loop."""
    last = time.thread_time()
    while True:
        await asyncio.sleep(0.001)
        now = time.thread_time()
        gaps.append(now - last)
        last = now


LARGE = {
    "/tokenize": {"inputs": ["a " * 500] * 200},
    "/decode": {"ids": [[7632] * 60] * 4000},
    "/v1/embeddings": {"model": "mini", "input": [[7632] * 60] * 4000, "encoding_format": "base64"},
    "/embed_all": {"inputs": ["a " * 50] * 400},
}


@timed
@pytest.mark.parametrize("path", LARGE)
async def test_a_large_request_leaves_others_their_turn(folder, path):
    gateway = client(folder, tokenize_apart=False)
    body = json.dumps(LARGE[path]).encode()
    gaps: list[float] = []
    probe = asyncio.create_task(largest_gap(gaps))
    await asyncio.sleep(0.01)
    reply = await gateway.request("POST", path, body)
    probe.cancel()
    gateway.app.close()
    assert reply is not None
    assert reply.status == 200
    assert max(gaps) < 0.15


@pytest.mark.parametrize(
    ("path", "fields"), [("/tokenize", {"inputs": ["a b c"] * 9}), ("/decode", {"ids": [[7632]] * 300})]
)
async def test_an_answer_that_is_text_is_bounded_too(folder, path, fields):
    gateway = client(folder, max_answer_values=100)
    reply = await post(gateway, path, **fields)
    assert reply.status == 400
    assert "--max-answer-values" in reply.error["message"]


async def test_slices_name_the_input_at_fault_and_keep_the_order(folder):
    gateway = client(folder, tokenize_apart=False, max_input_chars=20_000)
    told = (await post(gateway, "/tokenize", inputs=["a " * (i % 50) for i in range(3000)])).json
    assert [len(t) for t in told] == [i % 50 + 2 for i in range(3000)]
    ids = [[7632] * 9] * 3000
    assert (await post(gateway, "/decode", ids=ids)).json == [" ".join(["hi"] * 9)] * 3000
    for path, field in (("/decode", "ids"), ("/embed", "inputs")):
        assert (await post(gateway, path, **{field: [*ids, [-1]]})).error["param"] == f"{field}[3000][0]"
    assert (await post(gateway, "/tokenize", inputs=["a", "x" * 20_001])).error["param"] == "inputs[1]"
