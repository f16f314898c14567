"""`hortus bench engine --parts tiles`: other cuts of the products of few tokens, each judged in whole steps.

It is how the tables of kernels/skinny.py and preload.py came about, and how they would for another GPU or another width. A
product timed alone says little: one that leaves half of the multiprocessors to the kernels after it may be slower alone and
faster in a step. So for every product that a step of so many tokens asks one of the two for, each cut that is one change away
from today's gets an engine of its own on the same weights, and all of them take turns. What a table has no cut for is not
varied. Some 60 cuts a size, each compiled for a second or two. Needs a GPU.

How a new table is written: the least of the list names a module, its function, a size and a cut, in the order of Tile's
fields. Put that cut first among those for so many tokens in that function's table, and run this again until nothing is less
than "as it is". A cut of up to two rounds of programs is tried, but a table gives none outside of its bounds (one round;
preload.py's FEWEST and MOST_DEPTH): then these change too. Last, merge what is as good: each of preload.py's cuts is
compiled when a machine first starts.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from hortus.bench import reference
from hortus.rose.graphs import token_bucket
from hortus.rose.kernels import PROCESSORS
from hortus.types import Float32

if TYPE_CHECKING:
    from hortus.bench.engine import Bench
    from hortus.rose.gpu import GpuEngine
    from hortus.rose.kernels import preload, skinny

    Tile: TypeAlias = skinny.Tile | preload.Tile

SIZES = (16, 64, 128, 192, 256, 320, 384, 512, 768)
SECONDS = 10.0
"""All cuts of one size take turns for so long."""
LEAST_COSINE = 0.9995
ROOM = 227 * 1024
"""Bytes of shared memory that a program may hold on Hopper."""
TABLES = {"skinny": ("split", "whole", "gated"), "preload": ("gated", "added", "turned")}
"""Modules of rose/kernels, and their functions that give a cut."""
MOST_COLS = {64: 256, 128: 256, 192: 256, 256: 256, 320: 160}
"""Of a tile of so many rows: what quack's kernel for Hopper allows, and preload.py so far."""


class Product(NamedTuple):
    """What a table is asked for."""

    module: str
    kind: str
    """Its function's name."""
    width: int
    depth: int


def neighbours(tile: Tile, product: Product, tokens: int) -> list[Tile]:
    """Cuts with one thing changed that can run, within two rounds. Pure."""
    values, can_run = (_skinny if product.module == "skinny" else _preload)(tile, product)
    # preload.py counts the weight's rows, skinny.py those of what comes out.
    width = 2 * product.width if product[:2] == ("preload", "gated") else product.width
    others = [tile._replace(**{field: value}) for field, each in values.items() for value in each]
    return [o for o in others if o != tile and can_run(o) and o.programs(tokens, width) <= 2 * PROCESSORS]


_Ways: TypeAlias = tuple[dict[str, tuple[Any, ...]], Callable[[Any], bool]]
"""What each field of a tile may be, and whether a tile can run at all."""


def _skinny(tile: Any, product: Product) -> _Ways:
    values = {
        "rows": (16, 32, 64, 128),
        "cols": (16, 32, 64, 128),
        "depth": (32, 64, 128, 256),
        "parts": (2, 4, 8) if product.kind == "split" else (1,),  # split leaves its parts to the norm
        "warps": (2, 4, 8),
        "stages": tuple(range(max(2, tile.stages - 2), tile.stages + 3)),
    }

    def can_run(other: skinny.Tile) -> bool:
        taken = 2 * other.cols if product.kind == "gated" else other.cols
        fits = (other.rows + taken) * other.depth * 2 * other.stages <= ROOM
        return fits and other.divides(product.width, product.depth)

    return values, can_run


def _preload(tile: Any, product: Product) -> _Ways:
    from hortus.rose.kernels import preload

    values = {
        "rows": tuple(MOST_COLS),
        "cols": (128,) if product.kind == "turned" else tuple(range(32, 257, 32)),  # turned: a head
        "cluster": ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2)),
        "parts": (1, 2, 3, 4, 8) if product.kind == "added" else (1,),
    }

    def can_run(other: preload.Tile) -> bool:
        return other.cols <= MOST_COLS[other.rows] and product.depth % (other.parts * preload.DEPTH) == 0

    return values, can_run


@contextlib.contextmanager
def cut(tokens: int, chosen: dict[Product, Tile], seen: dict[Product, Tile] | None = None) -> Iterator[None]:
    """While it lasts, products of so many rows are cut as chosen; seen: what was asked for, and given."""
    modules = {name: importlib.import_module(f"hortus.rose.kernels.{name}") for name in TABLES}
    before = {(name, kind): getattr(modules[name], kind) for name, kinds in TABLES.items() for kind in kinds}

    def other(name: str, kind: str) -> Callable[[int, int, int], Tile | None]:
        def choose(rows: int, width: int, depth: int) -> Tile | None:
            product = Product(name, kind, width, depth)
            tile: Tile | None = before[name, kind](rows, width, depth)
            if rows == tokens:
                tile = chosen.get(product, tile)
                if seen is not None and tile is not None:
                    seen[product] = tile
            return tile

        return choose

    for name, kind in before:
        setattr(modules[name], kind, other(name, kind))
    try:
        yield
    finally:
        for (name, kind), function in before.items():
            setattr(modules[name], kind, function)


def tiles(b: Bench) -> None:
    """Cuts of the products of few tokens, one change from today's each, in whole steps in turn."""
    for tokens in SIZES:
        _size(b, tokens)


def _size(b: Bench, tokens: int) -> None:
    batch, rows = b.batch(tokens), token_bucket(tokens)

    def made(chosen: dict[Product, Tile], seen: dict[Product, Tile] | None = None) -> tuple[GpuEngine, Float32]:
        with cut(rows, chosen, seen):
            engine = b.again()
            return engine, [engine.step(batch).result() for _ in range(3)][-1]  # eager, captured, replayed

    seen: dict[Product, Tile] = {}
    base, want = made({}, seen)
    engines = {"as it is": base}
    for product, tile in seen.items():
        for other in neighbours(tile, product, rows):
            name = f"{product.module}.{product.kind} {product.width} x {product.depth}: {' '.join(map(str, other))}"
            try:
                engine, got = made({product: other})
            except Exception as e:  # noqa: BLE001  a compiler's or a driver's: this cut is not one
                said = str(e).partition("\n")[0][:80]  # nothing, of a bare assert
                print(f"  {name} does not run: {type(e).__name__}: {said}", flush=True)
                continue
            if float(reference.cosines(got, want).min()) >= LEAST_COSINE:
                engines[name] = engine
            else:
                print(f"  WRONG: {name}", flush=True)
    ms: dict[str, list[float]] = {name: [] for name in engines}
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        for name, engine in engines.items():
            started = time.perf_counter()
            engine.step(batch).result()
            ms[name].append((time.perf_counter() - started) * 1e3)
    best = sorted(ms, key=lambda name: float(np.median(ms[name])))[:12]
    for name in dict.fromkeys([*best, "as it is"]):
        b.add(f"tiles: {name}", ms=ms[name], batch=batch)
    for engine in engines.values():
        engine.close()
