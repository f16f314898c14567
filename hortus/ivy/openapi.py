"""/openapi.json, OpenAPI 3.1 made from the very structs that bodies are decoded into, and /docs, a page of it.

The page holds everything it needs, so it works without the internet. A test holds this table against the app's routes.
"""

from __future__ import annotations

import ast
import functools
import html
import inspect
import itertools
import textwrap
from typing import Any, NamedTuple

import msgspec

from hortus import __version__
from hortus.errors import TABLE
from hortus.ivy import cohere, openai, perplexity, rerank, tei
from hortus.ivy.exchange import Answer, Request

Body = type[msgspec.Struct]


class Route(NamedTuple):
    """One operation, as the documentation tells it."""

    method: str
    path: str
    family: str
    summary: str
    body: Body | None = None
    example: Any = None


_TEXT = "The cat sits on the mat."
_RANK = {"query": "Where is the cat?", "documents": [_TEXT, "It rains."]}
ROUTES = (
    Route("POST", "/v1/embeddings", "OpenAI, Perplexity, vLLM", "Vectors of texts or token ids.", openai.EmbeddingsRequest,
          {"model": "MODEL", "input": [_TEXT]}),
    Route("POST", "/embeddings", "OpenAI, Perplexity, vLLM", "As /v1/embeddings (Infinity).", openai.EmbeddingsRequest,
          {"model": "MODEL", "input": [_TEXT]}),
    Route("GET", "/v1/models", "OpenAI, Perplexity, vLLM", "The served model, in a list."),
    Route("GET", "/v1/models/{id}", "OpenAI, Perplexity, vLLM", "The served model."),
    Route("POST", "/v1/contextualizedembeddings", "OpenAI, Perplexity, vLLM", "Vectors of chunks in the context of their "
          "document; for contextual models.", perplexity.ContextualizedRequest,
          {"model": "MODEL", "input": [["First chunk.", "Second chunk."]]}),
    Route("POST", "/v2/embed", "Cohere", "Vectors of texts, in several types at once.", cohere.EmbedRequest,
          {"model": "MODEL", "texts": [_TEXT], "input_type": "search_document", "embedding_types": ["float", "ubinary"]}),
    Route("POST", "/rerank", "Rerank", "Documents by relevance: Jina's and vLLM's shape, or TEI's when `texts` are given.",
          rerank.RerankRequest, _RANK),
    Route("POST", "/v1/rerank", "Rerank", "Documents by relevance: Cohere v1, Jina, vLLM.", rerank.RerankRequest, _RANK),
    Route("POST", "/v2/rerank", "Rerank", "Documents by relevance: Cohere v2.", rerank.RerankRequest, _RANK),
    Route("POST", "/score", "Rerank", "Scores of pairs, in the order given.", rerank.ScoreRequest,
          {"queries": "Where is the cat?", "documents": [_TEXT]}),
    Route("POST", "/v1/score", "Rerank", "As /score.", rerank.ScoreRequest,
          {"queries": "Where is the cat?", "documents": [_TEXT]}),
    Route("POST", "/classify", "Rerank", "A classifier's labels with all probabilities (vLLM).", rerank.ClassifyRequest,
          {"input": [_TEXT]}),
    Route("POST", "/embed", "TEI", "Vectors, as a bare list.", tei.EmbedRequest, {"inputs": [_TEXT]}),
    Route("POST", "/embed_all", "TEI", "A vector for every token.", tei.EmbedTokensRequest, {"inputs": [_TEXT]}),
    Route("POST", "/embed_sparse", "TEI", "Weights of vocabulary entries; for sparse models.", tei.EmbedTokensRequest,
          {"inputs": [_TEXT]}),
    Route("POST", "/similarity", "TEI", "Cosines of one sentence with others.", tei.SimilarityRequest,
          {"inputs": {"source_sentence": _TEXT, "sentences": ["It rains."]}}),
    Route("POST", "/predict", "TEI", "A classifier's labels by score, of texts or pairs.", tei.PredictRequest,
          {"inputs": _TEXT}),
    Route("POST", "/tokenize", "TEI", "Tokens with their places in the text.", tei.TokenizeRequest, {"inputs": _TEXT}),
    Route("POST", "/decode", "TEI", "The text that ids spell.", tei.DecodeRequest, {"ids": [101, 102]}),
    Route("POST", "/", "TEI", "/embed, /similarity, /embed_sparse, /embed_all, /predict or /rerank: whatever the model and "
          "the body are for."),
    Route("GET", "/health", "Operation", "200 while the process lives."),
    Route("GET", "/ready", "Operation", "200 while the engine answers."),
    Route("GET", "/info", "Operation", "The model, its prompts, the limits."),
    Route("GET", "/metrics", "Operation", "Prometheus text."),
    Route("GET", "/openapi.json", "Operation", "This API, as OpenAPI 3.1."),
    Route("GET", "/docs", "Operation", "This API, as a page."),
    Route("GET", "/", "Page", "A page to try the model and to watch the server."),
    Route("GET", "/page/{id}", "Page", "Its files."),
    Route("GET", "/watch", "Page", "What it watches: a sample of the metrics a second, as server-sent events, while it is open."),
)  # fmt: skip


def _routes(with_page: bool) -> list[Route]:
    return [r for r in ROUTES if with_page or r.family != "Page"]


