"""Every API's routes without a port: shapes, and that they agree with one another."""

from __future__ import annotations

import base64
import json
import re

import numpy as np
import pytest
from ivy_stubs import load_once
from models_stubs import client, post, sequences
from small_models import END, pplx_folder

from hortus.tulip.fake import fake_rows

LONG = "word " * 100


@pytest.fixture(autouse=True)
def _tokenizer_read_once(monkeypatch):
    monkeypatch.setattr("hortus.ivy.vocabulary.load", load_once)


@pytest.fixture
def pplx(tmp_path):
    return client(pplx_folder(tmp_path / "pplx"))


def b64(text: str, kind: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text, validate=True), kind)


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


# --- one vector, whatever the dialect


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


# --- kinds of models

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


# --- Perplexity


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


# --- TEI


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


# --- not a number


async def test_non_finite_rows_are_named_in_the_requests_own_words(reranker, pplx):
    reranker.encoder.nan_at = 1
    for path, field in (("/rerank", "texts"), ("/rerank", "documents"), ("/score", "documents")):
        query = {"queries": "q"} if path == "/score" else {"query": "q"}
        reply = await post(reranker, path, **query, **{field: ["a", "b"]})
        assert (reply.error["code"], reply.error["param"]) == ("non_finite", f"{field}[1]")
    pplx.encoder.nan_at = 2
    reply = await post(pplx, "/v1/contextualizedembeddings", model="pplx", input=[["a", "b"], ["c"]])
    assert reply.error["param"] == "input[1]"


# --- Cohere


async def test_cohere_embed(folder, embed):
    texts = ["hello", "there"]
    reply = await post(embed, "/v2/embed", model="mini", texts=texts, input_type="search_document",
                       embedding_types=["float", "ubinary", "binary"], output_dimension=8)  # fmt: skip
    told = reply.json
    assert set(told["embeddings"]) == {"float", "ubinary", "binary"}
    assert told["texts"] == texts
    assert told["meta"]["billed_units"] == {"input_tokens": 6}
    rows = np.array(told["embeddings"]["float"])
    assert told["embeddings"]["ubinary"] == np.packbits(rows > 0, axis=1).tolist()
    assert told["embeddings"]["binary"] == (np.packbits(rows > 0, axis=1).astype(int) - 128).tolist()
    inputs = [{"content": [{"type": "text", "text": t}]} for t in texts]
    same = await post(embed, "/v2/embed", model="mini", inputs=inputs, output_dimension=8)
    assert same.json["embeddings"]["float"] == told["embeddings"]["float"]


async def test_cohere_cuts_by_default_from_either_end(embed):
    for truncate, last in ((None, 2773), ("END", 2773), ("START", 2203)):
        fields = {} if truncate is None else {"truncate": truncate}
        text = "word " * 90 + "end"
        reply = await post(embed, "/v2/embed", model="mini", texts=[text], input_type="classification", **fields)
        assert reply.json["meta"]["billed_units"]["input_tokens"] == 64
        assert sequences(embed.encoder.batches[-1])[0][-2] == last
    reply = await post(embed, "/v2/embed", model="mini", texts=[LONG], max_tokens=10)
    assert reply.json["meta"]["billed_units"]["input_tokens"] == 10


