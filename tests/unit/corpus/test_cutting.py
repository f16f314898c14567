"""What is pure: chunks of a text, units, parts and windows of a corpus."""

from __future__ import annotations

import itertools

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hortus.corpus import pieces, plan
from hortus.corpus.columns import Columns
from hortus.corpus.files import File
from hortus.corpus.read import Block

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
COLUMNS = Columns("text", None, pa.schema([pa.field("id", pa.string())]))


@given(st.integers(1, 300), st.integers(1, 40), st.data())
def test_chunks_cover_the_text_and_overlap_as_told(length: int, most: int, data: st.DataObject):
    overlap = data.draw(st.integers(0, most - 1))
    found = pieces.cut(length, most, overlap)
    assert found[0][0] == 0
    assert found[-1][1] == length
    assert all(0 < b - a <= most for a, b in found)
    assert all(nxt[0] == one[1] - overlap and nxt[1] > one[1] for one, nxt in itertools.pairwise(found))


@given(st.lists(st.integers(1, 10), max_size=30), st.integers(10, 30))
def test_chunks_that_share_a_sequence_fit(lengths: list[int], room: int):
    found = pieces.together(lengths, room)
    assert [i for lo, hi in found for i in range(lo, hi)] == list(range(len(lengths)))
    assert all(sum(lengths[lo:hi]) + hi - lo - 1 <= room for lo, hi in found)


def file(name: str, size: int = 1) -> File:
    return File(name, name, "text", None, size, "")


def test_small_files_share_a_unit_and_large_ones_do_not():
    files = [file(str(i), s) for i, s in enumerate([3, 3, 3, 3, 50, 1, 9, 9, 1])]
    found = [[int(f.url) for f in u.files] for u in plan.units(files, 10)]
    assert found == [[0, 1, 2, 3], [4], [5, 6], [7, 8]] or found == [[0, 1, 2, 3], [4], [5, 6, 7], [8]]
    assert [n for u in found for n in u] == list(range(9))


def read_of(rows: dict[str, list[str]], block: int):
    """A reader over rows in memory, and which rows it was asked for."""

    def read(of: File, columns: Columns, skip: int):
        texts = rows[of.url]
        for lo in range(skip, len(texts), block):
            part = texts[lo : lo + block]
            numbers = range(lo, lo + len(part))
            yield Block(of, numbers, list(part), pa.table({"": pa.nulls(len(part))}).select([]), float(len(part)))

    return read


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.integers(1, 25),
    st.integers(1, 9),
    st.integers(1, 11),
    st.booleans(),
    st.data(),
)
def test_windows_are_the_same_however_a_run_comes_to_them(sizes, part_rows, window_rows, block, counted, data):
    rows = {str(f): [f"{f}/{i}" for i in range(n)] for f, n in enumerate(sizes)}
    unit = plan.Unit(7, tuple(file(name) for name in rows))
    counts = list(map(len, rows.values())) if counted else None

    def run(**more):
        found = plan.windows(
            unit,
            COLUMNS,
            part_rows=part_rows,
            window_rows=window_rows,
            counts=counts,
            read=read_of(rows, block),
            **more,
        )
        return [(w.part, w.texts, w.ends_part, w.ends_unit) for w in found]

    whole = run()
    flat = [t for texts in rows.values() for t in texts]
    assert [t for _, texts, _, _ in whole for t in texts] == flat
    parts = max(1, -(-len(flat) // part_rows))
    for part in range(parts):
        mine = [w for w in whole if w[0] == part]
        assert [t for w in mine for t in w[1]] == flat[part * part_rows : (part + 1) * part_rows]
        assert all(len(w[1]) == window_rows for w in mine[:-1])
        assert [w[2] for w in mine] == [False] * (len(mine) - 1) + [True]
    assert [w[3] for w in whole] == [False] * (len(whole) - 1) + [True]

    done = data.draw(st.sets(st.integers(0, parts - 1), max_size=parts - 1))
    assert run(done=done) == [w for w in whole if w[0] not in done] or not flat
    lo = data.draw(st.integers(0, parts - 1))
    hi = data.draw(st.integers(lo + 1, parts))
    assert run(only=range(lo, hi)) == [w for w in whole if lo <= w[0] < hi]


def test_a_window_of_long_texts_has_fewer_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan, "WINDOW_CHARS", 10)
    rows = {"a": ["1234", "1234", "1234", "12345678901", "1", "2"]}
    unit = plan.Unit(0, (file("a"),))
    found = plan.windows(unit, COLUMNS, part_rows=100, window_rows=100, read=read_of(rows, 4))
    assert [w.texts for w in found] == [["1234", "1234"], ["1234"], ["12345678901"], ["1", "2"]]
