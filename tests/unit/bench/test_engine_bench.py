"""`hortus bench engine` where there is no GPU: what of a step is Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the GPU's engine is Linux's")

from hortus.bench.engine import main


def test_pythons_share_of_a_step_is_measured_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert main(["--shape", "tiny", "--parts", "python", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    notes = {(r["batch"], r["tokens"], r["note"]) for r in rows}
    assert {(1, 16, "python: step()"), (25, 512, "python: result()")} <= notes
    assert all(0 < r["median_ms"] < 50 for r in rows)
