"""What went wrong for users of other servers, as whole kinds of fault, on every route that takes text.

The numbers are those of a list of public reports. What is not here is elsewhere: bodies and limits in test_nasty_bodies,
clients that leave and dead engines in test_lifecycle, draining in test_drain, folders and lengths in the unit tests of folder
and tokenizer.
"""

from __future__ import annotations

import base64
import json
import re

import httpx
import numpy as np
import psutil
import pytest
from gateway_server import FOLDER, running
from small_models import pplx_folder

from hortus.errors import OutOfMemory
from hortus.tulip.fake import FakeEngine

MODEL = {"model": "mini"}
ROUTES = {
    "/v1/embeddings": lambda texts: {**MODEL, "input": texts},
    "/embed": lambda texts: {"inputs": texts},
    "/embed_all": lambda texts: {"inputs": texts},
    "/v2/embed": lambda texts: {**MODEL, "texts": texts, "truncate": "NONE"},
    "/rerank": lambda texts: {"query": "q", "texts": texts},
    "/v1/rerank": lambda texts: {"query": "q", "documents": texts},
    "/v2/rerank": lambda texts: {"query": "q", "documents": texts},
    "/score": lambda texts: {"queries": "q", "documents": texts},
    "/similarity": lambda texts: {"inputs": {"source_sentence": "q", "sentences": texts}},
}


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A tokenizer that adds nothing to a text, as pplx-embed's and Qwen3's: an empty text has no tokens."""
    folder = pplx_folder(tmp_path_factory.mktemp("bare"), name="mini")
    with (
        running(FakeEngine(name="mini", width=32, vocab_size=300, max_tokens=64), folder=folder) as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        yield client


def error(reply: httpx.Response) -> dict:
    assert 400 <= reply.status_code < 500, reply.text
    return reply.json()["error"]


def vectors(reply: httpx.Response) -> np.ndarray:
    assert reply.status_code == 200, reply.text
    return np.array([d["embedding"] for d in reply.json()["data"]])


# 1, 2, 3, 4: an empty text


@pytest.mark.parametrize("path", ROUTES)
def test_an_empty_text_is_named_and_hurts_nobody_else(bare, path):
    told = error(bare.post(path, json=ROUTES[path](["a", "", "b"])))
    assert told["code"] == "invalid_input"
    assert "[1]" in told["param"]
    assert bare.post(path, json=ROUTES[path](["a", "b"])).status_code == 200


@pytest.mark.parametrize("path", ROUTES)
def test_an_empty_text_is_a_text_where_the_tokenizer_adds_tokens(http, path):
    assert http.post(path, json=ROUTES[path](["a", "", "b"])).status_code == 200


# 8, 11, 12: text that is no text, and control characters


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("escape", ["\\ud83d", "\\udbc0", "x \\udc00 y"])
def test_lone_surrogates_are_refused_before_they_reach_a_tokenizer(http, path, escape):
    body = json.dumps(ROUTES[path](["HERE", "b"])).replace("HERE", escape)
    assert error(http.post(path, content=body))["code"] == "invalid_input"


@pytest.mark.parametrize("path", ROUTES)
def test_control_characters_are_text_on_every_route(http, path):
    for text in ("a\x00b", "\x07\x1b[0m", "\ufeff", "\u202e\u0000", "\x7f"):
        assert http.post(path, json=ROUTES[path]([text])).status_code == 200


# 13, 14, 15: too long


@pytest.mark.parametrize("path", ROUTES)
def test_too_long_says_both_numbers_and_can_be_cut(http, path):
    long = "word " * 600
    told = error(http.post(path, json=ROUTES[path](["a", long])))
    assert told["code"] == "context_length_exceeded"
    assert "602" in told["message"]
    assert "256" in told["message"]
    cut = ROUTES[path](["a", long])
    if path == "/v2/embed":
        cut["truncate"] = "END"
    elif path == "/similarity":
        cut["parameters"] = {"truncate": True}
    else:
        cut["truncate"] = True
    assert http.post(path, json=cut).status_code == 200


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank", "/score"])
@pytest.mark.parametrize(
    "how", [{"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": 100}, {"max_tokens_per_doc": 100}]
)
def test_every_peers_way_to_cut_documents_works(http, path, how):
    assert http.post(path, json={**ROUTES[path](["word " * 600]), **how}).status_code == 200
    for nonsense in ("yes", 1.5, [], {}):
        assert (
            error(http.post(path, json={**ROUTES[path](["a"]), next(iter(how)): nonsense}))["code"] == "invalid_input"
        )


# 21, 22, 24: token ids


@pytest.mark.parametrize("ids", [[-1], [30522], [2**31 - 1], [2**31], [2**63], [-(2**70)]])
@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed", "/embed_all", "/decode"])
def test_ids_outside_the_vocabulary_never_reach_the_engine(http, server, path, ids):
    steps = server.engine.steps
    fields = {"ids": [[5], ids]} if path == "/decode" else ROUTES[path]([[5], ids])
    assert "[1]" in error(http.post(path, json=fields))["param"]
    assert server.engine.steps == steps
    assert http.post("/v1/embeddings", json=ROUTES["/v1/embeddings"]([[1, 2, 3]])).status_code == 200


# 26 to 30: encodings


def test_an_encoding_is_honoured_or_refused(http):
    for name in ("float", "base64", "ubinary", "binary", "base64_binary"):
        reply = http.post("/v1/embeddings", json={**MODEL, "input": "a", "encoding_format": name})
        assert isinstance(reply.json()["data"][0]["embedding"], str if name.startswith("base64") else list)
    for name in ("BASE64", "Float", "base-64", "", "int4", "fp16"):
        told = error(http.post("/v1/embeddings", json={**MODEL, "input": "a", "encoding_format": name}))
        assert told["param"] == "encoding_format"
        assert "base64_binary" in told["message"]


# 32: products of int8


def test_similarity_of_a_quantised_model_is_computed_in_floats(bare):
    reply = bare.post("/similarity", json={"inputs": {"source_sentence": "abc", "sentences": ["abc", "xyz"]}})
    assert reply.json()[0] == pytest.approx(1)
    assert -1 <= reply.json()[1] <= 1


# 33, 34, 35: dimensions


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed", "/v2/embed"])
def test_dimensions_are_given_cut_and_bounded(http, path):
    field = "output_dimension" if path == "/v2/embed" else "dimensions"

    def ask(n: int) -> httpx.Response:
        return http.post(path, json={**ROUTES[path](["a"]), field: n})

    for n in (1, 100, 384):
        told = ask(n).json()
        row = (
            told[0]
            if path == "/embed"
            else told["data"][0]["embedding"]
            if "data" in told
            else told["embeddings"]["float"][0]
        )
        assert len(row) == n
        assert np.linalg.norm(row) == pytest.approx(1, abs=1e-5)
    for n in (0, -1, 385, 4096, 10**30):
        assert "1 to 384" in error(ask(n))["message"]


# 47 to 50: a vector depends on its own text alone


def test_vectors_do_not_depend_on_their_neighbours_or_places(http):
    rng = np.random.default_rng(5)
    texts = [" ".join(["word"] * int(n)) + f" {i}" for i, n in enumerate(rng.integers(1, 200, 60))]
    together = vectors(http.post("/v1/embeddings", json={**MODEL, "input": texts}))
    order = rng.permutation(60)
    shuffled = vectors(http.post("/v1/embeddings", json={**MODEL, "input": [texts[i] for i in order]}))
    np.testing.assert_array_equal(together[order], shuffled)
    for i in (0, 17, 59):
        np.testing.assert_array_equal(
            vectors(http.post("/v1/embeddings", json={**MODEL, "input": texts[i]}))[0], together[i]
        )


# 7, 55, 59: zero and not a number


def test_not_a_number_is_an_error_in_every_encoding_and_on_every_route():
    engine = FakeEngine.like(FOLDER)
    engine.nan_id = 7592  # "hello"
    with running(engine) as server, httpx.Client(base_url=server.url) as client:
        for name in ("float", "base64", "ubinary"):
            reply = client.post("/v1/embeddings", json={**MODEL, "input": ["a", "hello"], "encoding_format": name})
            assert (reply.status_code, reply.json()["error"]["param"]) == (500, "input[1]")
        for path, fields in ROUTES.items():
            reply = client.post(path, json=fields(["a", "hello"]))
            assert (reply.status_code, reply.json()["error"]["code"]) == (500, "non_finite"), path
            assert client.post(path, json=fields(["a"])).status_code == 200


class Zeros(FakeEngine):
    """Every row is zero, as pooling gives for a model whose values cancel."""

    def step(self, batch):
        lazy = super().step(batch)
        lazy._rows = np.zeros_like(lazy._rows)
        return lazy


def test_zero_stays_zero_and_is_json_on_every_route():
    with running(Zeros.like(FOLDER)) as server, httpx.Client(base_url=server.url) as client:
        for path, fields in ROUTES.items():
            told = client.post(path, json=fields(["a", "b"]))
            assert told.status_code == 200, path
            assert "null" not in told.text.replace('"null"', ""), path
            numbers = re.findall(r'(?:"embedding":|"score":|"relevance_score":|"float":|^)\[*(-?[\d.e-]+)', told.text)
            assert {float(n) for n in numbers} == {0.0}, path


# 66: rerankers' clients


def test_results_are_sorted_and_top_n_holds(http):
    documents = [f"document {i}" for i in range(20)]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        got = http.post(path, json={**MODEL, "query": "q", "documents": documents, "top_n": 7}).json()["results"]
        scores = [r["relevance_score"] for r in got]
        assert len(got) == 7
        assert scores == sorted(scores, reverse=True)
        assert set(got[0]) >= {"index", "relevance_score"}


# 72, 73: many inputs


@pytest.mark.parametrize("path", ROUTES)
def test_many_inputs_are_one_answer_or_a_clear_limit(http, path):
    assert http.post(path, json=ROUTES[path](["a"] * 1029)).status_code == 200
    told = error(http.post(path, json=ROUTES[path](["a"] * 8200)))
    assert "--max-inputs" in told["message"]


# 79, 81: memory


@pytest.mark.parametrize("path", ["/rerank", "/embed"])
def test_memory_does_not_grow_with_requests(http, path):
    """Large ones, one after the other: what they need is given back, or used again."""
    texts = ["word " * 800] * 100 if path == "/embed" else ["some words of a document"] * 500
    body = json.dumps({**ROUTES[path](texts), "truncate": True}).encode()

    def rounds(count: int) -> int:
        for _ in range(count):
            assert http.post(path, content=body).status_code == 200
        return psutil.Process().memory_info().rss

    before = rounds(3)
    assert rounds(6) - before < 40e6


# 82: series


def test_the_number_of_series_does_not_grow(http):
    def series() -> int:
        return sum(1 for line in http.get("/metrics").text.splitlines() if not line.startswith("#"))

    before = series()
    for i in range(30):
        http.post("/embed", json={"inputs": "x " * i})
        http.get(f"/nothing/{i}")
    assert series() == before


# 88: a request that does not fit the device


class Small(FakeEngine):
    """A device with memory for 300 tokens."""

    def step(self, batch):
        if batch.total_tokens > 300:
            raise OutOfMemory("the device is full; lower --max-batch-tokens")
        return super().step(batch)


def test_a_request_that_exceeds_memory_fails_alone():
    with running(Small.like(FOLDER)) as server, httpx.Client(base_url=server.url) as client:
        for path, fields in ROUTES.items():
            big = client.post(path, json=fields(["word " * 100] * 4))
            assert (big.status_code, big.json()["error"]["code"]) == (503, "out_of_memory"), path
            assert "retry-after" in big.headers
            assert client.post(path, json=fields(["word"])).status_code == 200
        assert client.get("/ready").status_code == 200


# 21: ids and the text that they spell, in base64


def test_flat_ids_are_one_input(http):
    reply = http.post("/v1/embeddings", json={**MODEL, "input": [101, 7592, 102], "encoding_format": "base64"})
    text = http.post("/v1/embeddings", json={**MODEL, "input": "hello", "encoding_format": "base64"})
    assert [d["embedding"] for d in reply.json()["data"]] == [d["embedding"] for d in text.json()["data"]]
    assert len(base64.b64decode(reply.json()["data"][0]["embedding"])) == 4 * 384
