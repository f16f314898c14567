"""Values of JSON lines and CSV: stored as they stand, or refused by name; one odd value changes no other."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpus_runs import embed, rejects, table
from hypothesis import given, settings
from hypothesis import strategies as st

from hortus.corpus import columns, values
from hortus.corpus.files import File
from hortus.errors import StartError

TYPES = ["bool", "int8", "int32", "int64", "uint8", "uint64", "float16", "float32", "float64", "string"]
EDGES = [2**n + d for n in (7, 8, 11, 24, 31, 32, 53, 63, 64, 70) for d in (-1, 0, 1)]
NUMBERS = st.sampled_from(EDGES + [-n for n in EDGES]) | st.integers(-300, 300) | st.floats(allow_nan=False)
PLAIN = st.none() | st.booleans() | NUMBERS.filter(lambda v: not math.isinf(v)) | st.text(max_size=3) | st.just("7")
NESTED = st.recursive(PLAIN, lambda s: st.lists(s, max_size=3) | st.dictionaries(st.sampled_from("ab"), s, max_size=2))


def same(stored: Any, value: Any, kind: pa.DataType) -> bool:
    """Whether what came back is what went in: only a fraction may have been rounded, a missing field become null."""
    if pa.types.is_list(kind) and isinstance(value, list):
        return len(stored) == len(value) and all(
            same(a, b, kind.value_type) for a, b in zip(stored, value, strict=True)
        )
    if pa.types.is_struct(kind) and isinstance(value, dict):
        inside = {f.name: f.type for f in kind}
        return value.keys() <= inside.keys() and all(same(stored[n], value.get(n), t) for n, t in inside.items())
    if pa.types.is_floating(kind) and isinstance(value, float):
        digits = {"halffloat": 1e-3, "float": 1e-7, "double": 0.0}[str(kind)]
        tiny = {"halffloat": 1e-7, "float": 1e-44, "double": 0.0}[str(kind)]
        return isinstance(stored, float) and math.isclose(stored, value, rel_tol=digits, abs_tol=tiny)
    if isinstance(value, bool) or isinstance(stored, bool):
        return stored is value
    return bool(stored == value)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(st.lists(PLAIN, max_size=6), st.sampled_from(TYPES))
def test_a_column_of_a_told_type_holds_what_was_there_or_refuses_it(there: list[Any], alias: str):
    kind = pa.type_for_alias(alias)
    found, bad = values.column(there, kind)
    for i, stored in enumerate(found.to_pylist()):
        assert stored is None if i in bad else same(stored, there[i], kind)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(st.lists(NESTED, max_size=6), st.lists(NESTED, max_size=6))
def test_a_column_of_a_guessed_type_likewise_and_others_do_not_change(first: list[Any], later: list[Any]):
    kind = values.guess(first)
    found, bad = values.column(first + later, kind)
    for i, (stored, value) in enumerate(zip(found.to_pylist(), first + later, strict=True)):
        assert stored is None if i in bad else same(stored, value, kind)


@pytest.mark.parametrize(
    ("there", "kind"),
    [
        ([], "string"),
        ([None], "string"),
        ([True, None], "bool"),
        ([1, 2, "many"], "int64"),
        (["many", 1, 2], "int64"),
        ([True, 1, 2], "int64"),
        ([1, 2, 2**64], "int64"),
        ([1, 2, 10**30], "int64"),
        ([1, -1, 2**63], "int64"),
        ([1, 2, 2**63], "uint64"),
        ([10, 10, 3.99], "double"),
        ([2**60 + 1, 2**60 + 3, 0.5], "int64"),
        ([[1, 2], [2.5], None], "list<item: double>"),
        ([{"a": 1}, {"b": "x"}, 3], "struct<a: int64, b: string>"),
        ([{}], "string"),
    ],
    ids=str,
)
def test_the_type_is_that_of_most(there: list[Any], kind: str):
    assert str(values.guess(there)) == kind


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: list[str], **flags: object) -> tuple[list, list[str]]:
    """What is stored of column `k`, whose values are given as JSON, and why the others were refused."""
    monkeypatch.setattr(columns, "PROBE_ROWS", 3)
    monkeypatch.setattr(columns, "PROBES", 4)
    lines = [f'{{"text": "row {i}", "k": {value}}}' for i, value in enumerate(there)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    status = embed(tmp_path / "in.jsonl", tmp_path / "out", **flags)
    told = rejects(tmp_path / "out")
    assert status == (3 if told else 0)
    assert {r["code"] for r in told} <= {"invalid_input"}
    return table(tmp_path / "out").column("k").to_pylist(), [r["reason"] for r in told]


@pytest.mark.parametrize(
    ("asked", "there", "stored", "said"),
    [
        ("k", ["1", "2", "3", "1199.5", "4"], [1, 2, 3, 4], "int64: 1199.5 ({} k:float64 takes it)"),
        ("k:int64", ["2.7"], [], "int64: 2.7 ({} k:float64 takes it)"),
        ("k", ["1", "2", "3", "true"], [1, 2, 3], "int64: true"),
        ("k", ["1", "2", "3", '"7"'], [1, 2, 3], 'int64: "7"'),
        ("k:int64", ['"7"'], [], 'int64: "7"'),
        ("k", ["1", "2", "3", "18446744073709551615"], [1, 2, 3], "18446744073709551615 ({} k:uint64 takes it)"),
        ("k", ["1", "2", "18446744073709551616", "3"], [1, 2, 3], "18446744073709551616 ({} k:string takes it)"),
        ("k", ["1", "2", "3", "-9223372036854775809"], [1, 2, 3], "-9223372036854775809 ({} k:string takes it)"),
        ("k", ["1", "2", "18446744073709551615"], [1, 2, 2**64 - 1], ""),
        ("k:int8", ["127", "128"], [127], "int8: 128 ({} k:int64 takes it)"),
        ("k:uint64", ["1", "-1"], [1], "uint64: -1 ({} k:int64 takes it)"),
        ("k", ["1.5", "2", "2.5", "9007199254740993"], [1.5, 2.0, 2.5], "double: 9007199254740993 ({} k:int64"),
        ("k:float32", ["0.5", "1e300"], [0.5], "float: 1e+300 ({} k:float64 takes it)"),
        ("k", ["true", "false", "true", "1"], [True, False, True], "bool: 1 ({} k:int64 takes it)"),
        ("k", ['"a"', '"b"', '"c"', "5"], ["a", "b", "c"], "string: 5 ({} k:int64 or k:string takes it)"),
        ("k:string", ['"a7"', "5", str(-(10**40)), "2.5"], ["a7", "5", str(-(10**40))], "2.5 ({} k:float64 takes it)"),
        ("k:string", ["true", "0"], ["0"], "string: true ({} k:bool takes it)"),
        ("k", ["null"] * 7 + ["7", "8", "8.5"], [None] * 7 + [7, 8], "int64: 8.5 ({} k:float64 takes it)"),
        ("k", ["null"] * 3 + ["null", "true", "null"], [None] * 4 + [True, None], ""),
        ("k", ["null"] * 12 + ["7"], [None] * 12, "string: 7 ({} k:int64 or k:string takes it)"),
        ("k", ["null"] * 12 + ["true"], [None] * 12, "string: true ({} k:bool takes it)"),
        ("k", ["[1]", "[2]", "[3]", "[2.7]"], [[1], [2], [3]], "[2.7]"),
        ("k", ["[1]", "[2]", "[3]", "[18446744073709551616]"], [[1], [2], [3]], "[18446744073709551616]"),
        ("k", ['{"a": [1]}', '{"a": [20000000000000000000]}'], [{"a": [1]}], "[20000000000000000000]"),
        ("k", ['{"a": 1}', '{"a": 2}', '{"a": 3}', '{"a": 4, "b": 5}'], [{"a": 1}, {"a": 2}, {"a": 3}], '"b": 5'),
        ("k", ["1", "2", "3", json.dumps("x" * 500)], [1, 2, 3], "x" * 70),
    ],
)
@pytest.mark.parametrize("flag", ["id", "keep"])
def test_json_lines_never_change_a_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str, asked: str, there: list[str], stored: list, said: str
):
    found, told = run(tmp_path, monkeypatch, there, **{flag: asked})
    assert found == stored
    assert list(map(type, found)) == list(map(type, stored))
    assert len(told) == len(there) - len(stored)
    assert all(reason.startswith("column 'k' is not ") and said.format("--" + flag) in reason for reason in told)
    assert all(len(reason) < 200 for reason in told)


def test_columns_that_are_null_at_first_are_found_each_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(columns, "PROBE_ROWS", 3)
    rows: list[dict[str, Any]] = [{"text": "a", "n": 1, "a": None, "b": None} for _ in range(9)]
    rows[4] |= {"a": [1.5]}
    rows[8] |= {"b": 2**64 - 1, "n": "no number"}
    (tmp_path / "in.jsonl").write_text("\n".join(["no JSON", *map(json.dumps, rows), "no JSON"]))
    path = str(tmp_path / "in.jsonl")
    file = File(path, path, "jsonl", None, 0, "")
    found = columns.settle([file], text="text", id=None, keep="n,a,b").schema
    assert [str(f.type) for f in found] == ["string", "int64", "list<item: double>", "uint64"]


def test_what_is_nested_deep_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    deep = ["[" * 1000 + inner + "]" * 1000 for inner in ("5", "1e30")]
    found, told = run(tmp_path, monkeypatch, ["1", "2", "3", *deep], id="k")
    assert found == [1, 2, 3]
    assert len(told) == 2


def test_csv_refuses_what_its_type_would_round(tmp_path: Path):
    (tmp_path / "in.csv").write_text("text,k\na,0.1\nb,9007199254740993\nc,1e400\nd,nan\ne,\nf,x\n")
    assert embed(tmp_path / "in.csv", tmp_path / "out", keep="k:float64") == 3
    assert [str(v) for v in table(tmp_path / "out").column("k").to_pylist()] == ["0.1", "nan", "None"]
    told = [(r["row"], r["reason"].partition(": ")[2]) for r in rejects(tmp_path / "out")]
    assert told == [(1, '"9007199254740993"'), (2, '"1e400"'), (5, '"x"')]


def test_dates_are_read_from_the_text_of_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found, told = run(tmp_path, monkeypatch, ['"2024-05-06"', "5.5", "true", '"soon"'], keep="k:date32")
    assert [str(d) for d in found] == ["2024-05-06"]
    assert [reason.partition(": ")[2] for reason in told] == ["5.5", "true", '"soon"']


def test_parquet_makes_no_number_of_yes_and_no(tmp_path: Path):
    for name, there in (("a", [7]), ("b", [True])):
        pq.write_table(pa.table({"text": ["x"], "k": there}), tmp_path / f"{name}.parquet")
    with pytest.raises(StartError, match=r"b\.parquet: column 'k' is not int64 throughout"):
        embed(str(tmp_path / "*.parquet"), tmp_path / "out", keep="k")


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_an_empty_file_has_no_rows_and_settles_no_type(tmp_path: Path, ending: str):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / f"a.{ending}").write_text("")
    (tmp_path / "in" / f"b.{ending}").write_text("\n  \n")
    full = {"jsonl": '{"text": "x", "k": 5}\n', "csv": "text,k\nx,5\n"}[ending]
    (tmp_path / "in" / f"c.{ending}").write_text(full)
    (tmp_path / "in" / f"d.{ending}").write_text("")
    assert embed(tmp_path / "in", tmp_path / "out", keep="k") == 0
    assert table(tmp_path / "out").column("k").to_pylist() == [5 if ending == "jsonl" else "5"]
    assert embed(tmp_path / "in" / f"a.{ending}", tmp_path / "none", keep="k") == 0
    assert len(table(tmp_path / "none")) == 0


def test_every_csv_must_have_the_columns(tmp_path: Path):
    (tmp_path / "a.csv").write_text("text,k\nx,5\n")
    (tmp_path / "b.csv").write_text("text,other\nx,5\n")
    with pytest.raises(StartError, match=r"b\.csv: no column 'k' \(--keep or --id\); it has text, other"):
        embed(str(tmp_path / "*.csv"), tmp_path / "out", keep="k")
