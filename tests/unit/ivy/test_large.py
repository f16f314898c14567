"""Large requests on every route that makes much of little: others get their turn meanwhile, and an answer has its bound."""

import asyncio
import json
import time

import pytest
from ivy_stubs import load_once
from models_stubs import FakeEncoder, client, post
from patience import timed

from hortus.errors import Overloaded


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


TEXTS = ["word " * 40] * 300
LISTS = {
    "/rerank": ("embed", {"query": "q", "texts": TEXTS, "return_text": True, "truncate": True}),
    "/v1/rerank": ("embed", {"query": "q", "documents": TEXTS}),
    "/v2/embed": ("embed", {"model": "mini", "texts": TEXTS, "embedding_types": ["base64"]}),
    "/similarity": ("embed", {"inputs": {"source_sentence": "q", "sentences": ["a"] * 3000}}),
    "/score": ("embed", {"queries": "q", "documents": ["a"] * 900}),
    "/classify": ("classify", {"input": ["a"] * 600}),
    "/predict": ("classify", {"inputs": [["a"]] * 600}),
}


async def turns_to_write(folder, path: str) -> tuple[int, int]:
    """Turns that others got from the last vectors to the answer; the answer's bytes."""
    kind, fields = LISTS[path]
    gateway = client(folder, kind=kind, width=8, tokenize_apart=False)
    turns = since = 0
    encode = gateway.encoder.encode

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def noted(*args, **named):
        nonlocal since
        found = await encode(*args, **named)
        since = turns
        return found

    gateway.encoder.encode = noted
    counting = asyncio.create_task(count())
    reply = await post(gateway, path, **fields)
    counting.cancel()
    gateway.app.close()
    assert reply.status == 200
    return turns - since, len(reply.body)


@pytest.mark.parametrize("path", LISTS)
async def test_a_long_list_is_written_a_slice_at_a_time(folder, path, monkeypatch):
    whole, size = await turns_to_write(folder, path)
    monkeypatch.setattr("hortus.ivy.lists.SLICE_BYTES", 1000)
    monkeypatch.setattr("hortus.ivy.lists.SLICE_NUMBERS", 50)
    sliced, _ = await turns_to_write(folder, path)
    assert sliced - whole > size / 3000 > 10


MANY = [f"text {i}" for i in range(300)]


@pytest.mark.parametrize(("room", "status"), [(10**6, 200), (700, 200), (300, 200), (100, 429)])
@pytest.mark.parametrize(
    ("path", "fields"),
    [("/embed", {"inputs": MANY}), ("/rerank", {"query": "q", "texts": MANY}), ("/embed_all", {"inputs": MANY})],
)
async def test_a_request_is_not_refused_for_its_own_chunks(folder, path, fields, room, status):
    """An idle server has room for it, chunk by chunk: who comes again later would be refused as well."""

    class Small(FakeEncoder):
        waiting = 0

        async def encode(self, batch, *, deadline=None):
            await asyncio.sleep(0)
            if self.waiting + len(batch.ids) > room:
                raise Overloaded("the queue is full")
            self.waiting += len(batch.ids)
            await asyncio.sleep(0.001)
            self.waiting -= len(batch.ids)
            return await super().encode(batch, deadline=deadline)

    plain, small = client(folder), client(folder)
    small.app._model().encoder = Small(16)
    want, told = await post(plain, path, **fields), await post(small, path, **fields)
    assert told.status == status
    assert told.json == want.json or status == 429
