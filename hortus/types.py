"""The nouns of Hortus, all of them, in one file.

Knows numpy and nothing else of ours. Does not know text, HTTP, gRPC or torch: `ivy`, `tulip` and `rose` never import
one another, they meet in the types and Protocols below.

A request's way, by noun:

    text --ivy--> TokenBatch --tulip--> TokenBatch (merged) --rose--> LazyTensor --tulip--> Result --ivy--> answer
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
UInt8 = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]
T = TypeVar("T")


@lru_cache(maxsize=4096)
def bounds_of_one(tokens: int) -> Int32:
    """[2] int32, 0 and `tokens`: cu_seqlens of one sequence, made once for each length. Cannot be written to."""
    bounds = np.array((0, tokens), np.int32)
    bounds.flags.writeable = False
    return bounds


@dataclass(slots=True, eq=False)
class TokenBatch:
    """Several token sequences packed into one row, without padding.

    The one shape in which token ids travel: Ivy makes it from text, Tulip slices and merges it, ROSE runs it, and it is
    what goes over the wire. Sequence `i` is `ids[cu_seqlens[i]:cu_seqlens[i + 1]]`; no sequence is empty (Ivy refuses
    those by index before they get here). Never changed once made; frozen it would cost four times as much to make.
    """

    ids: Int32
    """[total_tokens] int32, filled by ivy/tokenize; checked there against the vocabulary."""
    cu_seqlens: Int32
    """[sequences + 1] int32, cumulative lengths, starts with 0 (FlashAttention's name and layout)."""
    token_types: UInt8 | None = None
    """[total_tokens] uint8 segment of a pair; None means all zero. Filled by ivy/tokenize."""
    spans: Int32 | None = None
    """[rows, 2] int32 token ranges (first, end) in the packed row, in order of their sequences, each inside one sequence and
    not empty: one row of the result is pooled from each. None: one row a sequence, from all its tokens. Filled by Ivy, for
    chunks of a document and for a vector a token."""
    span_counts: Int32 | None = None
    """[sequences] int32 spans of each sequence, at least one; None exactly when `spans` is."""

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.cu_seqlens) - 1

    @property
    def total_tokens(self) -> int:
        return len(self.ids)

    @property
    def rows(self) -> int:
        """Rows that the result will have."""
        return len(self.cu_seqlens) - 1 if self.spans is None else len(self.spans)

    @property
    def span_rows(self) -> int:
        """Spans; 0 when there are none."""
        return 0 if self.spans is None else len(self.spans)

    @property
    def span_tokens(self) -> int:
        """Tokens of all spans together; 0 when there are none."""
        return 0 if self.spans is None else int((self.spans[:, 1] - self.spans[:, 0]).sum())

    def rows_of(self, lo: int, hi: int) -> tuple[int, int]:
        """(first row, end) of sequences lo..hi-1 in the result."""
        if self.span_counts is None:
            return lo, hi
        first = int(self.span_counts[:lo].sum())
        return first, first + int(self.span_counts[lo:hi].sum())

    @property
    def lengths(self) -> Int32:
        """[sequences] int32 token counts."""
        return self.cu_seqlens[1:] - self.cu_seqlens[:-1]

    @property
    def max_seqlen(self) -> int:
        return int(self.lengths.max()) if len(self) else 0

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]]) -> TokenBatch:
        """Pack lists of ids."""
        if len(sequences) == 1:  # the same in fewer calls: most requests have one
            return cls(np.array(sequences[0], np.int32), bounds_of_one(len(sequences[0])))
        cu = np.array([*accumulate(map(len, sequences), initial=0)], np.int32)
        ids = np.fromiter(chain.from_iterable(sequences), np.int32, int(cu[-1]))
        return cls(ids, cu)

    def slice(self, lo: int, hi: int) -> TokenBatch:
        """Sequences lo..hi-1. Views of the ids, no copy; cu_seqlens starts at 0 again."""
        if hi - lo == len(self.cu_seqlens) - 1:
            return self
        a, b = int(self.cu_seqlens[lo]), int(self.cu_seqlens[hi])
        types = None if self.token_types is None else self.token_types[a:b]
        cu = self.cu_seqlens[lo : hi + 1] - np.int32(a)
        if self.spans is None or self.span_counts is None:
            return TokenBatch(self.ids[a:b], cu, types)
        first, end = self.rows_of(lo, hi)
        return TokenBatch(self.ids[a:b], cu, types, self.spans[first:end] - np.int32(a), self.span_counts[lo:hi])

    @staticmethod
    def merge(parts: Sequence[TokenBatch]) -> TokenBatch:
        """The sequences of all parts in order, in one batch. One part is returned as it is."""
        if len(parts) == 1:
            return parts[0]
        ids = np.concatenate([p.ids for p in parts])
        sizes, starts = [len(p.cu_seqlens) - 1 for p in parts], [0, *accumulate([len(p.ids) for p in parts])]
        if sizes.count(1) == len(sizes):  # the same in fewer calls: most requests have one
            cu = np.array(starts, np.int32)
        else:
            # Numpy calls a part are what this costs, so ends are joined and shifted rather than lengths taken and summed.
            cu = np.zeros(sum(sizes) + 1, np.int32)
            np.concatenate([p.cu_seqlens[1:] for p in parts], out=cu[1:])
            cu[1:] += np.repeat(np.array(starts[:-1], np.int32), sizes)
        if all(p.token_types is None and p.spans is None for p in parts):
            return TokenBatch(ids, cu)
        types: UInt8 | None = None
        if any(p.token_types is not None for p in parts):
            types = np.concatenate(
                [p.token_types if p.token_types is not None else np.zeros(len(p.ids), np.uint8) for p in parts]
            )
        if all(p.spans is None for p in parts):
            return TokenBatch(ids, cu, types)
        spans = np.concatenate([p._all_spans() + np.int32(at) for p, at in zip(parts, starts[:-1], strict=True)])
        counts = [np.ones(len(p), np.int32) if p.span_counts is None else p.span_counts for p in parts]
        return TokenBatch(ids, cu, types, spans, np.concatenate(counts))

    def _all_spans(self) -> Int32:
        """The spans, also where None stands for one a sequence."""
        return np.stack([self.cu_seqlens[:-1], self.cu_seqlens[1:]], axis=1) if self.spans is None else self.spans


