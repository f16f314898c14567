"""`hortus embed` as a process: killed and gone on, stopped by a signal, its words to a program, its memory."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROWS = 6000


def command(given: Path, out: Path, *more: str) -> list[str]:
    fixed = ["--model", "demo", "--out", str(out), "--part-rows", "500", "--window-rows", "100", "--fake-delay-ms", "3"]
    return [sys.executable, "-W", "error", "-m", "hortus.cli", "embed", str(given), *fixed, *more]


IN_TIME = """
import os, random, sys, threading, time
from pathlib import Path
from hortus.cli import main

def at_a_part():
    out, more, within_s, number = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    count = lambda: len(list(out.glob("_parts/*.json")))
    wanted = count() + more
    while count() < wanted:
        time.sleep(0.002)
    time.sleep(random.Random(wanted).random() * within_s)  # somewhere inside the next part
    os.kill(os.getpid(), number)

threading.Thread(target=at_a_part, daemon=True).start()
sys.exit(main(sys.argv[5:]))
"""


def signalled(args: list[str], out: Path, number: int, parts: int, within_s: float = 0.0) -> subprocess.Popen[str]:
    """The command, which sends itself a signal when it has made so many more parts: looked at from outside it might have ended
    between two looks."""
    words = args[args.index("hortus.cli") + 1 :]
    mine = [str(out), str(parts), str(within_s), str(int(number))]
    return started(sys.executable, "-W", "error", "-c", IN_TIME, *mine, *words)


def everything(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}


def started(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str], status: int) -> str:
    out, err = process.communicate(timeout=180)
    assert process.returncode == status, err
    return out


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "in.jsonl"
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "nothing", "of", "note"]
    rng = random.Random(3)
    lines = [json.dumps({"id": i, "text": " ".join(rng.choices(words, k=rng.randint(1, 30)))}) for i in range(ROWS)]
    lines[77] = '{"id": 77, "text": null}'
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "out"
    told = [json.loads(line) for line in ended(started(*command(corpus, out, "--id", "id")), 3).splitlines()]
    assert told[-1]["event"] == "done"
    assert (told[-1]["rows"], told[-1]["total_rejected"], told[-1]["share"]) == (ROWS, 1, 1.0)
    assert told[-1]["rows_per_s"] > 0 < told[-1]["tokens_per_s"]
    assert 0 < told[-1]["device_busy"] <= 1
    return everything(out)


@pytest.mark.timeout(180)
def test_killed_again_and_again_and_the_same_bytes(corpus: Path, whole: dict[str, bytes], tmp_path: Path):
    """kill -9 whenever two more parts are done, until the run comes to its end by itself."""
    out, kills = tmp_path / "out", 0
    while True:
        process = signalled(command(corpus, out, "--id", "id"), out, signal.SIGKILL, 2, 0.02)
        _, err = process.communicate(timeout=100)
        if process.returncode == 3:
            break
        assert process.returncode == -signal.SIGKILL, err
        kills += 1
    assert kills >= 3
    assert everything(out) == whole


def test_a_signal_stops_it_and_it_goes_on(corpus: Path, whole: dict[str, bytes], tmp_path: Path):
    out = tmp_path / "out"
    process = signalled(command(corpus, out, "--id", "id"), out, signal.SIGTERM, 1)
    last = json.loads(ended(process, 128 + signal.SIGTERM).splitlines()[-1])
    assert last["event"] == "stopped"
    assert not list(out.rglob(".*.partial"))
    ended(started(*command(corpus, out, "--id", "id")), 3)
    assert everything(out) == whole


def test_what_is_wrong_is_one_line(corpus: Path, tmp_path: Path):
    process = started(*command(corpus, tmp_path / "out", "--text", "body"))
    _, err = process.communicate(timeout=180)
    assert process.returncode == 1
    assert err == f"hortus: {corpus}: no column 'body' (--text); it has id, text\n"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_is_flat_over_a_corpus_of_many_windows(tmp_path: Path):
    """A corpus of 90 windows takes what one of 6 does, and what allocators keep."""
    peaks = {}
    for windows in (6, 90):
        given = tmp_path / f"{windows}.parquet"
        rng, words = random.Random(1), ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "nothing", "of", "note"]
        texts = [" ".join(rng.choices(words, k=12)) for _ in range(1000)]
        with pq.ParquetWriter(given, pa.schema([("text", pa.string())])) as writer:
            for _ in range(windows):
                writer.write_table(pa.table({"text": texts}))
        out = tmp_path / f"out-{windows}"
        # The process tells its own peak: VmHWM is gone with it.
        code = (
            "import sys\nfrom hortus.cli import main\nstatus = main(sys.argv[1:])\n"
            "print(next(l for l in open('/proc/self/status') if 'VmHWM' in l).split()[1])\nsys.exit(status)"
        )
        args = command(given, out, "--part-rows", "20000", "--window-rows", "1000", "--progress", "none")[5:]
        args[args.index("500") : args.index("500") + 1] = ["20000"]
        env = {**os.environ, "HORTUS_LOG_LEVEL": "error"}
        done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=120, env=env)
        assert done.returncode == 0, done.stderr
        peaks[windows] = int(done.stdout.split()[-1]) / 1024
        assert sum(pq.read_metadata(p).num_rows for p in out.glob("*.parquet")) == windows * 1000
    # A window's vectors are 1.5 MiB, all of the larger corpus's 138 MiB.
    assert peaks[90] < peaks[6] + 60, f"MiB at most: {peaks}"
