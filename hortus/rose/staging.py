"""A batch's way onto the device: where to cut it, how a piece lies in memory, and the pinned blocks it is written into.

Knows TokenBatch and numpy; of the device only pinned memory and events. Does not know graphs or models.

A piece is one int32 block, so that one copy carries it:

    [ ids: tokens | positions: tokens | token types: tokens, if any | cu_seqlens: sequences + 2 | spans, if any ]

`tokens` and `sequences` are rounded up. Padding tokens (id 0, position 0) are a sequence of their own, always the last slot,
since attention wants every row to belong to a sequence; padding slots before it are sequences of no tokens. Nobody
attends to either, and their rows are never copied out. Spans are the tokens of all of them, joined, and where each ends
among those (rows + 1 numbers); they are of a step's own size, and behind all that a graph reads.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hortus.rose.device import Device
from hortus.rose.network import Inputs, ranges
from hortus.types import Float32, Int32, TokenBatch

_numbers: Int32 = np.arange(4096, dtype=np.int32)


def _count(n: int) -> Int32:
    """0 .. n - 1, as a view of an array made once."""
    global _numbers
    if len(_numbers) < n:
        _numbers = np.arange(2 * n, dtype=np.int32)
    return _numbers[:n]


def cut(cu_seqlens: Int32, most: int) -> list[tuple[int, int]]:
    """Sequence ranges of at most `most` tokens each (a longer sequence is alone), in order, covering all.

    As few as the limit allows, and of even size: a small last piece would leave the device half idle.
    """
    sequences, total = len(cu_seqlens) - 1, int(cu_seqlens[-1])
    if 0 < total <= most:  # the same in fewer calls: most steps are one piece
        return [(0, sequences)]
    pieces: list[tuple[int, int]] = []
    lo = 0
    while lo < sequences:
        start = int(cu_seqlens[lo])
        left = total - start
        share = -(-left // -(-left // most))
        hi = int(np.searchsorted(cu_seqlens, start + share, side="right")) - 1
        hi = min(max(hi, lo + 1), sequences)
        pieces.append((lo, hi))
        lo = hi
    return pieces


class Layout(NamedTuple):
    """Where the parts of a piece lie in its block, in int32 values."""

    sequences: int
    """Slots for sequences; one more follows for the padding tokens."""
    tokens: int
    """Rows, padding included."""
    typed: bool
    span_tokens: int = 0
    """Tokens of all spans together."""
    rows: int = 0
    """Spans; 0: there are none, a row a sequence."""

    @property
    def plain(self) -> int:
        """Where the spans begin."""
        return (3 if self.typed else 2) * self.tokens + self.sequences + 2

    @property
    def size(self) -> int:
        return self.plain + (self.span_tokens + self.rows + 1 if self.rows else 0)

    def fill(self, block: Int32, batch: TokenBatch) -> None:
        """Write the batch into block [size]. The batch must fit; every value of the block is written."""
        n, t, rows = len(batch), batch.total_tokens, self.tokens
        cu = batch.cu_seqlens
        block[:t] = batch.ids
        block[t:rows] = 0
        positions = block[rows : 2 * rows]
        if n == 1:
            positions[:t] = _count(t)
        else:
            np.subtract(_count(t), np.repeat(cu[:-1], cu[1:] - cu[:-1]), out=positions[:t])
        positions[t:] = 0
        at = 2 * rows
        if self.typed:
            types = block[at : at + rows]
            types[:t] = 0 if batch.token_types is None else batch.token_types
            types[t:] = 0
            at += rows
        end = self.plain
        block[at : at + n + 1] = cu
        block[at + n + 1 : end] = t
        block[end - 1] = rows
        if batch.spans is not None:
            starts, ends = batch.spans[:, 0], batch.spans[:, 1]
            block[end : end + self.span_tokens], block[end + self.span_tokens :] = ranges(starts, ends - starts)

    def cu_seqlens(self, block: Int32) -> Int32:
        """[sequences + 2] of a filled host block."""
        return block[self.plain - self.sequences - 2 : self.plain]

    def inputs(self, block: Tensor) -> Inputs:
        """The parts of a device block [size] as views."""
        rows, at = self.tokens, (3 if self.typed else 2) * self.tokens
        end, ends = self.plain, self.plain + self.span_tokens
        return Inputs(
            ids=block[:rows],
            positions=block[rows : 2 * rows],
            token_types=block[2 * rows : at] if self.typed else None,
            cu_seqlens=block[at:end],
            span_tokens=block[end:ends] if self.rows else None,
            span_cu_seqlens=block[ends : self.size] if self.rows else None,
        )


class Slot:
    """The pinned memory and the event of one step in flight.

    Life: taken by `step` from the Ring, filled and downloaded into; given back by `Rows.result` once the event
    has passed and the rows are copied out. If nobody ever asks for the result the slot is simply forgotten, and the
    allocator keeps its memory until the copies that use it are done.
    """

    __slots__ = ("_device", "_parts", "array", "block", "event", "rows", "rows_array")

    def __init__(self, device: Device, width: int) -> None:
        self._device = device
        self.event = device.event()
        self.block = device.pinned(4096, dtype=torch.int32)
        self.array: Int32 = self.block.numpy()
        self.rows = device.pinned(16, width, dtype=torch.float32)
        self.rows_array: Float32 = self.rows.numpy()
        self._parts: dict[int, Tensor] = {}

    def part(self, at: int, end: int) -> Tensor:
        """block[at:end]. Those from 0, one a bucket, are kept: a step of one piece makes no views."""
        if at:
            return self.block[at:end]
        if (view := self._parts.get(end)) is None:
            view = self._parts[end] = self.block[:end]
        return view

    def reserve(self, ints: int, rows: int) -> None:
        """Make room, by powers of two so that growing is rare."""
        if len(self.array) < ints:
            self.block = self._device.pinned(1 << (ints - 1).bit_length(), dtype=torch.int32)
            self.array = self.block.numpy()
            self._parts.clear()
        if len(self.rows_array) < rows:
            self.rows = self._device.pinned(1 << (rows - 1).bit_length(), self.rows.shape[1], dtype=torch.float32)
            self.rows_array = self.rows.numpy()


class Ring:
    """The free slots. Grows to as many as are ever in flight at once; the scheduler bounds that."""

    def __init__(self, device: Device, width: int) -> None:
        self._device = device
        self._width = width
        self._free: deque[Slot] = deque()  # append and pop are atomic: one thread takes, another gives

    def take(self) -> Slot:
        try:
            return self._free.pop()
        except IndexError:
            return Slot(self._device, self._width)

    def give(self, slot: Slot) -> None:
        self._free.append(slot)
