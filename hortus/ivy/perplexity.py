"""Perplexity's POST /v1/contextualizedembeddings: chunks embedded in the context of their document.

Knows its JSON. Does not know how spans are built. Perplexity's /v1/embeddings is the route of openai.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from hortus.errors import WrongKind
from hortus.ivy import assemble, outputs
from hortus.ivy.body import Asked, check_model, reader
from hortus.ivy.embed import WHAT, Done, Embedder
from hortus.ivy.exchange import Answer, Request, body_of
from hortus.ivy.openai import format_of, timed, usage
from hortus.types import Float32


class ContextualizedRequest(Asked):
    """The body of POST /v1/contextualizedembeddings."""

    input: list[list[str]]
    """Documents, each a list of its chunks in their order. A query is a document of one chunk."""
    model: str
    encoding_format: str | None = None
    """As in /v1/embeddings."""
    dimensions: int | None = None
    truncate: bool | None = None
    """Cut the last chunk of documents that are too long. Default: --auto-truncate."""


_read = reader(ContextualizedRequest)


class Perplexity:
    """The handler. `model` gives the opened model, or raises NotReady or Draining."""

    def __init__(self, model: Callable[[], Embedder]) -> None:
        self._model = model

    async def contextualized(self, request: Request) -> Answer:
        begin = time.perf_counter()
        embedder = self._model()
        asked = _read(request)
        check_model(asked.model, embedder.info.name)
        kind = embedder.info.kind
        if kind != "embed" or not embedder.contextual:
            raise WrongKind(
                f"{request.path} needs a contextual embedding model, which takes a document's chunks together; "
                f"{embedder.info.name} {'embeds each text by itself' if kind == 'embed' else f'is {WHAT[kind]}'}"
            )
        dimensions = embedder.dimensions(asked.dimensions)
        form = outputs.FORMS[format_of(embedder, asked.encoding_format, dimensions)]
        tokens = await embedder.documents(asked.input, truncate=embedder.truncate(asked.truncate))
        owners = assemble.owners(tokens.batch)
        starts = [0]
        for document in asked.input:
            starts.append(starts[-1] + len(document))

        def write(first: int, rows: Float32) -> bytes:
            texts = outputs.texts_of(rows, form, embedder.quantizer, dimensions, embedder.info.normalize)
            out = []
            for at, text in enumerate(texts, first):
                document = owners[at]
                chunk = at - starts[document]
                if chunk == 0:
                    out.append(b'%b{"object":"list","index":%d,"data":[' % (b"," if document else b"", document))
                comma = b"," if chunk else b""
                out.append(b'%b{"object":"embedding","index":%d,"embedding":%b' % (comma, chunk, form.left))
                out += (text, form.right, b"}")
                if at + 1 == starts[document + 1]:
                    out.append(b"]}")
            return b"".join(out)

        done: Done[bytes] = await embedder.run(tokens, write, deadline=request.deadline, values=dimensions)
        name = msgspec.json.encode(embedder.info.name)
        body = body_of(b'{"object":"list","data":[', done.parts, b'],"model":%b,%b}' % (name, usage(done.tokens)), b"")
        return timed(body, done.timings, begin)
