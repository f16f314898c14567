"""How relevant documents are to a query: one rule for the rerank and score routes of every API.

A reranker (a classifier with one label) reads query and document together; its score is what its own files make of its logit
(a CrossEncoder's activation), the sigmoid where they do not say. An
embedding model gives the cosine of the two vectors, with its query and document prompts where it has them. Does not know
JSON.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np

from hortus.errors import InvalidInput, WrongKind
from hortus.ivy import outputs
from hortus.ivy.assemble import Truncate
from hortus.ivy.embed import Done, Embedder, Tokens
from hortus.types import Float32, Timings


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be scored."""

    queries: list[str]
    """One for all documents, or one for each."""
    documents: list[str]
    truncate: Truncate
    most_query: int | None = None
    """Tokens kept of a query; None: all."""
    most_document: int | None = None
    instruction: str | None = None
    """For rerankers whose pair template has a place for one; None: its own."""
    raw: bool | None = None
    """Of a reranker: True its logits, False their sigmoid, None what the model's own files say. Cosines are as they are."""
    query_field: str = "query"
    field: str = "documents"
    """What the request calls them, for errors."""


@dataclass(frozen=True, slots=True)
class Scores:
    """One score a document, in order."""

    values: Float32
    tokens: int
    timings: Timings


async def score(embedder: Embedder, asked: Question, *, deadline: float, route: str) -> Scores:
    """Scores of every document. InvalidInput, TooLong, WrongKind, NonFinite, and what the encoder raises."""
    embedder.need("classify", "embed", route=route)
    for name, most in (("max_tokens_per_query", asked.most_query), ("max_tokens_per_doc", asked.most_document)):
        if most is not None and most < 1:
            raise InvalidInput(f"{name} is {most}; give at least 1", param=name)
    if len(asked.queries) not in (1, len(asked.documents)):
        raise InvalidInput(
            f"{len(asked.queries)} queries for {len(asked.documents)} documents: give one for all, or one for each",
            param=asked.query_field,
        )
    if embedder.info.kind == "embed":
        if asked.instruction is not None:
            raise InvalidInput("an embedding model takes no instruction with a pair", param="instruction")
        return await _cosines(embedder, asked, deadline)
    if embedder.info.width != 1:
        raise WrongKind(
            f"{route} needs a reranker (a classifier with one label) or an embedding model; {embedder.info.name} has "
            f"{embedder.info.width} labels"
        )
    tokens = await embedder.pairs(
        asked.queries,
        asked.documents,
        truncate=asked.truncate,
        most_query=asked.most_query,
        most_document=asked.most_document,
        instruction=asked.instruction,
        field=asked.field,
    )
    done: Done[Float32] = await embedder.run(tokens, lambda first, rows: rows[:, 0], deadline=deadline)
    logits = np.concatenate(done.parts)
    made = embedder.relevance if asked.raw is None else outputs.sigmoid
    return Scores(logits if asked.raw else made(logits), done.tokens, done.timings)


async def _cosines(embedder: Embedder, asked: Question, deadline: float) -> Scores:
    prompts, truncate = embedder.prompts, asked.truncate

    def limited(most: int | None) -> Truncate:
        if most is None:
            return truncate
        return Truncate(True, min(most, embedder.info.max_tokens, truncate.limit or most), truncate.left)

    ones = await embedder.inputs(
        asked.queries,
        truncate=limited(asked.most_query),
        prompt_name=prompts.named("query"),
        field=asked.query_field,
    )
    many = await embedder.inputs(
        asked.documents,
        truncate=limited(asked.most_document),
        prompt_name=prompts.named("document"),
        field=asked.field,
    )

    async def rows(tokens: Tokens) -> Done[Float32]:
        return await embedder.run(tokens, lambda first, rows: outputs.finish(rows, None, True), deadline=deadline)

    # Together, so that they share a step.
    try:
        async with asyncio.TaskGroup() as group:
            left, right = group.create_task(rows(ones)), group.create_task(rows(many))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    one, at, values = np.concatenate(left.result().parts), 0, []
    for part in right.result().parts:
        values.append(outputs.cosines(one[0] if len(one) == 1 else one[at : at + len(part)], part))
        at += len(part)
        await asyncio.sleep(0)
    a, b = left.result().timings, right.result().timings
    timings = Timings(a.tokenize_ms + b.tokenize_ms, max(a.queue_ms, b.queue_ms), max(a.device_ms, b.device_ms))
    return Scores(np.concatenate(values), left.result().tokens + right.result().tokens, timings)


def order(values: Float32, top: int | None) -> list[int]:
    """Indices from the highest score down, equal ones in the order given; at most `top` (None or 0: all)."""
    found: list[int] = np.argsort(-values, kind="stable").tolist()
    return found[:top] if top else found
