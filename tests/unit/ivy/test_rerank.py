"""Reranking, scoring and classifying without a port: every API's shapes, and that they agree with one another."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from ivy_stubs import load_once
from models_stubs import client, post, sequences

from hortus.errors import StartError
from hortus.tulip.fake import fake_rows

LONG = "word " * 100


@pytest.fixture(autouse=True)
def _tokenizer_read_once(monkeypatch):
    monkeypatch.setattr("hortus.ivy.vocabulary.load", load_once)


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


async def test_rerank_dialects_agree(reranker):
    documents = [f"document {i}" for i in range(7)]
    tei = (await post(reranker, "/rerank", query="q", texts=documents)).json
    replies = {
        p: (await post(reranker, p, query="q", documents=documents)).json
        for p in ("/rerank", "/v1/rerank", "/v2/rerank")
    }
    assert [x["score"] for x in tei] == sorted([x["score"] for x in tei], reverse=True)
    for path, reply in replies.items():
        assert [(r["index"], r["relevance_score"]) for r in reply["results"]] == [(x["index"], x["score"]) for x in tei]
        assert ("document" in reply["results"][0]) == (path != "/v2/rerank")
        assert reply["model"] == "mini"
        assert reply["usage"]["total_tokens"] == reply["meta"]["tokens"]["input_tokens"] > 0
    scores = (await post(reranker, "/score", text_1="q", text_2=documents)).json["data"]
    assert {s["index"]: s["score"] for s in scores} == {x["index"]: x["score"] for x in tei}
    row = fake_rows(reranker.encoder.batches[0], 1)[:, 0]
    np.testing.assert_allclose([s["score"] for s in scores], 1 / (1 + np.exp(-row.astype(np.float64))), rtol=1e-6)
    raw = (await post(reranker, "/rerank", query="q", texts=documents, raw_scores=True, return_text=True)).json
    assert [np.float32(x["score"]) for x in raw] == sorted(row, reverse=True)
    assert [x["text"] for x in raw] == [documents[x["index"]] for x in raw]


async def test_top_n_and_documents(reranker):
    documents = ["a", {"text": "b", "title": "B"}, "c"]
    two = (await post(reranker, "/v1/rerank", query="q", documents=documents, top_n=2)).json["results"]
    assert len(two) == 2
    assert two[0]["document"] in [{"text": "a"}, documents[1], {"text": "c"}]
    for top in (0, 99):
        assert len((await post(reranker, "/rerank", query="q", documents=documents, top_n=top)).json["results"]) == 3
    assert (await post(reranker, "/rerank", query="q", documents=documents, top_n=-1)).error["param"] == "top_n"
    bare = (await post(reranker, "/rerank", query="q", documents=documents, return_documents=False)).json["results"]
    assert "document" not in bare[0]
    fields = {"query": "q", "documents": [{"title": "t", "body": "b"}]}
    await post(reranker, "/v1/rerank", rank_fields=["title", "body"], **fields)
    assert reranker.encoder.batches[-1].total_tokens > 8
    refused = await post(reranker, "/v1/rerank", **fields)
    assert refused.error["param"] == "documents[0]"


def nested(depth: int) -> list:
    return [] if depth == 0 else [nested(depth - 1)]


@pytest.mark.parametrize(
    "value",
    [
        2**64 - 1,
        2**64,
        -(2**63) - 1,
        10**40,
        1e308,
        5e-324,
        -0.0,
        0.1,
        True,
        None,
        "\x00\u2028\U0001f431",
        {"": [{}, []]},
        nested(400),
    ],
    ids=lambda v: str(v)[:20],
)
async def test_a_document_comes_back_as_it_was_given(reranker, value):
    document = {"text": "a", "more": value, "\n": ""}
    reply = await post(reranker, "/rerank", query="q", documents=[document])
    assert repr(reply.json["results"][0]["document"]) == repr(document)


async def test_a_document_of_any_depth_is_answered_or_refused(reranker):
    seen = set()
    for depth in (*range(800, 1000, 5), 2000, 50_000):
        body = b'{"query": "q", "documents": [{"text": "a", "more": %b}]}' % (b"[" * depth + b"]" * depth)
        reply = await reranker.request("POST", "/rerank", body)
        seen.add((reply.status, None if reply.status == 200 else reply.error["code"]))
    assert seen <= {(200, None), (400, "invalid_input")}
    assert (400, "invalid_input") in seen


async def test_rerank_truncation_controls(reranker):
    long = {"query": "q", "documents": ["short", LONG]}
    refused = await post(reranker, "/rerank", **long)
    assert (refused.status, refused.error["param"]) == (400, "documents[1]")
    for how in (
        {"truncate": True},
        {"truncate_prompt_tokens": -1},
        {"max_tokens_per_doc": 50},
        {"truncate_prompt_tokens": 30},
    ):
        reply = await post(reranker, "/rerank", **long, **how)
        assert reply.status == 200, how
        assert max(reranker.encoder.batches[-1].lengths) == {"max_tokens_per_doc": 54, "truncate_prompt_tokens": 30}.get(
            next(iter(how)) if 0 < next(iter(how.values())) != 1 else "", 64)  # fmt: skip
    query = await post(reranker, "/rerank", query=LONG, documents=["a"], max_tokens_per_query=5)
    assert query.json["usage"]["total_tokens"] == 5 + 1 + 3
    await post(reranker, "/rerank", query="q", texts=["one " * 70 + "end"], truncate=True, truncation_direction="Left")
    left = sequences(reranker.encoder.batches[-1])[0]
    assert left[-2] == sequences(await _tokens(reranker, "end"))[0][1]
    for bad in ({"truncate_prompt_tokens": -2}, {"truncate_prompt_tokens": 999}, {"max_tokens_per_doc": 0},
                {"truncation_side": "middle"}, {"truncate": "yes"}):  # fmt: skip
        assert (await post(reranker, "/rerank", **long, **bad)).status == 400


async def _tokens(gateway, text):
    return gateway.app._embedder.tokenizer.encode([text])


async def test_rerank_on_an_embedding_model_is_the_cosine(embed):
    documents = [f"document {i}" for i in range(30)]
    reply = await post(embed, "/rerank", query="hello", documents=documents)
    query = np.array((await post(embed, "/embed", inputs="hello", prompt_name="query")).json[0])
    want = np.array((await post(embed, "/embed", inputs=documents)).json) @ query
    got = {r["index"]: r["relevance_score"] for r in reply.json["results"]}
    np.testing.assert_allclose([got[i] for i in range(30)], want, atol=1e-6)
    pairs = await post(embed, "/score", queries=["hello", "bye"], documents=["document 3", "document 3"])
    assert np.float32(pairs.json["data"][0]["score"]) == np.float32(got[3])
    refused = await post(embed, "/score", queries=["a", "b"], documents=["a", "b", "c"])
    assert refused.error["param"] == "queries"


async def test_the_query_gets_the_query_prompt(folder, embed):
    await post(embed, "/rerank", query="hi", documents=["you"])
    assert sorted(s for b in embed.encoder.batches for s in sequences(b)) == [
        [101, 2017, 102],
        [101, 23032, 1024, 7632, 102],
    ]


@pytest.mark.parametrize("activation", [None, "Sigmoid", "Identity"])
async def test_a_rerankers_own_activation_makes_its_scores(folder, activation):
    gateway = client(dataclasses.replace(folder, activation=activation), kind="classify", width=1)
    two = {"query": "cat?", "documents": ["The cat sits.", "It rains."]}
    tei = {"query": "cat?", "texts": two["documents"]}

    async def scores(path: str, key: str, **fields: object) -> list[float]:
        told = (await post(gateway, path, **fields)).json
        results = told if isinstance(told, list) else told.get("results", told.get("data"))
        return [r[key] for r in sorted(results, key=lambda r: r["index"])]

    logits = np.array(await scores("/rerank", "score", **tei, raw_scores=True))
    chances = 1 / (1 + np.exp(-logits))
    own = logits if activation == "Identity" else chances
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        np.testing.assert_allclose(await scores(path, "relevance_score", **two), own, rtol=1e-5)
        np.testing.assert_allclose(await scores(path, "relevance_score", **two, raw_scores=True), logits, rtol=1e-5)
        np.testing.assert_allclose(await scores(path, "relevance_score", **two, raw_scores=False), chances, rtol=1e-5)
    pairs = {"queries": two["query"], "documents": two["documents"]}
    np.testing.assert_allclose(await scores("/score", "score", **pairs), own, rtol=1e-5)
    np.testing.assert_allclose(await scores("/rerank", "score", **tei), chances, rtol=1e-5)
    told = json.loads((await gateway.request("GET", "/info")).body)
    assert told["activation"] == (activation or "Sigmoid")


def test_an_unknown_activation_is_a_start_error_of_rerankers_alone(folder):
    odd = dataclasses.replace(folder, activation="Tanh")
    with pytest.raises(StartError, match=r"Tanh .*supported: Sigmoid, Identity"):
        client(odd, kind="classify", width=1)
    client(odd, kind="classify", width=3)


async def test_infinitys_shapes(reranker, classifier, embed):
    documents = ["The cat sits.", "It rains."]
    told = (
        await post(
            reranker, "/rerank", query="q", documents=documents, raw_scores=False, return_documents=True, top_n=1
        )
    ).json
    assert told["object"] == "rerank"
    assert told["results"][0]["document"] == documents[told["results"][0]["index"]]
    bare = (await post(reranker, "/rerank", query="q", documents=documents, raw_scores=True)).json["results"]
    assert set(bare[0]) == {"index", "relevance_score"}
    plain = client(reranker.app._embedder.folder, kind="classify", width=1, rerank_documents="text")
    for path, shown in (("/rerank", True), ("/v1/rerank", True), ("/v2/rerank", False)):
        told = (await post(plain, path, query="q", documents=documents)).json["results"][0]
        assert told.get("document") == (documents[told["index"]] if shown else None)
    told = (await post(classifier, "/classify", input=documents, raw_scores=False)).json
    assert told["object"] == "classify"
    assert [set(x) for x in told["data"][1]] == [{"score", "label"}] * 3
    assert sum(x["score"] for x in told["data"][0]) == pytest.approx(1)
    logits = (await post(classifier, "/classify", input="a", raw_scores=True)).json["data"][0]
    assert sum(x["score"] for x in logits) != pytest.approx(1)
    one, two = [(await post(embed, p, model="mini", input="a")).json for p in ("/embeddings", "/v1/embeddings")]
    assert one == two


async def test_score_takes_one_spelling(reranker):
    assert (await post(reranker, "/score", text_1="a", queries="b", documents="c")).error["param"] == "queries"
    assert (await post(reranker, "/score", text_1="a")).error["param"] == "documents"
    assert len((await post(reranker, "/v1/score", data_1="a", data_2=["b", "c"])).json["data"]) == 2


async def test_classify(classifier):
    reply = (await post(classifier, "/classify", input=["a", "b"])).json
    for i, told in enumerate(reply["data"]):
        assert told["index"] == i
        assert told["num_classes"] == len(told["probs"]) == 3
        assert told["label"] == f"label {int(np.argmax(told['probs']))}"
