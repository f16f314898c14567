"""Servers whose answers are wrong, late or none are left out by name, whatever the suite; the others go on."""

import base64
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from zlib import crc32

import numpy as np
import pytest

from hortus.bench import served, suites
from hortus.bench.inprocess import InProcess
from hortus.bench.load import Clients
from hortus.bench.measure import Run
from hortus.bench.pace import UNANSWERED, Open
from hortus.bench.targets import Setting, Spec, open_target
from hortus.bench.texts import Corpus
from hortus.errors import StartError
from hortus.types import TokenBatch

HONEST = 12
"""Answers that are right before a `late` lie begins: the probe and the warm-up are among them."""


def vectors(texts):
    return np.stack([np.random.default_rng(crc32(t.encode())).normal(size=8).astype("<f4") for t in texts])


class Liar(ThreadingHTTPServer):
    """A server in OpenAI's shape that lies as its path says: http://HOST:PORT/LIE."""

    daemon_threads, request_queue_size = True, 64

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.first, self.free_at = {}, {}, 0.0
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, body, status=200, size=None):
        head = f"HTTP/1.1 {status} x\r\ncontent-length: {size or len(body)}\r\n\r\n"
        self.wfile.write(head.encode() + body)

    def do_GET(self):
        lie = self.path.split("/")[1]
        if lie == "no-http":
            self.wfile.write(b"220 mail here\r\n")
        elif lie == "silent":
            time.sleep(5)
        else:
            self.answer(
                {
                    "numbers": b'hortus_graph_steps_total{how="replay"} .\n\xff',
                    "no-json": b"<html>",
                    "no-models": b'{"data":[]}',
                    "list": b"[]",
                }.get(lie, b'{"data":[{"id":"m"}]}')
            )

    def do_POST(self):
        lie, kind = self.path.split("/")[1], self.path.rsplit("/", 1)[1]
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        texts = asked["inputs"] if kind == "embed" else asked["input"]
        rows = vectors([texts] if isinstance(texts, str) else texts)
        self.server.asked[lie] = count = self.server.asked.get(lie, 0) + 1
        late = lie.startswith("late-") and count > HONEST
        lie = lie.removeprefix("late-") if late or not lie.startswith("late-") else "truth"
        first = self.server.first.setdefault(self.path, rows) if asked.get("input") != "a" else rows
        rows = {
            "stale": lambda: first[:1].repeat(len(rows), 0),
            "fewer": lambda: rows[:-1], "more": lambda: np.concatenate([rows, rows]), "nan": lambda: rows * np.nan,
            "zero": lambda: rows * 0,
            "order": lambda: rows[::-1], "dims": lambda: rows[:, :3], "other": lambda: vectors(["x"] * len(rows)),
        }.get(lie, lambda: rows)()  # fmt: skip
        indices = {"same": [0] * len(rows), "from-1": range(1, 1 + len(rows))}.get(lie, range(len(rows)))
        data = [
            {"index": i, "embedding": r.tolist() if lie == "floats" else base64.b64encode(r.tobytes()).decode()}
            for i, r in zip(indices, rows, strict=True)
        ]
        body = json.dumps(rows.tolist() if kind == "embed" else {"data": data}).encode()
        if lie == "queue":  # one at a time
            self.server.free_at = max(self.server.free_at, time.monotonic()) + 0.05
            time.sleep(self.server.free_at - time.monotonic())
        if lie == "429":
            self.answer(b"{}", 429)
        elif lie == "error":
            self.answer(b'{"error":"overloaded"}')
        elif lie in ("cut", "drip", "hang"):
            if lie != "hang":
                self.answer(body[:20], size=len(body))
            for _ in range(100 if lie == "drip" else 0):
                time.sleep(0.05)
                self.wfile.write(b" ")
            if lie == "hang":
                time.sleep(5)
            self.close_connection = True
        else:
            self.answer(body)


@pytest.fixture(scope="module")
def liar():
    with Liar() as server:
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def clients():
    with Clients() as found:
        yield found


