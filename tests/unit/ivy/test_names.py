"""Errors speak of fields as the request that they answer does: whatever the dialect, they name what its schema has."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from ivy_stubs import load_once
from models_stubs import client, post

from hortus.ivy.openapi import ROUTES

BODIES = {r.path: r.body for r in ROUTES if r.body}
LONG = "word " * 100
OPENAI: dict[str, Any] = {"model": "mini", "input": "a"}
COHERE: dict[str, Any] = {"model": "mini", "texts": ["a"]}
TWO: dict[str, Any] = {"query": "q", "documents": ["a", "b"]}
PAIR: dict[str, Any] = {"queries": "q", "documents": ["a"]}
TEI: dict[str, Any] = {"inputs": "a"}
ONE: dict[str, Any] = {"source_sentence": "a", "sentences": ["b"]}

# (path, kind of model, what is asked, what the error names, words of its message)
REFUSED = [
    ("/v1/embeddings", "embed", {**OPENAI, "truncate_prompt_tokens": 2}, "truncate_prompt_tokens", "3 to 64"),
    ("/v1/embeddings", "embed", {**OPENAI, "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "-1"),
    ("/v1/embeddings", "embed", {**OPENAI, "truncation_side": "up"}, "truncation_side", "left"),
    ("/v1/embeddings", "embed", {**OPENAI, "dimensions": 99}, "dimensions", "1 to 16"),
    ("/v1/embeddings", "embed", {**OPENAI, "encoding_format": "int8"}, "encoding_format", "--int8-ranges"),
    ("/v1/embeddings", "embed", {**OPENAI, "input": LONG}, "input[0]", "`truncate: true`"),
    ("/v1/embeddings", "embed", {**OPENAI, "input": [7632] * 99}, "input", "`truncate: true`"),
    ("/v1/embeddings", "embed", {**OPENAI, "input_type": "poem"}, "input_type", "query"),
    ("/v2/embed", "embed", {**COHERE, "max_tokens": 2}, "max_tokens", "3 to 64"),
    ("/v2/embed", "embed", {**COHERE, "max_tokens": 0}, "max_tokens", "3 to 64"),
    ("/v2/embed", "embed", {**COHERE, "output_dimension": 99}, "output_dimension", "1 to 16"),
    ("/v2/embed", "embed", {**COHERE, "embedding_types": ["int8"]}, "embedding_types", "--int8-ranges"),
    ("/v2/embed", "embed", {**COHERE, "embedding_types": ["x"]}, "embedding_types", "ubinary"),
    ("/v2/embed", "embed", {**COHERE, "truncate": "LEFT"}, "truncate", "NONE, START, END"),
    ("/v2/embed", "embed", {**COHERE, "texts": ["a", LONG], "truncate": "NONE"}, "texts[1]", "`truncate: END`"),
    ("/v2/embed", "embed", {**COHERE, "input_type": "poem"}, "input_type", "query"),
    ("/rerank", "embed", {**TWO, "max_tokens_per_doc": 2}, "max_tokens_per_doc", "3 to 64"),
    ("/rerank", "embed", {**TWO, "max_tokens_per_query": 2}, "max_tokens_per_query", "3 to 64"),
    ("/rerank", "embed", {**TWO, "max_tokens_per_doc": 9, "truncate_prompt_tokens": 2}, "truncate_prompt_tokens", "3 to"),
    ("/rerank", "reranker", {**TWO, "max_tokens_per_doc": 0}, "max_tokens_per_doc", "at least 1"),
    ("/rerank", "reranker", {**TWO, "max_tokens_per_query": 0}, "max_tokens_per_query", "at least 1"),
    ("/rerank", "reranker", {**TWO, "truncate_prompt_tokens": 4}, "truncate_prompt_tokens", "no room for a pair"),
    ("/rerank", "reranker", {**TWO, "truncation_side": "up"}, "truncation_side", "left"),
    ("/rerank", "reranker", {**TWO, "truncation_direction": "up"}, "truncation_direction", "left"),
    ("/rerank", "reranker", {**TWO, "truncation_direction": "left", "truncation_side": "left"}, "truncation_side", "both"),
    ("/rerank", "reranker", {**TWO, "instruction": "x"}, "instruction", "`instruction`"),
    ("/rerank", "reranker", {**TWO, "instruct": "x"}, "instruct", "`instruct`"),
    ("/rerank", "embed", {**TWO, "instruct": "x"}, "instruct", "`instruct`"),
    ("/rerank", "embed", {**TWO, "instruct": "x", "instruction": "x"}, "instruct", "both"),
    ("/rerank", "reranker", {**TWO, "top_k": -1}, "top_k", "1 or more"),
    ("/rerank", "reranker", {**TWO, "top_n": -1}, "top_n", "1 or more"),
    ("/rerank", "reranker", {**TWO, "top_n": 1, "top_k": 0}, "top_k", "both"),
    ("/rerank", "embed", {"query": "q", "texts": ["a", LONG]}, "texts[1]", "`truncate: true`"),
    ("/rerank", "embed", {"query": "q", "texts": ["a", LONG]}, "texts[1]", "texts[1] has"),
    ("/rerank", "embed", {"query": LONG, "texts": ["a", LONG]}, "query", "query has"),
    ("/v1/rerank", "embed", {"query": LONG, "documents": ["a"]}, "query", "query has"),
    ("/score", "embed", {"text_1": LONG, "text_2": ["a"]}, "text_1", "text_1 has"),
    ("/score", "embed", {"text_1": ["a", LONG], "text_2": ["a", "b"]}, "text_1[1]", "text_1[1] has"),
    ("/v1/embeddings", "embed", {**OPENAI, "input": ["a", LONG]}, "input[1]", "input 1 has"),
    ("/score", "embed", {**PAIR, "max_tokens_per_doc": 2}, "max_tokens_per_doc", "3 to 64"),
    ("/score", "embed", {"text_1": "a", "items": ["b", LONG]}, "items[1]", "`truncate: true`"),
    ("/score", "reranker", {**PAIR, "truncate_prompt_tokens": 4}, "truncate_prompt_tokens", "no room for a pair"),
    ("/classify", "classify", {"input": "a", "truncation_side": "up"}, "truncation_side", "left"),
    ("/classify", "classify", {"input": "a", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens", "3 to 64"),
    ("/embed", "embed", {**TEI, "truncation_direction": "up"}, "truncation_direction", "left"),
    ("/embed", "embed", {**TEI, "dimensions": 0}, "dimensions", "1 to 16"),
    ("/embed", "embed", {**TEI, "prompt_name": "x"}, "prompt_name", "query"),
    ("/embed_all", "embed", {**TEI, "truncation_direction": "up"}, "truncation_direction", "left"),
    ("/embed_sparse", "sparse", {**TEI, "truncation_direction": "up"}, "truncation_direction", "left"),
    ("/predict", "classify", {**TEI, "truncation_direction": "up"}, "truncation_direction", "left"),
    ("/predict", "classify", {**TEI, "parameters": {"top_k": 0}}, "parameters.top_k", "1 or more"),
    ("/predict", "classify", {**TEI, "parameters": {"function_to_apply": "x"}}, "parameters.function_to_apply", "softmax"),
    ("/similarity", "embed", {"inputs": {**ONE, "source_sentence": LONG}}, "inputs.source_sentence", "--max-length"),
    ("/similarity", "embed", {"inputs": {**ONE, "sentences": ["b", LONG]}}, "inputs.sentences[1]", "`parameters.truncate: true`"),
    ("/similarity", "embed", {"inputs": {**ONE, "sentences": []}}, "inputs.sentences", "empty"),
    ("/similarity", "embed", {"inputs": ONE, "parameters": {"prompt_name": "x"}}, "parameters.prompt_name", "query"),
    ("/similarity", "embed", {"inputs": ONE, "parameters": {"truncation_direction": "up"}},
     "parameters.truncation_direction", "left"),
    ("/tokenize", "embed", {**TEI, "prompt_name": "x"}, "prompt_name", "query"),
    ("/decode", "embed", {"ids": [[5], [-1]]}, "ids[1][0]", "vocabulary"),
]  # fmt: skip


@pytest.fixture(scope="module")
def gateways(folder):
    """One of each kind, over a tokenizer read once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hortus.ivy.vocabulary.load", load_once)
        widths = {"reranker": 1, "classify": 3}
        return {
            kind: client(
                folder, kind="classify" if kind == "reranker" else kind, width=widths.get(kind, 16), max_inputs=3
            )
            for kind in ("embed", "reranker", "classify", "sparse", "tokens")
        }


