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

# NVIDIA H200, CUDA 13.0, torch 2.11.0, 2026-11-29. (tokens, longest): us of each of _BACKENDS.
# 16384 tokens with a longest of 2048 is a mix of 30 sequences of 16 to 2048 tokens.
_H200: dict[tuple[int, int, int], dict[tuple[int, int], tuple[float, ...]]] = {
    (16, 8, 128): {
        (128, 128): (8, 6, 8, 10),
        (512, 512): (19, 11, 13, 26),
        (4096, 4096): (395, 201, 205, 358),
        (1024, 128): (9, 7, 9, 10),
        (25600, 512): (343, 259, 242, 309),
        (51200, 512): (657, 538, 471, 595),
        (16384, 2048): (479, 266, 257, 411),
        (32768, 32768): (24904, 13331, 13351, 22660),
    },
    (32, 8, 128): {
        (128, 128): (8, 6, 8, 10),
        (512, 512): (20, 11, 13, 26),
        (4096, 4096): (785, 401, 405, 701),
        (1024, 128): (12, 13, 14, 11),
        (25600, 512): (655, 503, 466, 601),
        (51200, 512): (1297, 1044, 959, 1163),
        (16384, 2048): (894, 508, 510, 758),
        (32768, 32768): (50769, 26231, 26458, 44760),
    },
    (12, 12, 64): {
        (128, 128): (6, 6, 6, 7),
        (512, 512): (14, 11, 11, 17),
        (4096, 4096): (229, 97, 105, 176),
        (1024, 128): (7, 7, 6, 7),
        (25600, 512): (164, 151, 122, 154),
        (51200, 512): (317, 314, 238, 297),
        (16384, 2048): (233, 150, 138, 210),
        (32768, 32768): (10436, 6053, 6538, 10011),
    },
}

TABLE: tuple[Row, ...] = tuple(
    Row("NVIDIA H200", *shape, tokens, longest, dict(zip(_BACKENDS, us, strict=True)))
    for shape, cases in _H200.items()
    for (tokens, longest), us in cases.items()
)
