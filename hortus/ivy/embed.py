"""From texts, ids or pairs to rows: the part that every route of every API shares.

Two verbs: `texts`, `ids`, `pairs`, `documents` make Tokens; `run` sends them through the encoder, chunk by chunk, and hands
the rows to whoever writes them down. Knows prompts, tokens, chunks and an Encoder. Does not know JSON or HTTP.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from hortus.config import IvyConfig
from hortus.errors import InvalidInput, Overloaded, StartError, WrongKind, first_of
from hortus.folder import ModelFolder
from hortus.ivy import assemble, multivector, outputs, templates
from hortus.ivy.assemble import Truncate
from hortus.ivy.split import split
from hortus.ivy.tokenize import Tokenizer
from hortus.metrics import Metrics
from hortus.types import Encoder, Float32, ModelInfo, Timings, TokenBatch, all_finite

OUTSTANDING_CHUNKS = 3
"""Chunks of one request that the encoder holds at once: two for the device to overlap, one waiting behind them. However
large a request is, another's tokens never wait behind more of it than that."""
SLICE_VALUES = 32 * 1024
"""Values finished and written down before the event loop gets its turn: about a millisecond as JSON numbers."""

TOGETHER_VALUES = 8 * SLICE_VALUES
"""Most values of a step that are finished in one go for all who share it: half a millisecond."""
VALUE_BYTES = 8
"""Of answers that are text, /tokenize and /decode, so many bytes count as one of --max-answer-values."""

T = TypeVar("T")
Write = Callable[[int, Float32], T]
"""(index of the first row, rows as the engine gave them) -> what the answer needs of them."""
Run = Callable[[int, TokenBatch], Awaitable[tuple[list[T], Timings]]]
Texts = list[str]
Ids = list[list[int]]

WHAT = {
    "embed": "an embedding model",
    "classify": "a classifier",
    "sparse": "a sparse embedding model",
    "tokens": "a late-interaction model",
}


@dataclass(slots=True)
class Tokens:
    """A request, tokenised."""

    batch: TokenBatch
    seconds: float
    """What tokenising took."""
    field: str = "input"
    """What the request calls its inputs, for errors."""


