"""Matrix products with work in their epilogue, from the package quack-kernels (CuTe DSL), on Hopper.

Taken where there are many tokens: a product of 4,096 tokens ends 12 to 22 us earlier than the library's and the kernel
over its output that it makes needless. Each is compiled when the model is loaded (some seconds, kept on disk by the
package; one kernel serves all sizes) and tried against plain PyTorch: what cannot run, or is wrong, is not used, and the
log says why. Does not know models.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hortus.rose.kernels import PROCESSORS

log = logging.getLogger(__name__)


@functools.cache
def here(index: int | None) -> bool:
    """Whether the package and a GPU that it is tuned for here are there."""
    if torch.cuda.get_device_capability(index) != (9, 0):
        log.info("quack's products are not used: the tiles here are measured on Hopper only")
        return False
    if importlib.util.find_spec("quack") is None:
        log.info("quack's products are not used: install hortus[gpu] for large steps that are a tenth faster")
        return False
    return True


def _config(rows: int, cols: int) -> Any:
    return importlib.import_module("quack.gemm_config").GemmConfig(
        tile_m=rows, tile_n=cols, pingpong=True, cluster_m=2, cluster_n=1,
        is_dynamic_persistent=False, device_capacity=9,
    )  # fmt: skip


def _tried(name: str, make: Callable[[], Callable[..., Tensor]], *args: Tensor, want: Tensor) -> Any:
    """make(), if what it makes gives `want` of these arguments."""
    try:
        with warnings.catch_warnings():  # the compiler's remarks on its own code
            warnings.simplefilter("ignore")
            run = make()
            got = run(*args).float()
        gap = float((got - want).norm() / want.norm())
        if not gap < 0.01:
            raise ArithmeticError(f"its result is off by {gap:.3g}")
    except Exception as e:  # noqa: BLE001  another package's compiler: whatever fails, there is another way
        log.warning("quack's %s is not used: %s: %s", name, type(e).__name__, e)
        return None
    log.info("large steps: quack's %s", name)
    return run


@functools.cache
def gated(dtype: torch.dtype, index: int | None) -> Callable[[Tensor, Tensor], Tensor] | None:
    """(x [T, K], weight [2 I, K], gate and up in turn) -> silu(gate) * up, [T, I]; None where it cannot run."""

    def make() -> Callable[[Tensor, Tensor], Tensor]:
        gemm = importlib.import_module("quack.gemm_interface").gemm_act
        tiles = _config(128, 192)

        def run(x: Tensor, weight: Tensor) -> Tensor:
            both: tuple[Any, Tensor] = gemm(
                x, weight.t(), activation="swiglu", store_preact=False, tuned=False, config=tiles
            )
            return both[1]

        return run

    x, weight = (torch.randn(384, 256, device="cuda", dtype=dtype) for _ in range(2))
    both = (x.float() @ weight.float().t() / 16).view(384, -1, 2)
    gate, up = both[..., 0], both[..., 1]
    found: Callable[[Tensor, Tensor], Tensor] | None = _tried(
        "gated product", make, x, weight / 16, want=torch.nn.functional.silu(gate) * up
    )
    return found


_TURNED_TILE = 128
"""The side of a tile of `turned`."""


def fill(tokens: int, width: int) -> bool:
    """Whether `turned`'s tiles of [tokens, width] keep the multiprocessors busy to three quarters. Pure.

    One H200, 4,096 columns, us with norm and rotation, the library's product first: 512 tokens 11.8 and 10.5, 640 13.4 and 16.9,
    768 15.1 and 15.1, 1,024 20.3 and 16.4. In many waves a last one that is not full no longer counts.
    """
    tiles = -(-tokens // _TURNED_TILE) * -(-width // _TURNED_TILE)
    waves = -(-tiles // PROCESSORS)
    return 10 * tiles > 28 * PROCESSORS or 4 * tiles >= 3 * waves * PROCESSORS


@functools.cache
def _turned(dtype: torch.dtype, index: int | None, eps: float) -> Any:
    def make() -> Callable[..., Tensor]:
        epilogue = importlib.import_module("hortus.rose.kernels.epilogue").turned(eps)
        tiles = _config(_TURNED_TILE, _TURNED_TILE)

        def run(x: Tensor, weight: Tensor, angle: Tensor, norm: Tensor, turns: Tensor, stays: Tensor) -> Tensor:
            out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
            epilogue(
                x, weight.t(), out={"D": out}, config=tiles, tuned=False,
                angle=angle, rms=128, weight=norm, turns=turns, stays=stays,
            )  # fmt: skip
            return out

        return run

    x, weight = (torch.randn(512, 256, device="cuda", dtype=dtype) for _ in range(2))
    norm, phase = torch.rand(512, device="cuda") + 0.5, torch.rand(512, 64, device="cuda")
    turns = torch.ones(512, device="cuda")
    turns[384:] = 0
    y = (x.float() @ weight.float().t()).view(512, 4, 64, 2)
    normed = y[:, :3] * torch.rsqrt(y[:, :3].square().mean((2, 3), keepdim=True) + eps) * norm[:384].view(3, 64, 2)
    a, b = normed[..., 0], normed[..., 1]
    c, s = phase.cos()[:, None], phase.sin()[:, None]
    want = torch.cat([torch.stack([a * c - b * s, a * s + b * c], 3), y[:, 3:]], 1).flatten(1)
    rows = torch.stack([phase.cos(), phase.sin()], 2).flatten(1).half()
    return _tried("product with norm and rotation", make, x, weight, rows, norm * turns, turns, 1 - turns, want=want)


def turned(weight: Tensor, norm: Tensor, eps: float) -> Callable[[Tensor, Tensor], Tensor] | None:
    """(x [T, K], angles [T, 128]) -> x weight^T, [T, N]: heads of 128 columns, the first of them normed and turned.

    weight [N, K]; norm, float32, has as many values as columns are turned, whose pairs are neighbours. angles: cos and
    sin in turn, float16. None where it cannot run.
    """
    run = _turned(weight.dtype, weight.device.index, eps)
    if run is None:
        return None
    turns = torch.zeros(weight.shape[0], device=weight.device)
    turns[: len(norm)] = 1
    each = torch.zeros_like(turns)
    each[: len(norm)] = norm
    stays = 1 - turns
    return lambda x, angles: run(x, weight, angles, each, turns, stays)
