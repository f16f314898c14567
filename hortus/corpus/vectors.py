"""A window of texts to vectors, by the engine in this process: Ivy's tokens, Tulip's queue, Ivy's outputs.

A window's sequences are sorted by length, cut into full steps, and each step is handed to the scheduler as a work of its own
(Scheduler's merge=False), so that the same window always makes the same steps and gives the same bits. Several windows may
be asked for at once: their steps go to the engine in the order of the calls, so that it never waits for the end of a window.

Does not know files, rows or columns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hortus.corpus import pieces
from hortus.errors import EngineError, InvalidInput, NonFinite, RequestError, StartError, TooLong, first_of
from hortus.ivy import assemble, outputs
from hortus.ivy.embed import Embedder
from hortus.ivy.split import cut
from hortus.types import Encoder, Float32, Int32, TokenBatch

OUTSTANDING_STEPS = 4
"""Steps of all windows that the scheduler holds at once: two that run, two behind them."""
SLICE_CHARS = 256 * 1024
"""Characters cut into chunks at a time."""
_HALF_MAX = 65504.0

TYPES: dict[str, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "int8": np.int8,
    "uint8": np.uint8,
    "binary": np.int8,
    "ubinary": np.uint8,
}
"""What a value is stored as, by precision. Eight bits of binary codes make a value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What vectors are wanted."""

    precision: str = "float32"
    dimensions: int | None = None
    prompt_name: str | None = None
    """As in templates.Prompts: None the default, "" none."""
    truncate: bool | None = None
    """Cut texts that are too long; None takes --auto-truncate."""
    chunk_tokens: int | None = None
    chunk_overlap: int = 0
    contextual: bool = False

    @property
    def chunked(self) -> bool:
        """Whether a text may give several rows."""
        return self.chunk_tokens is not None or self.contextual


@dataclass(slots=True)
class Vectors:
    """What came of one window."""

    rows: npt.NDArray[Any]
    """[rows, values] of TYPES[precision], in order of the texts and, within one, of its chunks."""
    owners: Int32
    """[rows] the text that each row comes from."""
    chunks: Int32 | None = None
    """[rows, 3] number of the chunk in its text, where it begins and ends there (characters); None: a row a text."""
    refused: dict[int, RequestError] = field(default_factory=dict)
    """Texts without rows, and why."""
    tokens: int = 0
    """Run through the model, prompts and special tokens included."""


class Backend(Protocol):
    """Where vectors come from: an engine here, or servers."""

    @property
    def values(self) -> int:
        """Values a stored row."""

    @property
    def busy_s(self) -> float | None:
        """Seconds that the device has been at work; None when nobody here knows."""

    async def vectors(self, texts: Sequence[object]) -> Vectors:
        """A window's vectors. What is not text, or cannot be embedded, is told in `refused`; an error raised ends the run."""


def stored_values(precision: str, dimensions: int) -> int:
    """Values a stored row: for bits one byte for eight."""
    return (dimensions + 7) // 8 if precision in ("binary", "ubinary") else dimensions


def only_text(values: Sequence[object]) -> dict[int, RequestError]:
    """What of the values is no text, and why."""
    refused: dict[int, RequestError] = {}
    for i, value in enumerate(values):
        if type(value) is str:
            if not value.isascii():
                try:
                    value.encode()
                except UnicodeEncodeError as e:
                    refused[i] = InvalidInput(f"the text is not Unicode: half a surrogate pair at character {e.start}")
        elif isinstance(value, RequestError):
            refused[i] = value
        elif value is None:
            refused[i] = InvalidInput("no text: null")
        else:
            refused[i] = InvalidInput(f"no text: {type(value).__name__}")
    return refused


@dataclass(slots=True)
class _Sequences:
    """A window, tokenised."""

    batch: TokenBatch
    owners: list[int]
    """Of each row of the batch, in its order."""
    chunks: list[tuple[int, int, int]] | None