@pytest.mark.parametrize(
    "bad",
    [
        {"texts": ["a"], "inputs": []},
        {},
        {"texts": ["a"], "embedding_types": ["float64"]},
        {"texts": ["a"], "embedding_types": ["int8"]},
        {"texts": ["a"], "input_type": "image"},
        {"texts": ["a"], "truncate": "end"},
        {"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"inputs": [{"content": [{"type": "text", "text": "a"}], "extra": 1}]},
        {"inputs": [{"content": [{"type": "text", "text": "a", "more": 1}]}]},
        {"inputs": [{}]},
        {"texts": ["a"], "max_tokens": 0},
    ],
)
async def test_cohere_refusals(embed, bad):
    reply = await post(embed, "/v2/embed", model="mini", **bad)
    assert (reply.status, reply.error["code"]) == (400, "invalid_input")


async def test_int8_by_ranges(folder, tmp_path):
    ranges = np.stack([np.full(16, -1.0), np.full(16, 1.0)])
    np.save(tmp_path / "ranges.npy", ranges)
    gateway = client(folder, int8_ranges=str(tmp_path / "ranges.npy"))
    told = (
        await post(gateway, "/v2/embed", model="mini", texts=["a"], embedding_types=["float", "int8", "uint8"])
    ).json
    x = np.float32(told["embeddings"]["float"][0])
    steps = (ranges[1] - ranges[0]).astype(np.float32) / 255
    want = np.clip(np.floor((x + 1) / steps), 0, 255)
    assert told["embeddings"]["uint8"][0] == want.tolist()
    assert told["embeddings"]["int8"][0] == (want - 128).tolist()
    cut = await post(gateway, "/v1/embeddings", model="mini", input="a", encoding_format="base64_int8", dimensions=8)
    assert cut.error["param"] == "dimensions"


# --- prompts and templates


async def test_input_type_is_the_models_prompt_for_it(embed):
    for fields in ({"input_type": "query"}, {"input_type": "search_query"}, {"prompt_name": "query"}):
        await post(embed, "/v1/embeddings", model="mini", input="hi", **fields)
        assert sequences(embed.encoder.batches[-1]) == [[101, 23032, 1024, 7632, 102]]
    both = await post(embed, "/v1/embeddings", model="mini", input="hi", input_type="query", prompt_name="query")
    assert both.error["param"] == "input_type"
    assert (await post(embed, "/v1/embeddings", model="mini", input="hi", input_type="poem")).status == 400


async def test_templates_are_added_and_reloaded(folder, tmp_path):
    file = tmp_path / "templates.toml"
    file.write_text('default = "shout"\n[prompts]\nshout = "hey "\n')
    gateway = client(folder, templates=str(file))

    async def tokens() -> int:
        return (await post(gateway, "/v1/embeddings", model="mini", input="hi")).json["usage"]["total_tokens"]

    assert await tokens() == 4
    file.write_text('[prompts]\nshout = "hey you there "\n')
    assert await tokens() == 4
    gateway.app.reload()
    assert await tokens() == 3
    assert (await post(gateway, "/embed", inputs="hi", prompt_name="shout")).status == 200
    for wrong in ("default = 'none'", "[prompts]\nx = 1", "nonsense = 1", "pair = '{query}'", "= ="):
        file.write_text(wrong)
        gateway.app.reload()
        assert (await post(gateway, "/embed", inputs="hi", prompt_name="shout")).status == 200, (
            "a wrong file changes nothing"
        )


async def test_a_pair_template_makes_one_text(folder, tmp_path):
    file = tmp_path / "templates.toml"
    file.write_text('pair = "query {query} document {document} end"')
    gateway = client(folder, kind="classify", width=1, templates=str(file))
    await post(gateway, "/rerank", query="{document}", documents=["you"])
    said = gateway.app._embedder.tokenizer.texts(sequences(gateway.encoder.batches[0]), skip_special=True)
    assert said == ["query { document } document you end"]
    cut = await post(gateway, "/rerank", query="a", documents=[LONG], max_tokens_per_doc=10)
    assert cut.json["usage"]["total_tokens"] == 10 + 6
    assert (await post(gateway, "/rerank", query="a", documents=[LONG])).status == 400


@pytest.mark.parametrize("side", ["left", "right"])
async def test_truncate_keeps_the_words_of_a_pair_template(folder, tmp_path, side):
    file = tmp_path / "templates.toml"
    file.write_text('pair = "query {query} document {document} end"')
    gateway = client(folder, kind="classify", width=1, templates=str(file))

    async def said(**fields: object) -> list[str]:
        gateway.encoder.batches.clear()
        reply = await post(gateway, "/rerank", truncation_side=side, truncate=True, **fields)
        assert reply.status == 200, reply.body
        read = gateway.app._embedder.tokenizer.texts
        return [t for b in gateway.encoder.batches for t in read(sequences(b), skip_special=True)]

    many = " ".join(f"{i}" for i in range(100))
    kept = [str(i) for i in (range(47, 100) if side == "left" else range(53))]
    short, cut = await said(query="one two three four five six", documents=["you", many])
    assert short == "query one two three four five six document you end"
    assert cut == " ".join(["query one two three four five six document", *kept, "end"])
    (both,) = await said(query=many, documents=[many], truncate_prompt_tokens=25)
    assert both.split()[0] == "query"
    assert both.split()[-1] == "end"
    assert (len(both.split()), both.split().index("document")) == (23, 11)
    reply = await post(gateway, "/rerank", query="a", documents=[many], truncate_prompt_tokens=6)
    assert (reply.status, reply.error["param"]) == (400, "documents[0]")
    assert "--templates" in reply.error["message"]


# --- limits


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
