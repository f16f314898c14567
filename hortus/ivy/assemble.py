"""Token ids put together: pairs, documents of chunks, one vector a token. Pure; does not know a tokenizer.

Everything here ends in one TokenBatch, so that whatever a route asks for goes the same way from here on.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hortus.types import Int32, TokenBatch

Ids = list[int]


class Truncate(NamedTuple):
    """What becomes of an input that is too long."""

    on: bool = False
    """Cut it; else it is refused."""
    limit: int | None = None
    """Tokens, special ones included; None: as many as the model takes."""
    left: bool | None = None
    """Cut its beginning off; None: the side that the model's tokenizer_config.json names, the end by default."""
    field: str = "truncate_prompt_tokens"
    """Where the limit comes from, for errors."""


class Frame(NamedTuple):
    """What a tokenizer puts around two texts, as ids with their token types."""

    before: Ids
    between: Ids
    after: Ids
    types: tuple[list[int], int, list[int], int, list[int]] | None
    """Of before, left, between, right, after; None when all are zero."""

    @property
    def special(self) -> int:
        """Tokens beside those of the texts."""
        return len(self.before) + len(self.between) + len(self.after)


def shortened(ids: Ids, most: int | None, left: bool) -> Ids:
    """At most so many of the ids, from the side that is kept."""
    if most is None or len(ids) <= most:
        return ids
    return ids[len(ids) - most :] if left else ids[:most]


def longest_first(left: int, right: int, room: int) -> tuple[int, int]:
    """(tokens kept of the left text, of the right), where the longer one loses first: transformers' `longest_first`."""
    if left + right <= room:
        return left, right
    short, long = min(left, right), max(left, right)
    long = short if short > room else max(short, room - short)
    if short + long > room:
        short = room // 2
        long = short + room % 2
    return (short, long) if left <= right else (long, short)


def pairs(lefts: Sequence[Ids], rights: Sequence[Ids], frame: Frame) -> TokenBatch:
    """One sequence a pair, framed; token types where the frame has them. The texts fit already."""
    sequences = [[*frame.before, *a, *frame.between, *b, *frame.after] for a, b in zip(lefts, rights, strict=True)]
    batch = TokenBatch.of(sequences)
    if frame.types is None:
        return batch
    before, left, between, right, after = frame.types
    types: list[int] = []
    for a, b in zip(lefts, rights, strict=True):
        types += before + [left] * len(a) + between + [right] * len(b) + after
    return TokenBatch(batch.ids, batch.cu_seqlens, np.array(types, np.uint8))


def documents(chunks: Sequence[Sequence[Ids]], before: Ids, separator: Ids, after: Ids) -> TokenBatch:
    """One sequence a document: its chunks with the separator between them, and a span for each chunk, without separators.

    The spans come from the chunks' lengths, so nothing that a chunk says can make another.
    """
    sequences: list[Ids] = []
    spans: list[tuple[int, int]] = []
    start = 0
    for document in chunks:
        ids = list(before)
        for i, chunk in enumerate(document):
            if i:
                ids += separator
            spans.append((start + len(ids), start + len(ids) + len(chunk)))
            ids += chunk
        ids += after
        sequences.append(ids)
        start += len(ids)
    batch = TokenBatch.of(sequences)
    counts = np.array([len(d) for d in chunks], np.int32)
    return TokenBatch(batch.ids, batch.cu_seqlens, None, np.array(spans, np.int32).reshape(-1, 2), counts)


def of_type(batch: TokenBatch, number: int) -> TokenBatch:
    """The same sequences, all tokens of one type; 0: as they are."""
    if number == 0:
        return batch
    types = np.full(batch.total_tokens, number, np.uint8)
    return TokenBatch(batch.ids, batch.cu_seqlens, types, batch.spans, batch.span_counts)


def every_token(batch: TokenBatch) -> TokenBatch:
    """The same sequences with a row for each token, special ones included."""
    at = np.arange(batch.total_tokens, dtype=np.int32)
    return TokenBatch(batch.ids, batch.cu_seqlens, batch.token_types, np.stack([at, at + 1], axis=1), batch.lengths)


def without(batch: TokenBatch, skipped: Int32) -> TokenBatch:
    """The same sequences with a row for each token that is not one of `skipped`."""
    at = np.flatnonzero(~np.isin(batch.ids, skipped)).astype(np.int32)
    ends = np.searchsorted(at, batch.cu_seqlens)
    return TokenBatch(
        batch.ids, batch.cu_seqlens, batch.token_types, np.stack([at, at + 1], axis=1), np.diff(ends).astype(np.int32)
    )


def filled(batch: TokenBatch, length: int, token: int) -> TokenBatch:
    """Every sequence of one text with `token` behind it, up to `length` tokens."""
    sequences = [batch.ids[a:b].tolist() for a, b in itertools.pairwise(batch.cu_seqlens.tolist())]
    return TokenBatch.of([ids + [token] * (length - len(ids)) for ids in sequences])


def owners(batch: TokenBatch) -> list[int]:
    """The sequence that each row comes from."""
    counts = np.ones(len(batch), np.int32) if batch.span_counts is None else batch.span_counts
    return np.repeat(np.arange(len(batch)), counts).tolist()
