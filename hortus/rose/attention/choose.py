"""Which backend for which step: a pure choice over a measured table. Does not know torch, and runs nothing."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hortus.rose.attention import Heads
from hortus.rose.attention.measured import Row

UNMEASURED = ("fa4", "varlen", "flashinfer_fa3", "flashinfer_fa2", "twin")
"""Preference where the table has nothing on what is available."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the choice needs to know of a device."""

    name: str
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Choice:
    name: str
    reason: str
    """One line for a person."""


def choose(
    table: Sequence[Row], gpu: Gpu, heads: Heads, tokens: int, longest: int, available: Collection[str]
) -> Choice:
    """The fastest of `available` in the table's nearest row.

    Nearest: rows of this GPU (of any, where it was never measured); among them the nearest head_dim; then the nearest
    numbers of heads; then the nearest (tokens, longest), of two as near the one nearer in tokens, which say how full a GPU is;
    distances are of logarithms, because times follow ratios.
    """
    assert available, "the caller refuses to start when no backend can run"
    rows = [r for r in table if any(name in available for name in r.us)]
    if not rows:
        name = next(n for n in (*UNMEASURED, *sorted(available)) if n in available)
        return Choice(name, f"{name}: not measured; the first that can run")
    mine = [r for r in rows if r.gpu == gpu.name]

    def distance(r: Row) -> tuple[float, ...]:
        return (
            _apart(r.head_dim, heads.head_dim),
            _apart(r.heads, heads.heads) + _apart(r.kv_heads, heads.kv_heads),
            _apart(r.tokens, tokens) + _apart(r.longest, longest),
            _apart(r.tokens, tokens),
        )

    row = min(mine or rows, key=distance)
    times = sorted((us, name) for name, us in row.us.items() if name in available)
    case = f"{row.tokens} tokens, longest {row.longest}, heads {row.heads}/{row.kv_heads}x{row.head_dim} on {row.gpu}"
    others = ", ".join(f"{name} {us:g}" for us, name in times[1:])
    reason = f"{times[0][1]}: {times[0][0]:g} us at {case}" + (f" ({others})" if others else "")
    return Choice(times[0][1], reason)


def _apart(a: int, b: int) -> float:
    return abs(math.log2(max(a, 1) / max(b, 1)))
