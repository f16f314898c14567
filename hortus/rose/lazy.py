"""LazyTensor on a GPU: the rows of a step whose copy to the host may still be under way.

Knows a slot of the ring and its event. Does not know batches, graphs or models.
"""

from __future__ import annotations

from collections.abc import Callable

from hortus.errors import RequestError
from hortus.rose.staging import Ring, Slot
from hortus.types import Float32


class Rows:
    """[count, width] float32 to be. One thread may ask `ready` while another waits in `result`.

    `result` copies out of the ring and gives the slot back, so the array is the caller's alone and pinned memory stays
    bounded by the steps in flight, not by how long callers keep answers. The copy costs well under a microsecond a
    kilobyte and numpy does it without the GIL. Rows that are not finite are handed on as they are: only Ivy knows whose
    they are.
    """

    __slots__ = ("_array", "_count", "_failure", "_on_failure", "_ring", "_slot")

    def __init__(self, ring: Ring, slot: Slot, count: int, on_failure: Callable[[Exception], RequestError]) -> None:
        self._ring = ring
        self._slot: Slot | None = slot
        self._count = count
        self._on_failure = on_failure
        self._array: Float32 | None = None
        self._failure: RequestError | None = None

    def ready(self) -> bool:
        slot = self._slot
        if slot is None:
            return True
        try:
            return slot.event.query()
        except RuntimeError:
            return True  # the device failed: result() will say so without waiting

    def result(self) -> Float32:
        slot = self._slot
        if slot is not None:
            try:
                slot.event.synchronize()
            except RuntimeError as e:
                self._failure = self._on_failure(e)  # the slot is not given back: what became of its copies is unknown
            else:
                self._array = slot.rows_array[: self._count].copy()
                self._ring.give(slot)
            self._slot = None
        if self._failure is not None:
            raise self._failure
        assert self._array is not None, "a finished step has rows or a failure"
        return self._array
