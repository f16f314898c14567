"""quack's product for Hopper, launched early and with its weights in shared memory before its input is there: a derived class.

The package's loading warp waits for the kernel before it, then fetches weights and input side by side. Here it first fills
all its stages with weights, which no kernel writes, and waits only then (launch.py has the rules); see preload.py for why.
The package's other kernels stay as they are: only what is compiled with AHEAD is changed.

Imported only where the package is. Does not know models.
"""

# Traced by the package's compiler, not run: the values have no Python types.
# ruff: noqa: ANN001, ANN002, ANN003, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-not-found, import-untyped, misc"

from __future__ import annotations

import functools
import hashlib
import inspect
from pathlib import Path

import cutlass
import cutlass.cute as cute
from quack.epilogue import frontend
from quack.gemm_sm90 import GemmSm90

AHEAD = (("ahead", hashlib.sha256(Path(__file__).read_bytes()).hexdigest()),)
"""Attributes to compile with. The package keeps kernels on disk, by these among others, and would not see this file change."""


class Ahead(GemmSm90):
    """As the package's; with `ahead`, for one tile a program and nothing but an input and a weight to read."""

    ahead = ""

    def load_tma(self, pipeline, producer_state, copies, k_tile_cnt, **where):
        load = self._weights_first if self.ahead else super().load_tma
        return load(pipeline, producer_state, copies, k_tile_cnt, **where)

    @cute.jit
    def _weights_first(self, pipeline, producer_state, copies, k_tile_cnt, k_tile_start=0):
        copy_input, copy_weight = copies[0], copies[1]
        cute.arch.griddepcontrol_launch_dependents()
        first = cutlass.min(k_tile_cnt, self.ab_stage)
        input_state = producer_state.clone()
        for k_tile in cutlass.range(first, unroll=1):
            pipeline.producer_acquire(producer_state)  # announces the bytes of both
            full = pipeline.producer_get_barrier(producer_state)
            copy_weight(k_tile_start + k_tile, producer_state.index, tma_bar_ptr=full)
            producer_state.advance()
        # All that the other warps wait for, and write after it, comes through this one.
        cute.arch.griddepcontrol_wait()
        for k_tile in cutlass.range(first, unroll=1):
            full = pipeline.producer_get_barrier(input_state)
            copy_input(k_tile_start + k_tile, input_state.index, tma_bar_ptr=full)
            input_state.advance()
        for k_tile in cutlass.range(first, k_tile_cnt, unroll=1):
            pipeline.producer_acquire(producer_state)
            full = pipeline.producer_get_barrier(producer_state)
            copy_input(k_tile_start + k_tile, producer_state.index, tma_bar_ptr=full)
            copy_weight(k_tile_start + k_tile, producer_state.index, tma_bar_ptr=full)
            producer_state.advance()
        return producer_state

    def kernel(self, *args):
        if self.ahead:
            self.use_pdl = False  # the package's own wait, before any load, and its late word that the next may start
        made = super().kernel(*args)
        if self.ahead:
            made.launch = functools.partial(_launch, made.launch)
        return made


def _launch(launch, *, use_pdl, **how):
    return launch(use_pdl=True, **how)


def use() -> None:
    """From here on the package's epilogues are compiled on this class. Safe for whoever else uses them: without AHEAD it is as
    the package's own.

    Raises AttributeError, KeyError or TypeError where what is changed here does not look as expected.
    """
    want = list(inspect.signature(GemmSm90.load_tma).parameters)
    if want != ["self", "pipeline", "producer_state", "copy_fns", "k_tile_cnt", "k_tile_start"]:
        raise TypeError(f"its load_tma() takes {', '.join(want)}")
    if frontend._SM_BASE[9] not in (GemmSm90, Ahead):
        raise TypeError("its Hopper kernel is another")
    frontend._SM_BASE[9] = Ahead
