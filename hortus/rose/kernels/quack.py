"""Matrix products with work in their epilogue, from the package quack-kernels (CuTe DSL), on Hopper.

Taken where there are many tokens (preload.py has the few): a product of 4,096 tokens ends 12 to 22 us earlier than the
library's and the kernel over its output that it makes needless. Each is compiled when the model is loaded (some seconds,
kept on disk by the package; one kernel serves all sizes) and tried against plain PyTorch: what cannot run, or is
wrong, is not used, and the log says why. Does not know models.
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
from hortus.rose.kernels.fp8_twin import Quantised, quantise

log = logging.getLogger(__name__)


@functools.cache
def here(index: int | None) -> bool:
    """Whether the package and a GPU that it is tuned for here are there."""
    if torch.cuda.get_device_capability(index) != (9, 0):
        log.info("quack's products are not used: the tiles here are measured on Hopper only")
        return False
    if importlib.util.find_spec("quack") is None:
        log.info("quack's products are not used: install hortus[gpu] for steps that are a tenth faster, or more")
        return False
    return True


@functools.cache  # the package knows a configuration by its id()
def _config(rows: int, cols: int, cluster: tuple[int, int]) -> Any:
    return importlib.import_module("quack.gemm_config").GemmConfig(
        tile_m=rows, tile_n=cols, pingpong=True, cluster_m=cluster[0], cluster_n=cluster[1],
        is_dynamic_persistent=False, device_capacity=9,
    )  # fmt: skip


def tried(name: str, run: Callable[[], Tensor], want: Tensor) -> bool:
    """Whether run() gives `want`; the log says so."""
    try:
        with warnings.catch_warnings():  # the compiler's remarks on its own code
            warnings.simplefilter("ignore")
            got = run().float()
        gap = float((got - want).norm() / want.norm())
        if not gap < 0.01:
            raise ArithmeticError(f"its result is off by {gap:.3g}")
    except Exception as e:  # noqa: BLE001  another package's compiler: whatever fails, there is another way
        log.warning("quack's %s is not used: %s: %s", name, type(e).__name__, e)
        return False
    log.info("quack's %s is used", name)
    return True


DEEP = 2048
"""Values of the inner dimension that a program walks in a trial: more than shared memory holds, so stages are filled again."""


def gated_trial(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x [384, DEEP], weight [384, DEEP] in pairs, and silu(gate) * up."""
    x, weight = (torch.randn(384, DEEP, device="cuda", dtype=dtype) for _ in range(2))
    weight = weight / DEEP**0.5
    gate, up = (x.float() @ weight.float().t()).view(384, -1, 2).unbind(2)
    return x, weight, torch.nn.functional.silu(gate) * up


@functools.cache
def gated(dtype: torch.dtype, index: int | None) -> Callable[[Tensor, Tensor], Tensor] | None:
    """(x [T, K], weight [2 I, K], gate and up in turn) -> silu(gate) * up, [T, I]; None where it cannot run."""

    def run(x: Tensor, weight: Tensor) -> Tensor:
        gemm = importlib.import_module("quack.gemm_interface").gemm_act
        both: tuple[Any, Tensor] = gemm(
            x, weight.t(), activation="swiglu", store_preact=False, tuned=False, config=_config(128, 192, (2, 1))
        )
        return both[1]

    x, weight, want = gated_trial(dtype)
    return run if tried("gated product", lambda: run(x, weight), want) else None


_TURNED_TILE = 128
"""The side of a tile of `turned`."""


