"""The clients of other APIs, unchanged, against a real port: perplexityai, cohere, huggingface_hub, langchain, litellm."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys

import httpx
import numpy as np
import pytest
from gateway_server import running
from huggingface_hub import InferenceClient
from small_models import pplx_folder

from hortus.tulip.fake import FakeEngine, fake_rows
from hortus.types import TokenBatch


@pytest.fixture(autouse=True)
def online(monkeypatch):
    """huggingface_hub refuses even this machine's address when HF_HUB_OFFLINE is set, as it often is where tests run."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


TEXTS = ["The cat sits on the mat.", "joyeux noël", "It rains."]


def engine(**more: object) -> FakeEngine:
    return FakeEngine(name="mini", vocab_size=30522, max_tokens=256, **more)


@pytest.fixture(scope="module")
def reranker():
    with running(engine(kind="classify", labels=("relevant",))) as server:
        yield server


@pytest.fixture(scope="module")
def classifier():
    with running(engine(kind="classify", labels=("no", "yes", "maybe"))) as server:
        yield server


@pytest.fixture(scope="module")
def pplx(tmp_path_factory):
    yield from serve_pplx(tmp_path_factory.mktemp("pplx"), "pplx-embed-v1-0.6b", contextual=False)


@pytest.fixture(scope="module")
def pplx_context(tmp_path_factory):
    yield from serve_pplx(tmp_path_factory.mktemp("context"), "pplx-embed-context-v1-0.6b", contextual=True)


def serve_pplx(path, name, *, contextual):
    """Under its hub id: the client knows the name after the slash only."""
    folder = pplx_folder(path, name="perplexity-ai/" + name, contextual=contextual)
    fake = FakeEngine(name=folder.name, width=256, vocab_size=300, max_tokens=64)
    with running(fake, folder=folder) as server:
        yield server


def vectors_of(server, texts=TEXTS) -> np.ndarray:
    reply = httpx.post(server.url + "/embed", json={"inputs": texts})
    return np.array(reply.raise_for_status().json())


# --- Perplexity


def test_perplexity(pplx, pplx_context):
    import perplexity

    with perplexity.Perplexity(base_url=pplx.url, api_key="none", max_retries=0) as client:
        model = "pplx-embed-v1-0.6b"
        plain = client.embeddings.create(model=model, input=["hello"])
        bits = client.embeddings.create(model=model, input="hello", encoding_format="base64_binary", dimensions=128)
        with pytest.raises(perplexity.BadRequestError, match="1 to 256"):
            client.embeddings.create(model=model, input="a", dimensions=1024)
    with perplexity.Perplexity(base_url=pplx_context.url, api_key="none", max_retries=0) as client:
        context = client.contextualized_embeddings.create(
            model="pplx-embed-context-v1-0.6b", input=[["hello", "you"], ["hello"]]
        )
    row = fake_rows(TokenBatch.of([ids_of(pplx, "hello")]), 256)[0]
    codes = np.frombuffer(base64.b64decode(plain.data[0].embedding), np.int8)
    np.testing.assert_array_equal(codes, np.rint(np.tanh(row) * np.float32(127)))
    packed = np.frombuffer(base64.b64decode(bits.data[0].embedding), np.uint8)
    np.testing.assert_array_equal(np.unpackbits(packed, bitorder="little"), row[:128] >= 0)
    assert [[c.index for c in d.data] for d in context.data] == [[0, 1], [0]]
    assert context.data[1].data[0].embedding == plain.data[0].embedding
    assert context.data[0].data[0].embedding != plain.data[0].embedding
    assert context.usage.total_tokens == 5 + 1 + 3 + 5


def ids_of(server, text: str) -> list[int]:
    reply = httpx.post(server.url + "/tokenize", json={"inputs": text})
    return [t["id"] for t in reply.json()[0]]


# --- Cohere


def test_cohere_embed(server):
    import cohere

    with httpx.Client() as http:
        client = cohere.ClientV2(
            api_key="none", base_url=server.url, httpx_client=http, log_warning_experimental_features=False
        )
        reply = client.embed(
            model="mini",
            texts=TEXTS,
            input_type="search_document",
            embedding_types=["float", "ubinary"],
            output_dimension=64,
        )
        with pytest.raises(cohere.errors.BadRequestError) as caught:
            client.embed(model="mini", texts=TEXTS, input_type="search_document", output_dimension=1000)
        assert "1 to 384" in str(caught.value.body)
    floats = np.array(reply.embeddings.float_)
    assert floats.shape == (3, 64)
    np.testing.assert_array_equal(reply.embeddings.ubinary, np.packbits(floats > 0, axis=1))
    assert reply.response_type == "embeddings_by_type"
    assert reply.meta.billed_units.input_tokens > 0


