"""Pooling on the GPU: packed [T, H] to one float32 row a sequence, without atomics and without asking the device.

The host knows only T, N and H, not the lengths (they may change at every replay of a graph). So the work is cut by what
it knows: every sequence into the same number of parts, every row into blocks of columns, one program each. With one part
the program writes the answer; with more, a second kernel adds the parts in order. The order of additions follows from
(T, N) alone: the same batch gives the same bits at every run.
"""

# Arguments of Triton kernels are pointers and scalars of the device, for which Python has no types.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 64
"""Tokens a program reads at once."""
_COLS = 64
"""Columns a program owns: 128 bytes of a bf16 row, one full line of cache."""
_PART_TOKENS = 128
"""Tokens a part should have on average. Below twice this the second kernel costs more than it saves."""
_MOST_PARTS = 64

PICKED_TOKENS, PICKED_SHARE = 1024, 4
"""From so many tokens on, and so many a row, the rows that a head reads go on alone after the last attention. They
cost kernels of a few us each (which rows, two gathers): below, there is not more to save. Decisions/014 has figures."""
_EVEN = 16
"""Rows are a multiple of it, as a step's tokens are: another kernel is compiled for what is not."""

_MODES = {"mean": 0, "mean_sqrt_len": 1, "weightedmean": 2, "max": 3}


def _parts(tokens: int, sequences: int) -> int:
    """Parts a sequence is cut into, from what the host knows: the mean length. A power of two."""
    if tokens <= 2 * _PART_TOKENS * sequences:
        return 1
    return min(_MOST_PARTS, int(triton.next_power_of_2(tokens // (sequences * _PART_TOKENS))))


@triton.jit(do_not_specialize=["sequences", "tokens"])
def _picked(cu, out, sequences, tokens, ROWS: tl.constexpr, LAST: tl.constexpr):
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.load(cu + n + LAST, mask=n < sequences, other=0) - LAST
    tl.store(out + n, tl.minimum(tl.maximum(at, 0), tokens - 1))


def picked(cu_seqlens: Tensor, tokens: int, mode: str) -> Tensor | None:
    """As twin.picked. Whether hangs on (T, N) alone."""
    sequences = cu_seqlens.shape[0] - 1
    rows = triton.cdiv(sequences, _EVEN) * _EVEN
    if tokens < max(PICKED_TOKENS, PICKED_SHARE * rows):
        return None
    out = torch.empty(rows, dtype=torch.int32, device=cu_seqlens.device)
    _picked[(rows // _EVEN,)](cu_seqlens, out, sequences, tokens, _EVEN, int(mode == "last"), num_warps=1)
    return out


@triton.jit
def _pick(x, cu, out, row_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LAST: tl.constexpr):
    n = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(cu + n)
    end = tl.load(cu + n + 1)
    row = (end - 1 if LAST else start).to(tl.int64)
    mask = cols < WIDTH
    value = tl.load(x + row * row_stride + cols, mask=mask & (end > start), other=0.0)
    tl.store(out + n.to(tl.int64) * WIDTH + cols, value.to(tl.float32), mask=mask)


@triton.jit
def _finish(total, length, MODE: tl.constexpr):
    f = length.to(tl.float32)
    if MODE == 0:
        total = total / tl.maximum(f, 1.0)
    if MODE == 1:
        total = total / tl.sqrt(tl.maximum(f, 1.0))
    if MODE == 2:
        total = total / tl.maximum(f * (f + 1.0) / 2.0, 1.0)
    if MODE == 3:
        total = tl.where(length > 0, total, 0.0)
    return total


@triton.jit
def _reduce(
    x, cu, out, row_stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    part = tl.program_id(2)
    start = tl.load(cu + n)
    length = tl.load(cu + n + 1) - start
    size = (length + PARTS - 1) // PARTS
    lo = part * size
    hi = tl.minimum(lo + size, length)
    in_row = cols < WIDTH
    empty = float("-inf") if MODE == 3 else 0.0
    acc = tl.full((ROWS, COLS), empty, tl.float32)
    first = lo
    while first < hi:  # not range(): Triton's interpreter cannot take bounds read from memory with numpy >= 2.4
        rank = first + tl.arange(0, ROWS)
        mask = (rank < hi)[:, None] & in_row[None, :]
        at = (start + rank).to(tl.int64)[:, None] * row_stride + cols[None, :]
        value = tl.load(x + at, mask=mask, other=empty).to(tl.float32)
        if MODE == 3:
            # NaN must win, as in the twin: a broken row may not look whole.
            acc = tl.maximum(acc, value, propagate_nan=tl.PropagateNan.ALL)
        elif MODE == 2:
            acc += value * (rank + 1).to(tl.float32)[:, None]
        else:
            acc += value
        first += ROWS
    if MODE == 3:
        # tl.max drops NaN, a sum keeps it: add 0 x NaN back where there was one.
        broken = tl.sum((acc != acc).to(tl.int32), 0)
        total = tl.where(broken > 0, float("nan"), tl.max(acc, 0))
    else:
        total = tl.sum(acc, 0)
    if PARTS == 1:
        total = _finish(total, length, MODE)
    row = n.to(tl.int64) * PARTS + part
    tl.store(out + row * WIDTH + cols, total, mask=in_row)


@triton.jit
def _join(parts, cu, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, MODE: tl.constexpr):
    n = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, PARTS)
    length = tl.load(cu + n + 1) - tl.load(cu + n)
    in_row = cols < WIDTH
    at = (n.to(tl.int64) * PARTS + part)[:, None] * WIDTH + cols[None, :]
    values = tl.load(parts + at, mask=in_row[None, :], other=0.0)
    if MODE == 3:
        broken = tl.sum((values != values).to(tl.int32), 0)
        total = tl.where(broken > 0, float("nan"), tl.max(values, 0))
    else:
        total = tl.sum(values, 0)
    tl.store(out + n.to(tl.int64) * WIDTH + cols, _finish(total, length, MODE), mask=in_row)


def pool(x: Tensor, cu_seqlens: Tensor, mode: str) -> Tensor:
    """One row a sequence from packed x [T, H] (rows may be strided) -> [N, H] float32. Modes as in twin.pool.

    Rows after cu_seqlens[-1] are never read. A sequence of no tokens gives a row of zeros.
    """
    sequences, width = cu_seqlens.shape[0] - 1, x.shape[1]
    out = torch.empty(sequences, width, dtype=torch.float32, device=x.device)
    if mode in ("cls", "last"):
        grid = (sequences, triton.cdiv(width, 256))
        _pick[grid](x, cu_seqlens, out, x.stride(0), width, 256, mode == "last", num_warps=1)
        return out
    if mode not in _MODES:
        raise ValueError(f"unknown pooling mode {mode!r}")
    parts = _parts(x.shape[0], sequences)
    sums = out if parts == 1 else torch.empty(sequences * parts, width, dtype=torch.float32, device=x.device)
    grid3 = (sequences, triton.cdiv(width, _COLS), parts)
    _reduce[grid3](x, cu_seqlens, sums, x.stride(0), width, _ROWS, _COLS, parts, _MODES[mode], num_warps=4)
    if parts > 1:
        _join[(sequences, triton.cdiv(width, 64))](sums, cu_seqlens, out, width, 64, parts, _MODES[mode], num_warps=2)
    return out
