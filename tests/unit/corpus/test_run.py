"""A whole run in this process: every format, every kind of row, going on, and what is refused."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpus_runs import embed, everything, rejects, result, table, texts

import hortus
from hortus.corpus import pipeline
from hortus.errors import StartError

ROWS = 300


def write_parquet(path: Path, given: list[str]) -> None:
    pq.write_table(pa.table({"n": range(len(given)), "text": given}), path, row_group_size=70)


def write_jsonl(path: Path, given: list[str]) -> None:
    path.write_text("".join(json.dumps({"n": i, "text": t, "more": [1]}) + "\n\n" for i, t in enumerate(given)))


def write_csv(path: Path, given: list[str]) -> None:
    with path.open("w", newline="") as f:
        csv.writer(f).writerows([["text", "n"], *([t, i] for i, t in enumerate(given))])


def write_text(path: Path, given: list[str]) -> None:
    path.write_text("".join(t + "\r\n" for t in given))


WRITERS: dict[str, Callable[[Path, list[str]], None]] = {
    "parquet": write_parquet,
    "jsonl": write_jsonl,
    "csv": write_csv,
    "txt": write_text,
}


def vectors(out: Path) -> np.ndarray:
    return np.array(table(out).column("embedding").to_pylist())


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
@pytest.mark.parametrize("ending", WRITERS)
def test_every_format(tmp_path: Path, fake: hortus.Engine, ending: str, packed: str):
    if ending == "parquet" and packed:
        (tmp_path / f"a.parquet{packed}").write_bytes(b"")
        with pytest.raises(StartError, match="compresses inside"):
            embed(tmp_path / f"a.parquet{packed}", tmp_path / "out")
        return
    given = texts(ROWS)
    plain = tmp_path / f"in.{ending}"
    WRITERS[ending](plain, given)
    if packed:
        raw = plain.read_bytes()
        whole = raw[:999], raw[999:]  # two members, as concatenated files have
        if packed == ".gz":
            made = b"".join(gzip.compress(part) for part in whole)
        else:
            made = b"".join(pa.compress(part, codec="zstd", asbytes=True) for part in whole)
        plain.unlink()
        plain = tmp_path / f"in.{ending}{packed}"
        plain.write_bytes(made)
    named = {} if ending == "txt" else {"id": "n:int64" if ending == "csv" else "n", "keep": "text"}
    assert embed(plain, tmp_path / "out", part_rows=128, window_rows=50, **named) == 0
    found = table(tmp_path / "out")
    assert np.array_equal(vectors(tmp_path / "out"), fake.embed(given))
    assert sorted(p.name for p in (tmp_path / "out").glob("*.parquet")) == [
        f"part-00000-0000{i}.parquet" for i in range(3)
    ]
    if ending == "txt":
        assert found.column("id").to_pylist() == [f"{plain}:{i}" for i in range(ROWS)]
    else:
        assert found.column_names == ["n", "text", "embedding"]
        assert found.schema.field("n").type == pa.int64()
        assert found.column("n").to_pylist() == list(range(ROWS))
        assert found.column("text").to_pylist() == given
    assert result(tmp_path / "out")["rows"] == ROWS


def test_rows_that_cannot_be_embedded_are_told_and_left_out(tmp_path: Path, fake: hortus.Engine):
    lines = [
        '{"id": "a", "text": "fine", "n": 1}',
        '{"id": "b", "text": null, "n": 2}',
        '{"id": "c", "n": 3}',
        '{"id": "d", "text": 7}',
        '{"id": "e", "text": "' + "word " * 400 + '"}',
        '{"id": "f", "text": "also',
        "[1]",
        '{"id": "h", "text": "\\ud800"}',
        '{"id": "i", "text": "x", "n": "many"}',
        '{"id": "j", "text": "good", "n": null}',
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    assert embed(tmp_path / "in.jsonl", tmp_path / "out", id="id", keep="n") == 3
    assert table(tmp_path / "out").column("id").to_pylist() == ["a", "j"]
    assert np.array_equal(vectors(tmp_path / "out"), fake.embed(["fine", "good"]))
    told = rejects(tmp_path / "out")
    assert [r["row"] for r in told] == list(range(1, 9))
    assert [r["id"] for r in told] == ["b", "c", "d", "e", None, None, None, "i"]
    said = ["null", "null", "int", "402 tokens", "not JSON", "no JSON object", "not JSON", "column 'n' is not int64"]
    assert all(words in r["reason"] for words, r in zip(said, told, strict=True))
    assert told[3]["reason"].endswith("; shorten it, or give --auto-truncate to cut its end off")
    assert {r["code"] for r in told} == {"invalid_input", "context_length_exceeded"}
    assert (result(tmp_path / "out")["rejected"], result(tmp_path / "out")["rows_in"]) == (8, 10)


@pytest.mark.parametrize("ending", WRITERS)
def test_a_reject_has_the_id_that_the_row_would_have(tmp_path: Path, ending: str):
    path = tmp_path / f"in.{ending}"
    WRITERS[ending](path, ["one", "word " * 400, "two", "word " * 401])
    assert embed(path, tmp_path / "out", part_rows=3, window_rows=2) == 3
    numbers = [0, 2, 4, 6] if ending == "jsonl" else [0, 1, 2, 3]  # whose writer leaves lines empty
    made = [f"{path}:{n}" for n in numbers]
    assert [r["id"] for r in rejects(tmp_path / "out")] == made[1::2]
    assert table(tmp_path / "out").column("id").to_pylist() == made[::2]
    assert list(rejects(tmp_path / "out")[0]) == ["file", "row", "id", "code", "reason"]
    if ending != "txt":
        assert embed(path, tmp_path / "own", id="n") == 3
        assert [int(r["id"]) for r in rejects(tmp_path / "own")] == [1, 3]


def test_lines_of_csv_that_cannot_be_read(tmp_path: Path):
    (tmp_path / "in.csv").write_bytes(b'text,n\nfine,1\nshort\n"two\nlines",2\n"open\xff\nquote",3\n')
    assert embed(tmp_path / "in.csv", tmp_path / "out", keep="text") == 3
    assert table(tmp_path / "out").column("text").to_pylist() == ["fine", "two\nlines"]
    told = [(r["row"], r["reason"]) for r in rejects(tmp_path / "out")]
    assert told[0] == (1, "the line has 1 values, the first line 2")
    assert told[1] == (3, "the line is not UTF-8: byte 0xff at 5 (invalid start byte)")
    (tmp_path / "head.csv").write_bytes(b"text,\xff\nfine,1\n")
    with pytest.raises(StartError, match=r"head\.csv: its first line has no names of columns: the line is not UTF-8"):
        embed(tmp_path / "head.csv", tmp_path / "none")


LINES: dict[str, Callable[[bytes], bytes]] = {
    "jsonl": lambda text: b'{"text": "' + text + b'"}',
    "csv": lambda text: text,
    "txt": lambda text: text,
}


@pytest.mark.parametrize("ending", LINES)
def test_a_row_is_found_by_its_line_and_bytes_that_are_no_text_are_told(tmp_path: Path, ending: str):
    texts: list[bytes] = [b"one", b"", b"two", b"  ", b"", b"ba\xffd", b"\t", "caf\u00e9".encode(), b"\xc3", b""]
    lines = [LINES[ending](t) if t.strip() else t for t in texts]
    path = tmp_path / f"in.{ending}"
    path.write_bytes(b"\n".join([b"text", *lines] if ending == "csv" else lines))
    for out, sizes in (("out", {}), ("cut", {"part_rows": 2, "window_rows": 1})):
        assert embed(path, tmp_path / out, **sizes) == 3
        assert table(tmp_path / out).column("id").to_pylist() == [f"{path}:{i}" for i in (0, 2, 7)]
        said = [(r["row"], r["reason"].partition(" at ")[0]) for r in rejects(tmp_path / out)]
        assert said == [(5, "the line is not UTF-8: byte 0xff"), (8, "the line is not UTF-8: byte 0xc3")]
    whole = everything(tmp_path / "cut")
    (tmp_path / "cut" / "part-00000-00001.parquet").unlink()  # goes on in the middle of the blank lines
    assert embed(path, tmp_path / "cut", part_rows=2, window_rows=1) == 3
    assert everything(tmp_path / "cut") == whole


def test_parquet_that_holds_bytes_that_are_no_text(tmp_path: Path):
    raw = pa.array([b"one", b"ba\xffd"]).view(pa.string())
    pq.write_table(pa.table({"text": raw}), tmp_path / "in.parquet")
    assert embed(tmp_path / "in.parquet", tmp_path / "out") == 3
    assert [r["reason"] for r in rejects(tmp_path / "out")] == [
        "the text is not UTF-8: byte 0xff at 2 (invalid start byte)"
    ]


def test_several_files_folders_and_globs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b/2.txt", "b/1.txt", "b/_no.txt", "b/.no.txt", "b/deep/3.txt", "a.txt", "b/other.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert embed(["b", "*.txt", "b/1.txt"], tmp_path / "out") == 0
    assert table(tmp_path / "out").column("id").to_pylist() == ["b/1.txt:0", "b/2.txt:0", "b/deep/3.txt:0", "a.txt:0"]


def test_nothing_in_is_nothing_out(tmp_path: Path):
    (tmp_path / "in.txt").write_text("")
    assert embed(tmp_path / "in.txt", tmp_path / "out") == 0
    assert len(table(tmp_path / "out")) == 0
    pq.write_table(pa.table({"text": pa.array([], pa.string()), "n": pa.array([], pa.int8())}), tmp_path / "in.parquet")
    assert embed(tmp_path / "in.parquet", tmp_path / "two", keep="n") == 0
    assert table(tmp_path / "two").schema.names == ["id", "n", "embedding"]


class Crash(Exception):
    """What a test makes happen in the middle of a run."""


@pytest.mark.parametrize("at", [1, 4, 6, 9])
def test_a_run_that_was_cut_off_goes_on_and_leaves_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
):
    for i in range(2):
        write_jsonl(tmp_path / f"in{i}.jsonl", [*texts(ROWS)[i:], "word " * 400])
    given = [str(tmp_path / f"in{i}.jsonl") for i in range(2)]
    sizes = {"part_rows": 100, "window_rows": 30, "id": "n"}
    assert embed(given, tmp_path / "whole", **sizes) == 3
    taken, take = [], pipeline.Parts.take

    def crash(self, window, vectors):
        taken.append(window)
        if len(taken) == at * 2:
            raise Crash
        return take(self, window, vectors)

    monkeypatch.setattr(pipeline.Parts, "take", crash)
    with pytest.raises(Crash):
        embed(given, tmp_path / "out", **sizes)
    monkeypatch.setattr(pipeline.Parts, "take", take)
    left = everything(tmp_path / "out")
    assert embed(given, tmp_path / "out", **sizes) == 3
    after = everything(tmp_path / "out")
    assert after == everything(tmp_path / "whole")
    assert all(after[name] == data for name, data in left.items() if name.startswith("_parts"))
    assert embed(given, tmp_path / "out", **sizes) == 3  # once more: nothing to do
    assert everything(tmp_path / "out") == after


def test_a_part_whose_file_is_gone_is_made_again(tmp_path: Path):
    write_text(tmp_path / "in.txt", texts(ROWS))
    assert embed(tmp_path / "in.txt", tmp_path / "out", part_rows=100) == 0
    before = everything(tmp_path / "out")
    (tmp_path / "out" / "part-00000-00001.parquet").unlink()
    (tmp_path / "out" / "part-00000-00002.parquet").write_bytes(b"torn")
    assert embed(tmp_path / "in.txt", tmp_path / "out", part_rows=100) == 0
    assert everything(tmp_path / "out") == before


def test_another_run_is_refused(tmp_path: Path):
    write_text(tmp_path / "in.txt", texts(20))
    out = tmp_path / "out"
    assert embed(tmp_path / "in.txt", out) == 0
    before = everything(out)
    with pytest.raises(StartError, match="options precision: was 'float32', is 'float16'"):
        embed(tmp_path / "in.txt", out, precision="float16")
    with pytest.raises(StartError, match="options part_rows"):
        embed(tmp_path / "in.txt", out, part_rows=7)
    write_text(tmp_path / "more.txt", texts(3))
    with pytest.raises(StartError, match=r"more\.txt: new"):
        embed([str(tmp_path / "in.txt"), str(tmp_path / "more.txt")], out)
    write_text(tmp_path / "in.txt", texts(21))
    with pytest.raises(StartError, match=r"in\.txt: changed"):
        embed(tmp_path / "in.txt", out)
    assert everything(out) == before


def test_two_runs_do_not_share_a_folder(tmp_path: Path):
    from hortus.corpus.store import Store

    write_text(tmp_path / "in.txt", texts(3))
    store = Store(str(tmp_path / "out"))
    store.prepare()
    with pytest.raises(StartError, match="another `hortus embed`"):
        embed(tmp_path / "in.txt", tmp_path / "out")
    store.release()
    assert embed(tmp_path / "in.txt", tmp_path / "out") == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"text": "txt"}, "no column 'txt'"),
        ({"text": "n"}, "is int64, not text"),
        ({"keep": "nope"}, "no column 'nope'"),
        ({"keep": "n:int3"}, "no type 'int3'"),
        ({"precision": "int8"}, "--int8-ranges"),
        ({"dimensions": 1000}, "1 to 384"),
        ({"format": "jsonl"}, "none is a JSON object"),
        ({"prompt_name": "q"}, "unknown `prompt_name`"),
    ],
    ids=str,
)
def test_what_cannot_start_says_why(tmp_path: Path, flags: dict, said: str):
    write_parquet(tmp_path / "in.parquet", texts(10))
    with pytest.raises(StartError, match=said):
        embed(tmp_path / "in.parquet", tmp_path / "out", **flags)


@pytest.mark.parametrize(
    ("given", "said"),
    [("none.txt", "no such file"), ("*.txt", "matches no file"), (".", "known kind"), ("a.bin", "--format")],
)
def test_inputs_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, said: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.bin").write_text("x")
    with pytest.raises(StartError, match=said):
        embed(given, tmp_path / "out")


def test_a_file_that_breaks_off_ends_the_run_with_its_name(tmp_path: Path):
    write_text(tmp_path / "in.txt", texts(5000))
    torn = gzip.compress((tmp_path / "in.txt").read_bytes())[:-2000]
    (tmp_path / "torn.txt.gz").write_bytes(torn)
    with pytest.raises(StartError, match=r"torn\.txt\.gz: cannot be read as text"):
        embed(tmp_path / "torn.txt.gz", tmp_path / "out", part_rows=1000, window_rows=1000)
    assert not list((tmp_path / "out").glob(".*.partial"))


@pytest.mark.parametrize(
    ("precision", "kind", "values"),
    [("float16", pa.float16(), 384), ("binary", pa.int8(), 48), ("ubinary", pa.uint8(), 48), ("int8", pa.int8(), 384)],
)
def test_stored_forms(tmp_path: Path, fake: hortus.Engine, precision: str, kind: pa.DataType, values: int):
    write_text(tmp_path / "in.txt", texts(50))
    more = {}
    if precision == "int8":
        np.save(tmp_path / "ranges.npy", np.array([[-0.2] * 384, [0.2] * 384], np.float32))
        more["int8_ranges"] = str(tmp_path / "ranges.npy")
    assert embed(tmp_path / "in.txt", tmp_path / "out", precision=precision, **more) == 0
    found = table(tmp_path / "out")
    assert found.schema.field("embedding").type == pa.list_(pa.field("element", kind), values)
    if precision != "int8":
        assert np.array_equal(vectors(tmp_path / "out"), fake.embed(texts(50), precision=precision))


def test_chunks_are_rows(tmp_path: Path, fake: hortus.Engine):
    long = "the cat sat on a mat and saw nothing of note"
    write_parquet(tmp_path / "in.parquet", ["mat", long, "", "a cat"])
    assert embed(tmp_path / "in.parquet", tmp_path / "out", id="n", keep="text", chunk_tokens=6, chunk_overlap=1) == 3
    rows = table(tmp_path / "out").to_pylist()
    assert [(r["n"], r["chunk"]) for r in rows] == [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3), (3, 0)]
    cut = [r["text"][r["chunk_start"] : r["chunk_end"]] for r in rows]
    assert cut == ["mat", "the cat sat on", "on a mat and", "and saw nothing of", "of note", "a cat"]
    assert np.array_equal(vectors(tmp_path / "out"), fake.embed(cut))
    assert rejects(tmp_path / "out")[0]["reason"].startswith("the text is empty")


@pytest.mark.parametrize("ending", ["jsonl", "csv", "txt"])
def test_a_byte_order_mark_belongs_to_no_row(tmp_path: Path, ending: str):
    given = texts(5)
    for name, mark in (("plain", b""), ("marked", b"\xef\xbb\xbf")):
        WRITERS[ending](tmp_path / f"{name}.{ending}", given)
        file = tmp_path / f"{name}.{ending}"
        file.write_bytes(mark + file.read_bytes())
        assert embed(file, tmp_path / name) == 0
    np.testing.assert_array_equal(vectors(tmp_path / "marked"), vectors(tmp_path / "plain"))


def test_a_parquet_file_that_has_a_column_twice_is_refused(tmp_path: Path):
    columns = [pa.array([x, x]) for x in "abc"]
    pq.write_table(pa.Table.from_arrays(columns, names=["text", "n", "n"]), tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_arrays(columns, names=["text", "text", "n"]), tmp_path / "b.parquet")
    assert embed(tmp_path / "a.parquet", tmp_path / "fine") == 0, "nobody asks for n"
    with pytest.raises(StartError, match=r"'n' more than once .--keep"):
        embed(tmp_path / "a.parquet", tmp_path / "out", keep="n")
    with pytest.raises(StartError, match=r"'text' more than once .--text"):
        embed(tmp_path / "b.parquet", tmp_path / "out")


def test_a_csv_that_names_a_column_twice_is_refused(tmp_path: Path):
    (tmp_path / "a.csv").write_text("text,text,n\none,two,3\n")
    with pytest.raises(StartError, match="'text' more than once"):
        embed(tmp_path / "a.csv", tmp_path / "out")
    (tmp_path / "b.csv").write_text("text,n,n\none,2,3\n")
    assert embed(tmp_path / "b.csv", tmp_path / "fine") == 0, "nobody asks for n"
    with pytest.raises(StartError, match="'n' more than once"):
        embed(tmp_path / "b.csv", tmp_path / "out", keep="n")


@pytest.mark.parametrize(("given", "place"), [("in", "in/out"), ("in/**/*.*", "in"), ("in", ".")])
def test_what_a_run_writes_is_never_its_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, place: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "real").symlink_to(tmp_path)
    (tmp_path / "in" / "part-of-mine.jsonl").write_text(
        "".join(f'{{"text": "{t}"}}\n' for t in texts(30)) + "no json\n"
    )
    out = tmp_path / place
    assert embed(given, tmp_path / "real" / place, part_rows=10) == 3
    before = everything(out)
    (out / "part-00000-00001.parquet").unlink()
    assert embed(given, out, part_rows=10) == 3, "goes on, by another name of the folder too"
    assert everything(out) == before
    assert [i["url"] for i in json.loads((out / "_manifest.json").read_bytes())["inputs"]] == ["in/part-of-mine.jsonl"]
    with pytest.raises(StartError, match="is what a run into --out writes"):
        embed(str(out / "part-00000-00000.parquet"), out)
    with pytest.raises(StartError, match="but what runs into --out write"):
        embed(f"{place}/*.parquet", out)
    assert embed(str(out / "part-00000-00000.parquet"), tmp_path / "other", text="id") == 0, "another run may read them"
