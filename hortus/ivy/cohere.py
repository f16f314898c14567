"""Cohere's POST /v2/embed. Knows its JSON; its rerank routes are in rerank.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from hortus.errors import InvalidInput
from hortus.ivy import outputs
from hortus.ivy.body import Asked, check_model, one_of, reader
from hortus.ivy.embed import Done, Embedder
from hortus.ivy.exchange import Answer, Request, body_of
from hortus.ivy.lists import dumps, listed
from hortus.ivy.openai import timed
from hortus.types import Float32

TYPES = ("float", "int8", "uint8", "binary", "ubinary", "base64")


class EmbedRequest(Asked):
    """The body of POST /v2/embed."""

    model: str
    texts: list[str] | None = None
    inputs: list[dict[str, Any]] | None = None
    """Objects {"content": [{"type": "text", "text": ...}]}, instead of `texts`; only text is taken."""
    input_type: str | None = None
    """search_query, search_document, classification or clustering: the model's prompt for it, where it has one."""
    embedding_types: list[str] | None = None
    """Several of float, int8, uint8, binary, ubinary, base64. Default: float."""
    output_dimension: int | None = None
    truncate: str | None = None
    """END (default, as at Cohere): cut the end off; START: the beginning; NONE: refuse."""
    max_tokens: int | None = None
    """Cut to fewer tokens than the model takes."""

    def names(self) -> Mapping[str, str]:
        return {
            "dimensions": "output_dimension",
            "encoding_format": "embedding_types",
            "truncate_prompt_tokens": "max_tokens",
            "truncate: true": "truncate: END",
        }


_read = reader(EmbedRequest)


class Cohere:
    """The handler. `model` gives the opened model, or raises NotReady or Draining."""

    def __init__(self, model: Callable[[], Embedder]) -> None:
        self._model = model

    async def embed(self, request: Request) -> Answer:
        begin = time.perf_counter()
        embedder = self._model()
        asked = _read(request)
        check_model(asked.model, embedder.info.name)
        embedder.need("embed", route=request.path)
        dimensions = embedder.dimensions(asked.output_dimension)
        types = list(dict.fromkeys(one_of(t, TYPES, "embedding_types") for t in asked.embedding_types or ["float"]))
        forms = [outputs.FORMS[t] for t in types]
        for form in forms:
            embedder.quantizer.check(form.precision, dimensions)
        side = one_of(asked.truncate or "END", ("NONE", "START", "END"), "truncate")
        limit = None if asked.max_tokens is None else min(asked.max_tokens, embedder.info.max_tokens)
        texts = _texts(asked)
        tokens = await embedder.inputs(
            texts,
            truncate=embedder.truncate(side != "NONE", limit, side == "START"),
            prompt_name=embedder.prompts.named(asked.input_type),
            field="texts" if asked.inputs is None else "inputs",
        )

        def write(first: int, rows: Float32) -> list[bytes]:
            written = []
            for form in forms:
                found = outputs.texts_of(rows, form, embedder.quantizer, dimensions, embedder.info.normalize)
                written.append(b",".join([form.left + text + form.right for text in found]))
            return written

        done: Done[list[bytes]] = await embedder.run(
            tokens, write, deadline=request.deadline, values=dimensions * len(forms)
        )
        told = {
            "api_version": {"version": "2"},
            "billed_units": {"input_tokens": done.tokens},
            "tokens": {"input_tokens": done.tokens},
        }
        parts: list[bytes] = []
        for i, name in enumerate(types):
            parts += (b'%b"%b":[' % (b"]," if i else b"", name.encode()), done.parts[0][i])
            for part in done.parts[1:]:
                parts += (b",", part[i])
        head = b'{"id":%b,"response_type":"embeddings_by_type","embeddings":{' % dumps(request.name)
        parts.append(b']},"texts":[')
        for i, some in enumerate(await listed(texts)):
            parts += (b",", some) if i else (some,)
        body = body_of(head, parts, b'],"meta":%b}' % dumps(told), b"")
        return timed(body, done.timings, begin)


def _texts(asked: EmbedRequest) -> list[str]:
    if (asked.texts is None) == (asked.inputs is None):
        raise InvalidInput("give texts or inputs" + (", not both" if asked.texts is not None else ""), param="texts")
    if asked.texts is not None:
        return asked.texts
    texts = []
    for i, entry in enumerate(asked.inputs or []):
        content = entry.get("content")
        parts = content if isinstance(content, list) else []
        said = [p.get("text") if isinstance(p, dict) and p.get("type") == "text" else None for p in parts]
        unknown = [k for k in entry if k != "content"] + [
            k for p in parts if isinstance(p, dict) for k in p if k not in ("type", "text")
        ]
        if unknown and all(isinstance(t, str) for t in said):
            raise InvalidInput(f"inputs[{i}]: unknown field {unknown[0]!r:.80}", param=f"inputs[{i}]")
        if not said or not all(isinstance(t, str) for t in said):
            raise InvalidInput(
                f'inputs[{i}] must be {{"content": [{{"type": "text", "text": ...}}]}}: this server reads text only',
                param=f"inputs[{i}]",
            )
        texts.append("".join(str(t) for t in said))
    return texts