@dataclass(slots=True)
class Timings:
    """Where the time of one request went, in milliseconds. Each field says who fills it."""

    tokenize_ms: float = 0.0
    """ivy/tokenize."""
    queue_ms: float = 0.0
    """tulip: from enqueue to the first of its batches being handed to the engine."""
    device_ms: float = 0.0
    """tulip: from handing the first batch over to the last batch's rows being on the host."""
    total_ms: float = 0.0
    """ivy: from the body being read to the answer being encoded."""


class Together:
    """Rows that came at once, for what can be made once for all who share them."""

    __slots__ = ("_made", "rows")

    def __init__(self, rows: Float32) -> None:
        self.rows = rows
        """[rows, width]."""
        self._made: dict[Any, Any] = {}

    def once(self, make: Callable[[Float32], T]) -> T:
        """make(rows), made for the first who asks."""
        try:
            found: T = self._made[make]
        except KeyError:
            found = self._made[make] = make(self.rows)
        return found


def all_finite(rows: Float32) -> bool:
    """Whether one product tells that every value is finite: the sum of squares. False tells nothing: large ones overflow."""
    flat = rows.reshape(-1)
    return math.isfinite(flat.dot(flat))


@dataclass(slots=True, eq=False)
class Result:
    """What an Encoder answers for one TokenBatch."""

    rows: Float32
    """[rows, width] float32, in the order of the sequences (and of their spans). Not yet cut, normalised or quantised."""
    timings: Timings = field(default_factory=Timings)
    together: Together | None = None
    """The rows of a step, or of a message, that these are a part of, `first` the first of them."""
    first: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """What an engine says of the model it holds. Filled by the engine, shown at start and in /info."""

    name: str
    """The name requests must use (a hub id, or the folder's name, or --served-model-name)."""
    revision: str | None = None
    """Hub commit, when known."""
    family: str = "fake"
    """The architecture, as config.json's model_type says it."""
    width: int
    """Values a row, before any cut to `dimensions`; for a classifier its labels, for a sparse model its vocabulary."""
    kind: str = "embed"
    """What a row is: embed (a vector), classify (a logit a label; one label: a reranker's score), sparse (a weight a
    vocabulary entry), tokens (a vector a token, late interaction)."""
    labels: tuple[str, ...] = ()
    """A classifier's label names, in order."""
    max_tokens: int
    """Longest sequence, special tokens included (the sentence-transformers limit when the folder has one)."""
    vocab_size: int
    normalize: bool = False
    """Rows are to be divided by their L2 norm after cutting (the model ends in a Normalize module)."""
    pooling: str = "mean"
    dtype: str = "float32"
    device: str = "cpu"
    attention: str = "none"
    """Attention backend and why it was chosen, one line for a person."""
    parameters: int = 0
    batch_tokens: int = 16384
    """Tokens a step at which this engine on this device runs at full throughput: Tulip's budget unless overridden."""
    bulk_tokens: int = 0
    """The same where no short text waits behind a step, as in `hortus embed`; 0: as batch_tokens."""

    def in_words(self) -> str:
        """What a row is, for a person."""
        if self.kind == "tokens":
            return f"{self.width} values a token, scored by MaxSim"
        if self.kind == "sparse":
            return f"a weight for each of {self.width} entries of the vocabulary"
        if self.kind == "classify" and self.width == 1:
            return f"a score a pair ({', '.join(self.labels) or 'one label'}), {self.pooling} pooling"
        if self.kind == "classify":
            more = ", ..." if len(self.labels) > 8 else ""
            return f"a logit for each of {self.width} labels: {', '.join(self.labels[:8])}{more}"
        return (
            f"{self.width} values a text, {self.pooling} pooling, {'normalised' if self.normalize else 'as they are'}"
        )


