"""What is wrong in the words of `hortus bench` is bad usage: status 2 and the flag's name, before anything is loaded."""

import json
import os
import subprocess
import sys

import pytest

from hortus import bench
from hortus.bench.flags import cores
from hortus.bench.started import bound

RECORD = {"suite": "latency", "model": "m", "target": "hortus"}


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin1.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (tmp_path / "bad.jsonl").write_text(json.dumps(RECORD) + "\n[1]\n")
    (tmp_path / "lacking.jsonl").write_text('{"target": "hortus"}\n')
    for name, wrong in (
        ("nan", {"p99_ms": float("nan")}), ("null", {"target": None}), ("negative", {"median_ms": -1}), ("half", {"batch": 1.5}),
    ):  # fmt: skip
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(RECORD | wrong))
    (tmp_path / "words.jsonl").write_text("\n" + json.dumps(RECORD | {"median_ms": "fast"}))
    (tmp_path / "raw.jsonl").write_text('{"suite": "latency", "target": "serve", "ms": [1.0]}')
    (tmp_path / "large.jsonl").write_text(json.dumps(RECORD | {"batch": 10**400}))
    (tmp_path / "foreign.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "good.jsonl").write_text(json.dumps(RECORD) + "\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("latenci", "no suite 'latenci'"),
        ("latency --model demo --shape tiny", "--shape: not allowed with argument --model"),
        ("corpus --shape tiny --model demo", "--model: not allowed with argument --shape"),
        ("latency --rounds 0", "--rounds: '0' is not a whole number of at least 1"),
        ("latency --rounds -1", "--rounds: '-1'"),
        ("latency --rounds 1.5", "--rounds: '1.5'"),
        ("latency --seconds -1", "--seconds: '-1' is not a number of at least 0"),
        ("latency --seconds nan", "--seconds: 'nan'"),
        ("latency --seconds inf", "--seconds: 'inf'"),
        ("latency --processes 0", "--processes: '0'"),
        ("latency --most-clients 0", "--most-clients: '0'"),
        ("latency --threads 0", "--threads: '0'"),
        ("latency --tokens 16 0", "--tokens: '0'"),
        ("cases --cases 1x16 512", "--cases: '512' is no size; write INPUTSxTOKENS"),
        ("cases --cases 0x16", "--cases: '0' is not a whole number"),
        ("grpc --server-cores zero", "--server-cores: 'zero' is no list of cores"),
        ("grpc --server-cores 1-0", "--server-cores: '1-0' is no list of cores"),
        ("http --server-cores 99999", "--server-cores: core 99999 is not one that this process may use"),
        ("grpc --server-cores 0 --engine-cores 0-99999", "--engine-cores: core "),
        ("latency --texts nope", "--texts: nope: No such file"),
        ("latency --texts .", "--texts: .: Is a directory"),
        ("latency --texts latin1.txt", "--texts: latin1.txt: not UTF-8 at byte 3"),
        ("latency --header authorization", "--header: 'authorization' is no header line; write 'name: value'"),
        ("latency --header a\nb:c", "--header: "),
        ("latency --header :x", "--header: "),
        ("latency --header Content-Length:5", "--header: content-length is written for each request by itself"),
        ("latency --threads 100000", "--threads: 100000 is more than 1024, which is the most"),
        ("latency --processes 1000", "--processes: 1000 is more than 256"),
        ("latency --dtype int3", "--dtype: 'int3' is not one of"),
        ("latency --attention guess", "--attention: 'guess' is not one of"),
        ("latency --shape 70b", "--shape 70b: there are"),
        ("latency --out .", "--out: . is a folder"),
        ("latency --raw latin1.txt/x", "is no folder"),
        ("latency --out new.jsonl --raw ./new.jsonl", "--raw and --out are one file"),
        ("latency --target nothing", "no kind 'nothing'"),
        ("latency --target engine --target engine", "two of one name"),
        (
            "latency --target infinity:/nope/python",
            "--target infinity:/nope/python: there is no program /nope/infinity_emb",
        ),
        ("latency --target vllm:/nope/python", "--target vllm:/nope/python: there is no program /nope/python"),
        ("latency --target serve:'", "No closing quotation"),
        ("cpu --out .", "--out: . is a folder"),
        ("http --seconds -1", "--seconds: '-1'"),
        ("grpc --rounds 0", "--rounds: '0'"),
        ("watch --seconds 0", "--seconds: '0' is not more than 0"),
        ("watch --rounds 0", "--rounds: '0'"),
        ("corpus --rows 0", "--rows: '0'"),
        ("corpus --rows 5 --ray", "--rows 5: "),
        ("engine --rounds 0", "--rounds: '0'"),
        ("engine --minutes -1", "--minutes: '-1'"),
        ("engine --profile 1x", "--profile '1x': write COUNTxTOKENS"),
        ("engine --parts chek", "unknown part 'chek'"),
        ("kernels --tokens 0", "--tokens: '0'"),
        ("report nope.jsonl", "files: nope.jsonl: No such file"),
        ("report latin1.txt", "files: latin1.txt: not UTF-8 at byte 3"),
        ("report bad.jsonl", "bad.jsonl:2: no record"),
        ("report words.jsonl", "words.jsonl:2: median_ms: 'fast' is no number"),
        ("report nan.jsonl", "nan.jsonl:1: p99_ms: nan is no figure"),
        ("report null.jsonl", "null.jsonl:1: target: may not be null"),
        ("report negative.jsonl", "negative.jsonl:1: median_ms: -1 is less than 0"),
        ("report half.jsonl", "half.jsonl:1: batch: 1.5 is no whole number"),
        ("report raw.jsonl", "raw.jsonl:1: latencies, as --raw writes them"),
        ("report large.jsonl", "large.jsonl:1: batch: that many digits is no figure"),
        ("report foreign.jsonl empty.jsonl", "no record in foreign.jsonl, empty.jsonl"),
        ("corpus --texts nope", "--texts: nope: No such file"),
        ("corpus --texts good.jsonl", "--texts: rows come from Lee's corpus without --tokens"),
        ("beside --rate 0", "--rate: '0' is not more than 0"),
        ("report lacking.jsonl", "lacking.jsonl:1: no field suite"),
        ("report good.jsonl --to good.jsonl", "--to: good.jsonl is no folder"),
        ("readme --check", "run it from the root of a checkout"),
    ],
)
def test_bad_usage(files, monkeypatch, capsys, words, said):
    monkeypatch.setattr(bench, "_open", lambda *_: pytest.fail("something was loaded"))
    with pytest.raises(SystemExit) as e:
        bench.main([w.replace("\\n", "\n") for w in words.replace("\n", "\\n").split()])
    assert e.value.code == 2
    assert said in capsys.readouterr().err


def test_what_is_started_where_cores_are_given_stays_there():
    mine = os.sched_getaffinity(0)
    core = min(mine)
    assert cores(f"{core},{core}-{core}") == {core}
    with bound(cores(str(core))):
        told = subprocess.run(
            [sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"],
            capture_output=True,
            text=True,
            check=True,
        )
    assert told.stdout.split() == [str(core)]
    assert os.sched_getaffinity(0) == mine
    with bound(()):
        assert os.sched_getaffinity(0) == mine
