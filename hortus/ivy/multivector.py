"""Late interaction: texts to a vector a token as queries and as documents, and the score of the two (MaxSim).

Khattab and Zaharia, arXiv 2004.12832: each vector of the query takes the document's nearest, and their products are summed.
Knows what the folder says (hortus/late.py) and a tokenizer. Does not know JSON or the encoder.
"""

from __future__ import annotations

import numpy as np

from hortus.errors import InvalidInput, StartError
from hortus.ivy import assemble
from hortus.ivy.assemble import Truncate
from hortus.ivy.reading import in_words
from hortus.ivy.tokenize import Tokenizer
from hortus.late import Late
from hortus.types import Float32, Int32, TokenBatch


class Reader:
    """Reads texts the model's way."""

    def __init__(self, late: Late, tokenizer: Tokenizer) -> None:
        """StartError when the tokenizer lacks a token that the model needs."""
        self._late, self._tokenizer = late, tokenizer
        found = [i for i in map(tokenizer.token_id, late.skip) if i is not None]
        self._skipped: Int32 = np.array(found, np.int32)
        self._filler = None if late.expansion is None else tokenizer.token_id(late.expansion.token)
        if late.expansion is not None and self._filler is None:
            raise StartError(f"queries are expanded by {late.expansion.token!r}, which the tokenizer does not know")

    async def read(self, texts: list[str], *, query: bool, truncate: Truncate, field: str) -> TokenBatch:
        """Tokens with a row for each that gets a vector. InvalidInput, TooLong."""
        late, expansion = self._late, self._late.expansion
        name = "query" if query else next((n for n in ("document", "passage", "corpus") if n in late.prompts), "")
        prefix = late.prompts.get(name, "")
        limit = late.query_length if query else late.document_length
        if query and expansion is not None:
            limit = expansion.length if expansion.fixed else max(limit, expansion.length) if limit else None
        most = [n for n in (limit, truncate.limit, self._tokenizer.max_tokens) if n is not None]
        if truncate.limit is None or truncate.limit <= self._tokenizer.max_tokens:  # else it is refused, as everywhere
            truncate = truncate._replace(limit=min(most))
        batch = await self._tokenizer.batch([prefix + t for t in texts], truncate=truncate, field=field)
        if query and expansion is not None and self._filler is not None:
            batch = assemble.filled(batch, expansion.length, self._filler)
        if not (late.skip_queries if query else late.skip_documents) or not len(self._skipped):
            return assemble.every_token(batch)
        batch = assemble.without(batch, self._skipped)
        assert batch.span_counts is not None, "made just now"
        if not batch.span_counts.all():
            at = int(np.flatnonzero(batch.span_counts == 0)[0])
            raise InvalidInput(f"{in_words(field, at)} has no token that gets a vector", param=f"{field}[{at}]")
        return batch


class MaxSim:
    """The scores of documents whose rows come in pieces, in order, perhaps before the queries' rows.

    Of a document only the greatest product with each of the query's vectors is kept.
    """

    def __init__(self, queries: TokenBatch, documents: TokenBatch, *, mean: bool) -> None:
        self._query_counts, self._counts = _counts(queries), _counts(documents)
        self._ends = np.concatenate([[0], np.cumsum(self._counts)])
        self._mean = mean
        self._queries: list[Float32] = []
        self._best: list[Float32 | None] = [None] * len(documents)
        self._early: list[tuple[int, Float32]] = []

    def asked(self, rows: Float32) -> None:
        """All rows of all queries: one query for all documents, or one for each."""
        self._queries = np.split(rows, np.cumsum(self._query_counts)[:-1])
        for first, early in self._early:
            self._take(first, early)
        self._early.clear()

    def found(self, first: int, rows: Float32) -> None:
        """Some of the documents' rows, from row `first` on."""
        if self._queries:
            self._take(first, rows)
        else:
            self._early.append((first, rows))

    def _take(self, first: int, rows: Float32) -> None:
        at = int(np.searchsorted(self._ends, first, "right")) - 1
        end = first + len(rows)
        while at < len(self._counts) and self._ends[at] < end:
            mine = rows[max(self._ends[at] - first, 0) : self._ends[at + 1] - first]
            products = self._query(at) @ mine.T  # [query's vectors, some of the document's]
            best, before = products.max(1), self._best[at]
            self._best[at] = best if before is None else np.maximum(before, best)
            at += 1

    def _query(self, document: int) -> Float32:
        return self._queries[0] if len(self._queries) == 1 else self._queries[document]

    def scores(self) -> Float32:
        """[documents] float32, once all rows have come."""
        sums = []
        for best in self._best:
            assert best is not None, "every document has a row"
            sums.append(best.mean(dtype=np.float64) if self._mean else best.sum(dtype=np.float64))
        return np.array(sums, np.float32)


def _counts(batch: TokenBatch) -> Int32:
    assert batch.span_counts is not None, "a row a token"
    return batch.span_counts
