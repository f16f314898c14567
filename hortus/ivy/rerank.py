"""Reranking and classifying in the shapes of Cohere, Jina, vLLM and TEI: /rerank, /v1/rerank, /v2/rerank, /score, /classify.

One body and one answer serve Cohere, Jina and vLLM: each reads its own fields of it. TEI's is told by `texts`, Infinity's by
`raw_scores` beside `documents`. Does not know how a score comes about.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import orjson

from hortus.errors import InvalidInput
from hortus.ivy.body import Asked, check_model, reader
from hortus.ivy.embed import Done, Embedder
from hortus.ivy.exchange import Answer, Request, body_of
from hortus.ivy.lists import around, listed
from hortus.ivy.openai import timed, truncation
from hortus.ivy.scores import Question, order, score
from hortus.types import Float32


def either(asked: RerankRequest, one: str, other: str) -> tuple[Any, str]:
    """(value, name) of a field that two APIs name differently; InvalidInput when both are given."""
    first, second = getattr(asked, one), getattr(asked, other)
    if first is not None and second is not None:
        raise InvalidInput(f"give `{one}` or `{other}`, not both", param=other)
    return (first, one) if second is None else (second, other)


class RerankRequest(Asked):
    """The body of /rerank, /v1/rerank and /v2/rerank."""

    query: str
    documents: list[str | dict[str, Any]] | None = None
    """Texts, or objects with a `text` (or the `rank_fields`)."""
    texts: list[str] | None = None
    """TEI's name for `documents`: the answer has TEI's shape then."""
    model: str | None = None
    top_n: int | None = None
    """Most results; 0: all."""
    top_k: int | None = None
    """The same, as Voyage spells it."""
    return_documents: bool | None = None
    """Default: true on /rerank and /v1/rerank (Jina, vLLM), false on /v2/rerank (Cohere)."""
    rank_fields: list[str] | None = None
    """Of documents that are objects: the fields to read, default `text`."""
    max_tokens_per_doc: int | None = None
    max_tokens_per_query: int | None = None
    truncate: bool | None = None
    """Cut pairs that are too long, the longer text first. Default: --auto-truncate."""
    truncation_direction: str | None = None
    """left or right (TEI)."""
    truncate_prompt_tokens: int | None = None
    """Cut pairs to so many tokens; -1: to what the model takes (vLLM)."""
    truncation_side: str | None = None
    """left or right (vLLM)."""
    raw_scores: bool | None = None
    """true: a reranker's logits, false: their sigmoid (TEI, Infinity). Default: the sigmoid in TEI's shape, else what the model's
    own files say. With `documents` the answer has Infinity's shape: a document is a text, not an object."""
    return_text: bool | None = None
    """Repeat the texts in the answer (TEI)."""
    instruction: str | None = None
    """What relevance is to mean, for rerankers that read an instruction (vLLM)."""
    instruct: str | None = None
    """The same, as SGLang spells it."""

    def names(self) -> Mapping[str, str]:
        twice = {"truncation_side": "truncation_direction", "instruction": "instruct"}
        return {ours: theirs for ours, theirs in twice.items() if getattr(self, ours) is None and getattr(self, theirs)}


class ScoreRequest(Asked):
    """The body of /score and /v1/score. One query for all documents, or one for each."""

    queries: str | list[str] | None = None
    """Also spelt text_1, data_1."""
    documents: str | list[str] | None = None
    """Also spelt items, text_2, data_2."""
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    items: str | list[str] | None = None
    model: str | None = None
    truncate: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    max_tokens_per_doc: int | None = None
    max_tokens_per_query: int | None = None
    instruction: str | None = None
    """What relevance is to mean, for rerankers that read an instruction (vLLM)."""


class ClassifyRequest(Asked):
    """The body of /classify."""

    input: str | list[str]
    model: str | None = None
    truncate: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    raw_scores: bool | None = None
    """Given: the answer has Infinity's shape, a list of labels with their scores for each text; true: logits."""


_rerank, _score, _classify = reader(RerankRequest), reader(ScoreRequest), reader(ClassifyRequest)


def text_of(document: str | dict[str, Any], at: int, fields: list[str] | None) -> str:
    """A document's text. InvalidInput when an object lacks a field, or holds something else than text in it."""
    if isinstance(document, str):
        return document
    fields = fields or ["text"]
    for name in fields:
        if not isinstance(document.get(name), str):
            raise InvalidInput(
                f"documents[{at}] has no text in its field {name!r:.80} (rank_fields)", param=f"documents[{at}]"
            )
    return document[fields[0]] if len(fields) == 1 else "\n".join(f"{n}: {document[n]}" for n in fields)


