"""The only file that speaks to CUDA's runtime: one stream, pinned memory, copies, events and graph capture.

`Device` is the seam. `CudaDevice` obeys it on a GPU; the tests' fake obeys it on the CPU and finishes work as late as it
likes, so that ring, graphs and life cycle are proved without a GPU. Does not know models, batches or shapes.

One stream carries everything: upload, kernels, download, event. Its order is the whole proof that buffers are safe:
a shared device buffer may be rewritten by an upload enqueued later, because every kernel that reads the old contents was
enqueued earlier. Only the host's side of a copy needs an event, since the host does not wait its turn in the stream.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A mark in the stream."""

    def query(self) -> bool:
        """True once everything before the mark is done. Never blocks."""

    def synchronize(self) -> None:
        """Wait for the mark without holding the GIL; raises when the device failed."""


class Captured(Protocol):
    """A captured graph."""

    def replay(self) -> Tensor:
        """Enqueue it; returns the [rows, width] float32 result on the device, good until the next replay."""


class Device(Protocol):
    """One stream of one device. Methods are called from one thread at a time (not always the same), but an Event's from any."""

    name: str
    total_bytes: int
    """Memory it has."""

    def enter(self) -> None:
        """Make the calling thread's work go to this stream. Cheap when it does already."""

    def pinned(self, *size: int, dtype: torch.dtype) -> Tensor:
        """Page-locked host memory, contents undefined."""

    def empty(self, ints: int) -> Tensor:
        """[ints] int32 on the device, contents undefined."""

    def event(self) -> Event:
        """A new event, to be recorded again and again."""

    def record(self, event: Event) -> None:
        """Put the event's mark at the stream's end."""

    def upload(self, to: Tensor, host: Tensor) -> None:
        """Enqueue a copy from pinned memory; returns at once."""

    def download(self, to: Tensor, rows: Tensor) -> None:
        """Enqueue a copy of the first len(to) rows into pinned memory; returns at once."""

    def run(self, body: Callable[[], Tensor]) -> Tensor:
        """Enqueue the body's kernels; returns its result on the device."""

    def capture(self, body: Callable[[], Tensor]) -> Captured:
        """Record the body's kernels into a graph, running none. Whatever it raises, the stream is usable after."""

    def drop_graphs(self) -> None:
        """Called when no captured graph is held any more: their memory pool is given up."""

    def relieve(self) -> None:
        """Give cached free memory back, after an OutOfMemoryError."""

    def synchronize(self) -> None:
        """Wait for all work; raises when the device failed for good."""

    def reserved_bytes(self) -> int:
        """Device memory the allocator holds."""


class _CudaGraph:
    """A captured CUDA graph and the tensor it leaves its result in."""

    __slots__ = ("graph", "rows")

    def __init__(self, graph: torch.cuda.CUDAGraph, rows: Tensor) -> None:
        self.graph = graph
        self.rows = rows

    def replay(self) -> Tensor:
        self.graph.replay()
        return self.rows


class CudaDevice:
    """A GPU.

    blocking: waiting threads sleep in the driver (cudaEventBlockingSync) instead of spinning. See docs/graphs.md for what
    each costs.
    """

    def __init__(self, index: int = 0, *, blocking: bool = False) -> None:
        self._index = index
        self._device = torch.device("cuda", index)
        self._blocking = blocking
        self.name = torch.cuda.get_device_name(index)
        self.total_bytes = torch.cuda.get_device_properties(index).total_memory
        # Capture is refused on the default stream, so ours is another. Weights were loaded on the default one.
        torch.cuda.synchronize(self._device)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def enter(self) -> None:
        # The current stream belongs to the thread, and whoever else uses the thread may have changed it.
        # Asked by its raw handle: torch.cuda.current_stream takes 5 us.
        if torch._C._cuda_getCurrentRawStream(self._index) != self._stream.cuda_stream:
            torch.cuda.set_stream(self._stream)

    def pinned(self, *size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(*size, dtype=dtype, pin_memory=True)

    def empty(self, ints: int) -> Tensor:
        return torch.empty(ints, dtype=torch.int32, device=self._device)

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event(blocking=self._blocking)  # type: ignore[no-untyped-call]

    def record(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event), "an event of another device was recorded"
        event.record(self._stream)

    def upload(self, to: Tensor, host: Tensor) -> None:
        to.copy_(host, non_blocking=True)

    def download(self, to: Tensor, rows: Tensor) -> None:
        to.copy_(rows[: to.shape[0]], non_blocking=True)

    def run(self, body: Callable[[], Tensor]) -> Tensor:
        return body()

    def capture(self, body: Callable[[], Tensor]) -> _CudaGraph:
        graph = torch.cuda.CUDAGraph()
        # A collection in the middle could free another graph or tensor, which a capturing stream may refuse.
        collecting = gc.isenabled()
        gc.disable()
        try:
            # thread_local: the waiter thread goes on asking for events meanwhile, which "global" would forbid.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                rows = body()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the end of a broken capture fails too; tell the first fault
                    graph.capture_end()
                raise
            graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        return _CudaGraph(graph, rows)

    def drop_graphs(self) -> None:
        # A pool that no graph refers to is dead to the allocator: later captures need a new one.
        self._pool = torch.cuda.graph_pool_handle()

    def relieve(self) -> None:
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self._device)