def there(path: str, field: str) -> bool:
    """Whether the route's schema has the field, also as part of another."""
    body: Any = BODIES[path]
    for name in re.sub(r"\[\d+\]", "", field).split("."):
        found = {f.encode_name: f.type for f in msgspec.structs.fields(body)} if body is not None else {}
        if name not in found:
            return False
        kinds = [t for t in getattr(found[name], "__args__", (found[name],)) if isinstance(t, type)]
        body = next((t for t in kinds if issubclass(t, msgspec.Struct)), None)
    return True


@pytest.mark.parametrize(("path", "kind", "asked", "param", "words"), REFUSED, ids=lambda x: str(x)[:50])
async def test_errors_name_what_the_request_has(gateways, path, kind, asked, param, words):
    reply = await post(gateways[kind], path, **asked)
    assert (reply.status, reply.error["param"]) == (400, param), reply.error
    assert words in reply.error["message"]
    named = [name.partition(":")[0] for name in re.findall(r"`([^`]+)`", reply.error["message"])]
    for name in (param, *named):
        assert there(path, name), name


@pytest.mark.parametrize("path", [p for p in BODIES if p not in ("/", "/v1/contextualizedembeddings")])
async def test_too_many_inputs_are_counted_where_they_are(gateways, path):
    many = ["a"] * 4
    asked, kind, param = {
        "/v2/embed": ({**COHERE, "texts": many}, "embed", "texts"),
        "/rerank": ({"query": "q", "texts": many}, "reranker", "texts"),
        "/v1/rerank": ({"query": "q", "documents": many}, "embed", "documents"),
        "/v2/rerank": ({"query": "q", "documents": many}, "embed", "documents"),
        "/score": ({"data_1": "q", "data_2": many}, "embed", "data_2"),
        "/v1/score": ({"text_1": "q", "text_2": many}, "reranker", "text_2"),
        "/classify": ({"input": many}, "classify", "input"),
        "/embed": ({"inputs": many}, "embed", "inputs"),
        "/embed_all": ({"inputs": many}, "tokens", "inputs"),
        "/embed_sparse": ({"inputs": many}, "sparse", "inputs"),
        "/similarity": ({"inputs": {"source_sentence": "q", "sentences": many}}, "embed", "inputs.sentences"),
        "/predict": ({"inputs": [[text] for text in many]}, "classify", "inputs"),
        "/tokenize": ({"inputs": many}, "embed", "inputs"),
        "/decode": ({"ids": [[5]] * 4}, "embed", "ids"),
    }.get(path, ({**OPENAI, "input": many}, "embed", "input"))
    reply = await post(gateways[kind], path, **asked)
    assert (reply.status, reply.error["param"]) == (400, param), reply.error
    assert "--max-inputs" in reply.error["message"]


async def test_ids_longer_than_the_model_takes_can_be_decoded(gateways):
    assert (await post(gateways["embed"], "/decode", ids=[7632] * 99)).json == [" ".join(["hi"] * 99)]
