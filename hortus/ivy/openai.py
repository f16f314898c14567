"""OpenAI's routes: POST /v1/embeddings, GET /v1/models, GET /v1/models/{id}.

Knows their JSON, to the letter, and two extensions (`truncate`, `prompt_name`). Does not know tokens or the engine.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import msgspec

from hortus.errors import InvalidInput, ModelNotFound
from hortus.ivy import outputs
from hortus.ivy.embed import Embedder
from hortus.ivy.exchange import Answer, Request
from hortus.types import Float32, Timings

FORMATS: dict[str, Callable[[Float32], list[bytes]]] = {"float": outputs.as_numbers, "base64": outputs.as_base64}
_AROUND = {"float": (b"[", b"]"), "base64": (b'"', b'"')}


class EmbeddingsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /v1/embeddings. Of a key given twice the last counts."""

    input: str | list[str | int | list[int]]
    """One text, several, one list of token ids, or several. A list holds one kind only."""
    model: str
    encoding_format: str | None = None
    """float (default) or base64: little-endian float32."""
    dimensions: int | None = None
    """Keep the first so many values, then normalise if the model does. Default: all."""
    user: str | None = None
    """Taken for compatibility; not used."""
    truncate: bool | None = None
    """Cut inputs that are too long instead of refusing them. Default: --auto-truncate."""
    prompt_name: str | None = None
    """One of the model's prompts; "" for none; default: the model's default prompt."""


_decoder = msgspec.json.Decoder(EmbeddingsRequest)
_path = re.compile(r" - at `\$\.?([^`]*)`$")
_named = re.compile(r"(?:unknown|required) field `([^`]*)`")


def decode(body: bytes) -> EmbeddingsRequest:
    """Parse and check in one pass; InvalidInput says where it went wrong."""
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as e:
        text = str(e)
        at, named = _path.search(text), _named.search(text)
        param = at[1] if at else named[1] if named else None
        hint = ""
        if "unknown field" in text:
            hint = "; known: " + ", ".join(EmbeddingsRequest.__struct_fields__)
        where = f"{param}: " if at and param else ""
        raise InvalidInput(where + (text[: at.start()] if at else text) + hint, param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        # Lone surrogates and invalid UTF-8 end here, before any tokenizer sees them.
        raise InvalidInput(f"the body is not valid JSON in UTF-8: {e}") from None
    except RecursionError:
        raise InvalidInput("the body is not valid JSON: nested too deeply") from None


def sort_out(given: str | list[Any]) -> tuple[list[Any], bool]:
    """(inputs, flat): all texts or all id lists. flat: one list of ids came without outer brackets. InvalidInput if mixed."""
    if isinstance(given, str):
        return [given], False
    kinds = set(map(type, given))
    if len(kinds) > 1:
        first = type(given[0])
        at = next(i for i, x in enumerate(given) if type(x) is not first)
        raise InvalidInput(
            f"input[{at}] is not of the same kind as input[0]: give only texts, only token ids, or only lists of ids",
            param=f"input[{at}]",
        )
    return ([given], True) if kinds == {int} else (given, False)


def item_writer(encoding: str) -> Callable[[int, Float32], bytes]:
    """Rows to the entries of `data`, comma-separated, numbered from the index given."""
    encode = FORMATS[encoding]
    left, right = _AROUND[encoding]
    head, tail = b'{"object":"embedding","index":%d,"embedding":' + left, right + b"}"

    def write(first: int, rows: Float32) -> bytes:
        return b",".join([head % i + text + tail for i, text in enumerate(encode(rows), first)])

    return write


_WRITERS = {name: item_writer(name) for name in FORMATS}


def timing_headers(timings: Timings) -> list[tuple[bytes, bytes]]:
    """Where the time went, in milliseconds."""
    return [
        (b"x-hortus-tokenize-ms", b"%.3f" % timings.tokenize_ms),
        (b"x-hortus-queue-ms", b"%.3f" % timings.queue_ms),
        (b"x-hortus-device-ms", b"%.3f" % timings.device_ms),
        (b"x-hortus-total-ms", b"%.3f" % timings.total_ms),
    ]


class OpenAI:
    """The handlers. `model` gives the opened model, or raises NotReady or Draining."""

    def __init__(self, model: Callable[[], Embedder]) -> None:
        self._model = model
        self._created = int(time.time())

    async def embeddings(self, request: Request) -> Answer:
        begin = time.perf_counter()
        embedder = self._model()
        asked = decode(request.body)
        _check_model(asked.model, embedder.info.name)
        encoding = "float" if asked.encoding_format is None else asked.encoding_format
        if encoding not in FORMATS:
            raise InvalidInput(
                f"unknown encoding_format {encoding!r:.80}; allowed: {', '.join(FORMATS)}", param="encoding_format"
            )
        inputs, flat = sort_out(asked.input)
        done = await embedder.embed(
            inputs,
            _WRITERS[encoding],
            deadline=request.deadline,
            prompt_name=asked.prompt_name,
            truncate=asked.truncate,
            dimensions=asked.dimensions,
            flat=flat,
        )
        answer = b'{"object":"list","data":[%b],"model":%b,"usage":{"prompt_tokens":%d,"total_tokens":%d}}' % (
            done.parts[0] if len(done.parts) == 1 else b",".join(done.parts),
            msgspec.json.encode(embedder.info.name),
            done.tokens,
            done.tokens,
        )
        done.timings.total_ms = (time.perf_counter() - begin) * 1e3
        return Answer(answer, headers=timing_headers(done.timings))

    async def models(self, request: Request) -> Answer:
        return Answer(msgspec.json.encode({"object": "list", "data": [self._entry(self._model())]}))

    async def one_model(self, request: Request) -> Answer:
        embedder = self._model()
        _check_model(request.tail, embedder.info.name)
        return Answer(msgspec.json.encode(self._entry(embedder)))

    def _entry(self, embedder: Embedder) -> dict[str, Any]:
        return {"id": embedder.info.name, "object": "model", "created": self._created, "owned_by": "hortus"}


def _check_model(asked: str, served: str) -> None:
    if asked != served:
        raise ModelNotFound(f"the model {asked!r:.200} is not served here; this server has {served!r}", param="model")