def fill(tokens: int, width: int, rows: int = _TURNED_TILE, cols: int = _TURNED_TILE) -> bool:
    """Whether tiles of rows x cols, `turned`'s, of [tokens, width] keep the multiprocessors busy to three quarters. Pure.

    One H200, 4,096 columns, us with norm and rotation, the library's product first: 512 tokens 11.8 and 10.5, 640 13.4 and 16.9,
    768 15.1 and 15.1, 1,024 20.3 and 16.4. In many waves a last one that is not full no longer counts.
    """
    tiles = -(-tokens // rows) * -(-width // cols)
    waves = -(-tiles // PROCESSORS)
    return 10 * tiles > 28 * PROCESSORS or 4 * tiles >= 3 * waves * PROCESSORS


def angles(cos: Tensor, sin: Tensor) -> Tensor:
    """[positions, 64] each -> [positions, 256] float16, for `turned`: cos and sin in turn, then 1 and 0, which turn nothing.

    Half the bytes of float32 for an error of 2^-12, where what is turned is then rounded to 2^-9.
    """
    still = torch.stack([torch.ones_like(cos), torch.zeros_like(sin)], 2)
    return torch.cat([torch.stack([cos, sin], 2), still], 1).flatten(1).half()


def turned_trial(dtype: torch.dtype, heads: int, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [512, DEEP], weight [128 (heads + 2), DEEP], angles' rows, norm [128 (heads + 2)], and what turned gives of them."""
    width = 128 * heads
    x, weight = (torch.randn(n, DEEP, device="cuda", dtype=dtype) for n in (512, width + 256))
    weight = weight / DEEP**0.5  # or what is not normed would hide what is
    norm, phase = torch.ones(len(weight), device="cuda"), torch.rand(512, 64, device="cuda")
    norm[:width] += torch.rand(width, device="cuda")
    y = (x.float() @ weight.float().t()).view(512, heads + 2, 64, 2)
    normed = y[:, :heads] * torch.rsqrt(y[:, :heads].square().mean((2, 3), keepdim=True) + eps)
    a, b = (normed * norm[:width].view(heads, 64, 2)).unbind(3)
    c, s = phase.cos()[:, None], phase.sin()[:, None]
    want = torch.cat([torch.stack([a * c - b * s, a * s + b * c], 3), y[:, heads:]], 1).flatten(1)
    return x, weight, angles(phase.cos(), phase.sin()), norm, want


@functools.cache
def turned(dtype: torch.dtype, index: int | None, eps: float, heads: int) -> Callable[..., Tensor] | None:
    """(x [T, K], weight [N, K], angles' rows [T, 256], norm [N] float32) -> x weight^T, [T, N]; None where it cannot run.

    The first `heads` heads, of 128 columns, are normed and turned, their pairs neighbours; norm is 1 for the others.
    """

    def run(x: Tensor, weight: Tensor, rows: Tensor, norm: Tensor) -> Tensor:
        epilogue = importlib.import_module("hortus.rose.kernels.epilogue").turned(eps, heads)
        out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
        epilogue(
            x, weight.t(), out={"D": out}, config=_config(_TURNED_TILE, _TURNED_TILE, (1, 2)), tuned=False,
            angle=rows, rms=128, weight=norm,
        )  # fmt: skip
        return out

    *args, want = turned_trial(dtype, heads, eps)
    return run if tried("product with norm and rotation", lambda: run(*args), want) else None


def _e4m3(*shape: int) -> Quantised:
    return quantise(torch.randn(*shape, device="cuda"))


@functools.cache
def gated_e4m3(index: int | None) -> Callable[[Quantised, Quantised], Tensor] | None:
    """As gated, of operands in e4m3 -> bfloat16."""

    def run(x: Quantised, weight: Quantised) -> Tensor:
        epilogue = importlib.import_module("hortus.rose.kernels.epilogue").gated_e4m3
        out = x.scale.new_empty(x.values.shape[0], weight.values.shape[0] // 2, dtype=torch.bfloat16)
        args = {"scale": x.scale.view(-1), "column": weight.scale.view(-1), "postact": out}
        epilogue.gemm(
            x.values, weight.values.t(), None, epi_args=args, tile_M=128, tile_N=192, cluster_M=2, pingpong=True,
            b_kn=True, post_init_attrs=_FAST_SUMS,
        )  # fmt: skip
        return out

    x, weight = _e4m3(384, 256), _e4m3(384, 256)
    weight = weight._replace(scale=weight.scale / 16)
    gate, up = (x.exact() @ weight.exact().t()).view(384, -1, 2).unbind(2)
    want = torch.nn.functional.silu(gate) * up
    return run if tried("gated product in e4m3", lambda: run(x, weight), want) else None


_FAST_SUMS = (("fp8_slow_accum", False),)
"""Sums stay in the tensor cores' own accumulators, as in torch._scaled_mm with use_fast_accum."""