class Rerank:
    """The handlers. `model` gives the opened model, or raises NotReady or Draining."""

    def __init__(self, model: Callable[[], Embedder]) -> None:
        self._model = model

    async def rerank(self, request: Request) -> Answer:
        begin = time.perf_counter()
        embedder = self._model()
        asked = _rerank(request)
        check_model(asked.model, embedder.info.name)
        if (asked.documents is None) == (asked.texts is None):
            raise InvalidInput("give documents (Cohere, Jina, vLLM) or texts (TEI)", param="documents")
        tei = asked.documents is None
        given: list[str | dict[str, Any]] = [*(asked.documents or asked.texts or [])]
        top, of = either(asked, "top_n", "top_k")
        if top is not None and top < 0:
            raise InvalidInput(f"`{of}` is {top}; give 1 or more, or 0 for all", param=of)
        side, _ = either(asked, "truncation_direction", "truncation_side")
        instruction, _ = either(asked, "instruction", "instruct")
        question = Question(
            queries=[asked.query],
            documents=[text_of(d, i, asked.rank_fields) for i, d in enumerate(given)],
            truncate=truncation(embedder, asked.truncate, asked.truncate_prompt_tokens, side),
            most_query=asked.max_tokens_per_query,
            most_document=asked.max_tokens_per_doc,
            instruction=instruction,
            raw=bool(asked.raw_scores) if tei else asked.raw_scores,
            field="texts" if tei else "documents",
        )
        scores = await score(embedder, question, deadline=request.deadline, route=request.path)
        values = scores.values
        found = order(values, top)
        if tei:
            parts = await listed(
                {"index": i, "score": values[i], **({"text": question.documents[i]} if asked.return_text else {})}
                for i in found
            )
            return timed(body_of(b"[", parts, b"]"), scores.timings, begin)
        second = request.path.startswith("/v2")
        infinity = asked.raw_scores is not None
        shown = not (second or infinity) if asked.return_documents is None else asked.return_documents
        plain = infinity or embedder.plain_documents

        def result(i: int) -> dict[str, Any]:
            told = {"index": i, "relevance_score": values[i]}
            return told | {"document": question.documents[i] if plain else _shown(given[i], i)} if shown else told

        before = {
            "id": request.name,
            "object": "rerank" if infinity else "list",
            "created": int(time.time()),
            "model": embedder.info.name,
        }
        after = {
            "usage": {"prompt_tokens": scores.tokens, "total_tokens": scores.tokens},
            "meta": {
                "api_version": {"version": "2" if second else "1"},
                "billed_units": {"search_units": 1},
                "tokens": {"input_tokens": scores.tokens},
            },
        }
        body = around(before, "results", await listed(map(result, found)), after)
        return timed(body, scores.timings, begin)

    async def score(self, request: Request) -> Answer:
        begin = time.perf_counter()
        embedder = self._model()
        asked = _score(request)
        check_model(asked.model, embedder.info.name)
        query_field, queries = _only(asked, "queries", "text_1", "data_1")
        field, documents = _only(asked, "documents", "items", "text_2", "data_2")
        question = Question(
            queries=queries,
            documents=documents,
            truncate=truncation(embedder, asked.truncate, asked.truncate_prompt_tokens, asked.truncation_side),
            most_query=asked.max_tokens_per_query,
            most_document=asked.max_tokens_per_doc,
            instruction=asked.instruction,
            query_field=query_field,
            field=field,
        )
        scores = await score(embedder, question, deadline=request.deadline, route=request.path)
        told = self._list(request, embedder, scores.tokens)
        entries = ({"index": i, "object": "score", "score": value} for i, value in enumerate(scores.values))
        return timed(around(told, "data", await listed(entries), {}), scores.timings, begin)

    async def classify(self, request: Request) -> Answer:
        begin = time.perf_counter()
        embedder = self._model()
        asked = _classify(request)
        check_model(asked.model, embedder.info.name)
        embedder.need("classify", route=request.path)
        tokens = await embedder.inputs(
            [asked.input] if isinstance(asked.input, str) else asked.input,
            truncate=truncation(embedder, asked.truncate, asked.truncate_prompt_tokens, asked.truncation_side),
        )
        done: Done[Float32] = await embedder.run(
            tokens,
            lambda first, rows: rows if asked.raw_scores else embedder.probabilities(rows),
            deadline=request.deadline,
        )
        rows = np.concatenate(done.parts)
        names = labels(embedder)
        told = self._list(request, embedder, done.tokens)
        if asked.raw_scores is not None:
            told["object"] = "classify"
            parts = await listed(ranked(row, names) for row in rows)
        else:
            parts = await listed(
                {"index": i, "label": names[int(row.argmax())], "probs": row, "num_classes": len(row)}
                for i, row in enumerate(rows)
            )
        return timed(around(told, "data", parts, {}), done.timings, begin)

    def _list(self, request: Request, embedder: Embedder, tokens: int) -> dict[str, Any]:
        return {
            "id": request.name,
            "object": "list",
            "created": int(time.time()),
            "model": embedder.info.name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }


def labels(embedder: Embedder) -> list[str]:
    """The classifier's labels, by transformers' own names where it has none."""
    return list(embedder.info.labels) or [f"LABEL_{i}" for i in range(embedder.info.width)]


def ranked(row: Float32, names: list[str]) -> list[dict[str, Any]]:
    """TEI's list of labels with their scores, the highest first."""
    return [{"score": row[i], "label": names[i]} for i in order(row, None)]


def _shown(document: str | dict[str, Any], at: int) -> dict[str, str] | orjson.Fragment:
    """A document as the answer repeats it. InvalidInput when it can be read and not written.

    An object is written by what has read it: orjson takes no number beyond 64 bits, and nothing nested as deeply.
    """
    if isinstance(document, str):
        return {"text": document}
    try:
        return orjson.Fragment(msgspec.json.encode(document))
    except RecursionError:  # fewer calls were under way when it was read
        raise InvalidInput(f"documents[{at}] is nested too deeply", param=f"documents[{at}]") from None


def _only(asked: ScoreRequest, *names: str) -> tuple[str, list[str]]:
    """(name, texts) of the one field given among several spellings."""
    given = [n for n in names if getattr(asked, n) is not None]
    if len(given) != 1:
        raise InvalidInput(f"give one of {', '.join(names)}", param=names[0])
    value = getattr(asked, given[0])
    return given[0], [value] if isinstance(value, str) else value