class LazyTensor(Protocol):
    """The rows of one step, perhaps not computed yet."""

    def ready(self) -> bool:
        """True once result() would not wait. Never blocks, callable from any thread."""

    def result(self) -> Float32:
        """[rows, width] float32 on the host. Waits without holding the GIL; raises EngineError on a failed step.

        The array belongs to the caller: the engine does not write to it again.
        """


class Engine(Protocol):
    """ROSE's whole interface. The fake in tulip/fake.py obeys it too."""

    @property
    def info(self) -> ModelInfo: ...

    def quick(self, batch: TokenBatch) -> bool:
        """Whether `step` would only enqueue this batch, in well under a millisecond and waiting for nothing: then Tulip calls
        it on its event loop, which saves two threads' waking each other. Asked right before that step."""

    def step(self, batch: TokenBatch) -> LazyTensor:
        """Enqueue one batch. Called from one thread at a time (Tulip's loop or its step thread); several may be in flight.

        A device engine returns as soon as the work is enqueued. A CPU engine has nothing to overlap with and returns a
        finished result.
        """

    def close(self) -> None:
        """Free the device. Idempotent; no step is in flight when it is called."""


class Encoder(Protocol):
    """What Ivy sends token batches to: Tulip in this process, or a stub for one far away."""

    async def encode(self, batch: TokenBatch, *, deadline: float | None = None) -> Result:
        """Rows for every sequence (every span of it, where the batch has spans), in order.

        deadline: time.monotonic() seconds after which the answer is of no use. Cancelling the awaiting task drops what
        has not been started. Raises Overloaded, DeadlineExceeded, Draining, EngineError (see errors.py).
        """