def test_cohere_rerank(reranker):
    import cohere

    with httpx.Client() as http:
        second = cohere.ClientV2(api_key="none", base_url=reranker.url, httpx_client=http)
        first = cohere.Client(api_key="none", base_url=reranker.url, httpx_client=http)
        two = second.rerank(model="mini", query="cat?", documents=TEXTS, top_n=2, max_tokens_per_doc=100)
        one = first.rerank(model="mini", query="cat?", documents=[{"text": t} for t in TEXTS], return_documents=True)
    assert [(r.index, r.relevance_score) for r in two.results] == [(r.index, r.relevance_score) for r in one.results][
        :2
    ]
    assert one.results[0].relevance_score >= one.results[1].relevance_score
    assert one.results[0].document.text == TEXTS[one.results[0].index]
    assert two.meta.api_version.version == "2"


# --- Hugging Face


def test_huggingface_embeds(server):
    for url in (server.url, server.url + "/embed"):
        got = InferenceClient(model=url).feature_extraction(TEXTS[0], normalize=True, truncate=True)
        assert got.shape == (1, 384)
        np.testing.assert_allclose(got, vectors_of(server, TEXTS[:1]), rtol=1e-6)
    for url in (server.url, server.url + "/similarity"):
        scores = InferenceClient(model=url).sentence_similarity(TEXTS[0], other_sentences=TEXTS[1:])
        vectors = vectors_of(server)
        np.testing.assert_allclose(scores, vectors[1:] @ vectors[0], atol=1e-6)


def test_huggingface_errors_can_be_read(server):
    from huggingface_hub.errors import HfHubHTTPError

    with pytest.raises(HfHubHTTPError, match="1 to 384"):
        InferenceClient(model=server.url + "/embed").feature_extraction("a", dimensions=9999)


def test_huggingface_classifies(classifier):
    for url in (classifier.url, classifier.url + "/predict"):
        assert len(InferenceClient(model=url).text_classification("a text")) == 3
        got = InferenceClient(model=url).text_classification("a text", top_k=2)
        assert len(got) == 2
        assert {x.label for x in got} < {"no", "yes", "maybe"}
        assert got[0].score >= got[1].score


# --- LangChain


def test_langchain_texts(server):
    from langchain_openai import OpenAIEmbeddings

    client = OpenAIEmbeddings(
        model="mini", base_url=server.url + "/v1", api_key="none", check_embedding_ctx_length=False, max_retries=0
    )
    np.testing.assert_allclose(client.embed_documents(TEXTS), vectors_of(server), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(client.embed_query(TEXTS[0]), vectors_of(server)[0], rtol=1e-5, atol=1e-7)


def test_langchain_ids_of_another_vocabulary(server):
    """What LangChain sends by default: token ids that are not this model's. One vector, or a refusal; docs/http-api.md warns."""
    import openai

    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        one = client.embeddings.create(model="mini", input=[15339, 1917])
        assert len(one.data) == 1
        with pytest.raises(openai.BadRequestError, match="vocabulary, 0 to 30521"):
            client.embeddings.create(model="mini", input=[[9906, 99999]])


# --- LiteLLM, in a process of its own: it leaves event loops and sockets open, which is an error here

PROVIDERS = ("cohere", "jina_ai", "hosted_vllm", "huggingface")
PROGRAM = """
import json, litellm, sys
told = json.loads(sys.argv[1])
texts, embed, rerank = told["texts"], told["embed"], told["rerank"]
vectors = litellm.embedding(model="openai/mini", input=texts, api_base=embed + "/v1", api_key="none", encoding_format="float")
infinity = litellm.embedding(model="infinity/mini", input=texts, api_base=embed, api_key="none")
ranks = {
    p: litellm.rerank(model=p + "/mini", query="cat?", documents=texts, top_n=2, api_base=base, api_key="none").results
    for p, base in (*((p, rerank) for p in told["providers"]), ("infinity", told["plain"]))
}
print("RESULT" + json.dumps({
    "vectors": [d["embedding"] for d in vectors.data],
    "infinity": [d["embedding"] for d in infinity.data],
    "ranks": {p: [(r["index"], r["relevance_score"]) for r in found] for p, found in ranks.items()},
}))
"""


def test_litellm(server, reranker):
    with running(engine(kind="classify", labels=("relevant",)), rerank_documents="text") as plain:
        told = {"texts": TEXTS, "embed": server.url, "rerank": reranker.url, "plain": plain.url, "providers": PROVIDERS}
        ran = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(told)],
            env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},  # else it asks the internet at import
            capture_output=True, text=True, timeout=100,
        )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    got = json.loads(next(x for x in ran.stdout.splitlines() if x.startswith("RESULT")).removeprefix("RESULT"))
    for name in ("vectors", "infinity"):
        np.testing.assert_allclose(got[name], vectors_of(server), rtol=1e-6)
    scores = httpx.post(reranker.url + "/score", json={"queries": "cat?", "documents": TEXTS}).json()["data"]
    for provider in (*PROVIDERS, "infinity"):
        found = got["ranks"][provider]
        assert len(found) == 2, provider
        for at, value in found:
            assert value == pytest.approx(scores[at]["score"])
