"""A disk that is full: one line, nothing torn, and the same command goes on. In parts, rejects, records, manifest."""

from __future__ import annotations

import errno
import io
import sys
from pathlib import Path

import pytest
from corpus_runs import embed, everything, settings, texts

from hortus.corpus import command, store
from hortus.corpus.progress import Progress
from hortus.errors import StartError


class Disk:
    """Its n-th file finds only so much room."""

    def __init__(self, nth: int, room: int) -> None:
        self.nth, self.room, self.files = nth, room, 0

    def open(self, path: str, mode: str) -> io.BufferedIOBase:
        self.files += 1
        full, room = self.files >= self.nth, self.room

        class File(io.FileIO):
            def write(self, data: bytes | memoryview, /) -> int:
                if full and self.tell() + memoryview(data).nbytes > room:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return super().write(data)

        return io.BufferedWriter(File(path, "wb"))


@pytest.fixture
def given(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text("\n".join([*texts(40), "word " * 400, *texts(10)]))
    return path


def test_a_full_disk_is_one_line_and_the_run_goes_on(given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    flags = {"part_rows": 40, "window_rows": 10}
    assert embed(given, tmp_path / "whole", **flags) == 3
    whole = everything(tmp_path / "whole")
    # The manifest; the first part's magic, then its second rows; the second part's record; rejects; the manifest's end.
    for nth, room in ((1, 0), (2, 0), (2, 20_000), (5, 0), (6, 0), (7, 100)):
        out = tmp_path / f"out{nth}-{room}"
        with monkeypatch.context() as patch:
            patch.setattr(store, "open", Disk(nth, room).open, raising=False)
            with pytest.raises(
                StartError, match=r"out\d-\d+: no room left; once that is mended, the same command goes on"
            ):
                embed(given, out, **flags)
        left = everything(out)
        assert not [name for name in left if name.endswith(".partial")], out
        assert all(whole[name] == data for name, data in left.items() if name.startswith(("part", "_parts")))
        assert len([name for name in left if name.startswith("_parts")]) == max(0, min(2, (nth - 1) // 3)), out
        assert embed(given, out, **flags) == 3
        assert everything(out) == whole, out


def test_a_disk_that_is_full_only_at_the_flush(given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(handle: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(store.os, "fsync", full)
        with pytest.raises(StartError, match="no room left"):
            embed(given, tmp_path / "out")
    assert not list((tmp_path / "out").glob("part*"))
    assert embed(given, tmp_path / "out") == 3


def test_another_fault_of_the_disk_says_what(given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(store.os, "replace", broken)
    with pytest.raises(StartError, match=r"cannot be written: \[Errno 5\] Input/output error; once"):
        embed(given, tmp_path / "out")


def test_what_fails_outside_the_folder_is_one_line_too(given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(command, "open_sink", full)
    with pytest.raises(StartError, match="No space left on device; once"):
        command.embed([str(given)], "demo", settings(tmp_path / "out", into="lancedb:x#y"))


def test_progress_that_cannot_be_told_ends_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    class Full(io.StringIO):
        def write(self, text: str, /) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    progress = Progress("json", total_bytes=10)
    progress.end("done")
    progress.end("done")
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == ["progress is told no more"]
