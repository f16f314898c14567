"""What is told of a run: also before its first window, and never more than is done."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from corpus_runs import texts

from hortus.corpus import files, progress, read
from hortus.corpus.columns import Columns


def test_lines_come_before_the_first_window(monkeypatch: pytest.MonkeyPatch):
    told: list[dict] = []

    class Out:
        def write(self, text: str) -> int:
            told.append(json.loads(text))
            return len(text)

        def flush(self) -> None:
            if len(told) == 3:
                enough.set()

    monkeypatch.setattr(sys, "stdout", Out())
    monkeypatch.setitem(progress.EVERY_S, "json", 0.001)

    async def run() -> None:
        async with progress.Progress("json", total_bytes=100).telling():
            await enough.wait()

    enough = asyncio.Event()
    asyncio.run(run())
    assert [(t["event"], t["rows"], t["share"], t["eta_s"]) for t in told[:3]] == [("progress", 0, 0.0, None)] * 3


def test_telling_ends_with_what_it_tells_of():
    async def run() -> set[asyncio.Task]:
        with pytest.raises(RuntimeError):
            async with progress.Progress("json", total_bytes=100).telling():
                raise RuntimeError
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert not asyncio.run(run())


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
@pytest.mark.parametrize("ending", ["jsonl", "csv", "txt"])
def test_the_share_does_not_run_ahead(tmp_path: Path, ending: str, packed: str):
    rows = 8 * read.BLOCK_ROWS
    lines = [json.dumps({"text": t}) if ending == "jsonl" else t for t in texts(rows)]
    raw = "\n".join(["text", *lines] if ending == "csv" else lines).encode()
    path = tmp_path / f"in.{ending}{packed}"
    path.write_bytes({"": raw, ".gz": gzip.compress(raw), ".zst": pa.compress(raw, codec="zstd", asbytes=True)}[packed])
    (file,) = files.listed([str(path)])
    columns = Columns("text", None, pa.schema([pa.field("id", pa.string())]))
    share, done = 0.0, 0
    for block in read.blocks(file, columns):
        share, done = share + block.bytes / file.size, done + len(block)
        assert abs(share - done / rows) < 0.03, "a small file is read in one piece, and told as it is given out"
    assert share == pytest.approx(1.0)
    first = next(iter(read.blocks(file, columns, rows // 2)))
    assert abs(first.skipped / file.size - 0.5) < 0.03


def test_the_end_is_the_end():
    told = progress.Progress("none", total_bytes=100)
    told.add(rows=1, rejected=0, tokens=1, bytes=90.0)  # and ten bytes of blank lines
    assert (told.state("progress")["share"], told.state("done")["share"]) == (0.9, 1.0)
