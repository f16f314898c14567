"""What may enter from the wire: the checks that Ivy makes in process, made again where anyone can speak.

Pure; knows the model's limits. Does not know gRPC.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hortus.errors import InvalidInput, RequestError, TooLong
from hortus.types import ModelInfo, TokenBatch


def faults(batches: Sequence[TokenBatch], info: ModelInfo, max_rows: int, types: int = 0) -> list[RequestError | None]:
    """What is wrong with each batch, None where nothing is. max_rows: rows that fit into one answer. types: how many types of
    tokens the model tells apart; 0: it reads none.

    Ids outside the vocabulary would read past the embedding table, types of tokens past theirs, an empty sequence would divide
    by zero.
    """
    # One sequence is the common case, and of few tokens: Python's own min and max beat numpy's there.
    most, vocabulary = min(info.max_tokens, 64), info.vocab_size
    return [
        None
        if len(b.cu_seqlens) == 2
        and b.spans is None
        and b.token_types is None
        and 0 < len(b.ids) <= most
        and min(ids := b.ids.tolist()) >= 0
        and max(ids) < vocabulary
        else _fault(b, info, max_rows, types)
        for b in batches
    ]


def _fault(batch: TokenBatch, info: ModelInfo, max_rows: int, types: int) -> RequestError | None:
    count = len(batch.cu_seqlens) - 1
    if count == 0:
        return InvalidInput("no sequences", param="input")
    if batch.rows > max_rows:
        return InvalidInput(
            f"{batch.rows} rows asked for at once; at most {max_rows} fit into one message (a limit of the protocol): send "
            "several asks"
        )
    ids = batch.ids
    lengths = batch.lengths
    if lengths.min() < 1:
        at = int(lengths.argmin())
        return InvalidInput(f"sequence {at} is empty", param=f"input[{at}]")
    if lengths.max() > info.max_tokens:
        at = int(lengths.argmax())
        return TooLong(
            f"sequence {at} has {int(lengths[at])} tokens, this model takes at most {info.max_tokens} (--max-length)",
            param=f"input[{at}]",
        )
    if int(ids.min()) < 0 or int(ids.max()) >= info.vocab_size:
        position = int(((ids < 0) | (ids >= info.vocab_size)).argmax())
        at = int(np.searchsorted(batch.cu_seqlens, position, side="right")) - 1
        return InvalidInput(
            f"token id {int(ids[position])} of sequence {at} is outside this model's vocabulary, 0 to {info.vocab_size - 1}",
            param=f"input[{at}]",
        )
    if types and batch.token_types is not None and int(batch.token_types.max()) >= types:
        position = int(batch.token_types.argmax())
        at = int(np.searchsorted(batch.cu_seqlens, position, side="right")) - 1
        return InvalidInput(
            f"token type {int(batch.token_types[position])} of sequence {at} is none of this model's, 0 to {types - 1}",
            param=f"input[{at}]",
        )
    return _span_fault(batch)


def _span_fault(batch: TokenBatch) -> RequestError | None:
    """Spans must be pieces of their own sequences, or rows would be pooled from another request's tokens."""
    if batch.spans is None or batch.span_counts is None:
        return None
    if batch.span_counts.min() < 1:
        at = int(batch.span_counts.argmin())
        return InvalidInput(f"sequence {at} has no span, others of the same ask have", param=f"input[{at}]")
    owners = np.repeat(np.arange(len(batch)), batch.span_counts)
    first, end = batch.spans[:, 0], batch.spans[:, 1]
    bad = (first < batch.cu_seqlens[owners]) | (end > batch.cu_seqlens[owners + 1]) | (first >= end)
    if not bad.any():
        return None
    at = int(owners[bad.argmax()])
    return InvalidInput(f"a span of sequence {at} is empty or leaves its sequence", param=f"input[{at}]")
