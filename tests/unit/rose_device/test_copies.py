"""Copies as CUDA's runtime is asked for them, by a runtime that copies at once."""

import ctypes

import numpy as np
import pytest
import torch

from hortus.rose.device import Copies


def runtime(seen, code=0):
    def memcpy(to, origin, count, kind, stream):
        seen.append((count, kind, stream))
        ctypes.memmove(to, origin, count)
        return code

    return memcpy


def test_parts_of_blocks_arrive_where_they_belong():
    seen = []
    copies = Copies(runtime(seen), 77)
    host, block = torch.arange(100, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    copies.up(block[8:40], host[50:82])
    np.testing.assert_array_equal(block, [0] * 8 + list(range(50, 82)) + [0] * 24)
    rows, ring = torch.randn(5, 3), torch.zeros(8, 3)
    copies.down(ring[2:6], rows)
    assert torch.equal(ring[2:6], rows[:4])
    assert not ring[:2].any()
    assert not ring[6:].any()
    assert seen == [(128, Copies.UP, 77), (48, Copies.DOWN, 77)]


def test_what_the_runtime_refuses_is_an_error():
    copies = Copies(runtime([], code=700), 1)
    with pytest.raises(RuntimeError, match="cudaMemcpyAsync failed with CUDA error 700"):
        copies.up(torch.zeros(4), torch.ones(4))


def test_sizes_must_agree():
    copies = Copies(runtime([]), 1)
    for fault in (
        lambda: copies.up(torch.zeros(4), torch.ones(5)),
        lambda: copies.down(torch.zeros(4, 2), torch.ones(4, 3)),
        lambda: copies.down(torch.zeros(4, 2), torch.ones(3, 2)),
    ):
        with pytest.raises(AssertionError):
            fault()
