"""Microseconds one attention call takes, by backend: the table choose.py reads.

Non-causal bf16 calls timed by replay of a CUDA graph; FlashInfer's plan() on the host (65 to 300 us, once a batch) is not
in. Made by `hortus bench kernels` on the device named; rerun it there and replace the rows to teach Hortus a new GPU.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One measured case."""

    gpu: str
    """The device's name as CUDA gives it."""
    heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    longest: int
    """Tokens of the longest sequence."""
    us: dict[str, float]
    """Backend -> microseconds."""


_BACKENDS = ("varlen", "fa4", "flashinfer_fa3", "flashinfer_fa2")

# NVIDIA H200, CUDA 13.0, torch 2.11.0, 2026-12-01; one sequence of 32,768 tokens is of two days before. (tokens, longest): us of
# each of _BACKENDS. 16,506 tokens with a longest of 2,048 is a mix of 30 sequences of 16 to 2,048 tokens.
_H200: dict[tuple[int, int, int], dict[tuple[int, int], tuple[float, ...]]] = {
    (16, 8, 128): {
        (128, 128): (7.8, 4.7, 7.2, 6.5),
        (512, 512): (18.7, 7.7, 12.2, 16.1),
        (4096, 4096): (399.4, 195, 204, 352.6),
        (1024, 128): (8.8, 6.7, 8.6, 7.3),
        (4096, 512): (59.2, 35.9, 43.2, 52.4),
        (25600, 512): (339.4, 202.4, 241.2, 316.2),
        (51200, 512): (699.7, 411.1, 476.1, 623.6),
        (16506, 2048): (536.7, 273.3, 281.9, 492.9),
        (32768, 32768): (24904, 13331, 13351, 22660),
    },
    (32, 8, 128): {
        (128, 128): (8.7, 4.7, 7.7, 6.8),
        (512, 512): (19.1, 10.6, 12.9, 16.1),
        (4096, 4096): (771.2, 387.8, 402.3, 695.6),
        (1024, 128): (12.6, 9.3, 13.7, 10.5),
        (4096, 512): (114.3, 67.2, 80.7, 100.1),
        (25600, 512): (657.7, 393.4, 472, 642),
        (51200, 512): (1367.9, 801.2, 936.3, 1243.7),
        (16506, 2048): (1029.1, 519.5, 572.5, 892.6),
        (32768, 32768): (50769, 26231, 26458, 44760),
    },
    (12, 12, 64): {
        (128, 128): (6.4, 4.3, 5.9, 4.5),
        (512, 512): (13.4, 7.2, 10.8, 10.5),
        (4096, 4096): (228, 95.7, 102.1, 170.5),
        (1024, 128): (6.7, 5.3, 6.2, 4.7),
        (4096, 512): (34.4, 20.1, 27.8, 25.6),
        (25600, 512): (161.4, 114.1, 120.7, 149.4),
        (51200, 512): (310.6, 227.7, 233.4, 287),
        (16506, 2048): (241.9, 143.4, 147.9, 221.2),
        (32768, 32768): (10436, 6053, 6538, 10011),
    },
}

TABLE: tuple[Row, ...] = tuple(
    Row("NVIDIA H200", *shape, tokens, longest, dict(zip(_BACKENDS, us, strict=True)))
    for shape, cases in _H200.items()
    for (tokens, longest), us in cases.items()
)