@pytest.fixture
def run(clients, tmp_path):
    words = tmp_path / "words.txt"
    words.write_text(" ".join(f"w{i}" for i in range(300)))

    def encode(texts):
        return TokenBatch.of([[1] * len(t.split()) for t in texts])

    setting = Setting(folder=SimpleNamespace(name="m", max_tokens=64), clients=clients, processes=1)
    truth = InProcess("truth", "made up", lambda inputs: vectors(inputs.texts))
    return Run(setting, [], Corpus(encode, [words]), truth, rounds=3, seconds=0.1, only_tokens=(8,), most_clients=2)


def opened(run, liar, lie, kind="openai"):
    return open_target(Spec(lie, kind, f"http://127.0.0.1:{liar.server_port}/{lie}"), run.setting)


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ("fewer", "shape|no answer in OpenAI's shape"),
        ("more", r"vectors of shape \(10, 8\), the reference has \(5, 8\)"),
        ("nan", "cosine nan to the reference"),
        ("order", "cosine .* to the reference"),
        ("dims", r"vectors of shape \(5, 3\)"),
        ("other", "cosine"),
        ("same", r"indices of the answer are \[0, 0"),
        ("from-1", r"indices of the answer are \[1, 2"),
        ("late-nan", "an answer while it was timed: cosine nan"),
        ("late-other", "an answer while it was timed: cosine"),
        ("late-error", "200 with too short a body"),
        ("late-429", "x 429 beside"),
        ("late-cut", "a broken connection"),
    ],
)  # fmt: skip
def test_no_lie_is_timed(run, liar, capsys, lie, why):
    liar.asked.clear()
    run.targets = [opened(run, liar, lie), opened(run, liar, "truth")]
    records = run.case("scoring", 5, 8, 1)
    assert [r.target for r in records] == ["truth"]
    assert records[0].cosine > 0.99999
    assert [*run.refused] == [lie]
    assert re.search(why, run.refused[lie]), run.refused[lie]
    assert f"LEFT OUT: {lie}: " in capsys.readouterr().out


@pytest.mark.parametrize("lie", ["stale", "late-stale", "nan", "zero"])
@pytest.mark.parametrize("reference", ["truth", "none"])
def test_what_says_the_same_of_every_text_is_right_of_none(run, liar, lie, reference):
    """Also where that is what it said rightly of the first; nor does the first target, wrong, make others look wrong."""
    liar.asked.clear()
    liar.first.clear()
    if reference == "none":
        run.reference = None
        run.targets = [
            opened(run, liar, "nan"),
            opened(run, liar, "truth"),
            *([opened(run, liar, lie)] if lie != "nan" else []),
        ]
    else:
        run.targets = [opened(run, liar, lie), opened(run, liar, "truth")]
    assert [r.target for r in run.case("latency", 1, 8, 1)] == ["truth"]
    assert lie in run.refused
    # What is measured in `parity` is the vectors themselves: figures or none, and left out of what follows.
    run.targets = [opened(run, liar, "truth"), opened(run, liar, lie)]
    run.refused.clear()
    liar.first.clear()
    records = suites.parity(run)
    assert {r.target for r in records} == {"truth", lie} - {"nan", "zero"}
    assert [*run.refused] == [lie]
    assert all(np.isfinite(r.cosine) for r in records)