@dataclass(slots=True)
class Done(Generic[T]):
    """What came of one request."""

    parts: list[T]
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
        self.info, self.encoder, self.folder = info, encoder, folder
        self._config, self._metrics = config, metrics
        self._truncate = Truncate(config.auto_truncate)
        self.model_json = msgspec.json.encode(info.name)
        """The model's name as it stands in answers."""
        self.prompts = self.read_prompts()
        self.tokenizer = Tokenizer(
            folder,
            max_tokens=info.max_tokens,
            vocab_size=info.vocab_size,
            inline_chars=config.tokenize_inline_chars,
            threads=config.tokenize_threads,
            max_chars=config.max_input_chars,
            apart=config.tokenize_apart,
        )
        ranges = None if config.int8_ranges is None else outputs.read_ranges(config.int8_ranges)
        if ranges is not None and ranges.shape[1] > info.width:
            raise StartError(f"--int8-ranges: {ranges.shape[1]} dimensions, the model has {info.width}")
        own = any(m.kind == "FlexibleQuantizer" for m in folder.modules)
        self.quantizer = outputs.Quantizer(tanh=own, ranges=None if own else ranges)
        self.late = None
        if info.kind == "tokens" and folder.late is not None:
            self.late = multivector.Reader(folder.late, self.tokenizer)
        self.contextual = contextual(folder.config)
        if self.contextual:
            self.tokenizer.prepare_documents()
        # A classifier that says so gives independent yes or no answers; others choose one of their labels.
        independent = folder.config.get("problem_type") == "multi_label_classification" or info.width == 1
        self.probabilities = outputs.sigmoid if independent else outputs.softmax
        one = info.kind == "classify" and info.width == 1
        self.activation = (folder.activation or "Sigmoid") if one else None
        self.relevance = outputs.activation(self.activation)
        self.plain_documents = config.rerank_documents == "text"

    def close(self) -> None:
        self.tokenizer.close()

    def read_prompts(self) -> templates.Prompts:
        """The model's prompts and those of --templates. StartError."""
        folder, pair = self.folder, None
        if self.info.kind == "classify" and self.info.width == 1:
            pair = templates.pair_of(folder.config)
            if (
                pair is not None and folder.default_prompt_name is not None
            ):  # a CrossEncoder's prompt is its instruction
                pair = dataclasses.replace(pair, instruction=folder.prompts[folder.default_prompt_name])
        prompts = templates.Prompts(folder.prompts, folder.default_prompt_name, pair, folder.adapters)
        if self._config.templates is not None:
            prompts = templates.read(self._config.templates, prompts)
            if folder.prompts_apart and any(prompts.texts.values()):
                raise StartError(
                    f"--templates {self._config.templates}: [prompts] for a model that leaves a prompt's tokens out of pooling "
                    "(include_prompt false in its Pooling's config.json), which is not supported"
                )
        architecture = str((folder.config.get("architectures") or [""])[0])
        if self.info.kind == "classify" and prompts.pair is None and architecture.endswith("ForCausalLM"):
            raise StartError(
                f"{self.info.name} reads query and document in words of its own, and how is not known for "
                f"{self.info.family}: give `pair` in a file for --templates"
            )
        return prompts

    def need(self, *kinds: str, route: str) -> None:
        """WrongKind unless the model is of one of these kinds."""
        if self.info.kind not in kinds:
            raise WrongKind(
                f"{route} needs {' or '.join(WHAT[k] for k in kinds)}; "
                f"{self.info.name} is {WHAT.get(self.info.kind, self.info.kind)}"
            )

    def dimensions(self, asked: int | None) -> int:
        """Values a vector; InvalidInput when the model has no such vectors."""
        if asked is None:
            return self.info.width
        if not 1 <= asked <= self.info.width:
            raise InvalidInput(
                f"`dimensions` is {asked}, this model can give 1 to {self.info.width}", param="dimensions"
            )
        return asked

    def truncate(self, on: bool | None = None, limit: int | None = None, left: bool | None = None) -> Truncate:
        """on: None takes --auto-truncate."""
        if on is None and limit is None and left is None:
            return self._truncate
        return Truncate(self._config.auto_truncate if on is None else on, limit, left)

    # Tokens

    async def inputs(
        self,
        inputs: Sequence[Any],
        *,
        truncate: Truncate,
        prompt_name: str | None = None,
        flat: bool = False,
        field: str = "input",
    ) -> Tokens:
        """Texts, or lists of ids. flat: one list of ids was written without its outer brackets. InvalidInput, TooLong."""
        begin = time.perf_counter()
        self.count(len(inputs), field)
        ids = isinstance(inputs[0], list)
        prompt = self.prompts.choose(prompt_name, ids=ids)
        if ids:
            batch = await self.tokenizer.packed(inputs, truncate=truncate, flat=flat, field=field)
        else:
            texts = [prompt + t for t in inputs] if prompt else inputs
            batch = await self.tokenizer.batch(texts, truncate=truncate, field=field)
        batch = assemble.of_type(batch, self.prompts.adapter(prompt_name, ids=ids))
        return self._tokens(batch, begin, field)

    async def pairs(
        self,
        queries: list[str],
        documents: list[str],
        *,
        truncate: Truncate,
        most_query: int | None = None,
        most_document: int | None = None,
        instruction: str | None = None,
        field: str = "documents",
    ) -> Tokens:
        """Pairs as the model reads them; one query may stand for all. InvalidInput, TooLong.

        Where the tokenizer frames them, the model's default prompt goes before the query, as with a CrossEncoder.
        """
        begin = time.perf_counter()
        self.count(len(documents), field)
        pair = self.prompts.pair
        if instruction is not None and (pair is None or not pair.takes_instruction()):
            raise InvalidInput("this model takes no `instruction` with a pair", param="instruction")
        prompt = self.prompts.choose(None) if pair is None else ""
        if most_query is not None and (pair is not None or prompt):
            queries, most_query = await self.tokenizer.shorten(queries, most_query), None
        if pair is None:
            queries = [prompt + q for q in queries] if prompt else queries
            batch = await self.tokenizer.pairs(
                queries, documents, truncate=truncate, most_left=most_query, most_right=most_document, field=field
            )
            return self._tokens(batch, begin, field)
        if most_document is not None:
            documents = await self.tokenizer.shorten(documents, most_document)
        queries = queries * len(documents) if len(queries) == 1 else queries
        if len(pair.pieces) > 1:
            texts = [pair.texts(q, d, instruction) for q, d in zip(queries, documents, strict=True)]
            batch = await self.tokenizer.pieces(texts, pair.cut, documents, truncate=truncate, field=field)
        else:
            batch = await self.tokenizer.joined(
                queries, documents, functools.partial(pair.text, instruction), truncate=truncate, field=field
            )
        return self._tokens(batch, begin, field)

    async def documents(self, documents: list[list[str]], *, truncate: Truncate, field: str = "input") -> Tokens:
        """Documents of chunks: one row a chunk. InvalidInput, TooLong."""
        begin = time.perf_counter()
        self.count(len(documents), field)
        for i, document in enumerate(documents):
            if not document:
                raise InvalidInput(f"document {i} has no chunks", param=f"{field}[{i}]")
        return self._tokens(await self.tokenizer.documents(documents, truncate=truncate, field=field), begin, field)

    async def vectors(
        self, inputs: Sequence[Any], *, query: bool, truncate: Truncate, flat: bool = False, field: str = "input"
    ) -> Tokens:
        """Texts as a late-interaction model reads queries, or documents: a row for each token that gets a vector. Ids are
        taken as they are. InvalidInput, TooLong."""
        begin = time.perf_counter()
        self.count(len(inputs), field)
        assert self.late is not None, "asked only of late-interaction models"
        if isinstance(inputs[0], list):
            batch = await self.tokenizer.packed(inputs, truncate=truncate, flat=flat, field=field)
            batch = assemble.every_token(batch)
        else:
            batch = await self.late.read([*inputs], query=query, truncate=truncate, field=field)
        return self._tokens(batch, begin, field)

    async def told(self, texts: AsyncIterator[bytes], field: str) -> list[bytes]:
        """What the tokenizer writes of a request, slice by slice. InvalidInput when it would be too much for one answer."""
        parts, size, most = [], 0, self._config.max_answer_values
        async for part in texts:
            parts.append(part)
            size += len(part)
            if size > most * VALUE_BYTES:
                raise InvalidInput(
                    f"an answer of more than {most * VALUE_BYTES} bytes: at most {most} values are given in one, and "
                    f"{VALUE_BYTES} bytes of text count as one (--max-answer-values); send fewer inputs",
                    param=field,
                )
        return parts

    def every_token(self, tokens: Tokens) -> Tokens:
        """The same with a row for each token."""
        return Tokens(assemble.every_token(tokens.batch), tokens.seconds, tokens.field)

    def count(self, count: int, field: str) -> None:
        if not count:
            raise InvalidInput(f"{field} is an empty list", param=field)
        if count > self._config.max_inputs:
            raise InvalidInput(
                f"{count} inputs in one request, at most {self._config.max_inputs} are taken (--max-inputs)",
                param=field,
            )

    def _tokens(self, batch: TokenBatch, begin: float, field: str) -> Tokens:
        seconds = time.perf_counter() - begin
        self._metrics.tokenize_seconds.observe(seconds)
        self._metrics.request_tokens.observe(len(batch.ids))
        return Tokens(batch, seconds, field)

    # Rows

    async def run(
        self,
        tokens: Tokens,
        write: Write[T],
        *,
        deadline: float,
        values: int | None = None,
        make: Callable[[Float32], Float32] | None = None,
    ) -> Done[T]:
        """Every row, checked to be finite and handed to `write` chunk by chunk as they come.

        deadline: time.monotonic() seconds. values: how many of a row go into the answer; default all. make: what is made of each
        row by itself before; of rows that came together it is made once for all who ask for the same. Raises InvalidInput when
        the answer would be too large, NonFinite, and what the encoder raises; then nothing of this request stays behind in the
        encoder.
        """
        batch = tokens.batch
        size = batch.rows * (values or self.info.width)
        if size > self._config.max_answer_values:
            raise InvalidInput(
                f"{batch.rows} rows of {values or self.info.width} values are {size} numbers in one answer, at "
                f"most {self._config.max_answer_values} are given (--max-answer-values); send fewer inputs",
                param=tokens.field,
            )

        async def run(lo: int, chunk: TokenBatch) -> tuple[list[T], Timings]:
            result = await self.encoder.encode(chunk, deadline=deadline)
            rows, together = result.rows, result.together
            finite = together is not None and together.once(all_finite)
            step = max(1, SLICE_VALUES // rows.shape[1])
            if len(rows) <= step:
                if make is not None and finite and together is not None and together.rows.size <= TOGETHER_VALUES:
                    made = together.once(make)[result.first : result.first + len(rows)]
                    return [write(lo, made)], result.timings
                return [finished(lo, rows, finite)], result.timings
            pieces = []
            for at in range(0, len(rows), step):
                pieces.append(finished(lo + at, rows[at : at + step], finite))
                await asyncio.sleep(0)
            return pieces, result.timings

        def finished(first: int, rows: Float32, finite: bool) -> T:
            if not finite:
                outputs.check_finite(rows, lambda i: self._name(tokens, first + i))
            return write(first, rows if make is None else make(rows))

        chunks = split(batch, self.info.batch_tokens)
        parts, timings = await (run(0, batch) if len(chunks) == 1 else _run_all(run, chunks))
        timings.tokenize_ms = tokens.seconds * 1e3
        return Done(parts, len(batch.ids), timings)

    def _name(self, tokens: Tokens, row: int) -> str:
        """What the request calls the input of a row."""
        at = row if tokens.batch.spans is None else assemble.owners(tokens.batch)[row]
        return f"{tokens.field}[{at}]"


def contextual(config: dict[str, Any]) -> bool:
    """Whether config.json is that of a model trained to embed chunks in the context of their document."""
    classes = config.get("auto_map")
    return isinstance(classes, dict) and str(classes.get("AutoModel", "")).endswith("ContextualModel")


async def _run_all(run: Run[T], chunks: Sequence[TokenBatch]) -> tuple[list[T], Timings]:
    """Run every chunk, OUTSTANDING_CHUNKS at a time, answers in order. The first failure cancels the rest.

    A full queue is no failure while others of the request's chunks are under way, since it may be these that fill it: fewer
    go at a time from then on. Else a request larger than the queue would be told to come again, each time it does.
    """
    parts: list[list[T]] = [[]] * len(chunks)
    begin, queue_ms, first_start = time.perf_counter(), 0.0, float("inf")
    firsts = itertools.accumulate([chunk.rows for chunk in chunks], initial=0)
    waiting = deque(enumerate(zip(firsts, chunks, strict=False)))
    workers = min(OUTSTANDING_CHUNKS, len(chunks))

    async def worker() -> None:
        nonlocal queue_ms, first_start, workers
        while waiting:
            i, (lo, chunk) = waiting.popleft()
            sent = time.perf_counter()
            try:
                parts[i], timings = await run(lo, chunk)
            except Overloaded:
                if workers == 1:
                    raise
                waiting.appendleft((i, (lo, chunk)))
                break
            queue_ms = max(queue_ms, timings.queue_ms)
            first_start = min(first_start, sent + timings.queue_ms / 1e3)
        workers -= 1

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(worker())
    except BaseExceptionGroup as failures:
        raise first_of(failures) from None
    device_ms = (time.perf_counter() - max(first_start, begin)) * 1e3
    return [part for piece in parts for part in piece], Timings(queue_ms=queue_ms, device_ms=device_ms)
