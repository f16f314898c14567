"""`hortus bench engine --parts tiles`: other cuts of the products of few tokens, each judged in whole steps.

It is how the tables of kernels/skinny.py came about, and how they would for another GPU or another width. A product timed alone
says little: one that leaves half of the multiprocessors to the kernels after it may be slower alone and faster in a step. So for
every product that a step of so many tokens asks skinny.py for, each cut that is one change away from today's gets an engine of
its own on the same weights, and all of them take turns. The least of the list is the next table; run it again from there until
nothing gains. Some 30 cuts a size, one to two minutes. Needs a GPU.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hortus.bench import reference
from hortus.rose.graphs import token_bucket
from hortus.rose.kernels import PROCESSORS
from hortus.types import Float32

if TYPE_CHECKING:
    from hortus.bench.engine import Bench
    from hortus.rose.gpu import GpuEngine
    from hortus.rose.kernels.skinny import Tile

SIZES = (16, 64, 128, 256, 320, 512)
SECONDS = 10.0
"""All cuts of one size take turns for so long."""
LEAST_COSINE = 0.9995
ROOM = 227 * 1024
"""Bytes of shared memory that a program may hold on Hopper."""


class Product(NamedTuple):
    """What skinny.py is asked for."""

    kind: str
    """split, whole or gated: its function's name."""
    width: int
    depth: int


def neighbours(tile: Tile, product: Product, tokens: int) -> list[Tile]:
    """Cuts with one thing changed that are even, run within two rounds and fit a program's shared memory. Pure."""
    steps: dict[str, tuple[int, ...]] = {
        "rows": (16, 32, 64, 128),
        "cols": (16, 32, 64, 128),
        "depth": (32, 64, 128, 256),
        "parts": (1, 2, 4, 8) if product.kind == "split" else (tile.parts,),
        "warps": (2, 4, 8),
        "stages": tuple(range(max(2, tile.stages - 2), tile.stages + 3)),
    }
    found = []
    for field, values in steps.items():
        for value in values:
            other = tile._replace(**{field: value})
            taken = 2 * other.cols if product.kind == "gated" else other.cols
            runs = (
                other.divides(product.width, product.depth) and other.programs(tokens, product.width) <= 2 * PROCESSORS
            )
            fits = (other.rows + taken) * other.depth * 2 * other.stages <= ROOM
            split = other.parts > 1 or product.kind != "split"  # a product in parts leaves them to the norm
            if other != tile and runs and fits and split:
                found.append(other)
    return found


@contextlib.contextmanager
def cut(tokens: int, chosen: dict[Product, Tile], seen: dict[Product, Tile] | None = None) -> Iterator[None]:
    """While it lasts, products of so many rows are cut as chosen; seen: what was asked for, and given."""
    from hortus.rose.kernels import skinny

    before = {kind: getattr(skinny, kind) for kind in ("split", "whole", "gated")}

    def other(kind: str) -> Callable[[int, int, int], Tile | None]:
        def choose(rows: int, width: int, depth: int) -> Tile | None:
            product = Product(kind, width, depth)
            tile: Tile | None = before[kind](rows, width, depth)
            if rows == tokens:
                tile = chosen.get(product, tile)
                if seen is not None and tile is not None:
                    seen[product] = tile
            return tile

        return choose

    for kind in before:
        setattr(skinny, kind, other(kind))
    try:
        yield
    finally:
        for kind, function in before.items():
            setattr(skinny, kind, function)


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
            name = f"{product.kind} {product.width} x {product.depth}: {' '.join(map(str, other))}"
            try:
                engine, got = made({product: other})
            except Exception as e:  # noqa: BLE001  a compiler's or a driver's: this cut is not one
                print(f"  {name} does not run: {type(e).__name__}: {str(e).splitlines()[0][:80]}", flush=True)
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
