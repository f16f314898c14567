"""What a person may type as inputs: what is read of it, what is passed over and told, what is refused."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from corpus_runs import embed

from hortus.corpus.files import listed
from hortus.errors import StartError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder `in` of everything; the current folder is the one it lies in."""
    names = ["a.txt", "deep/b.txt", "t.tsv", "deep/noext", "_under.txt", ".hidden.txt", "deep/.git/c.txt", "r.md.gz"]
    for name in names:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "in"


def urls(inputs: list[str], **more: str) -> list[str]:
    return [f.url for f in listed(inputs, **more)]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    caplog.clear()
    return found


def test_what_a_folder_holds_is_read_or_told_once(folder: Path, caplog: pytest.LogCaptureFixture):
    assert urls(["in"]) == ["in/a.txt", "in/deep/b.txt"]
    hidden = "3 whose names, or whose folders', begin with . or _ (such as in/.hidden.txt; name them to have them read)"
    unnamed = "3 whose names say no format (such as in/deep/noext; give --format to have them read)"
    assert told(caplog) == [f"passed over, of what the inputs hold: {unnamed}; {hidden}"]
    (folder / "r.md.gz").unlink()
    assert urls(["in"], format="text") == ["in/a.txt", "in/deep/b.txt", "in/deep/noext", "in/t.tsv"]
    assert told(caplog) == [f"passed over, of what the inputs hold: {hidden}"]
    assert urls(["in/_under.txt", "in/.hidden.txt"]) == ["in/_under.txt", "in/.hidden.txt"]
    assert told(caplog) == []


def test_a_compressed_file_of_a_told_format_is_unpacked(folder: Path):
    found = {f.url: (f.format, f.compression) for f in listed(["in"], format="csv")}
    assert found["in/r.md.gz"] == ("csv", "gzip")


def test_what_a_glob_matches_is_read_or_told(folder: Path, caplog: pytest.LogCaptureFixture):
    os.mkfifo(folder / "pipe.txt")
    assert urls(["in/[adp]*"]) == ["in/a.txt"]
    assert told(caplog) == [
        "passed over, of what the inputs hold: 1 that are folders, or links to some (such as in/deep; name them to have "
        "what is in them read); 1 that are no regular files (such as in/pipe.txt)"
    ]


def test_one_warning_for_all_inputs(folder: Path, caplog: pytest.LogCaptureFixture):
    assert urls(["in/deep", "in"]) == ["in/deep/b.txt", "in/a.txt"]
    assert len(told(caplog)) == 1


@pytest.mark.parametrize("given", ["in", "in/*/b.txt", "in/**/*.txt"])
@pytest.mark.parametrize("error", [PermissionError(13, "no"), OSError(5, "broken")])
def test_a_folder_that_cannot_be_listed_is_told_or_ends_the_run(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, given: str, error: OSError
):
    (folder / "shut").mkdir()
    scandir = os.scandir

    def hindered(path: str) -> Iterator[os.DirEntry[str]]:
        if str(path).endswith("shut"):
            raise error
        return scandir(path)

    monkeypatch.setattr(os, "scandir", hindered)
    if isinstance(error, PermissionError):
        assert "in/deep/b.txt" in urls([given])
        assert "1 that may not be read, with all that is in them (such as in/shut)" in told(caplog)[0]
        with pytest.raises(StartError, match=r"in/shut: .* that may not be read"):
            listed(["in/shut"])
    else:
        with pytest.raises(StartError, match="broken"):
            listed([given])


def test_a_name_that_is_not_utf8_is_told_before_anything_is_read(folder: Path):
    os.rename(folder / "a.txt", os.fsencode(folder) + b"/caf\xe9.txt")
    with pytest.raises(StartError, match=r"in/caf\\udce9\.txt': its name is not UTF-8"):
        listed(["in"])


@pytest.mark.parametrize("given", ["", " ", "\t"])
def test_an_empty_input_is_not_the_current_folder(folder: Path, given: str):
    with pytest.raises(StartError, match="an input is empty: name a file"):
        embed(["in", given], folder / "out")


def test_what_is_no_regular_file_is_called_so(folder: Path, caplog: pytest.LogCaptureFixture):
    os.mkfifo(folder / "pipe.txt")
    with pytest.raises(StartError, match=r"in/pipe\.txt: is no regular file"):
        listed(["in/pipe.txt"])
    (folder / "gone.txt").symlink_to("nowhere")
    assert urls(["in"]) == ["in/a.txt", "in/deep/b.txt"]
    assert "2 that are no regular files (such as in/gone.txt)" in told(caplog)[0]


def test_a_folder_of_nothing_that_is_read_says_what_it_holds(folder: Path):
    (folder / "a.txt").unlink()
    (folder / "deep" / "b.txt").unlink()
    with pytest.raises(StartError, match=r"a folder without files of a known kind .*; passed over: .*give --format"):
        listed(["in"])
    (folder / "empty").mkdir()
    with pytest.raises(StartError, match=r"in/empty: a folder without files$"):
        listed(["in/empty"], format="text")


def test_a_file_is_read_once_however_its_folder_is_written(folder: Path, caplog: pytest.LogCaptureFixture):
    (folder.parent / "link").symlink_to("in")
    (folder / "loop").symlink_to(".")
    (folder / "same.txt").symlink_to("a.txt")  # another name is another file
    whole = ["in/a.txt", "in/deep/b.txt", "in/same.txt"]
    ways = [
        "in/../in/a.txt",
        "./in/a.txt",
        str(folder / "a.txt"),
        f"file://{folder}/a.txt",
        "link/a.txt",
        "link",
        "in/a*",
    ]
    for way in ways:
        assert urls(["in", way]) == whole, way
    assert urls(["link/../in/a.txt", "in"])[1:] == whole[1:]
    assert "1 that are folders, or links to some (such as in/loop;" in told(caplog)[0]