def test_what_parity_measured_is_not_lost_when_it_is_stopped(run, liar, monkeypatch):
    run.targets = [opened(run, liar, "truth"), opened(run, liar, "other")]
    monkeypatch.setattr(run.targets[1], "vectors", lambda inputs: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        suites.parity(run)
    assert [r.target for r in run.told] == ["truth"]


def test_a_reference_that_fails_ends_the_run_and_blames_no_target(run, liar):
    run.reference = InProcess("truth", "made up", lambda inputs: 1 / 0)
    run.targets = [opened(run, liar, "truth")]
    for suite in ("latency", "start", "parity"):
        with pytest.raises(StartError, match=r"the reference fails at .* tokens .ZeroDivisionError"):
            suites.SUITES[suite](run)
    assert run.refused == {}


@pytest.mark.parametrize("suite", ["latency", "concurrency", "arrivals", "mixed", "start", "parity"])
def test_every_suite_goes_on_without_it(run, liar, suite):
    liar.asked.clear()
    run.rounds = 1
    run.targets = [opened(run, liar, "late-429"), opened(run, liar, "truth")]
    records = suites.SUITES[suite](run)
    assert [*run.refused] == ["late-429"]
    assert {r.target for r in records} == {"truth"}


def test_the_reference_is_asked_once_a_size(run, liar):
    """It is slow: float32, unfused. Rounds and targets share what it said: of two texts, or of the many of one request."""
    asked = []
    run.reference = InProcess("truth", "made up", lambda x: asked.append(len(x.texts)) or vectors(x.texts))
    run.targets = [opened(run, liar, "truth")]
    suites.mixed(run)
    assert sorted(asked) == [1, 1, 64]


def test_the_first_answers_of_a_wrong_model_are_no_figures(run, liar):
    run.targets = [opened(run, liar, "other")]
    assert suites.start(run) == []
    assert "cosine" in run.refused["other"]


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ("no-http", "no whole answer from .*/models .BadStatusLine"),
        ("no-json", "/models lists no model: b'<html>'"),
        ("no-models", "/models lists no model"),
        ("list", "/models lists no model"),
        ("silent", "no whole answer from .*/models within 0.3 s"),
        ("hang", "no whole answer from .*/embeddings within 0.3 s"),
        ("drip", "no whole answer from .*/embeddings within 0.3 s"),
        ("cut", "no whole answer from .*/embeddings .IncompleteRead"),
        ("429", "/embeddings answered 429"),
    ],
)
def test_what_is_no_such_server_is_told_at_once(run, liar, monkeypatch, lie, why):
    monkeypatch.setattr(served, "PATIENCE_S", 0.3)
    monkeypatch.setattr(served, "FIRST_PATIENCE_S", 0.3)
    with pytest.raises(StartError, match=why):
        opened(run, liar, lie)


def test_the_queue_of_one_is_worked_off_before_the_next_is_timed(run, liar):
    target, requests = opened(run, liar, "queue"), run.corpus.several(1, 8, 4)
    load = run.timed(target, requests, Open(400, 0.2))
    assert load.failed[UNANSWERED] > 10
    assert time.monotonic() >= liar.free_at


@pytest.mark.parametrize("lie", ["truth", "silent", "no-json", "no-http", "numbers"])
def test_a_server_without_graphs_is_passed_over_not_left_out(run, liar, monkeypatch, lie):
    monkeypatch.setattr(served, "PATIENCE_S", 0.3)
    target = opened(run, liar, "truth")
    monkeypatch.setattr(target, "ask", lambda method, path, ask=target.ask: ask(method, f"/{lie}"))
    run.targets = [target]
    assert suites.graphs(run) == []
    assert run.targets == [target]


def test_what_a_server_does_otherwise_is_told(run, liar):
    """Its figures are kept, and say of what they are."""
    assert opened(run, liar, "truth").about == "texts to vectors over HTTP, base64"
    assert opened(run, liar, "floats").about.endswith("HTTP, floats where base64 was asked for")
    run.setting.folder.name = "another"
    assert opened(run, liar, "truth").about.endswith("HTTP, base64, as its model m")


def test_tei_is_asked_when_it_is_opened(run, liar):
    run.targets = [opened(run, liar, "truth", "tei")]
    assert [r.target for r in run.case("scoring", 5, 8, 1)] == ["truth"]
    with pytest.raises(StartError, match="/embed answered 429"):
        opened(run, liar, "429", "tei")


def test_of_a_server_elsewhere_neither_number_format_nor_machine_is_claimed(run, liar):
    run.dtype = "float32"
    target = opened(run, liar, "truth")
    run.targets = [target]
    [record] = run.case("scoring", 5, 8, 1)
    assert (record.dtype, "asked from" in record.hardware) == (None, False)
    target.elsewhere = "far.example"
    [record] = run.case("scoring", 5, 8, 1)
    assert record.hardware.startswith("that of far.example, asked from ")
