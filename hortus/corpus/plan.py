"""How a corpus is cut up: files into units, a unit's rows into parts, a part's rows into windows. Pure but for reading on.

    unit     neighbouring small files, or one large file: what one task of a cluster reads at least
    part     --part-rows input rows of a unit: one output file, done or not done
    window   --window-rows input rows of a part, fewer of long texts: what is sorted and embedded together

Everything here follows from the list of files and the options alone, never from time, so that a run that goes on, or runs on a
cluster, makes the same parts. Does not know vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

import pyarrow as pa

from hortus.corpus.columns import Columns
from hortus.corpus.files import File
from hortus.corpus.read import Block, blocks

UNIT_BYTES = 16 * 2**20
"""Neighbouring files are read as one until they are this large."""
WINDOW_CHARS = 8 * 2**20
"""Characters of text a window, where --window-rows would be more."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Some neighbouring files, whose rows are numbered through."""

    number: int
    files: tuple[File, ...]


@dataclass(slots=True)
class Window:
    """Neighbouring rows of one part."""

    unit: int
    part: int
    blocks: list[Block]
    ends_part: bool
    ends_unit: bool

    @property
    def texts(self) -> list[object]:
        return [t for b in self.blocks for t in b.texts]

    @property
    def kept(self) -> pa.Table:
        return pa.concat_tables([b.kept for b in self.blocks])

    def __len__(self) -> int:
        return sum(map(len, self.blocks))


def units(files: Sequence[File], unit_bytes: int = UNIT_BYTES) -> list[Unit]:
    """Files in order, small ones together."""
    found: list[list[File]] = []
    size = unit_bytes
    for file in files:
        if size >= unit_bytes or file.size >= unit_bytes:
            found.append([])
            size = 0
        found[-1].append(file)
        size += file.size
    return [Unit(i, tuple(f)) for i, f in enumerate(found)]


def part_name(unit: int, part: int) -> str:
    """Sorted by name, parts stand in the order of the rows."""
    return f"part-{unit:05d}-{part:05d}"


def windows(
    unit: Unit,
    columns: Columns,
    *,
    part_rows: int,
    window_rows: int,
    done: Set[int] = frozenset(),
    only: range | None = None,
    counts: Sequence[int | None] | None = None,
    read: Callable[[File, Columns, int], Iterable[Block]] = blocks,
) -> Iterator[Window]:
    """The windows of the unit's parts that are not `done` (and are in `only`, if that is given), in order.

    counts: rows of its files, where known: what comes before the first part wanted is not read then. A unit without rows has
    one part without rows. A window is given once the row after it has been seen, so that it knows what it ends.
    """
    first = 0 if only is None else only.start
    while first in done:
        first += 1
    filling: Window | None = None
    rows = chars = 0
    part = 0
    stopped = False
    for part, piece in _pieces(_rows(unit, columns, first * part_rows, counts, read), first * part_rows, part_rows):
        if only is not None and part >= only.stop:
            stopped = True
            break
        lo = 0
        while lo < len(piece) and part not in done:
            new = filling is None or filling.part != part
            hi = lo if new else fitting(piece.texts, lo, window_rows - rows, WINDOW_CHARS - chars)
            if hi == lo:  # there is no window that takes this row
                if filling is not None:
                    filling.ends_part = new
                    yield filling
                filling = Window(unit.number, part, [], False, False)
                rows = chars = 0
                hi = max(fitting(piece.texts, lo, window_rows, WINDOW_CHARS), lo + 1)
            assert filling is not None, "made above"
            filling.blocks.append(piece.slice(lo, hi))
            rows += hi - lo
            chars += sum(map(_chars, piece.texts[lo:hi]))
            lo = hi
    if filling is None and first == 0 and not stopped:
        filling = Window(unit.number, 0, [], True, True)
    if filling is not None:
        filling.ends_part, filling.ends_unit = True, not stopped and filling.part == part
        yield filling


def fitting(texts: Sequence[object], lo: int, rows: int, chars: int) -> int:
    """The end of the run of texts from `lo` on that has at most so many rows and characters."""
    hi, end = lo, min(lo + rows, len(texts))
    while hi < end and (chars := chars - _chars(texts[hi])) >= 0:
        hi += 1
    return hi


def _chars(text: object) -> int:
    return len(text) if isinstance(text, str) else 0


def _rows(
    unit: Unit,
    columns: Columns,
    skip: int,
    counts: Sequence[int | None] | None,
    read: Callable[[File, Columns, int], Iterable[Block]],
) -> Iterator[Block]:
    """The unit's rows from number `skip` on."""
    for i, file in enumerate(unit.files):
        count = counts[i] if counts is not None else None
        if count is not None and skip >= count:
            skip -= count
            continue
        if count is not None or len(unit.files) == 1:
            yield from read(file, columns, skip)
            skip = 0
            continue
        for block in read(file, columns, 0):  # only its end says how many rows it has
            lo = min(skip, len(block))
            skip -= lo
            if lo < len(block):
                yield block.slice(lo, len(block))


def _pieces(rows: Iterable[Block], at: int, part_rows: int) -> Iterator[tuple[int, Block]]:
    """(part, rows of it): blocks cut where parts end. at: the number of the first row."""
    for block in rows:
        lo = 0
        while lo < len(block):
            hi = min(len(block), lo + part_rows - at % part_rows)
            yield at // part_rows, block.slice(lo, hi)
            at += hi - lo
            lo = hi
