"""OpenAI's routes, with what Perplexity and vLLM add to them: POST /v1/embeddings, GET /v1/models, GET /v1/models/{id}.

Knows their JSON, to the letter. Does not know tokens or the engine.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import msgspec

from hortus.errors import InvalidInput
from hortus.ivy import outputs
from hortus.ivy.assemble import Truncate
from hortus.ivy.body import Asked, check_model, one_of, reader, sort_out
from hortus.ivy.embed import Done, Embedder
from hortus.ivy.exchange import Answer, Body, Request, body_of
from hortus.types import Float32, Timings


class EmbeddingsRequest(Asked):
    """The body of POST /v1/embeddings. Of a key given twice the last counts."""

    input: str | list[str | int | list[int]]
    """One text, several, one list of token ids, or several. A list holds one kind only."""
    model: str
    encoding_format: str | None = None
    """float, base64 (little-endian float32), int8, uint8, binary, ubinary, base64_int8, base64_binary. Default: float; for
    pplx-embed models base64_int8, as in Perplexity's API."""
    dimensions: int | None = None
    """Keep the first so many values, then normalise if the model does. Default: all."""
    user: str | None = None
    """Taken for compatibility; not used."""
    truncate: bool | None = None
    """Cut inputs that are too long instead of refusing them. Default: --auto-truncate."""
    prompt_name: str | None = None
    """One of the model's prompts; "" for none; default: the model's default prompt."""
    task: str | None = None
    """As Jina's API spells `prompt_name`: retrieval.query, retrieval.passage, text-matching, ..., where the model has it."""
    input_type: str | None = None
    """query or document (also as search_query, search_document, classification, clustering): the model's prompt for it."""
    truncate_prompt_tokens: int | None = None
    """Cut inputs to so many tokens; -1: to what the model takes."""
    truncation_side: str | None = None
    """left or right: the side that is cut off."""


_read = reader(EmbeddingsRequest)
SIDES = ("left", "right")


def prompt_of(
    embedder: Embedder, prompt_name: str | None, input_type: str | None, task: str | None = None
) -> str | None:
    """The prompt's name from the fields that can say it; InvalidInput when more than one does."""
    if task is not None:
        if prompt_name is not None or input_type is not None:
            raise InvalidInput("give one of `task`, `prompt_name` and `input_type`", param="task")
        if task not in embedder.prompts.texts:
            known = ", ".join(sorted(embedder.prompts.texts)) or "none"
            raise InvalidInput(f"unknown `task` {task!r:.80}; this model's: {known}", param="task")
        return task
    if input_type is None:
        return prompt_name
    if prompt_name is not None:
        raise InvalidInput("give `prompt_name` or `input_type`, not both", param="input_type")
    return embedder.prompts.named(input_type)


def truncation(embedder: Embedder, on: bool | None, tokens: int | None = None, side: str | None = None) -> Truncate:
    """vLLM's and TEI's fields as one rule. A number of tokens asks for cutting by itself; -1 stands for the model's limit."""
    if tokens is not None and tokens < 0:
        if tokens != -1:
            raise InvalidInput(
                f"`truncate_prompt_tokens` is {tokens}; give -1 or a number of tokens", param="truncate_prompt_tokens"
            )
        tokens, on = None, True
    left = None if side is None else one_of(side.lower(), SIDES, "truncation_side") == "left"
    return embedder.truncate(True if tokens is not None and on is None else on, tokens, left)


@functools.cache
def _around(encoding: str) -> tuple[bytes, bytes]:
    form = outputs.FORMS[encoding]
    return b'{"object":"embedding","index":%d,"embedding":' + form.left, form.right + b"}"


def writer(
    embedder: Embedder, encoding: str, dimensions: int
) -> tuple[Callable[[Float32], Float32] | None, Callable[[int, Float32], bytes]]:
    """(what is made of rows first, rows to the entries of `data`, comma-separated, numbered by row)."""
    form, quantizer, info = outputs.FORMS[encoding], embedder.quantizer, embedder.info
    head, tail = _around(encoding)
    whole = info.normalize and form.precision == "float32" and dimensions == info.width

    def write(first: int, rows: Float32) -> bytes:
        texts = form.text(rows) if whole else outputs.texts_of(rows, form, quantizer, dimensions, info.normalize)
        return b",".join([head % i + text + tail for i, text in enumerate(texts, first)])

    return outputs.normal if whole else None, write


def format_of(embedder: Embedder, asked: str | None, dimensions: int) -> str:
    """The encoding to answer in; InvalidInput when it does not exist, or not for this model."""
    if asked is None:
        return "base64_int8" if embedder.quantizer.tanh else "float"
    if (form := outputs.FORMS.get(asked)) is None:
        form = outputs.FORMS[one_of(asked, tuple(outputs.FORMS), "encoding_format")]
    embedder.quantizer.check(form.precision, dimensions)
    return asked


def usage(tokens: int) -> bytes:
    return b'"usage":{"prompt_tokens":%d,"total_tokens":%d}' % (tokens, tokens)


_TIMED = b"".join(b"x-hortus-%b-ms: %%.3f\r\n" % part for part in (b"tokenize", b"queue", b"device", b"total"))


def timed(body: Body, timings: Timings, begin: float) -> Answer:
    """An answer with the headers that say where the time went, in milliseconds. begin: time.perf_counter() seconds."""
    timings.total_ms = (time.perf_counter() - begin) * 1e3
    told = (timings.tokenize_ms, timings.queue_ms, timings.device_ms, timings.total_ms)
    return Answer(body, headers=_TIMED % told, timings=timings)


class OpenAI:
    """The handlers. `model` gives the opened model, or raises NotReady or Draining."""

    def __init__(self, model: Callable[[], Embedder]) -> None:
        self._model = model
        self._created = int(time.time())

    async def embeddings(self, request: Request) -> Answer:
        begin = time.perf_counter()
        embedder = self._model()
        asked = _read(request)
        check_model(asked.model, embedder.info.name)
        embedder.need("embed", route="/v1/embeddings")
        dimensions = embedder.dimensions(asked.dimensions)
        encoding = format_of(embedder, asked.encoding_format, dimensions)
        inputs, flat = sort_out(asked.input)
        tokens = await embedder.inputs(
            inputs,
            truncate=truncation(embedder, asked.truncate, asked.truncate_prompt_tokens, asked.truncation_side),
            prompt_name=prompt_of(embedder, asked.prompt_name, asked.input_type, asked.task),
            flat=flat,
        )
        make, write = writer(embedder, encoding, dimensions)
        done: Done[bytes] = await embedder.run(tokens, write, deadline=request.deadline, values=dimensions, make=make)
        tail = b'],"model":%b,%b}' % (embedder.model_json, usage(done.tokens))
        body = body_of(b'{"object":"list","data":[', done.parts, tail)
        return timed(body, done.timings, begin)

    async def models(self, request: Request) -> Answer:
        return Answer(msgspec.json.encode({"object": "list", "data": [self._entry(self._model())]}))

    async def one_model(self, request: Request) -> Answer:
        embedder = self._model()
        check_model(request.tail, embedder.info.name)
        return Answer(msgspec.json.encode(self._entry(embedder)))

    def _entry(self, embedder: Embedder) -> dict[str, Any]:
        return {"id": embedder.info.name, "object": "model", "created": self._created, "owned_by": "hortus"}
