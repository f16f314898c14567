"""Values of JSON lines and CSV to columns: which type a column has, and which values it takes. Pure.

A value is stored as it stands, or it is told that it cannot be: never cut, never rounded to another whole number. Only a
fraction is rounded, to the type that its column has. Does not know files, rows or what becomes of a value that does not fit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

Holds = Callable[[Any], bool]
_FAILURES = (pa.ArrowException, TypeError, ValueError, OverflowError)
_FRACTIONS: dict[pa.DataType, Any] = {
    pa.float64(): np.finfo(np.float64),
    pa.float32(): np.finfo(np.float32),
    pa.float16(): np.finfo(np.float16),
}
_WHOLE = re.compile(r"[+-]?\d+")
_AS_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_LONG = b"0" * 19
"""Digits of the least whole number that has more than 63 bits."""
_DEEPEST = 32
"""Lists and objects in one another whose type is guessed."""
_TOLD_CHARS = 80


def guess(values: Sequence[Any], depth: int = 0) -> pa.DataType:
    """The type of a column of JSON values: that of most of them, so that one odd value changes no other."""
    there = [v for v in values if v is not None]
    kinds = [_kind(v) for v in there]
    most = max(dict.fromkeys(kinds), key=kinds.count, default="string")
    mine = [v for v, kind in zip(there, kinds, strict=True) if kind == most]
    if most == "bool":
        return pa.bool_()
    if most == "number":
        types = [pa.int64(), pa.uint64()] + [pa.float64()] * any(isinstance(v, float) for v in mine)
        return max(types, key=lambda kind: sum(map(holds(kind), mine)))
    if most == "list" and depth < _DEEPEST:
        return pa.list_(guess(list(chain.from_iterable(mine)), depth + 1))
    names = dict.fromkeys(chain.from_iterable(mine)) if most == "object" else {}
    if names and depth < _DEEPEST:
        return pa.struct([(name, guess([v.get(name) for v in mine], depth + 1)) for name in names])
    return pa.string()


def _kind(value: Any) -> str:
    """Of a JSON value that is not null."""
    return {bool: "bool", int: "number", float: "number", list: "list", dict: "object"}.get(type(value), "string")


def holds(kind: pa.DataType) -> Holds:
    """Whether a JSON value that is not null can be stored in a column of the type as it stands."""
    types = pa.types
    if types.is_boolean(kind):
        return lambda v: type(v) is bool
    if types.is_integer(kind):
        signed = types.is_signed_integer(kind)
        lowest, end = (-(2 ** (kind.bit_width - 1)), 2 ** (kind.bit_width - 1)) if signed else (0, 2**kind.bit_width)
        return lambda v: type(v) is int and lowest <= v < end
    if kind in _FRACTIONS:
        limits = _FRACTIONS[kind]
        exact = 2 ** (limits.nmant + 1)  # every whole number up to here
        least, most = float(limits.smallest_subnormal), float(limits.max)
        return lambda v: (
            -exact <= v <= exact if type(v) is int else type(v) is float and (v == 0 or least <= abs(v) <= most)
        )
    if types.is_temporal(kind):  # JSON has none of its own: text is read, whole numbers count the type's unit
        return lambda v: type(v) is str or type(v) is int
    if types.is_list(kind):
        inner = holds(kind.value_type)
        return lambda v: type(v) is list and all(x is None or inner(x) for x in v)
    if types.is_struct(kind):
        inside = {f.name: holds(f.type) for f in kind}
        return lambda v: type(v) is dict and all(n in inside and (x is None or inside[n](x)) for n, x in v.items())
    return lambda v: type(v) is str


def _reads(kind: pa.DataType) -> Holds:
    """Whether a text that pyarrow reads as a number is one that the type holds: it rounds and overflows in silence."""
    if kind not in _FRACTIONS:
        return lambda text: True
    fits = holds(kind)

    def good(text: str) -> bool:
        if "n" in text.lower():  # nan, inf
            return True
        return fits(int(text) if _WHOLE.fullmatch(text) else float(text))

    return good


def column(
    values: Sequence[Any], kind: pa.DataType, *, csv: bool = False, digits: bool = False
) -> tuple[pa.Array, list[int]]:
    """(the column [len(values)], places of the values that it cannot hold, which are null there).

    csv: the values are text, and are read as what the type is; an empty one is null unless the type is text.
    digits: the type is text, and takes whole numbers too.
    """
    if digits:
        values = [str(v) if type(v) is int else v for v in values]
    array, fits = (_from_text, _reads(kind)) if csv else (_from_json, holds(kind))
    if csv and not pa.types.is_string(kind):
        values = [v or None for v in values]
    bad = {i for i, v in enumerate(values) if v is not None and not _succeeds(fits, v)}
    good = [None if i in bad else v for i, v in enumerate(values)] if bad else values
    try:
        return array(good, kind), sorted(bad)
    except _FAILURES:
        pass
    single = []
    for i, value in enumerate(good):
        try:
            single.append(array([value], kind))
        except _FAILURES:
            bad.add(i)
            single.append(pa.nulls(1, kind))
    return pa.concat_arrays(single), sorted(bad)


def _succeeds(fits: Holds, value: Any) -> bool:
    try:
        return fits(value)
    except ValueError:  # no number at all
        return False


def _from_text(values: Sequence[str | None], kind: pa.DataType) -> pa.Array:
    return pa.array(values, pa.string()).cast(kind)


def _from_json(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_temporal(kind) and all(isinstance(v, str | None) for v in values):
        return _from_text(values, kind)
    return pa.array(values, kind)


def unfit(name: str, flag: str, value: Any, kind: pa.DataType) -> str:
    """Why a column does not take a value, as it stands in the file, and how it could be asked to."""
    try:
        told = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        told = "lists or objects in one another, too deep to be told"
    told = told if len(told) <= _TOLD_CHARS else told[:_TOLD_CHARS] + "..."
    plain = pa.types.is_primitive(kind) and not pa.types.is_temporal(kind)
    takes = []
    if type(value) in (int, float) and (plain or pa.types.is_string(kind)):
        takes = [_alias(t) for t in (pa.int64(), pa.uint64(), pa.float64()) if holds(t)(value)][:1]
    if type(value) is bool and pa.types.is_string(kind):
        takes = ["bool"]
    if type(value) is int and (pa.types.is_string(kind) or (plain and not takes)):
        takes.append("string")  # its digits
    hint = f" ({flag} {' or '.join(f'{name}:{t}' for t in takes)} takes it)" if takes else ""
    return f"column {name!r} is not {kind!s:.80}: {told}{hint}"


def _alias(kind: pa.DataType) -> str:
    """As --keep takes it: pyarrow prints `double` for what it reads as `float64`."""
    return "float64" if kind == pa.float64() else str(kind)


def vast(value: Any, line: bytes) -> bool:
    """Whether a JSON value, read from the line, may be or hold a whole number that orjson made a float of: one beyond 64 bits."""
    if type(value) is float:
        return abs(value) >= 2.0**63
    return isinstance(value, list | dict) and _LONG in line.translate(_AS_ZEROS)
