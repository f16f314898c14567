"""Routes in the shapes of Hugging Face's text-embeddings-inference: /embed, /embed_all, /embed_sparse, /similarity, /predict,
/tokenize, /decode, and / for whichever of them the model is for.

Knows their JSON. /rerank is in rerank.py, /info in health.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from hortus.errors import InvalidInput
from hortus.ivy import assemble, outputs
from hortus.ivy.body import Asked, check_model, one_of, reader, sort_out
from hortus.ivy.embed import Done, Embedder, Tokens
from hortus.ivy.exchange import Answer, Request, body_of
from hortus.ivy.lists import dumps, listed, numbers
from hortus.ivy.openai import timed, truncation
from hortus.ivy.rerank import Rerank, labels, ranked
from hortus.ivy.scores import cosines, only
from hortus.types import Float32


class TeiRequest(Asked):
    """Its word for a side is not vLLM's."""

    def names(self) -> Mapping[str, str]:
        return {"truncation_side": "truncation_direction"}


class EmbedRequest(TeiRequest):
    """The body of /embed."""

    inputs: str | list[str | int | list[int]]
    truncate: bool | None = None
    """Default: --auto-truncate."""
    truncation_direction: str | None = None
    """left or right, in any case."""
    prompt_name: str | None = None
    normalize: bool | None = None
    """Divide by the L2 norm; default true, also for models that do not by themselves."""
    dimensions: int | None = None
    encoding_format: str | None = None
    """float, or base64."""
    model: str | None = None


class EmbedTokensRequest(TeiRequest):
    """The body of /embed_all and /embed_sparse."""

    inputs: str | list[str | int | list[int]]
    truncate: bool | None = None
    truncation_direction: str | None = None
    prompt_name: str | None = None
    model: str | None = None


class SimilarityInputs(msgspec.Struct, forbid_unknown_fields=True):
    """What to compare with what."""

    source_sentence: str
    sentences: list[str]


class SimilarityParameters(msgspec.Struct, forbid_unknown_fields=True):
    """How to read the sentences."""

    truncate: bool | None = None
    truncation_direction: str | None = None
    prompt_name: str | None = None


class SimilarityRequest(Asked):
    """The body of /similarity."""

    inputs: SimilarityInputs
    parameters: SimilarityParameters | None = None
    model: str | None = None

    def names(self) -> Mapping[str, str]:
        return {
            "truncation_side": "parameters.truncation_direction",
            "prompt_name": "parameters.prompt_name",
            "truncate: true": "parameters.truncate: true",
        }


class PredictParameters(msgspec.Struct, forbid_unknown_fields=True):
    """What huggingface_hub's text_classification sends."""

    function_to_apply: str | None = None
    """sigmoid, softmax, or none for logits."""
    top_k: int | None = None


class PredictRequest(TeiRequest):
    """The body of /predict: one text, one pair, or a list whose entries are lists of one text or of a pair."""

    inputs: str | list[str | list[str]]
    truncate: bool | None = None
    truncation_direction: str | None = None
    raw_scores: bool | None = None
    parameters: PredictParameters | None = None
    model: str | None = None


class TokenizeRequest(Asked):
    """The body of /tokenize."""

    inputs: str | list[str]
    add_special_tokens: bool | None = None
    """Default true."""
    prompt_name: str | None = None


class DecodeRequest(Asked):
    """The body of /decode."""

    ids: list[int | list[int]]
    skip_special_tokens: bool | None = None
    """Default true."""


_embed, _embed_tokens, _similarity = reader(EmbedRequest), reader(EmbedTokensRequest), reader(SimilarityRequest)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_predict, _tokenize, _decode = reader(PredictRequest), reader(TokenizeRequest), reader(DecodeRequest)


