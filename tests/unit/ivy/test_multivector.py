"""Late interaction over HTTP: which tokens get vectors, and MaxSim of rows that come in pieces."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from models_stubs import client, post, sequences

from hortus.ivy.multivector import MaxSim
from hortus.late import Expansion, Late
from hortus.tulip.fake import fake_rows
from hortus.types import TokenBatch

LATE = Late(
    prompts={"query": "[unused0] ", "document": "[unused1] "},
    markers=("[unused0] ", "[unused1] "),
    expansion=Expansion(length=8, fixed=True, attend=False, token="[MASK]"),
    skip=(",", "!"),
    document_length=40,
)
CLS, SEP, MASK, Q, D = 101, 102, 103, 1, 2


@pytest.fixture
def late(folder):
    return dataclasses.replace(folder, late=LATE, kind="tokens")


def maxsim(query: np.ndarray, document: np.ndarray) -> float:
    return float((query.astype(float) @ document.astype(float).T).max(1).sum())


def vectors(batch: TokenBatch) -> list[np.ndarray]:
    return np.split(fake_rows(batch, 16), np.cumsum(batch.span_counts)[:-1])


async def test_which_tokens_get_vectors(late):
    gateway = client(late, kind="tokens")
    documents = (await post(gateway, "/embed_all", inputs=["hi, you!", "hi"])).json
    assert [len(d) for d in documents] == [5, 4]  # [CLS] [D] hi you [SEP]: no comma, no exclamation mark
    queries = (await post(gateway, "/embed_all", inputs=["hi, you!"], prompt_name="query")).json
    assert [len(q) for q in queries] == [8]
    seen = sequences(gateway.encoder.batches[-1])[0]
    assert (seen[:2], seen[-2], len(seen)) == ([CLS, Q], SEP, 8)
    assert sequences(gateway.encoder.batches[0])[0][:2] == [CLS, D]
    await post(gateway, "/embed_all", inputs="hi", prompt_name="query")
    assert sequences(gateway.encoder.batches[-1])[0][3:] == [SEP, MASK, MASK, MASK, MASK]
    told = await post(gateway, "/embed_all", inputs="hi", prompt_name="other")
    assert (told.status, told.error["param"]) == (400, "prompt_name")
    ids = (await post(gateway, "/embed_all", inputs=[[5, 6, 7]])).json
    assert len(ids[0]) == 3
    long = await post(gateway, "/embed_all", inputs="word " * 10, prompt_name="query")
    assert (long.status, long.error["code"]) == (400, "context_length_exceeded")


async def test_scores_are_maxsim(late):
    """Several chunks of documents; one query for all, and one for each."""
    gateway = client(late, kind="tokens")
    documents = [f"document {'of many words ' * (i % 5)} {i}" for i in range(40)]
    got = (await post(gateway, "/rerank", query="which one?", documents=documents)).json["results"]
    batches = gateway.encoder.batches
    assert len(batches) >= 3
    query = vectors(batches[0])[0]
    want = np.array([maxsim(query, d) for b in batches[1:] for d in vectors(b)])
    assert sorted(r["index"] for r in got) == list(range(40))
    assert [r["relevance_score"] for r in got] == pytest.approx(sorted(want, reverse=True), rel=1e-5)
    assert {r["index"]: r["relevance_score"] for r in got}[7] == pytest.approx(want[7], rel=1e-5)

    batches.clear()
    queries = [f"question {i}" for i in range(40)]
    got = (await post(gateway, "/score", queries=queries, documents=documents)).json["data"]
    every = [v for b in batches for v in vectors(b)]
    asked = [v for b in batches for v, s in zip(vectors(b), sequences(b), strict=True) if s[1] == Q]
    found = [v for b in batches for v, s in zip(vectors(b), sequences(b), strict=True) if s[1] == D]
    assert len(every) == 80
    assert [d["score"] for d in got] == pytest.approx([maxsim(*p) for p in zip(asked, found, strict=True)], rel=1e-5)


@pytest.mark.parametrize("late_queries", [False, True])
@pytest.mark.parametrize("mean", [False, True])
def test_rows_in_any_pieces(late_queries, mean):
    rng = np.random.default_rng(0)
    query, counts = rng.standard_normal((5, 4)).astype(np.float32), np.array([3, 1, 7, 2], np.int32)
    rows = rng.standard_normal((13, 4)).astype(np.float32)
    want = np.array([maxsim(query, d) for d in np.split(rows, np.cumsum(counts)[:-1])]) / (5 if mean else 1)

    def batch(counts) -> TokenBatch:
        return TokenBatch(np.zeros(sum(counts), np.int32), np.cumsum([0, *counts]), span_counts=np.array(counts))

    for size in (1, 2, 5, 13):
        maxsim_ = MaxSim(batch([5]), batch(counts.tolist()), mean=mean)
        if not late_queries:
            maxsim_.asked(query)
        for at in reversed(range(0, 13, size)):  # chunks come in any order
            maxsim_.found(at, rows[at : at + size])
        if late_queries:
            maxsim_.asked(query)
        np.testing.assert_allclose(maxsim_.scores(), want, rtol=1e-5)
