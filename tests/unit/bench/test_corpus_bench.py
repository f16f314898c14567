"""What `hortus bench corpus` makes of its measurements."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from hortus.bench import corpus


def test_the_rate_of_actors_is_told_from_their_parts(tmp_path: Path):
    (tmp_path / "_parts").mkdir()
    for i, at in enumerate((105.0, 101.0, 109.0)):
        path = tmp_path / "_parts" / f"part-00000-0000{i}.json"
        path.write_text(json.dumps({"rows": 10 + i}))
        os.utime(path, (at, at))
    assert corpus.span(tmp_path) == (22, 101.0, 109.0), "the first that was finished tells when the others began"


def test_shares_of_processor_time_are_told_by_thread():
    before = {"tulip-step": 1.0, "MainThread": 0.5}
    after = {"tulip-step": 10.0, "MainThread": 0.75, "tokenize": 0.75, "asyncio": 0.0}
    assert corpus.told_shares(before, after) == "tulip-step 90.0%, tokenize 7.5%, MainThread 2.5%"
    assert corpus.told_shares({}, {}) == ""


def test_processor_time_is_that_of_actors_alone():
    assert corpus.actor_seconds(os.getpid()) == 0.0
    spin = "import os; os.times()\nwhile os.times().user < 0.1: pass\nprint(flush=True); input()"
    named = {"actor": "ray::MapWorker(Map(Actor))", "other": "ray::DashboardAgent"}
    for kind, name in named.items():
        with subprocess.Popen(
            [name, "-c", spin], executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as job:
            assert job.stdout is not None
            assert job.stdin is not None
            job.stdout.readline()
            assert (corpus.actor_seconds(os.getpid()) >= 0.09) == (kind == "actor")
            job.stdin.write(b"\n")
            job.stdin.close()