class Local:
    """Backend over one opened model. All methods belong to the scheduler's event loop."""

    def __init__(self, embedder: Embedder, wish: Wish, *, scheduler: Encoder | None = None) -> None:
        """InvalidInput, WrongKind, StartError when the model cannot give such vectors."""
        embedder.need("embed", route="embedding")
        self._embedder, self._wish = embedder, wish
        self._encoder = scheduler or embedder.encoder
        self._dimensions = embedder.dimensions(wish.dimensions)
        if wish.precision not in TYPES:
            raise InvalidInput(
                f"unknown precision {wish.precision!r:.80}; allowed: {', '.join(TYPES)}", param="precision"
            )
        embedder.quantizer.check(wish.precision, self._dimensions)
        self._prompt = embedder.prompts.choose(wish.prompt_name)
        self._adapter = 0 if wish.contextual else embedder.prompts.adapter(wish.prompt_name)
        self._truncate = embedder.truncate(wish.truncate)
        self._steps = asyncio.Semaphore(OUTSTANDING_STEPS)
        self._cut_at = 0
        self._prompt_ids: list[int] = []
        if wish.chunked:
            self._plan_chunks()

    def _plan_chunks(self) -> None:
        """Settle how many of a text's tokens a chunk takes. StartError."""
        wish, tokenizer, info = self._wish, self._embedder.tokenizer, self._embedder.info
        if wish.contextual and not self._embedder.contextual:
            raise StartError(
                f"--contextual needs a contextual embedding model; {info.name} embeds each chunk by itself: leave it out"
            )
        if wish.contextual and wish.chunk_tokens is None:
            raise StartError("--contextual needs --chunk-tokens: how long a chunk is")
        if wish.contextual and wish.chunk_overlap:
            raise StartError("--chunk-overlap does not go with --contextual: each chunk sees the others as it is")
        assert wish.chunk_tokens is not None, "chunked means one of the two"
        if wish.chunk_tokens > info.max_tokens:
            raise StartError(
                f"--chunk-tokens {wish.chunk_tokens}: the model takes at most {info.max_tokens} (--max-length)"
            )
        if self._prompt and not wish.contextual:
            self._prompt_ids = tokenizer.plain_ids(self._prompt)
        special = sum(map(len, tokenizer.around)) + len(self._prompt_ids)
        self._cut_at = wish.chunk_tokens - special
        if self._cut_at <= wish.chunk_overlap:
            raise StartError(
                f"--chunk-tokens {wish.chunk_tokens} leaves {self._cut_at} tokens of text beside {special} special and prompt "
                f"tokens: give more than --chunk-overlap {wish.chunk_overlap} and those"
            )
        if wish.contextual:
            tokenizer.prepare_documents()

    @property
    def values(self) -> int:
        return stored_values(self._wish.precision, self._dimensions)

    @property
    def busy_s(self) -> float | None:
        return getattr(self._encoder, "busy_s", None)

    async def vectors(self, texts: Sequence[object]) -> Vectors:
        """See Backend. Raises NotReady and Draining when the engine is gone."""
        refused = only_text(texts)
        good = [i for i in range(len(texts)) if i not in refused] if refused else list(range(len(texts)))
        found = await self._tokenise([str(texts[i]) for i in good], refused, good)
        rows = np.empty((found.batch.rows, self.values), TYPES[self._wish.precision])
        failed: dict[int, RequestError] = {}
        await self._run(found.batch, rows, failed)
        owners = np.array(found.owners, np.int32)
        for at, error in failed.items():
            refused.setdefault(int(owners[at]), error)
        chunks = None if found.chunks is None else np.array(found.chunks, np.int32).reshape(-1, 3)
        if failed:  # a text with one row that failed has none at all: half a document is no answer
            keep = ~np.isin(owners, [*refused])
            rows, owners, chunks = rows[keep], owners[keep], None if chunks is None else chunks[keep]
        return Vectors(rows, owners, chunks, refused, found.batch.total_tokens)

    # Tokens

    async def _tokenise(self, texts: list[str], refused: dict[int, RequestError], names: list[int]) -> _Sequences:
        """names: what each text is called in `refused`."""
        if self._wish.chunked:
            return await self._chunked(texts, refused, names)
        prompted = [self._prompt + t for t in texts] if self._prompt else texts
        batch, bad = await self._embedder.tokenizer.sift(prompted, truncate=self._truncate)
        refused |= {names[i]: _unnumbered(e, i) for i, e in bad.items()}
        return _Sequences(batch, [n for i, n in enumerate(names) if i not in bad], None)

    async def _chunked(self, texts: list[str], refused: dict[int, RequestError], names: list[int]) -> _Sequences:
        wish, tokenizer = self._wish, self._embedder.tokenizer
        before, after = tokenizer.around
        room = self._embedder.info.max_tokens - len(before) - len(after)
        sequences: list[list[int]] = []
        documents: list[list[list[int]]] = []
        owners: list[int] = []
        chunks: list[tuple[int, int, int]] = []
        for lo, hi in cut([len(t) for t in texts], SLICE_CHARS, 1024):
            found = await tokenizer.tokens(texts[lo:hi], special=False, literal=wish.contextual)
            for i, encoding in enumerate(found, lo):
                ids, offsets = encoding.ids, encoding.offsets
                if (error := self._unfit(texts[i], ids)) is not None:
                    refused[names[i]] = error
                    continue
                ends = pieces.cut(len(ids), self._cut_at, wish.chunk_overlap)
                owners += [names[i]] * len(ends)
                chunks += [(n, offsets[a][0], offsets[b - 1][1]) for n, (a, b) in enumerate(ends)]
                if wish.contextual:
                    runs = pieces.together([b - a for a, b in ends], room, len(tokenizer.separator))
                    documents += [[ids[a:b] for a, b in ends[first:end]] for first, end in runs]
                else:
                    sequences += [[*before, *self._prompt_ids, *ids[a:b], *after] for a, b in ends]
        if wish.contextual:
            return _Sequences(assemble.documents(documents, before, tokenizer.separator, after), owners, chunks)
        return _Sequences(TokenBatch.of(sequences), owners, chunks)

    def _unfit(self, text: str, ids: list[int]) -> RequestError | None:
        """Why a text that is to be cut into chunks cannot be."""
        if not ids:
            return InvalidInput("the text is empty: this model's tokenizer makes no token of it")
        most = self._embedder.tokenizer.max_chars
        if len(text) > most:
            return TooLong(f"the text has {len(text)} characters, at most {most} are read (--max-input-chars)")
        if max(ids) >= self._embedder.info.vocab_size:
            return InvalidInput("the text spells a special token that this model has no embedding for")
        return None

    # Rows

    async def _run(self, batch: TokenBatch, rows: npt.NDArray[Any], failed: dict[int, RequestError]) -> None:
        """Every sequence through the engine, its stored rows into `rows`. failed: rows without a vector, and why."""
        lengths = batch.lengths
        order = np.argsort(-lengths, kind="stable").astype(
            np.int32
        )  # the longest first: what does not fit shows at once
        firsts = _firsts(batch)
        budget = self._embedder.info.batch_tokens

        async def step(which: Int32) -> None:
            async with self._steps:
                await self._step(batch, which, firsts, rows, failed)

        try:
            async with asyncio.TaskGroup() as group:
                for lo, hi in cut(lengths[order], budget, 1024):
                    group.create_task(step(order[lo:hi][::-1]))
        except BaseExceptionGroup as failures:
            raise first_of(failures) from None

    async def _step(
        self, batch: TokenBatch, which: Int32, firsts: Int32, rows: npt.NDArray[Any], failed: dict[int, RequestError]
    ) -> None:
        """One step; one that fails is halved until what is at fault stands alone."""
        try:
            result = await self._encoder.encode(assemble.of_type(take(batch, which), self._adapter))
        except EngineError as e:
            if len(which) > 1:
                half = len(which) // 2
                await self._step(batch, which[:half], firsts, rows, failed)
                await self._step(batch, which[half:], firsts, rows, failed)
            else:
                failed |= dict.fromkeys(range(int(firsts[which[0]]), int(firsts[which[0] + 1])), e)
            return
        at = np.concatenate([np.arange(firsts[i], firsts[i + 1]) for i in which]) if batch.spans is not None else which
        given = result.rows
        finite: npt.NDArray[np.bool_] = np.logical_and.reduce(np.isfinite(given), axis=1)
        if not finite.all():
            error = NonFinite(
                "the model gave NaN or Inf for the text; its number format may not fit the model (--dtype)"
            )
            failed |= {int(row): error for row in at[~finite]}
            given = np.where(finite[:, None], given, np.float32(0))
        rows[at] = self._stored(given, at, failed)

    def _stored(self, given: Float32, at: Int32, failed: dict[int, RequestError]) -> npt.NDArray[Any]:
        wish, embedder = self._wish, self._embedder
        dimensions, normalize = self._dimensions, embedder.info.normalize
        if wish.precision not in ("float32", "float16"):
            return embedder.quantizer.codes(given, wish.precision, dimensions, normalize)
        finished = outputs.finish(given, dimensions, normalize)
        if wish.precision == "float32":
            return finished
        over: npt.NDArray[np.bool_] = np.logical_or.reduce(np.abs(finished) > _HALF_MAX, axis=1)
        if over.any():
            error = NonFinite("the vector has values that float16 cannot hold; use --precision float32")
            failed |= {int(row): error for row in at[over]}
            finished = np.where(over[:, None], np.float32(0), finished)
        return finished.astype(np.float16)


def take(batch: TokenBatch, which: Int32) -> TokenBatch:
    """Some sequences of a batch, in the order of `which`."""
    if batch.spans is not None:  # documents: few and long
        return TokenBatch.merge([batch.slice(int(i), int(i) + 1) for i in which])
    lengths = batch.lengths[which]
    cu = np.zeros(len(which) + 1, np.int32)
    np.cumsum(lengths, out=cu[1:])
    index = np.repeat(batch.cu_seqlens[which] - cu[:-1], lengths) + np.arange(cu[-1], dtype=np.int32)
    return TokenBatch(batch.ids[index], cu)


def _firsts(batch: TokenBatch) -> Int32:
    """[sequences + 1] the first row of each sequence."""
    if batch.span_counts is None:
        return np.arange(len(batch) + 1, dtype=np.int32)
    return np.array([0, *accumulate(batch.span_counts.tolist())], np.int32)


def _unnumbered(error: InvalidInput, i: int) -> InvalidInput:
    """The same without the text's place in a window, which says nothing to a person."""
    return type(error)(error.message.replace(f"input {i} ", "the text ", 1))
