"""Matrix products of few tokens: the time of a step of up to some hundred tokens is mostly theirs.

The physics. Such a product reads its weight once and hardly computes: 4 to 12 MB, 1 to 3 us at 4 TB/s. A library's kernel
takes 5 to 8 us, because it starts cold: launch, first bytes from memory, a short loop, a write, and the next kernel waits
for all of it. So three things are done here:

- A kernel is launched while the one before still runs (launch.py) and asks at once for its part of the weight to come
  into the L2 cache; only then does it wait for its input.
- A product with few columns is split along its depth over more multiprocessors. The parts, float32, are added in order by
  the norm that follows anyway (rms.sum_rms_norm_): no kernel more, no atomics, the same bits each run.
- silu(gate) * up is formed where both are still in registers, which is why their rows lie in pairs.

Does not know models.
"""

# Arguments of Triton kernels are pointers and scalars of the device, for which Python has no types.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hortus.rose.kernels import PROCESSORS
from hortus.rose.kernels.launch import early


class Tile(NamedTuple):
    """How a product is cut into programs."""

    rows: int
    cols: int
    depth: int
    """Values of the inner dimension a turn of the loop."""
    parts: int
    """Programs that share one tile's inner dimension."""
    warps: int
    stages: int

    def divides(self, width: int, depth: int) -> bool:
        """Whether it cuts width columns, each of depth values, evenly."""
        return width % self.cols == 0 and depth % (self.parts * self.depth) == 0

    def programs(self, tokens: int, width: int) -> int:
        return width // self.cols * -(-tokens // self.rows) * self.parts