class Tei:
    """The handlers. `model` gives the opened model, or raises NotReady or Draining."""

    def __init__(self, model: Callable[[], Embedder], rerank: Rerank) -> None:
        self._model, self._rerank = model, rerank

    async def root(self, request: Request) -> Answer:
        """Whatever the model is for."""
        embedder = self._model()
        if embedder.info.kind == "classify":
            return await (self._rerank.rerank(request) if _starts(request.body, "texts") else self.predict(request))
        if embedder.info.kind == "sparse":
            return await self.embed_sparse(request)
        if embedder.info.kind == "tokens":
            return await self.embed_all(request)
        compared = _starts(request.body, "inputs") == b"{"
        return await (self.similarity(request) if compared else self.embed(request))

    async def embed(self, request: Request) -> Answer:
        begin = time.perf_counter()
        embedder = self._model()
        asked = _embed(request)
        check_model(asked.model, embedder.info.name)
        embedder.need("embed", route=request.path)
        dimensions = embedder.dimensions(asked.dimensions)
        form = outputs.FORMS[one_of(asked.encoding_format or "float", ("float", "base64"), "encoding_format")]
        tokens = await self._inputs(embedder, asked)
        normalize = asked.normalize is not False

        def write(first: int, rows: Float32) -> bytes:
            texts = outputs.texts_of(rows, form, embedder.quantizer, dimensions, normalize)
            return b",".join([form.left + text + form.right for text in texts])

        done: Done[bytes] = await embedder.run(tokens, write, deadline=request.deadline, values=dimensions)
        return timed(body_of(b"[", done.parts, b"]"), done.timings, begin)

    async def embed_all(self, request: Request) -> Answer:
        """A vector a token, special ones included, as they are."""
        begin = time.perf_counter()
        embedder = self._model()
        asked = _embed_tokens(request)
        check_model(asked.model, embedder.info.name)
        embedder.need("embed", "tokens", route=request.path)
        if embedder.late is None:
            tokens = embedder.every_token(await self._inputs(embedder, asked))
        else:
            tokens = await self._vectors(embedder, asked)
        write = _nested(tokens, outputs.FORMS["float"])
        done: Done[bytes] = await embedder.run(tokens, write, deadline=request.deadline)
        return timed(body_of(b"[", done.parts, b"]", b""), done.timings, begin)

    async def embed_sparse(self, request: Request) -> Answer:
        begin = time.perf_counter()
        embedder = self._model()
        asked = _embed_tokens(request)
        check_model(asked.model, embedder.info.name)
        embedder.need("sparse", route=request.path)
        tokens = await self._inputs(embedder, asked)

        def write(first: int, rows: Float32) -> bytes:
            found = [np.flatnonzero(row) for row in rows]
            told = [[{"index": i, "value": row[i]} for i in at.tolist()] for row, at in zip(rows, found, strict=True)]
            return dumps(told)[1:-1]

        done: Done[bytes] = await embedder.run(tokens, write, deadline=request.deadline)
        return timed(body_of(b"[", done.parts, b"]"), done.timings, begin)

    async def similarity(self, request: Request) -> Answer:
        """Cosines of one sentence with others, all read with the same prompt."""
        begin = time.perf_counter()
        embedder = self._model()
        asked = _similarity(request)
        check_model(asked.model, embedder.info.name)
        embedder.need("embed", route=request.path)
        how = asked.parameters or SimilarityParameters()
        sides = ("source_sentence", [asked.inputs.source_sentence]), ("sentences", asked.inputs.sentences)
        with only("inputs.source_sentence"):
            one, many = [
                await embedder.inputs(
                    texts,
                    truncate=truncation(embedder, how.truncate, None, how.truncation_direction),
                    prompt_name=how.prompt_name,
                    field=f"inputs.{field}",
                )
                for field, texts in sides
            ]
            scores = await cosines(embedder, one, many, request.deadline)
        return timed(body_of(b"[", await numbers(scores.values), b"]"), scores.timings, begin)

    async def predict(self, request: Request) -> Answer:
        begin = time.perf_counter()
        embedder = self._model()
        asked = _predict(request)
        check_model(asked.model, embedder.info.name)
        embedder.need("classify", route=request.path)
        top = asked.parameters.top_k if asked.parameters else None
        if top is not None and top < 1:
            raise InvalidInput(f"`parameters.top_k` is {top}; give 1 or more", param="parameters.top_k")
        lefts, rights, single = _texts_or_pairs(asked.inputs)
        truncate = truncation(embedder, asked.truncate, None, asked.truncation_direction)
        if rights:
            tokens = await embedder.pairs(lefts, rights, truncate=truncate, field="inputs")
        else:
            tokens = await embedder.inputs(lefts, truncate=truncate, field="inputs")
        apply = self._function(embedder, asked)
        done: Done[Float32] = await embedder.run(tokens, lambda first, rows: apply(rows), deadline=request.deadline)
        names = labels(embedder)
        parts = await listed(ranked(row, names)[:top] for part in done.parts for row in part)
        # With `parameters`, as huggingface_hub sends them, one text's answer is a list in a list as well.
        alone = single and asked.parameters is None
        return timed(parts[0] if alone else body_of(b"[", parts, b"]"), done.timings, begin)

    def _function(self, embedder: Embedder, asked: PredictRequest) -> Callable[[Float32], Float32]:
        named = asked.parameters.function_to_apply if asked.parameters else None
        if named is not None:
            return {"sigmoid": outputs.sigmoid, "softmax": outputs.softmax, "none": lambda rows: rows}[
                one_of(named, ("sigmoid", "softmax", "none"), "parameters.function_to_apply")
            ]
        return (lambda rows: rows) if asked.raw_scores else embedder.probabilities

    async def tokenize(self, request: Request) -> Answer:
        embedder = self._model()
        asked = _tokenize(request)
        texts = [asked.inputs] if isinstance(asked.inputs, str) else asked.inputs
        embedder.count(len(texts), "inputs")
        prompt = embedder.prompts.choose(asked.prompt_name)
        texts = [prompt + t for t in texts]
        found = embedder.tokenizer.told(texts, special=asked.add_special_tokens is not False, field="inputs")
        return Answer(body_of(b"[", await embedder.told(found, "inputs"), b"]"))

    async def decode(self, request: Request) -> Answer:
        embedder = self._model()
        asked = _decode(request)
        sequences, flat = sort_out(asked.ids, "ids")
        embedder.count(len(sequences), "ids")
        skip = asked.skip_special_tokens is not False
        found = embedder.tokenizer.spelt(sequences, skip_special=skip, flat=flat, field="ids")
        return Answer(body_of(b"[", await embedder.told(found, "ids"), b"]"))

    async def _vectors(self, embedder: Embedder, asked: EmbedTokensRequest) -> Tokens:
        """For late interaction, whose two prompts say how a text is read, not only what goes before it."""
        role = one_of(asked.prompt_name or "document", ("query", "document"), "prompt_name")
        inputs, flat = sort_out(asked.inputs, "inputs")
        truncate = truncation(embedder, asked.truncate, None, asked.truncation_direction)
        return await embedder.vectors(inputs, query=role == "query", truncate=truncate, flat=flat, field="inputs")

    async def _inputs(self, embedder: Embedder, asked: EmbedRequest | EmbedTokensRequest) -> Tokens:
        inputs, flat = sort_out(asked.inputs, "inputs")
        return await embedder.inputs(
            inputs,
            truncate=truncation(embedder, asked.truncate, None, asked.truncation_direction),
            prompt_name=asked.prompt_name,
            flat=flat,
            field="inputs",
        )


