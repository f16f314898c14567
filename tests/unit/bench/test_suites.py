"""Every suite once, tiny, over a real server with a fake engine; and what becomes of targets that are wrong."""

import json

import numpy as np
import pytest

from hortus import bench
from hortus.bench import shapes, suites
from hortus.bench.inprocess import InProcess, Ours
from hortus.bench.load import Clients
from hortus.bench.measure import Run
from hortus.bench.results import cosines
from hortus.bench.targets import Setting
from hortus.bench.texts import Corpus
from hortus.config import RoseConfig
from hortus.engines import open_model
from hortus.ivy.tokenize import Tokenizer
from hortus.types import TokenBatch

FLAGS = [
    "--reference",
    "none",
    "--tokens",
    "16",
    "--cases",
    "1x16",
    "3x900",
    "--most-clients",
    "2",
    "--processes",
    "2",
    "--rounds",
    "2",
    "--seconds",
    "0.1",
]


def test_every_suite_is_listed():
    assert {*bench.SUITES} == {*suites.SUITES}
    assert all(f.__doc__ for f in suites.SUITES.values())


def test_every_suite_over_a_server(tmp_path, capsys):
    out, raw = tmp_path / "out.jsonl", tmp_path / "raw.jsonl"
    words = [",".join(suites.SUITES), "--target", "fake=serve:--fake-delay-ms 0", "--out", str(out), "--raw", str(raw)]
    assert bench.main([*words, *FLAGS]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    by_suite = {r["suite"] for r in rows}
    # No graphs on a fake engine; `start` writes first-hit as well.
    assert by_suite == {*suites.SUITES, "first-hit"} - {"graphs"}
    assert {r["target"] for r in rows} == {"fake"}
    by_chance = ("arrivals", "mixed")  # of a slow machine's few requests a second, none may arrive in a tenth of one
    assert all(r["median_ms"] > 0 for r in rows if r["suite"] not in ("parity", *by_chance))
    assert {r["clients"] for r in rows if r["suite"] == "concurrency"} == {1, 2}
    assert [r["batch"] for r in rows if r["suite"] == "scoring"] == [5, 25, 50]
    assert [(r["batch"], r["tokens"]) for r in rows if r["suite"] == "cases"] == [
        (1, 16),
        (3, 256),
    ]  # the model's limit
    offered = [r["offered_per_s"] for r in rows if r["suite"] == "arrivals"]
    assert offered == sorted(offered)
    assert all(r["cosine"] > 0.99999 for r in rows if r["suite"] == "latency")  # against itself
    assert all("cosine" not in r and "p99" not in r["note"] for r in rows if r["suite"] == "start"), (
        "nothing was asked yet"
    )
    assert all("client_cores" in r for r in rows if r["suite"] == "throughput")
    assert all(r["cpu_ms"] > 0 for r in rows if r["suite"] == "throughput")  # of the server's processes
    lines = [json.loads(line) for line in raw.read_text().splitlines()]
    assert all(ms > 0 for line in lines for ms in line["ms"])
    sizes = {
        (r["suite"], r["batch"], r["tokens"], r["clients"])
        for r in rows
        if r["suite"] in ("latency", "scoring", "cases")
    }
    assert sizes <= {(x["suite"], x["batch"], x["tokens"], x["clients"]) for x in lines}, "which case a line is of"
    assert all((x["clients"] is None) == (x["offered_per_s"] is not None) for x in lines)
    said = capsys.readouterr().out
    assert "passed over" in said
    asked = next(r["tokens"] for r in rows if r["suite"] == "throughput")
    assert f"throughput: batches of 100 x {asked} tokens from" in said, (
        "what is asked, whatever the suite's own size is"
    )


def test_what_a_suite_does_is_told_with_the_sizes_of_the_run():
    assert bench.about("latency") == "one input of 128, 512, 4096 tokens"
    assert bench.about("throughput", [64]) == "batches of 100 x 64 tokens from 4 client processes"
    assert bench.about("concurrency", [16], 4) == "1 to 4 clients with 16 tokens each, over HTTP"
    assert bench.about("parity", []) == "vectors against the reference"


def test_bad_words_are_named(capsys):
    for words in ("latency --tokens 16 2", "cases --cases 1x1"):
        assert bench.main([*words.split(), "--target", "openai:http://127.0.0.1:1"]) == 1
        said = capsys.readouterr()
        assert "this tokenizer makes at least 3 of a text" in said.err
        assert "opening" not in said.out
    assert bench.main(["latency", "--reference", "none", "--target", "openai:http://127.0.0.1:1"]) == 1
    assert "nothing answers at 127.0.0.1:1" in capsys.readouterr().out


@pytest.fixture
def run():
    folder = open_model("demo", None, RoseConfig(), weights=False)
    tokenizer = Tokenizer(folder, max_tokens=1 << 20)
    run = Run(Setting(folder=folder, clients=Clients()), [], Corpus(tokenizer.encode), None, rounds=2, seconds=0.01)
    yield run
    run.close()
    tokenizer.close()


def target(name, rows):
    return InProcess(name, "made up", lambda inputs: rows(len(inputs.texts)))


def fail(n):
    raise RuntimeError("out of memory")


def test_targets_that_are_wrong_are_not_timed(run, capsys):
    good = lambda n: np.tile(np.array([[1, 2, 3]], np.float32), (n, 1))  # noqa: E731
    run.reference = target("truth", good)
    run.targets = [
        target("twice as long", lambda n: 2 * good(n)),  # the same direction
        target("near", lambda n: good(n) + np.array([[0, 0, 0.1]], np.float32)),
        target("off", lambda n: good(n) + np.array([[0, 0, 1]], np.float32)),
        target("nan", lambda n: good(n) * np.nan),
        target("short", lambda n: good(n)[:, :2]),
        target("broken", fail),
    ]
    records = suites.latency(run)
    assert {r.target for r in records} == {"twice as long", "near"}
    assert [*run.refused] == ["off", "nan", "short", "broken"]
    assert "cosine 0.9" in run.refused["off"]
    assert "out of memory" in run.refused["broken"]
    assert "(1, 2), the reference has (1, 3)" in run.refused["short"]
    assert {r.tokens for r in records} == {128, 256}  # the model's limit, where it is less than the suite's size
    assert all((r.ratio is None) == (r.target == "twice as long") for r in records)
    assert "LEFT OUT: off" in capsys.readouterr().out


def test_a_target_that_fails_later_is_left_out_and_the_others_go_on(run):
    calls = iter(range(100))
    one = np.ones((1, 3), np.float32)
    run.targets = [target("good", lambda n: one), target("tired", lambda n: one if next(calls) < 5 else fail(n))]
    run.seconds = 0.0
    records = run.case("latency", 1, 16, 1)
    assert [(r.target, r.rounds) for r in records] == [("good", 2)]
    assert "out of memory" in run.refused["tired"]


def test_rounds_take_turns(run):
    order = []

    def noted(name):
        def rows(n):
            order.append(name)
            return np.ones((n, 3), np.float32)

        return target(name, rows)

    run.targets, run.seconds = [noted("a"), noted("b")], 0.0  # one call a round
    run.case("latency", 1, 16, 1)
    assert order == ["a"] * 4 + ["b"] * 4 + ["a", "b", "b", "a"]


@pytest.mark.parametrize("shape", ["tiny", "tiny-bert", "tiny-modernbert"])
def test_real_engines_agree(shape, tmp_path, capsys):
    """Hortus and its peers on random weights of a tiny shape: the check before timing is the test."""
    peers, out = ("engine", "hortus", "sentence-transformers", "transformers"), tmp_path / "out.jsonl"
    words = ["cases", "--shape", shape, "--threads", "1", *[w for p in peers for w in ("--target", p)]]
    assert bench.main([*words, "--cases", "1x16", "3x40", "--rounds", "1", "--seconds", "0", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["batch"], r["target"]) for r in rows] == [(n, p) for n in (1, 3) for p in peers]
    assert all(r["cosine"] > 0.999999 for r in rows)
    assert all("sdpa" in r["note"] for r in rows if r["target"].endswith("transformers"))
    assert {r["model"] for r in rows} == {shapes.model_name(shape)}
    assert {r["dtype"] for r in rows} == {"float32"}
    assert (
        bench.main(
            [
                "cases",
                "--shape",
                shape,
                "--threads",
                "1",
                "--dtype",
                "fp8",
                "--target",
                peers[2],
                "--target",
                peers[3],
                "--cases",
                "1x16",
                "--rounds",
                "1",
                "--seconds",
                "0",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    assert {json.loads(line)["dtype"] for line in out.read_text().splitlines()[len(rows) :]} == {None}, (
        "peers know no fp8"
    )


@pytest.mark.parametrize(
    ("architecture", "what"),
    [("BertForSequenceClassification", "a classifier"), ("BertForMaskedLM", "a sparse embedding model")],
)
def test_what_is_no_embedder_is_not_measured_as_one(tmp_path, capsys, architecture, what):
    folder = shapes.shape_folder(tmp_path, "tiny-bert")
    (folder / "modules.json").unlink()
    config = json.loads((folder / "config.json").read_text()) | {"architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(config))
    assert bench.main(["latency", "--model", str(folder), "--target", "sentence-transformers"]) == 1
    assert f"is {what}; the suites measure embedding models" in capsys.readouterr().err


def test_random_weights_tell_texts_apart(tmp_path):
    """Vectors that are all alike would pass any check: texts differ by far more than a target may be off."""
    for shape in ("tiny-bert", "tiny-modernbert"):
        folder = open_model(str(shapes.shape_folder(tmp_path, shape)), None, RoseConfig(), weights=False)
        ours = Ours(folder)
        rows = ours.vectors(TokenBatch.of(np.random.default_rng(0).integers(3, 500, (4, 64)).tolist()))
        assert max(cosines(rows[:1], rows[i : i + 1])[0] for i in (1, 2, 3)) < 0.98
        ours.tokenizer.close()