@triton.jit
def fetch(weight, first, ROWS: tl.constexpr, BYTES: tl.constexpr, STRIDE: tl.constexpr) -> None:
    """Ask for ROWS x BYTES of a weight to come into the L2 cache; 128 bytes a line."""
    LINES: tl.constexpr = ROWS * (BYTES // 128)
    line = tl.arange(0, triton.next_power_of_2(LINES)) % LINES
    at = weight + first + (line // (BYTES // 128)).to(tl.int64) * STRIDE + (line % (BYTES // 128)) * 64
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _product(
    x, weight, out, tokens,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr,
    PARTS: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(2)
    SHARE: tl.constexpr = DEPTH // PARTS
    TAKEN: tl.constexpr = 2 * COLS if GATED else COLS
    first = tl.program_id(0) * TAKEN
    if EARLY:
        fetch(weight, first.to(tl.int64) * DEPTH + part * SHARE, TAKEN, SHARE * 2, DEPTH)
        gdc_launch_dependents()
        gdc_wait()
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = part * SHARE + tl.arange(0, STEP)
    a_at = x + rows.to(tl.int64)[:, None] * DEPTH + k[None, :]
    # Masked and not the last row again: 48 reads of one line by each program queue up at the one place that holds it.
    live = (rows < tokens)[:, None]
    b_at = weight + (first + tl.arange(0, TAKEN)).to(tl.int64)[:, None] * DEPTH + k[None, :]
    acc = tl.zeros((ROWS, TAKEN), tl.float32)
    for i in range(0, SHARE, STEP):
        acc = tl.dot(tl.load(a_at + i, mask=live, other=0.0), tl.load(b_at + i).T, acc)
    if GATED:
        gate, up = tl.split(tl.reshape(acc, (ROWS, COLS, 2)))
        acc = gate * tl.sigmoid(gate) * up
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    at = out + (part * tokens + rows).to(tl.int64)[:, None] * WIDTH + cols[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=live)


def product(x: Tensor, weight: Tensor, tile: Tile, *, gated: bool = False) -> Tensor:
    """x weight^T for x [T, K], weight [N, K], both contiguous. The tile's cols divide N, parts x depth divides K.

    One part: -> [T, N] in x's dtype. More: -> [parts, T, N] float32, to be added in order.
    gated: the rows of weight are gate 0, up 0, gate 1, ..; -> silu(x gate^T) * (x up^T), [T, N / 2], one part.
    """
    tokens, depth = x.shape
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    assert x.is_contiguous(), "the product walks whole rows"
    assert weight.is_contiguous(), "the product walks whole rows"
    assert width % tile.cols == 0, f"{width} columns are not cut evenly by {tile}"
    assert depth % (tile.parts * tile.depth) == 0, f"a depth of {depth} is not cut evenly by {tile}"
    if tile.parts == 1:
        out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    else:
        out = torch.empty(tile.parts, tokens, width, dtype=torch.float32, device=x.device)
    grid = (width // tile.cols, triton.cdiv(tokens, tile.rows), tile.parts)
    on = early(x)
    _product[grid](
        x, weight, out, tokens, depth, width, tile.rows, tile.cols, tile.depth, tile.parts, gated, on,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=on,
    )  # fmt: skip
    return out


MOST_DEPTH = 1024
"""What a program should walk at most: in a longer walk, as with more programs than multiprocessors, the library's product, whose
loads cost its threads nothing, is the faster. One H200, 4B shape (2,560 wide), a step of 256 tokens through 9 layers: 1.67 ms by
these products, 1.04 by the library's."""


def _first(tiles: list[Tile], tokens: int, width: int, depth: int) -> Tile | None:
    """The first that cuts the sizes evenly into programs neither too many nor too long."""
    for tile in tiles:
        if (
            tile.divides(width, depth)
            and tile.programs(tokens, width) <= PROCESSORS
            and depth // tile.parts <= MOST_DEPTH
        ):
            return tile
    return None


def split(tokens: int, width: int, depth: int) -> Tile | None:
    """A good cut of a product whose parts are added after it. None where the library's product is better. Pure.

    This and the next two give the best of some 40 in whole steps on one H200, 0.6B shape: docs/decisions/010-gpu-small-steps.md.
    A product alone says little: one whose programs leave room lets the next kernels begin, and fetch their weights.
    """
    tiles: list[Tile] = []
    if tokens <= 64:
        tiles = [Tile(64, 32, 128, 4, 4, 5), Tile(64, 64, 128, 4, 4, 4), Tile(64, 64, 64, 2, 4, 5)]
    elif tokens <= 128:
        wide = Tile(128, 64, 64, 4, 8, 5)
        tiles = [wide] if depth <= 2 * width else [Tile(64, 64, 128, 4, 4, 4), wide, Tile(128, 64, 64, 2, 8, 5)]
    elif tokens <= 512:
        tiles = [Tile(128, 64, 64, 4, 8, 5), Tile(128, 64, 64, 2, 8, 5)]
    return _first(tiles, tokens, width, depth)


def whole(tokens: int, width: int, depth: int) -> Tile | None:
    """As split, of a product that is not split: only where the weight is wide enough to give all something to do."""
    tiles: list[Tile] = []
    if tokens <= 64:
        tiles = [Tile(64, 32, 128, 1, 4, 5), Tile(64, 64, 128, 1, 4, 4)]
    elif tokens <= 128:
        tiles = [Tile(64, 64, 128, 1, 4, 4), Tile(128, 64, 64, 1, 8, 4)]
    elif tokens <= 256:
        tiles = [Tile(128, 64, 64, 1, 8, 4)]
    return _first(tiles, tokens, width, depth) if width >= 3072 else None


def gated(tokens: int, width: int, depth: int) -> Tile | None:
    """As split, of a product of pairs that gives width columns."""
    tiles: list[Tile] = []
    if tokens <= 64:
        tiles = [Tile(64, 32, 128, 1, 4, 4)]
    elif tokens <= 128:
        tiles = [Tile(128, 32, 64, 1, 8, 5)]
    elif tokens <= 256:
        tiles = [Tile(128, 64, 64, 1, 8, 5)]
    return _first(tiles, tokens, width, depth)