def field_docs(kind: Body) -> dict[str, str]:
    """What the source says under each field of a struct: read once, for people."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except OSError:  # installed without sources
        return {}
    lines = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    found = {}
    for field, after in itertools.pairwise(lines):
        match field, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(said))):
                found[name] = " ".join(said.split())
    return found


@functools.cache
def document(*, with_page: bool = True) -> dict[str, Any]:
    """The whole OpenAPI 3.1 document. with_page: the routes of the page at / too."""
    bodies = list(dict.fromkeys(r.body for r in ROUTES if r.body is not None))
    names = {b: f"{b.__module__.rpartition('.')[2]}.{b.__name__}" for b in bodies}
    schemas: dict[str, Any] = {}
    for body in bodies:  # one at a time: two APIs may name their bodies alike
        _, found = msgspec.json.schema_components([body], ref_template="#/components/schemas/{name}")
        own = found.pop(body.__name__)
        schemas.update(found)
        for name, told in field_docs(body).items():
            own["properties"][name]["description"] = told
        schemas[names[body]] = {**own, "description": " ".join((body.__doc__ or "").split())}
    schemas["Error"] = {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"enum": sorted({w.type for w in TABLE.values()})},
                    "param": {"type": ["string", "null"], "description": "The field at fault, such as input[3]."},
                    "code": {"enum": list(TABLE)},
                },
            }
        },
    }
    paths: dict[str, Any] = {}
    for route in _routes(with_page):
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, names)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Hortus",
            "version": __version__,
            "description": "Text embeddings, reranking and classification. Errors have one shape and one table on all routes.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "Where --api-keys are set."}
            },
        },
        "security": [{}, {"key": []}],
    }


_KINDS = {
    ("GET", "/metrics"): "text/plain",
    ("GET", "/docs"): "text/html",
    ("GET", "/"): "text/html",
    ("GET", "/page/{id}"): "text/plain",
    ("GET", "/watch"): "text/event-stream",
}
"""What is not JSON."""


def _operation(route: Route, names: dict[Body, str]) -> dict[str, Any]:
    kind = _KINDS.get((route.method, route.path), "application/json")
    answer: dict[str, Any] = {"description": "The answer.", "content": {kind: {}}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    told: dict[str, Any] = {
        "operationId": f"{route.method.lower()} {route.path}",
        "tags": [route.family],
        "summary": route.summary,
        "responses": {"200": answer, "default": {"description": "An error, by the table of codes.", "content": error}},
    }
    if "{id}" in route.path:
        told["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    if route.body is not None:
        content: dict[str, Any] = {"schema": {"$ref": f"#/components/schemas/{names[route.body]}"}}
        content["example"] = route.example
        told["requestBody"] = {"required": True, "content": {"application/json": content}}
    elif route.method == "POST":
        told["requestBody"] = {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}
    return told


_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "code,pre{font:14px/1.4 ui-monospace,monospace;background:#f4f4f2;border-radius:3px}code{padding:0 .2em}"
    "pre{padding:.7em;overflow:auto}table{border-collapse:collapse;width:100%}"
    "td,th{border-top:1px solid #ddd;padding:.3em .5em;text-align:left;vertical-align:top}"
    "details{margin:.4em 0}summary{cursor:pointer}b{color:#276749}"
)


@functools.cache
def page(*, with_page: bool = True) -> bytes:
    """The documentation as one HTML page, without scripts."""
    told, out = document(), [f"<!doctype html><html lang=en><meta charset=utf-8><title>Hortus {__version__}</title>"]
    out.append(f"<style>{_STYLE}</style><h1>Hortus {__version__}</h1><p>{html.escape(told['info']['description'])} ")
    out.append("The same for programs: <a href=/openapi.json>/openapi.json</a>.")
    for family in dict.fromkeys(r.family for r in _routes(with_page)):
        out.append(f"<h2>{html.escape(family)}</h2>")
        for route in (r for r in ROUTES if r.family == family):
            head = f"<b>{route.method}</b> <code>{route.path}</code> {html.escape(route.summary)}"
            if route.body is None:
                out.append(f"<p>{head}")
                continue
            example = html.escape(msgspec.json.format(msgspec.json.encode(route.example)).decode())
            curl = html.escape(f"curl http://HOST:PORT{route.path} -H 'content-type: application/json' -d")
            out.append(f"<details><summary>{head}</summary><pre>{curl} '{example}'</pre>{_table(route.body)}</details>")
    out.append("<h2>Errors</h2><table><tr><th>code<th>HTTP<th>retry")
    out += [f"<tr><td><code>{c}</code><td>{w.http}<td>{'yes' if w.retryable else 'no'}" for c, w in TABLE.items()]
    out.append("</table></html>")
    return "".join(out).encode()


def _table(kind: Body) -> str:
    docs, rows = field_docs(kind), []
    for field in msgspec.structs.fields(kind):
        needed = " (required)" if field.required else ""
        told = html.escape(docs.get(field.name, ""))
        rows.append(
            f"<tr><td><code>{field.encode_name}</code>{needed}<td>{html.escape(str(_spelt(kind, field.name)))}<td>{told}"
        )
    return "<table><tr><th>field<th>values<th>" + "".join(rows) + "</table>"


def _spelt(kind: Body, name: str) -> str:
    """The type as the source writes it, without its None."""
    return str(kind.__annotations__[name]).replace(" | None", "")


class Pages:
    """The handlers. Both answers are made once."""

    def __init__(self, *, with_page: bool) -> None:
        self._with_page = with_page

    async def openapi(self, request: Request) -> Answer:
        return Answer(msgspec.json.encode(document(with_page=self._with_page)))

    async def docs(self, request: Request) -> Answer:
        return Answer(page(with_page=self._with_page), content_type=b"text/html; charset=utf-8")
