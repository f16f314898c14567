"""`hortus embed --ray local`: two actors of Ray Data, one of them killed; the same bytes as one process leaves."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROWS = 4000


def embed(given: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    fixed = ["--model", "demo", "--out", str(out), "--id", "n", "--part-rows", "250", "--window-rows", "100"]
    words = [sys.executable, "-m", "hortus.cli", "embed", str(given), *fixed, "--fake-delay-ms", "200", *more]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def everything(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}


def actors(of: int) -> list[psutil.Process]:
    """The processes of the run that hold an engine."""
    found = []
    for process in psutil.Process(of).children(recursive=True):
        try:
            if "MapWorker" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:  # it has ended meanwhile
            continue
    return found


@pytest.mark.timeout(400)
def test_two_actors_one_of_them_killed(tmp_path: Path):
    texts = [None if i == 77 else f"the cat {i} sat on " + "a mat " * (i % 20) for i in range(ROWS)]
    pq.write_table(pa.table({"n": range(ROWS), "text": texts}), tmp_path / "in.parquet", row_group_size=700)
    out, killed = tmp_path / "out", False
    run = embed(tmp_path / "in.parquet", out, "--ray", "local", "--actors", "2", "--threads", "1")
    deadline, engines = time.monotonic() + 300, []
    while run.poll() is None and not killed:
        assert time.monotonic() < deadline, "no part was made"
        # Looked for before there is a part: to look through all processes of a busy machine takes as long as making all parts.
        engines = engines if len(engines) == 2 else actors(run.pid)
        if engines and any(out.glob("_parts/*.json")):
            engines[0].kill()
            killed = True
            # It may have been in the middle of a file, or not: as if it had.
            (out / ".part-00000-00000.parquet.1.partial").write_bytes(b"half a")
        time.sleep(0.02)
    told, err = run.communicate(timeout=300)
    assert killed, err
    assert run.returncode == 3, err
    last = json.loads(told.splitlines()[-1])
    assert (last["event"], last["rows"], last["total_rejected"]) == ("done", ROWS, 1)
    alone = embed(tmp_path / "in.parquet", tmp_path / "alone", "--fake-delay-ms", "0")
    _, err = alone.communicate(timeout=120)
    assert alone.returncode == 3, err
    assert everything(out) == everything(tmp_path / "alone")


def test_tasks():
    pytest.importorskip("ray")
    from hortus.corpus.cluster import Task, tasks_of
    from hortus.corpus.manifest import Record

    def record(unit: int, part: int, ends: bool) -> Record:
        return Record(
            name="", unit=unit, part=part, rows_in=1, rows=1, rejected=0, tokens=1, bytes=1, sha256="", ends_unit=ends, engine=""
        )  # fmt: skip

    counts = [[5, 6], [None], [None, 3], [0]]
    one = [Task(0, range(p, p + 1)) for p in range(3)]
    assert tasks_of(counts, 5, []) == [*one, Task(1, None), Task(2, None), Task(3, range(1))]
    done = [record(0, 1, False), record(1, 0, False), record(1, 1, True), record(2, 1, True)]
    assert tasks_of(counts, 5, done) == [one[0], one[2], Task(2, None), Task(3, range(1))]


def test_what_ended_an_actor_is_told_in_our_words():
    from hortus.corpus.cluster import why

    rays = "ray.exceptions.UserCodeException: UDF failed to process a data block.\nTo change retry attempts, configure more."
    ours = (
        "OSError: [Errno 28]\n\nThe above ...\n  File x\nhortus.errors.StartError: --out X: no room left; go on\n\n"
        + rays
    )
    assert why(ours) == "--out X: no room left; go on"
    assert why(rays) == "the cluster gave up: To change retry attempts, configure more."
