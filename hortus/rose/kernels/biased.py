"""Products with a bias on the GPU, BERT's: a LinearFactory, and one for what a norm adds to a residual.

By quack where it is installed (Hopper), with bias and GELU in the epilogue: up to 512 tokens as in preload.py, weights first,
and what a norm adds in parts; many tokens where its tiles fill the GPU. Else, and without a bias, the library's product.
Figures: docs/decisions/015-weights-first.md. Does not know models.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hortus.rose.kernels import preload, quack
from hortus.rose.kernels.linear import Linear, plain
from hortus.rose.kernels.preload import Tile

MOST_TOKENS, MOST_DEPTH = 512, 2048
"""Tokens, and values of the inner dimension that one program walks."""
FEWEST = 36
"""Programs, of a product in parts: an example with fewer is cut further."""

# The first that fits. As in preload.py the best of some 40 in whole steps on one H200, bge-base's and MiniLM's shapes, and few.
_BIASED = (Tile(64, 64), Tile(128, 96))
_ACTIVATED = (Tile(64, 32), Tile(128, 64), Tile(128, 96))
_SUMMED = (
    (128, (Tile(64, 64, parts=4), Tile(64, 32, parts=4), Tile(64, 32, parts=3))),
    (256, (Tile(64, 64, parts=2),)),
    (MOST_TOKENS, (Tile(64, 64), Tile(128, 64, parts=2))),
)
_MANY = Tile(128, 192, (2, 1))
"""Of many tokens: two groups of warps in turns."""


def whole(tokens: int, width: int, depth: int, activation: str | None) -> Tile | None:
    """The tile for a product of few tokens with a weight [width, depth]; None: another is better, or it cannot be cut. Pure."""
    tiles = _BIASED if activation is None else _ACTIVATED
    return _first(tiles, tokens, width, depth, 1)


def summed(tokens: int, width: int, depth: int) -> Tile | None:
    """As whole, of a product that a norm adds. Pure."""
    tiles = next((tiles for most, tiles in _SUMMED if tokens <= most), ())
    return _first(tiles, tokens, width, depth, FEWEST)


def _first(tiles: tuple[Tile, ...], tokens: int, width: int, depth: int, fewest: int) -> Tile | None:
    if tokens > MOST_TOKENS:
        return None
    return next((tile for tile in tiles if tile.fits(tokens, width, depth, fewest, MOST_DEPTH)), None)


def linear(weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Linear:
    """A LinearFactory."""
    return _made(weight, bias, activation, functools.partial(whole, activation=activation))


def added(weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Linear:
    """A LinearFactory for what ops.add_layer_norm or add_layer_norm_ adds: [T, out], or in parts [P, T, out] float32."""
    return linear(weight, bias, activation) if activation else _made(weight, bias, None, summed)


def _made(
    weight: Tensor, bias: Tensor | None, activation: str | None, pick: Callable[[int, int, int], Tile | None]
) -> Linear:
    other = plain(weight, bias, activation)
    if bias is None or activation not in (None, "gelu") or not preload.can_run(weight):
        return other
    (width, depth), works = weight.shape, functools.partial(_works, weight.dtype, weight.device.index, activation)
    found = dict.fromkeys(pick(tokens, width, depth) for tokens in range(64, MOST_TOKENS + 1, 64))
    tiles = [tile for tile in found if tile is not None]
    few, many = all(map(works, tiles)), works(_MANY)
    # A first part begins with the bias, the others with nothing.
    rows = F.pad(bias.float()[None], (0, 0, 0, max([tile.parts for tile in tiles], default=1) - 1))

    def run(x: Tensor) -> Tensor:
        tokens = x.shape[0]
        tile = pick(tokens, width, depth) if few else None
        if tile is None and many and quack.fill(tokens, width, _MANY.rows, _MANY.cols):
            tile = _MANY
        if tile is None:
            return other(x)
        return preload.product(x.contiguous(), weight, tile, bias=rows, activation=activation, many=tile is _MANY)

    return run


@functools.cache
def _works(dtype: torch.dtype, index: int | None, activation: str | None, tile: Tile) -> bool:
    depth = quack.DEEP * tile.parts
    x, weight = (torch.randn(n, depth, device="cuda", dtype=dtype) for n in (200, 256))
    weight = weight / depth**0.5
    bias = F.pad(torch.randn(1, 256, device="cuda"), (0, 0, 0, tile.parts - 1))
    want = x.float() @ weight.float().t() + bias[0]

    def run() -> Tensor:
        got = preload.product(x, weight, tile, bias=bias, activation=activation, many=tile is _MANY)
        return got if tile.parts == 1 else got.sum(0)

    name = f"product with a bias{' and GELU' if activation else ''}, {tile}"
    return quack.tried(name, run, want if activation is None else F.gelu(want))
