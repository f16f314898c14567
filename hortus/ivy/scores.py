"""How relevant documents are to a query: one rule for the rerank and score routes of every API.

A reranker (a classifier with one label) reads query and document together; its score is what its own files make of its logit
(a CrossEncoder's activation), the sigmoid where they do not say. An embedding model gives the cosine of the two vectors, with
its query and document prompts where it has them; a late-interaction model MaxSim. Does not know JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from hortus.errors import InvalidInput, RequestError, WrongKind, first_of
from hortus.ivy import outputs
from hortus.ivy.assemble import Truncate
from hortus.ivy.embed import Done, Embedder, Tokens
from hortus.ivy.multivector import MaxSim
from hortus.types import Float32, Timings

A = TypeVar("A")
B = TypeVar("B")


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
    with only(asked.query_field if len(asked.queries) == 1 else None):
        return await _score(embedder, asked, deadline, route)


@contextlib.contextmanager
def only(field: str | None) -> Iterator[None]:
    """Errors about the only text of a field call it by the field."""
    try:
        yield
    except RequestError as e:
        first = f"{field}[0]"
        if field is not None and e.param == first:
            e.param, e.message = field, e.message.replace(first, field, 1)
        raise


async def _score(embedder: Embedder, asked: Question, deadline: float, route: str) -> Scores:
    late = embedder.late is not None  # else its folder does not say how queries are read
    embedder.need("classify", "embed", *(["tokens"] if late else []), route=route)
    for name, most in (("max_tokens_per_query", asked.most_query), ("max_tokens_per_doc", asked.most_document)):
        if most is not None and most < 1:
            raise InvalidInput(f"`{name}` is {most}; give at least 1", param=name)
    if len(asked.queries) not in (1, len(asked.documents)):
        raise InvalidInput(
            f"{len(asked.queries)} queries for {len(asked.documents)} documents: give one for all, or one for each",
            param=asked.query_field,
        )
    if embedder.info.kind != "classify":
        if asked.instruction is not None:
            raise InvalidInput("an embedding model takes no `instruction` with a pair", param="instruction")
        return await (_cosines if embedder.info.kind == "embed" else _nearest)(embedder, asked, deadline)
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


def _limited(embedder: Embedder, truncate: Truncate, most: int | None, field: str) -> Truncate:
    """How texts are cut of which at most so many tokens are asked to be kept. `field` says so."""
    if most is None:
        return truncate
    most = min(most, embedder.info.max_tokens)
    if truncate.limit is not None and truncate.limit < most:
        return truncate._replace(on=True)
    return Truncate(True, most, truncate.left, field)


async def _nearest(embedder: Embedder, asked: Question, deadline: float) -> Scores:
    """MaxSim, for late interaction. Documents' rows are scored as they come, and dropped."""
    late = embedder.folder.late
    assert late is not None, "asked only where it says how texts are read"
    ones = await embedder.vectors(
        asked.queries,
        query=True,
        truncate=_limited(embedder, asked.truncate, asked.most_query, "max_tokens_per_query"),
        field=asked.query_field,
    )
    many = await embedder.vectors(
        asked.documents,
        query=False,
        truncate=_limited(embedder, asked.truncate, asked.most_document, "max_tokens_per_doc"),
        field=asked.field,
    )
    maxsim = MaxSim(ones.batch, many.batch, mean=late.mean)

    async def queries() -> Done[Float32]:
        done: Done[Float32] = await embedder.run(ones, lambda first, rows: rows, deadline=deadline)
        maxsim.asked(np.concatenate(done.parts))
        return done

    left, right = await _both(queries(), embedder.run(many, maxsim.found, deadline=deadline, values=1))
    return Scores(maxsim.scores(), left.tokens + right.tokens, _joined(left.timings, right.timings))


async def _both(one: Coroutine[None, None, Done[A]], other: Coroutine[None, None, Done[B]]) -> tuple[Done[A], Done[B]]:
    """Together, so that they share a step. The first failure cancels the other."""
    try:
        async with asyncio.TaskGroup() as group:
            left, right = group.create_task(one), group.create_task(other)
    except BaseExceptionGroup as failures:
        raise first_of(failures) from None
    return left.result(), right.result()


def _joined(a: Timings, b: Timings) -> Timings:
    return Timings(a.tokenize_ms + b.tokenize_ms, max(a.queue_ms, b.queue_ms), max(a.device_ms, b.device_ms))


async def _cosines(embedder: Embedder, asked: Question, deadline: float) -> Scores:
    prompts, truncate = embedder.prompts, asked.truncate
    ones = await embedder.inputs(
        asked.queries,
        truncate=_limited(embedder, truncate, asked.most_query, "max_tokens_per_query"),
        prompt_name=prompts.named("query"),
        field=asked.query_field,
    )
    many = await embedder.inputs(
        asked.documents,
        truncate=_limited(embedder, truncate, asked.most_document, "max_tokens_per_doc"),
        prompt_name=prompts.named("document"),
        field=asked.field,
    )
    return await cosines(embedder, ones, many, deadline)


async def cosines(embedder: Embedder, ones: Tokens, many: Tokens, deadline: float) -> Scores:
    """Of one text, or one for each, with each of many. NonFinite, and what the encoder raises."""

    async def rows(tokens: Tokens) -> Done[Float32]:
        return await embedder.run(tokens, lambda first, rows: outputs.finish(rows, None, True), deadline=deadline)

    left, right = await _both(rows(ones), rows(many))
    one, at, values = np.concatenate(left.parts), 0, []
    for part in right.parts:
        values.append(outputs.cosines(one[0] if len(one) == 1 else one[at : at + len(part)], part))
        at += len(part)
        await asyncio.sleep(0)
    return Scores(np.concatenate(values), left.tokens + right.tokens, _joined(left.timings, right.timings))


def order(values: Float32, top: int | None) -> list[int]:
    """Indices from the highest score down, equal ones in the order given; at most `top` (None or 0: all)."""
    found: list[int] = np.argsort(-values, kind="stable").tolist()
    return found[:top] if top else found
