"""`hortus embed --server`: the same vectors as an engine here, whatever the servers do meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from gateway_server import running
from patience import PATIENCE_S, until_seen

from hortus import cli, config
from hortus.config import TulipConfig
from hortus.corpus import command, server
from hortus.errors import EngineError, StartError
from hortus.tulip.fake import FakeEngine

TEXTS = [f"the cat {i} sat on " + "a mat " * (i % 40) for i in range(1500)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    rows: list[object] = list(TEXTS)
    rows[7], rows[8], rows[900] = None, "word " * 400, "word " * 401
    path.write_text("\n".join(json.dumps({"id": i, "text": t}) for i, t in enumerate(rows)))
    return path


def embed(given: Path, out: Path, *urls: str, **flags: object) -> int:
    fixed = {"out": str(out), "id": "id", "progress": "none", "part_rows": 400, "window_rows": 200}
    settings = config.load(flags={**fixed, "server": ",".join(urls), **flags})
    return command.embed([str(given)], None, settings)


def local(given: Path, out: Path, **flags: object) -> int:
    fixed = {
        "out": str(out),
        "id": "id",
        "progress": "none",
        "part_rows": 400,
        "window_rows": 200,
        "fake_delay_ms": 0.0,
    }
    return command.embed([str(given)], "demo", config.load(flags={**fixed, **flags}))


def rows(out: Path) -> tuple[list[int], np.ndarray]:
    tables = [pq.read_table(p) for p in sorted(out.glob("part-*"))]
    return [i for t in tables for i in t.column("id").to_pylist()], np.concatenate(
        [np.array(t.column("embedding").to_pylist()) for t in tables]
    )


def rejects(out: Path) -> dict[int, tuple[str, str]]:
    lines = [json.loads(line) for p in sorted(out.glob("_rejects/*")) for line in p.read_text().splitlines()]
    return {r["id"]: (r["code"], r["reason"]) for r in lines}


def engine() -> FakeEngine:
    return FakeEngine(width=384, max_tokens=256, normalize=True, name="mini", delay_s=0.002)


@pytest.mark.parametrize("precision", ["float32", "float16", "binary"])
def test_the_same_vectors_and_rejects_as_here(corpus: Path, tmp_path: Path, precision: str):
    assert local(corpus, tmp_path / "local", precision=precision) == 3
    with running(engine()) as one, running(engine()) as two:
        assert embed(corpus, tmp_path / "out", one.url, two.url + "/v1", precision=precision) == 3
        assert min(one.engine.steps, two.engine.steps) > 1
    (ids, got), (wanted_ids, wanted) = rows(tmp_path / "out"), rows(tmp_path / "local")
    assert ids == wanted_ids
    assert np.array_equal(got, wanted)
    assert rejects(tmp_path / "out") == rejects(tmp_path / "local")
    assert set(rejects(tmp_path / "out")) == {7, 8, 900}


def test_a_server_that_ends_is_done_without(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert local(corpus, tmp_path / "local") == 3
    with running(engine()) as one, running(engine()) as two:

        def end() -> None:
            with contextlib.suppress(AssertionError):  # in any case it ends
                until_seen(lambda: one.engine.steps >= 6)
            one.stop()

        ender = threading.Thread(target=end)
        ender.start()
        assert embed(corpus, tmp_path / "out", one.url, two.url) == 3
        ender.join()
    assert np.array_equal(rows(tmp_path / "out")[1], rows(tmp_path / "local")[1])


def test_a_queue_that_is_full_is_waited_for(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "REQUEST_CHARS", 4000)
    monkeypatch.setattr(server, "REST_S", (0.01, 0.05))
    with running(engine(), TulipConfig(max_queue_tokens=1500)) as one:
        held, taken = threading.Event(), FakeEngine.step

        def step(self, batch):
            if self.steps == 4:
                self.hold()
                held.set()
            return taken(self, batch)

        def refused() -> float:
            return one.sample("hortus_requests_total", code="overloaded")

        def let_go() -> None:  # the engine, once a request was refused
            assert held.wait(PATIENCE_S)
            try:
                until_seen(refused)
            finally:
                one.engine.release()

        monkeypatch.setattr(FakeEngine, "step", step)
        with ThreadPoolExecutor(1) as pool:
            released = pool.submit(let_go)
            assert embed(corpus, tmp_path / "out", one.url) == 3
            released.result()
        assert refused() > 0
    assert len(rows(tmp_path / "out")[0]) == len(TEXTS) - 3


def test_no_server_for_long_ends_the_run(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "PATIENCE_S", 0.3)
    monkeypatch.setattr(server, "REST_S", (0.02, 0.1))
    with running(engine()) as one:
        taken = FakeEngine.step

        def step(self, batch):
            if self.steps == 8:
                one.stop()
            return taken(self, batch)

        monkeypatch.setattr(FakeEngine, "step", step)
        with pytest.raises(StartError, match=r"no server has answered for 0\.3 s"):
            embed(corpus, tmp_path / "out", one.url)
        monkeypatch.setattr(FakeEngine, "step", taken)
    monkeypatch.setattr(server, "PATIENCE_S", PATIENCE_S)
    with running(engine()) as again:
        assert embed(corpus, tmp_path / "out", again.url) == 3


def test_a_server_that_is_not_there_at_the_start_is_left_out(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with running(engine()) as one:
        assert embed(corpus, tmp_path / "out", "http://127.0.0.1:9", one.url) == 3
    said = [r.getMessage() for r in caplog.records if "does not answer" in r.getMessage()]
    assert len(said) == 1
    assert "http://127.0.0.1:9: ConnectionRefusedError" in said[0]
    assert len(rows(tmp_path / "out")[0]) == len(TEXTS) - 3


def test_servers_of_which_none_answers_are_all_told(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "CONNECT_S", 0.3)
    with socket.create_server(
        ("127.0.0.1", 0)
    ) as mute:  # takes connections, as a stopped process does, and says nothing
        silent = f"http://127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(StartError, match=rf"--server http://127\.0\.0\.1:9: Conn.*; {silent}: TimeoutError"):
            embed(corpus, tmp_path / "out", "http://127.0.0.1:9", silent)


def test_flags_of_an_engine_are_refused_by_name(tmp_path: Path):
    flags = {
        "out": str(tmp_path),
        "server": "http://127.0.0.1:9",
        "dtype": "float16",
        "threads": 2,
        "fake_delay_ms": 0.0,
    }
    with pytest.raises(
        StartError, match="--dtype, --threads, --fake-delay-ms: nothing here for them to set with --server"
    ):
        command.embed(["in.txt"], None, config.load(flags=flags))
    taken = {f"--{w.replace('_', '-')}" for w in ("auto_truncate", "log_level")}
    ivy_and_tulip = {
        "--" + f.name.replace("_", "-")
        for section, cls in config.SECTIONS.items()
        for f in dataclasses.fields(cls)
        if section in ("ivy", "tulip") and cli.takes("embed", section, f.name)
    }
    named = {"--" + name.replace("_", "-") for name in command._ENGINE_IVY + command._ENGINE_TULIP}
    assert ivy_and_tulip == named | taken, "every flag of `hortus embed` is for one or the other"


def test_what_cannot_start_says_why(corpus: Path, tmp_path: Path):
    with pytest.raises(StartError, match=r"--server http://127\.0\.0\.1:9: "):
        embed(corpus, tmp_path / "out", "http://127.0.0.1:9")
    with pytest.raises(StartError, match="expected a URL"):
        embed(corpus, tmp_path / "out", "127.0.0.1:9")
    with running(engine(), api_keys="secret") as one, running(FakeEngine(width=8, name="mini")) as two:
        with pytest.raises(StartError, match="key"):
            embed(corpus, tmp_path / "out", one.url)
        assert embed(corpus, tmp_path / "keyed", one.url, server_key="secret") == 3
        with pytest.raises(StartError, match="not the same model"):
            embed(corpus, tmp_path / "out", one.url, two.url, server_key="secret")
        with pytest.raises(StartError, match="--int8-ranges"):
            embed(corpus, tmp_path / "out", two.url, precision="int8")
        with pytest.raises(StartError, match="--dimensions 9"):
            embed(corpus, tmp_path / "out", two.url, dimensions=9)
        with pytest.raises(StartError, match="--chunk-tokens"):
            embed(corpus, tmp_path / "out", two.url, chunk_tokens=9)
    with pytest.raises(StartError, match="--model and --server"):
        command.embed([str(corpus)], "demo", config.load(flags={"out": "x", "server": "http://a"}))


@contextlib.contextmanager
def stand_in(answer: Callable[[int, list[str]], object], info: Callable[[int], object]) -> Iterator[str]:
    """The URL of something that is taken for a server. answer: to the n-th request for vectors, from 0; bytes as they are, None:
    the connection is closed. info: of a server that has had so many."""
    asked = [0]

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.tell(info(asked[0]))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked[0] += 1
            self.tell(answer(asked[0] - 1, body["input"]))

        def tell(self, told: object) -> None:
            if told is None:
                self.close_connection = True
                return
            data = told if isinstance(told, bytes) else json.dumps(told).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as there:
        thread = threading.Thread(target=there.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{there.server_port}"
        finally:
            there.shutdown()
            thread.join()


def an_info(revision: str) -> dict[str, object]:
    model = {"name": "m", "revision": revision, "kind": "embed", "width": 2, "dtype": "float32", "device": "cpu"}
    return {"model": model, "limits": {"max_inputs": 8}, "prompts": {}}


def vectors(n: int, texts: list[str]) -> dict[str, object]:
    return {"data": [{"embedding": [0.0, 1.0]} for _ in texts], "usage": {"total_tokens": len(texts)}}


def test_a_server_that_comes_back_with_another_model_ends_the_run(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server, "REST_S", (0.01, 0.05))

    def answer(n: int, texts: list[str]) -> object:
        return None if 3 <= n < 20 else vectors(n, texts)

    with (
        stand_in(answer, lambda n: an_info("one" if n < 3 else "two")) as url,
        pytest.raises(StartError, match=r"has come back with .*'two'.*not the same model"),
    ):
        embed(corpus, tmp_path / "out", url)
    with stand_in(answer, lambda n: an_info("one")) as url:
        assert embed(corpus, tmp_path / "again", url) == 3


@pytest.mark.parametrize(
    "told",
    [
        b"<html>welcome</html>",
        b"[]",
        {"data": [], "usage": {"total_tokens": 1}},
        {"data": [{"embedding": [1.0, 2.0]}]},
        {"data": [{"embedding": "?"}] * 8, "usage": {"total_tokens": 1}},
        {"data": [{"embedding": [1.0, None]}] * 8, "usage": {"total_tokens": 1}},
        {"data": {"embedding": [1.0, 2.0]}, "usage": {"total_tokens": 1}},
    ],
    ids=["page", "list", "none", "no usage", "no base64", "null", "no list"],
)
def test_what_is_no_answer_with_vectors_ends_the_run_in_words(corpus: Path, tmp_path: Path, told: object):
    with (
        stand_in(lambda n, texts: told if n else vectors(n, texts), lambda n: an_info("one")) as url,
        pytest.raises((StartError, EngineError), match="a server answered"),
    ):
        embed(corpus, tmp_path / "out", url)
