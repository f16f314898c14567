"""How our Triton kernels are launched: early, and with how many threads.

Early: on Hopper and later a kernel may be launched while the one before it in the stream still runs (programmatic
dependent launch; CUDA C++ Programming Guide, the chapter of that name). Its launch, some 1 us, and its first reads then
cost nothing. The rules that make it safe, for every kernel launched so:

- Before its wait it reads only what no kernel writes: weights, and the step's inputs, which were copied up before its first one.
- Every thread waits, before the first other read and before any write. The wait ends when the kernel before is complete
  and its writes are seen; since that one waited too, so is everything earlier.
- It lets the next kernel start (`gdc_launch_dependents`) at once: the hardware does so only when all its own programs run.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor


@functools.cache
def _early(index: int | None) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


def early(x: Tensor) -> bool:
    """Whether kernels on x's device may be launched early. Never in Triton's interpreter."""
    return x.is_cuda and _early(x.device.index)


@functools.cache
def _shared(index: int | None) -> int:
    return int(torch.cuda.get_device_properties(index).shared_memory_per_multiprocessor)


def roomy(x: Tensor) -> bool:
    """Whether a program on x's device may hold 164 kB of shared memory, as some of skinny.py's do: not before Hopper, nor on
    GeForce."""
    return not x.is_cuda or _shared(x.device.index) > 200 * 1024


def row(width: int) -> tuple[int, int]:
    """(block, warps) for one row a program: 8 elements a thread, up to 16 warps."""
    block = triton.next_power_of_2(width)
    return block, min(16, max(1, block // 256))
