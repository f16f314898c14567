"""Text or token ids to finished vectors: the part that every family of routes shares.

Knows prompts, tokens, chunks and an Encoder. Does not know JSON, HTTP, or how an answer is written down.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from hortus.config import IvyConfig
from hortus.errors import InvalidInput
from hortus.folder import ModelFolder
from hortus.ivy import outputs
from hortus.ivy.split import split
from hortus.ivy.templates import Prompts
from hortus.ivy.tokenize import Tokenizer
from hortus.metrics import Metrics
from hortus.types import Encoder, Float32, ModelInfo, Timings, TokenBatch

OUTSTANDING_CHUNKS = 3
"""Chunks of one request that the encoder holds at once: two for the device to overlap, one waiting behind them. However
large a request is, another's tokens never wait behind more of it than that."""
SLICE_VALUES = 32 * 1024
"""Values finished and written down before the event loop gets its turn: about a millisecond as JSON numbers."""

Texts = list[str]
Ids = list[list[int]]
Write = Callable[[int, Float32], bytes]
"""(index of the first row, rows) -> their part of the answer."""
Run = Callable[[int, TokenBatch], Awaitable[tuple[bytes, Timings]]]


@dataclass(frozen=True, slots=True)
class Embedded:
    """What came of one request."""

    parts: list[bytes]
    """What `write` made of the rows, in order."""
    tokens: int
    """Tokens run through the model, prompts and special tokens included."""
    timings: Timings
    """tokenize_ms, queue_ms (of the chunk that waited longest), device_ms (from the first start to the last end)."""


class Embedder:
    """One opened model, as Ivy sees it."""

    def __init__(
        self, folder: ModelFolder, info: ModelInfo, encoder: Encoder, config: IvyConfig, metrics: Metrics
    ) -> None:
        """Reads the tokenizer: takes up to seconds for large vocabularies. StartError."""
        self.info, self.encoder = info, encoder
        self.prompts = Prompts(folder.prompts, folder.default_prompt_name)
        self.tokenizer = Tokenizer(
            folder,
            max_tokens=info.max_tokens,
            vocab_size=info.vocab_size,
            inline_chars=config.tokenize_inline_chars,
            threads=config.tokenize_threads,
        )
        self._config, self._metrics = config, metrics

    def close(self) -> None:
        self.tokenizer.close()

    async def embed(
        self,
        inputs: Texts | Ids,
        write: Write,
        *,
        deadline: float,
        prompt_name: str | None = None,
        truncate: bool | None = None,
        dimensions: int | None = None,
        flat: bool = False,
    ) -> Embedded:
        """Vectors of every input, written by `write` chunk by chunk as they come.

        inputs: all texts, or all lists of ids. deadline: time.monotonic() seconds. truncate: None takes --auto-truncate.
        flat: one list of ids was written without its outer brackets. Raises InvalidInput, TooLong, NonFinite, and what the
        encoder raises; then nothing of this request stays behind in the encoder.
        """
        if not inputs:
            raise InvalidInput("input is an empty list", param="input")
        if len(inputs) > self._config.max_inputs:
            raise InvalidInput(
                f"{len(inputs)} inputs in one request, this server takes at most {self._config.max_inputs} (--max-inputs)",
                param="input",
            )
        if dimensions is not None and not 1 <= dimensions <= self.info.width:
            raise InvalidInput(
                f"dimensions is {dimensions}, this model can give 1 to {self.info.width}", param="dimensions"
            )
        begin = time.perf_counter()
        batch = await self._tokens(
            inputs, prompt_name, self._config.auto_truncate if truncate is None else truncate, flat
        )
        tokenized = time.perf_counter() - begin
        self._metrics.tokenize_seconds.observe(tokenized)
        self._metrics.request_tokens.observe(batch.total_tokens)

        async def run(lo: int, chunk: TokenBatch) -> tuple[bytes, Timings]:
            result = await self.encoder.encode(chunk, deadline=deadline)
            step = max(1, SLICE_VALUES // result.rows.shape[1])
            if len(result.rows) <= step:
                return finished(lo, result.rows), result.timings
            pieces = []
            for at in range(0, len(result.rows), step):
                pieces.append(finished(lo + at, result.rows[at : at + step]))
                await asyncio.sleep(0)
            return b",".join(pieces), result.timings

        def finished(first: int, rows: Float32) -> bytes:
            outputs.check_finite(rows, first)
            return write(first, outputs.finish(rows, dimensions, self.info.normalize))

        parts, timings = await _run_all(run, split(batch, self.info.batch_tokens))
        timings.tokenize_ms = tokenized * 1e3
        return Embedded(parts, batch.total_tokens, timings)

    async def _tokens(self, inputs: Texts | Ids, prompt_name: str | None, truncate: bool, flat: bool) -> TokenBatch:
        ids = [x for x in inputs if isinstance(x, list)]
        prompt = self.prompts.choose(prompt_name, ids=bool(ids))
        if ids:
            return self.tokenizer.pack(ids, truncate=truncate, flat=flat)
        texts = [x for x in inputs if isinstance(x, str)]
        return await self.tokenizer.batch([prompt + t for t in texts] if prompt else texts, truncate=truncate)


async def _run_all(run: Run, chunks: Sequence[TokenBatch]) -> tuple[list[bytes], Timings]:
    """Run every chunk, OUTSTANDING_CHUNKS at a time, answers in order. The first failure cancels the rest."""
    if len(chunks) == 1:
        part, timings = await run(0, chunks[0])
        return [part], Timings(queue_ms=timings.queue_ms, device_ms=timings.device_ms)
    parts: list[bytes] = [b""] * len(chunks)
    begin, queue_ms, first_start = time.perf_counter(), 0.0, float("inf")
    firsts = itertools.accumulate(map(len, chunks), initial=0)
    waiting = iter(enumerate(zip(firsts, chunks, strict=False)))

    async def worker() -> None:
        nonlocal queue_ms, first_start
        for i, (lo, chunk) in waiting:
            sent = time.perf_counter()
            parts[i], timings = await run(lo, chunk)
            queue_ms = max(queue_ms, timings.queue_ms)
            first_start = min(first_start, sent + timings.queue_ms / 1e3)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(OUTSTANDING_CHUNKS, len(chunks))):
                group.create_task(worker())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    device_ms = (time.perf_counter() - max(first_start, begin)) * 1e3
    return parts, Timings(queue_ms=queue_ms, device_ms=device_ms)
