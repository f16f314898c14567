"""Every API's routes without a port: that they agree with one another."""

from __future__ import annotations

import re

import numpy as np
import pytest
from models_stubs import b64, client, post

pytestmark = pytest.mark.usefixtures("tokenizer_read_once")
LONG = "word " * 100


async def test_all_dialects_give_the_same_vectors(embed):
    texts = ["hello", "there you are"]
    openai = (await post(embed, "/v1/embeddings", model="mini", input=texts)).json["data"]
    tei = (await post(embed, "/embed", inputs=texts)).json
    cohere = (await post(embed, "/v2/embed", model="mini", texts=texts, embedding_types=["float", "base64"])).json
    assert [d["embedding"] for d in openai] == tei == cohere["embeddings"]["float"]
    packed = [b64(t, "<f4") for t in cohere["embeddings"]["base64"]]
    np.testing.assert_array_equal(np.float32(tei), packed)
    batches = embed.encoder.batches
    assert len({b.ids.tobytes() for b in batches}) == 1


async def test_all_dialects_have_the_same_limits_and_errors(embed):
    for path, fields in {
        "/v1/embeddings": {"model": "mini", "input": ["a", LONG]},
        "/embed": {"inputs": ["a", LONG]},
        "/embed_all": {"inputs": ["a", LONG]},
        "/v2/embed": {"model": "mini", "texts": ["a", LONG], "truncate": "NONE"},
        "/rerank": {"query": "q", "documents": ["a", LONG]},
        "/score": {"queries": "q", "documents": ["a", LONG]},
        "/similarity": {"inputs": {"source_sentence": "a", "sentences": [LONG]}},
    }.items():
        reply = await post(embed, path, **fields)
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded"), path
        assert re.search(r"sentences\[0\]|\[1\]", reply.error["param"])
        assert "102" in reply.error["message"]
        assert "64" in reply.error["message"]


async def test_unknown_fields_and_other_models_are_refused_everywhere(embed):
    for path in [p for p, m in embed.app._routes.items() if "POST" in m]:
        reply = await post(embed, path, nonsense=1)
        assert reply.status == 400, path
        assert reply.error["code"] == "invalid_input"
    for path, fields in {
        "/embed": {"inputs": "a"},
        "/rerank": {"query": "q", "documents": ["a"]},
        "/score": {"queries": "q", "documents": ["a"]},
        "/v2/embed": {"texts": ["a"]},
    }.items():
        assert (await post(embed, path, model="other", **fields)).error["code"] == "model_not_found"


async def test_empty_lists_are_refused_everywhere(embed):
    for path, fields in {
        "/v1/embeddings": {"model": "mini", "input": []},
        "/embed": {"inputs": []},
        "/embed_all": {"inputs": []},
        "/v2/embed": {"model": "mini", "texts": []},
        "/rerank": {"query": "q", "documents": []},
        "/v2/rerank": {"query": "q", "texts": []},
        "/score": {"queries": "q", "documents": []},
        "/similarity": {"inputs": {"source_sentence": "a", "sentences": []}},
        "/tokenize": {"inputs": []},
        "/decode": {"ids": []},
    }.items():
        reply = await post(embed, path, **fields)
        assert (reply.status, reply.error["code"]) == (400, "invalid_input"), path
        assert "empty" in reply.error["message"]


NEEDS = {
    "/v1/embeddings": ({"model": "mini", "input": "a"}, {"embed"}),
    "/embed": ({"inputs": "a"}, {"embed"}),
    "/embed_all": ({"inputs": "a"}, {"embed", "tokens"}),
    "/embed_sparse": ({"inputs": "a"}, {"sparse"}),
    "/similarity": ({"inputs": {"source_sentence": "a", "sentences": ["b"]}}, {"embed"}),
    "/v2/embed": ({"model": "mini", "texts": ["a"]}, {"embed"}),
    "/rerank": ({"query": "q", "texts": ["a"]}, {"embed", "reranker"}),
    "/v1/rerank": ({"query": "q", "documents": ["a"]}, {"embed", "reranker"}),
    "/v2/rerank": ({"query": "q", "documents": ["a"]}, {"embed", "reranker"}),
    "/score": ({"queries": "q", "documents": ["a"]}, {"embed", "reranker"}),
    "/predict": ({"inputs": "a"}, {"classify", "reranker"}),
    "/classify": ({"input": "a"}, {"classify", "reranker"}),
    "/v1/contextualizedembeddings": ({"model": "mini", "input": [["a"]]}, set()),
}


@pytest.mark.parametrize("kind", ["embed", "classify", "reranker", "sparse", "tokens"])
async def test_a_route_that_the_model_is_not_for_says_so(folder, kind):
    width = {"classify": 3, "reranker": 1}.get(kind, 16)
    gateway = client(folder, kind="classify" if kind == "reranker" else kind, width=width)
    for path, (fields, kinds) in NEEDS.items():
        reply = await post(gateway, path, **fields)
        if kind in kinds:
            assert reply.status == 200, (path, reply.body)
        else:
            assert (reply.status, reply.error["code"]) == (424, "wrong_model_kind"), path
            assert path in reply.error["message"]
            assert "mini" in reply.error["message"]


async def test_the_root_is_what_the_model_is_for(folder, embed, reranker, classifier):
    assert len((await post(embed, "/", inputs="a")).json[0]) == 16
    assert len((await post(embed, "/", inputs={"source_sentence": "a", "sentences": ["b", "c"]})).json) == 2
    assert (await post(reranker, "/", query="q", texts=["a"])).json[0]["index"] == 0
    assert set((await post(classifier, "/", inputs="a")).json[0]) == {"score", "label"}
    sparse = client(folder, kind="sparse")
    assert set((await post(sparse, "/", inputs="a")).json[0][0]) == {"index", "value"}


async def test_non_finite_rows_are_named_in_the_requests_own_words(reranker, pplx):
    reranker.encoder.nan_at = 1
    for path, field in (("/rerank", "texts"), ("/rerank", "documents"), ("/score", "documents")):
        query = {"queries": "q"} if path == "/score" else {"query": "q"}
        reply = await post(reranker, path, **query, **{field: ["a", "b"]})
        assert (reply.error["code"], reply.error["param"]) == ("non_finite", f"{field}[1]")
    pplx.encoder.nan_at = 2
    reply = await post(pplx, "/v1/contextualizedembeddings", model="pplx", input=[["a", "b"], ["c"]])
    assert reply.error["param"] == "input[1]"


async def test_an_answers_size_is_bounded(folder):
    gateway = client(folder, max_answer_values=100)
    reply = await post(gateway, "/embed_all", inputs=["a b c d e f g"])
    assert (reply.status, reply.error["param"]) == (400, "inputs")
    assert "--max-answer-values" in reply.error["message"]
    assert (await post(gateway, "/embed", inputs=["a"] * 6)).status == 200
    assert (await post(gateway, "/embed", inputs=["a"] * 50, dimensions=2)).status == 200


async def test_a_texts_characters_are_bounded(folder):
    gateway = client(folder, max_input_chars=1000)
    reply = await post(gateway, "/embed", inputs=["a", "x" * 1001])
    assert (reply.error["code"], reply.error["param"]) == ("context_length_exceeded", "inputs[1]")
    assert "--max-input-chars" in reply.error["message"]
    assert (await post(gateway, "/embed", inputs="x" * 5000, truncate=True)).status == 200
    rerank = client(folder, kind="classify", width=1, max_input_chars=1000)
    assert (await post(rerank, "/rerank", query="q", texts=["x" * 1001])).error["param"] == "texts[0]"