def _starts(body: bytes, field: str) -> bytes:
    """The first byte of a field of the body, none where it is not given. The name is not looked for in the body's bytes:
    texts may spell anything."""
    try:
        value = memoryview(_fields(body).get(field, b""))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # the route that reads it says what is wrong
        return b""
    first = bytes(value[:1])
    return b"" if first == b"n" else first  # null


def _nested(tokens: Tokens, form: outputs.Form) -> Callable[[int, Float32], bytes]:
    """Rows in brackets, with brackets around the rows of each sequence and commas between."""
    owners = assemble.owners(tokens.batch)

    def write(first: int, rows: Float32) -> bytes:
        out = []
        for at, text in enumerate(form.text(rows), first):
            new = at == 0 or owners[at] != owners[at - 1]
            last = at + 1 == len(owners) or owners[at + 1] != owners[at]
            comma = b"" if at == 0 else b","
            out.append(comma + (b"[[" if new else b"[") + text + (b"]]" if last else b"]"))
        return b"".join(out)

    return write


def _texts_or_pairs(inputs: str | list[str | list[str]]) -> tuple[list[str], list[str], bool]:
    """(texts, [], _) or (lefts, rights, _), and whether one answer is to stand alone. TEI: a flat list of two is a pair."""
    if isinstance(inputs, str):
        return [inputs], [], True
    if not inputs:
        raise InvalidInput("inputs is an empty list", param="inputs")
    if all(isinstance(x, str) for x in inputs):
        if len(inputs) != 2:
            raise InvalidInput(
                "inputs is a list of texts: give two for a pair, or each text in a list of its own", param="inputs"
            )
        return [str(inputs[0])], [str(inputs[1])], True
    sizes = {len(x) if isinstance(x, list) else 0 for x in inputs}
    if sizes not in ({1}, {2}):
        raise InvalidInput("inputs must be lists of one text, or lists of two", param="inputs")
    lefts = [x[0] for x in inputs]
    return lefts, [x[1] for x in inputs] if sizes == {2} else [], False
