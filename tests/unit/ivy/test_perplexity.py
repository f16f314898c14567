"""Perplexity's API: its formats, and chunks in the context of their document."""

from __future__ import annotations

import numpy as np
import pytest
from models_stubs import b64, post
from small_models import END

from hortus.tulip.fake import fake_rows

pytestmark = pytest.mark.usefixtures("tokenizer_read_once")


async def test_pplx_default_is_int8_and_all_formats_are_taken(pplx):
    replies = {f: await post(pplx, "/v1/embeddings", model="pplx", input="hello", **({"encoding_format": f} if f else {}))
               for f in (None, "float", "base64", "base64_int8", "base64_binary", "int8", "binary", "ubinary")}  # fmt: skip
    got = {f: r.json["data"][0]["embedding"] for f, r in replies.items()}
    row = fake_rows(pplx.encoder.batches[0], 16)[0]
    np.testing.assert_array_equal(np.float32(got["float"]), row)  # as pooled: nothing is normalised
    np.testing.assert_array_equal(b64(got["base64"], "<f4"), row)
    codes = np.rint(np.tanh(row) * np.float32(127)).astype(np.int8)
    np.testing.assert_array_equal(b64(got["base64_int8"], "i1"), codes)
    assert got[None] == got["base64_int8"]
    assert got["int8"] == codes.tolist()
    np.testing.assert_array_equal(b64(got["base64_binary"], "u1"), np.packbits(row >= 0, bitorder="little"))
    assert got["ubinary"] == np.packbits(row >= 0).tolist()
    assert got["binary"] == (np.packbits(row >= 0).astype(int) - 128).tolist()
    refused = await post(pplx, "/v1/embeddings", model="pplx", input="a", encoding_format="BASE64")
    assert refused.status == 400
    assert "base64_binary" in refused.error["message"]


async def test_contextual_chunks_come_back_by_document(pplx):
    documents = [["one", "two", "three"], ["alone"], ["x", "y"]]
    reply = await post(pplx, "/v1/contextualizedembeddings", model="pplx", input=documents)
    assert reply.status == 200
    assert [d["index"] for d in reply.json["data"]] == [0, 1, 2]
    assert [[c["index"] for c in d["data"]] for d in reply.json["data"]] == [[0, 1, 2], [0], [0, 1]]
    got = [b64(c["embedding"], "i1") for d in reply.json["data"] for c in d["data"]]
    rows = fake_rows(pplx.encoder.batches[0], 16)
    np.testing.assert_array_equal(got, np.rint(np.tanh(rows) * np.float32(127)))
    assert reply.json["usage"]["total_tokens"] == sum(len("".join(d)) + len(d) - 1 for d in documents)
    query = await post(pplx, "/v1/embeddings", model="pplx", input="alone")
    assert query.json["data"][0]["embedding"] == reply.json["data"][1]["data"][0]["embedding"]


async def test_many_chunks_over_many_batches_keep_their_places(pplx):
    documents = [[f"d{i}c{j}" for j in range(i % 7 + 1)] for i in range(150)]
    fields = {"model": "pplx", "encoding_format": "float", "dimensions": 5}
    reply = await post(pplx, "/v1/contextualizedembeddings", input=documents, **fields)
    assert len(pplx.encoder.batches) > 3
    data = reply.json["data"]
    assert [len(d["data"]) for d in data] == [len(d) for d in documents]
    for i in (0, 77, 149):
        alone = await post(pplx, "/v1/contextualizedembeddings", input=[documents[i]], **fields)
        assert alone.json["data"][0]["data"] == data[i]["data"]


async def test_a_chunk_cannot_pose_as_a_separator(pplx):
    reply = await post(pplx, "/v1/contextualizedembeddings", model="pplx", input=[[f"a{END}b", "c"]])
    assert len(reply.json["data"][0]["data"]) == 2


@pytest.mark.parametrize("bad", [[], [[]], [["a", ""]], [["a"], []], ["a"], "a", [[1]]])
async def test_bad_documents_are_named(pplx, bad):
    reply = await post(pplx, "/v1/contextualizedembeddings", model="pplx", input=bad)
    assert reply.status == 400
    assert reply.error["param"].startswith("input")


async def test_other_models_are_told_which_kind_is_needed(embed, reranker):
    for gateway, told in ((embed, "embeds each text by itself"), (reranker, "is a classifier")):
        reply = await post(gateway, "/v1/contextualizedembeddings", model="mini", input=[["a"]])
        assert (reply.status, reply.error["code"]) == (424, "wrong_model_kind")
        assert "needs a contextual embedding model" in reply.error["message"]
        assert reply.error["message"].endswith(f"mini {told}")
