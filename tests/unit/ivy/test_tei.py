"""text-embeddings-inference's API: its shapes, and what it has of its own."""

from __future__ import annotations

import json

import numpy as np
import pytest
from models_stubs import client, post, unit

from hortus.tulip.fake import fake_rows

pytestmark = pytest.mark.usefixtures("tokenizer_read_once")


async def test_embed_normalises_unless_told_not_to(folder, embed):
    plain = (await post(embed, "/embed", inputs="hi", normalize=False)).json[0]
    cut = (await post(embed, "/embed", inputs="hi", normalize=False, dimensions=4)).json[0]
    normal = (await post(embed, "/embed", inputs="hi", dimensions=4)).json[0]
    assert cut == plain[:4]
    np.testing.assert_allclose(normal, unit(np.array(cut)), rtol=1e-5)


async def test_embed_all_is_a_vector_a_token(embed):
    reply = await post(embed, "/embed_all", inputs=["hi", "you there my friend", [7632]])
    assert reply.status == 400  # texts and ids in one list
    reply = await post(embed, "/embed_all", inputs=["hi", "you there my friend"])
    assert [len(s) for s in reply.json] == [3, 6]
    np.testing.assert_array_equal(
        np.float32([row for s in reply.json for row in s]), fake_rows(embed.encoder.batches[0], 16)
    )
    many = await post(embed, "/embed_all", inputs=[f"text {i} " * (i % 9 + 1) for i in range(200)])
    assert [len(s) for s in many.json] == [2 + 2 * (i % 9 + 1) for i in range(200)]


async def test_sparse_weights(folder):
    gateway = client(folder, kind="sparse", width=16)
    reply = await post(gateway, "/embed_sparse", inputs=["a", "b"])
    rows = fake_rows(gateway.encoder.batches[0], 16)
    for told, row in zip(reply.json, rows, strict=True):
        dense = np.zeros(16, np.float32)
        for entry in told:
            dense[entry["index"]] = entry["value"]
        np.testing.assert_array_equal(dense, row)


async def test_similarity_is_the_cosine(embed):
    reply = await post(embed, "/similarity", inputs={"source_sentence": "a", "sentences": ["b", "a", "c"]})
    one, many = (unit(fake_rows(batch, 16).astype(np.float64)) for batch in embed.encoder.batches)
    np.testing.assert_allclose(reply.json, many @ one[0], atol=1e-6)
    assert reply.json[1] == 1.0


async def test_predict(classifier, reranker):
    one = (await post(classifier, "/predict", inputs="a")).json
    assert [x["score"] for x in one] == sorted([x["score"] for x in one], reverse=True)
    np.testing.assert_allclose(sum(x["score"] for x in one), 1, rtol=1e-6)
    many = (await post(classifier, "/predict", inputs=[["a"], ["b"]])).json
    assert many[0] == one
    pair, pairs = [(await post(classifier, "/predict", inputs=i)).json for i in (["a", "b"], [["a", "b"]])]
    assert pairs == [pair]
    assert classifier.encoder.batches[-1].token_types.any()
    raw = (await post(classifier, "/predict", inputs="a", raw_scores=True)).json
    row = fake_rows(classifier.encoder.batches[0], 3)[0]
    assert {x["label"]: np.float32(x["score"]) for x in raw} == {f"label {i}": row[i] for i in range(3)}
    assert (await post(reranker, "/predict", inputs="a")).json[0]["label"] == "label 0"
    for bad in (["a", "b", "c"], [["a"], ["a", "b"]], [[]], [["a", "b", "c"]], ["a", ["b"]]):
        assert (await post(classifier, "/predict", inputs=bad)).status == 400


async def test_tokenize_and_decode(embed):
    tokens = (await post(embed, "/tokenize", inputs="Hëllo  you")).json[0]
    assert [t["text"] for t in tokens] == ["[CLS]", "Hëllo", "you", "[SEP]"]
    assert [(t["start"], t["stop"]) for t in tokens] == [(None, None), (0, 5), (7, 10), (None, None)]
    assert [t["special"] for t in tokens] == [True, False, False, True]
    bare = (await post(embed, "/tokenize", inputs=["hi"], add_special_tokens=False)).json
    assert [t["id"] for t in bare[0]] == [7632]
    assert (await post(embed, "/decode", ids=[t["id"] for t in tokens])).json == ["hello you"]
    both = await post(embed, "/decode", ids=[[101, 7632, 102], [2017]], skip_special_tokens=False)
    assert both.json == ["[CLS] hi [SEP]", "you"]
    assert (await post(embed, "/decode", ids=[[-1]])).error["param"] == "ids[0][0]"


async def test_info_of_a_sparse_model_is_teis(folder):
    told = json.loads((await client(folder, kind="sparse").request("GET", "/info")).body)
    assert told["model_type"] == {"embedding": {"pooling": "splade"}}
    assert told["model"]["kind"] == "sparse"


async def test_info_speaks_tei_too(classifier, reranker, embed):
    for gateway, kind in ((classifier, "classifier"), (reranker, "reranker"), (embed, "embedding")):
        told = json.loads((await gateway.request("GET", "/info")).body)
        assert list(told["model_type"]) == [kind]
        assert told["model_id"] == "mini"
        assert told["max_input_length"] == 64


@pytest.mark.parametrize(
    "text", ["texts", "source_sentence", "sentences", "inputs", 'say "texts": []', '"source_sentence"']
)
async def test_the_root_s_route_does_not_hang_on_what_texts_say(text, embed, reranker, classifier, folder):
    gateways = {"/embed": embed, "/embed_sparse": client(folder, kind="sparse"), "/predict": classifier}
    for path, gateway in gateways.items():
        for inputs in (text, [text, text]):
            told, want = [await post(gateway, p, inputs=inputs) for p in ("/", path)]
            assert (told.status, told.json) == (200, want.json), path
    for path, gateway, fields in (
        ("/similarity", embed, {"inputs": {"source_sentence": text, "sentences": [text, "a"]}}),
        ("/rerank", reranker, {"query": text, "texts": [text, "a"]}),
    ):
        told, want = [await post(gateway, p, **fields) for p in ("/", path)]
        assert (told.status, told.json) == (200, want.json), path
    assert (await reranker.request("POST", "/", b'{"\\u0074exts": ["a"], "query": "q"}')).status == 200
    assert (await reranker.request("POST", "/", b'{"inputs": ')).status == 400
