"""Products of up to some hundred tokens whose weights are in shared memory before their input is there: quack's kernel for
Hopper, changed by hopper.py.

The physics. A step of few tokens is a chain of some 200 kernels, each of which waits for the one before it. What a product
then still has to read is what its layer waits for, at the rate of the L2 cache, which all its programs share. Weights do not
depend on that kernel: a program launched early takes as much of its tile as shared memory holds while the others
still run. Then its input alone is left, a tile of which the programs of a cluster read once for all of them.

Tables of tiles, pure, and the products themselves, each proven when a model is loaded. Not there: skinny.py's, or the
library's. Does not know models.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hortus.rose.kernels import PROCESSORS, quack

log = logging.getLogger(__name__)


class Tile(NamedTuple):
    """How a product is cut into programs."""

    rows: int
    cols: int
    """Of the weight's rows; pairs count twice."""
    cluster: tuple[int, int] = (1, 1)
    """Programs along rows and columns that read what they share once."""
    parts: int = 1
    """Programs that share one tile's inner dimension."""

    def programs(self, tokens: int, width: int) -> int:
        """A cluster is whole, whatever of it is used."""
        down, along = -(-tokens // (self.rows * self.cluster[0])), -(-width // (self.cols * self.cluster[1]))
        return down * along * math.prod(self.cluster) * self.parts

    def fits(self, tokens: int, width: int, depth: int, fewest: int, most_depth: int) -> bool:
        """Whether it cuts a product into programs that all run at once, are not too few, and do not walk too far."""
        enough = fewest <= self.programs(tokens, width) <= PROCESSORS
        return enough and depth % (self.parts * DEPTH) == 0 and depth // self.parts <= most_depth


DEPTH = 64
"""Values of the inner dimension a stage: 128 bytes, as the copy engine's pattern has it."""
FEWEST, MOST_DEPTH = 44, 5120
"""Programs, and values of the inner dimension that one walks: what was measured and paid was within."""

# Up to so many tokens, the first tile that fits. The best of some 30 to 100 a size in whole steps on one H200, 0.6B and 4B
# shapes, of which few are kept, since each is compiled for some two seconds at a machine's first start:
# docs/decisions/015-weights-first.md.
_Table = tuple[tuple[int, tuple[Tile, ...]], ...]
_GATED: _Table = (
    (64, (Tile(64, 64), Tile(64, 160))),
    (128, (Tile(64, 96, (2, 1)), Tile(128, 160))),
    (256, (Tile(128, 96, (2, 1)), Tile(256, 160))),
    (512, (Tile(128, 192),)),
)
_ADDED: _Table = (
    (64, (Tile(64, 64, (1, 1), 4), Tile(64, 64, (1, 1), 2))),
    (128, (Tile(64, 64, (2, 1), 2), Tile(64, 64, (1, 4)), Tile(64, 160, (2, 1), 4))),
    (192, (Tile(64, 64, (1, 2), 2),)),
    (256, (Tile(64, 64, (1, 4)), Tile(64, 160, (2, 1), 2))),
    (448, (Tile(64, 64, (1, 4)),)),
    (768, (Tile(128, 64, (1, 4)),)),
)
_TURNED: _Table = (
    (64, ()),
    (128, (Tile(64, 128, (2, 1)),)),
    (192, (Tile(64, 128),)),
    (256, (Tile(64, 128, (2, 1)),)),
    (512, (Tile(128, 128),)),
)


def _pick(table: _Table, tokens: int, width: int, depth: int) -> Tile | None:
    tiles = next((tiles for most, tiles in table if tokens <= most), ())
    return next((tile for tile in tiles if tile.fits(tokens, width, depth, FEWEST, MOST_DEPTH)), None)


def gated(tokens: int, width: int, depth: int) -> Tile | None:
    """The tile for a product with a weight [2 width, depth] in pairs; None where another is better, or it cannot be cut. Pure."""
    return _pick(_GATED, tokens, 2 * width, depth)


def added(tokens: int, width: int, depth: int) -> Tile | None:
    """For one with a weight [width, depth] that a norm adds to the residual. Pure."""
    # 1,024 x 3,072 at 16 tokens is the exception of what was measured: 0.589 ms a step by skinny.py's, 0.602 so.
    if tokens <= 64 and width <= 1024 and depth > 2048:
        return None
    return _pick(_ADDED, tokens, width, depth)


def turned(tokens: int, width: int, depth: int) -> Tile | None:
    """For one with a weight [width, depth] whose heads, of 128 columns, are normed and turned. Pure."""
    return _pick(_TURNED, tokens, width, depth)


def _run(
    epilogue: Any,
    x: Tensor,
    weight: Tensor,
    out: Tensor | None,
    tile: Tile,
    args: dict[str, Any],
    *,
    many: bool = False,
) -> None:
    how: dict[str, Any] = {"pingpong": True}
    if not many:
        how = {"persistent": False, "post_init_attrs": importlib.import_module("hortus.rose.kernels.hopper").AHEAD}
    epilogue.gemm(
        x, weight, out, epi_args=args, tile_M=tile.rows, tile_N=tile.cols, cluster_M=tile.cluster[0],
        cluster_N=tile.cluster[1], b_kn=True, **how,
    )  # fmt: skip


def _epilogues() -> Any:
    return importlib.import_module("hortus.rose.kernels.epilogue")


def product(
    x: Tensor,
    weight: Tensor,
    tile: Tile,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    many: bool = False,
) -> Tensor:
    """activation(x weight^T + bias) for x [T, K], weight [N, K], contiguous.

    -> [T, N] in x's dtype; of several parts [parts, T, N] float32, to be added in order. bias: [parts, N] float32. activation:
    None or, with a bias and one part, gelu. many: of many tokens, by tiles in turns and without weights ahead.
    """
    (tokens, depth), width, parts = x.shape, weight.shape[0], tile.parts
    epilogues = _epilogues()
    epilogue = epilogues.plain if bias is None else epilogues.biased if activation is None else epilogues.gelu
    if parts == 1:
        out = x.new_empty(tokens, width)
        _run(epilogue, x, weight.t(), out, tile, {} if bias is None else {"bias": bias[0]}, many=many)
        return out
    # Parts are a batch of products, each of its share of the inner dimension.
    out = torch.empty(parts, tokens, width, dtype=torch.float32, device=x.device)
    shares = x.view(tokens, parts, depth // parts).transpose(0, 1)
    turned_weight = weight.view(width, parts, depth // parts).permute(1, 2, 0)
    _run(epilogue, shares, turned_weight, out, tile, {} if bias is None else {"bias": bias[:parts]})
    return out


def gated_product(x: Tensor, weight: Tensor, tile: Tile) -> Tensor:
    """silu(gate) * up -> [T, N / 2] of x [T, K], weight [N, K], its rows gate 0, up 0, gate 1, .."""
    out = x.new_empty(x.shape[0], weight.shape[0] // 2)
    _run(_epilogues().gated, x, weight.t(), None, tile, {"postact": out})
    return out


def turned_product(x: Tensor, weight: Tensor, rows: Tensor, norm: Tensor, heads: int, eps: float, tile: Tile) -> Tensor:
    """As quack.turned's: the first `heads` heads of x weight^T normed and turned; norm [N] is 1 where nothing is normed."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    _run(_epilogues().turned(eps, heads), x, weight.t(), out, tile, {"angle": rows, "rms": 128, "weight": norm})
    return out


@functools.cache
def _here(index: int | None) -> bool:
    if not quack.here(index):
        return False
    try:
        importlib.import_module("hortus.rose.kernels.hopper").use()
    except Exception as e:  # noqa: BLE001  another package, of any version: whatever fails, there is another way
        log.warning("small steps: quack's products are not used, they are not as expected: %s: %s", type(e).__name__, e)
        return False
    return True


def can_run(weight: Tensor) -> bool:
    """Whether the products here are for such a weight, and the package is there."""
    # The copy engine reads and writes rows that begin at multiples of 16 bytes.
    fits = weight.is_cuda and weight.dtype.itemsize == 2 and not any(size % 8 for size in weight.shape)
    return fits and _here(weight.device.index)


def _all(weight: Tensor, table: _Table, works: Callable[[Tile], bool]) -> bool:
    """Whether there are tiles of a table for such a weight, and all work. Each is compiled and tried once in a process."""
    if not can_run(weight):
        return False
    found = dict.fromkeys(_pick(table, tokens, *weight.shape) for tokens in range(64, table[-1][0] + 1, 64))
    tiles = [tile for tile in found if tile is not None]
    return bool(tiles) and all(works(tile) for tile in tiles)


def can_gate(weight: Tensor) -> bool:
    """Whether gated_product works for this weight, by every tile that `gated` gives."""
    of_pairs = weight.shape[0] % 16 == 0  # what comes out is half as wide
    return of_pairs and _all(weight, _GATED, lambda tile: _gates(tile, weight.dtype, weight.device.index))


def can_add(weight: Tensor) -> bool:
    """Whether product works for this weight, by every tile that `added` gives."""
    return _all(weight, _ADDED, lambda tile: _multiplies(tile, weight.dtype, weight.device.index))


def can_turn(weight: Tensor, heads: int, eps: float) -> bool:
    """Whether turned_product works for this weight, by every tile that `turned` gives."""
    dtype, index = weight.dtype, weight.device.index
    return _all(weight, _TURNED, lambda tile: _turns(tile, dtype, index, heads, eps))


@functools.cache
def _gates(tile: Tile, dtype: torch.dtype, index: int | None) -> bool:
    x, weight, want = quack.gated_trial(dtype)
    return quack.tried(f"gated product, {tile}", lambda: gated_product(x, weight, tile), want)


@functools.cache
def _multiplies(tile: Tile, dtype: torch.dtype, index: int | None) -> bool:
    x, weight = (torch.randn(n, quack.DEEP * tile.parts, device="cuda", dtype=dtype) for n in (200, 256))
    want = x.float() @ weight.float().t()

    def run() -> Tensor:
        got = product(x, weight, tile)
        return got if tile.parts == 1 else got.sum(0)

    return quack.tried(f"product, {tile}", run, want)


@functools.cache
def _turns(tile: Tile, dtype: torch.dtype, index: int | None, heads: int, eps: float) -> bool:
    x, weight, rows, norm, want = quack.turned_trial(dtype, heads, eps)
    return quack.tried(
        f"product with norm and rotation, {tile}", lambda: turned_product(x, weight, rows, norm, heads, eps, tile), want
    )
