"""The Hopper kernel of the package flash-attn-4, launched early and with programs that go on: a class derived from the package's.

The package launches a program for each tile of queries. Short sequences make many short programs, one on a multiprocessor at a
time, and each begins with nothing to compute: it looks up which tile is its own, and waits for its first keys. Here there are
as many programs as multiprocessors, each goes on to the tile so many further, and its loading warp is there already while the
others finish the last: 25 sequences of 512 tokens, 16 heads of 128, 141 -> 115 us a call, 100 of 128 tokens 93 -> 52, one of
4,096 221 -> 218 (one H200). The package's loops are written for that; what it lacks is room for a tile's output beside the
next one's queries, which it keeps in the same place.

A stride knows nothing of how long a tile takes; see fa4.goes_on.

Imported only where the package is. Does not know models or batches.
"""

# Traced by the package's compiler, not run: the values have no Python types.
# ruff: noqa: ANN001, ANN002, ANN003, ANN201, ANN202, ANN205
# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-not-found, import-untyped, misc, has-type"

from __future__ import annotations

import functools
import inspect
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from flash_attn.cute import interface
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.tile_scheduler import SingleTileVarlenScheduler

from hortus.rose.attention.fa4 import GOES_ON

_SHARED = 227 * 1024
"""Bytes of shared memory that a program may hold on Hopper. The package's barriers, and aligning the rest, take 1,024."""


class _Strided(SingleTileVarlenScheduler):
    """This program's tile, then the one as many further as there are programs."""

    @staticmethod
    def create(params, ctx=None, *, loc=None, ip=None):
        tile, split, _ = cute.arch.block_idx()
        return _Strided(params, tile, split, loc=loc, ip=ip)

    def advance_to_next_work(self, *, loc=None, ip=None):
        self._tile_idx += cute.arch.grid_dim()[0]


class Hopper(FlashAttentionForwardSm90):
    """As the package's; launched while the kernel before it still runs (kernels/launch.py has the rules)."""

    def __init__(self, *args, num_threads, **kwargs) -> None:
        super().__init__(*args, num_threads=num_threads, **kwargs)
        values = (self.tile_m + self.num_stages * self.tile_n) * (self.tile_hdim + self.tile_hdimv)
        if not self.mma_pv_is_rs:  # weights by way of shared memory, as the package has it for a head_dim of 65 to 96
            values += self.tile_m * self.tile_n
        self._goes_on = num_threads == GOES_ON and 2 * values + 1024 <= _SHARED

    def _get_shared_storage_cls(self):
        queries = self.sQ_layout
        if self._goes_on:  # a tile's output lies behind its queries
            self.sQ_layout = cute.make_layout(self.tile_m * (self.tile_hdim + self.tile_hdimv))
        try:
            return super()._get_shared_storage_cls()
        finally:
            self.sQ_layout = queries

    def load(self, *args):
        # The loading warps read first, and what they load is all that the others wait for.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        return super().load(*args)

    def mma(self, tiled_mma_qk, tiled_mma_pv, mO, mLSE, sQ, sK, sVt, sP, sO, *rest):
        if self._goes_on:
            sO = cute.make_tensor(sO.iterator + self.tile_m * self.tile_hdim, sO.layout)
        return super().mma(tiled_mma_qk, tiled_mma_pv, mO, mLSE, sQ, sK, sVt, sP, sO, *rest)

    def kernel(self, *args):
        if self._goes_on:
            args = tuple(_Strided if a is SingleTileVarlenScheduler else a for a in args)
        made: Any = super().kernel(*args)
        launch = functools.partial(made.launch, use_pdl=True)
        most = torch.cuda.get_device_properties().multi_processor_count if self._goes_on else None

        def fewer(*, grid, **how):
            return launch(grid=grid if most is None else (cutlass.min(grid[0], most), 1, 1), **how)

        made.launch = fewer
        return made


def use() -> None:
    """From here on the package compiles this class: it asks for its own by name. Safe for whoever else calls it.

    Raises AttributeError or TypeError where what is changed here does not look as expected.
    """
    package = FlashAttentionForwardSm90
    if list(inspect.signature(package.mma).parameters)[:10] != list(inspect.signature(Hopper.mma).parameters)[:10]:
        raise TypeError("its mma() takes other arguments")
    for name in ("load", "kernel", "_get_shared_storage_cls"):
        getattr(package, name)
    interface.FlashAttentionForwardSm90 = Hopper


def undo() -> None:
    interface.FlashAttentionForwardSm90 = FlashAttentionForwardSm90
