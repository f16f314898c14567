"""What is asked of quack's products when a model is loaded, on a machine without a GPU: PyTorch plays their part."""

from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from test_biased import multiplied

from hortus.rose.kernels import biased, preload, quack, twin

TILES = {tile for table in (preload._GATED, preload._ADDED, preload._TURNED) for _, tiles in table for tile in tiles}
TILES |= {*biased._BIASED, *biased._ACTIVATED, *(tile for _, tiles in biased._SUMMED for tile in tiles), biased._MANY}
EPS, HEADS = 1e-6, 3


def gated(x, weight, tile):
    gate, up = (x.float() @ weight.float().t()).view(len(x), -1, 2).unbind(2)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def turned(x, weight, rows, norm, heads, eps, tile):
    y = (x.float() @ weight.float().t()).view(len(x), -1, 128)
    y[:, :heads] = twin.rms_norm(y[:, :heads], torch.ones(128), eps)
    y = (y.flatten(1) * norm).view(len(x), -1, 64, 2)
    c, s = rows.float()[:, None, :128].unflatten(2, (64, 2)).unbind(3)
    a, b = y[:, :heads].clone().unbind(3)
    y[:, :heads] = torch.stack([a * c - b * s, a * s + b * c], 3)
    return y.flatten(1).to(x.dtype)


@pytest.fixture
def depths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """On the CPU; how many values each program walked."""
    seen: list[int] = []

    def of(run: Any) -> Any:
        def noted(x: torch.Tensor, weight: torch.Tensor, *args: Any, **how: Any) -> torch.Tensor:
            tile = next(a for a in args if isinstance(a, preload.Tile))
            seen.append(x.shape[1] // tile.parts)
            got: torch.Tensor = run(x, weight, *args, **how)
            return got

        return noted

    for name in ("randn", "rand", "ones"):
        made = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *size, made=made, device=None, **how: made(*size, **how))
    for name, run in (("product", multiplied), ("gated_product", gated), ("turned_product", turned)):
        monkeypatch.setattr(preload, name, of(run))
    for works in (preload._gates, preload._multiplies, preload._turns, biased._works):
        works.cache_clear()
        monkeypatch.setattr(sys.modules[works.__module__], works.__name__, works.__wrapped__)
    return seen


@pytest.mark.parametrize("tile", sorted(TILES), ids=str)
def test_a_trial_is_right_and_fills_shared_memory_more_than_once(tile: preload.Tile, depths: list[int]) -> None:
    half = torch.bfloat16
    assert preload._multiplies(tile, half, None)
    assert biased._works(half, None, None, tile)
    if tile.parts == 1:
        assert biased._works(half, None, "gelu", tile)
        assert preload._gates(tile, half, None)
        assert preload._turns(tile, half, None, HEADS, EPS)
    stages = 227 * 1024 // ((tile.rows + tile.cols) * preload.DEPTH * 2)
    assert min(depths) > stages * preload.DEPTH


@pytest.mark.parametrize("broken", ["norm", "turn", "values"])
def test_a_trial_sees_what_a_product_leaves_out(
    broken: str, depths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(x, weight, rows, norm, heads, eps, tile):
        if broken == "norm":
            norm = torch.ones_like(norm)
        if broken == "turn":
            rows = quack.angles(torch.ones(len(rows), 64), torch.zeros(len(rows), 64))
        got = turned(x, weight, rows, norm, heads, eps, tile)
        return got if broken != "values" else torch.cat([got[:, : 128 * heads], got[:, 128 * heads :] * 0.9], 1)

    monkeypatch.setattr(preload, "turned_product", wrong)
    assert not preload._turns(preload.Tile(64, 128), torch.bfloat16, None, HEADS, EPS)


@pytest.mark.parametrize(
    ("shape", "dtype", "fits"),
    [
        ((1024, 2048), torch.bfloat16, True), ((1024, 2048), torch.float16, True), ((1024, 2048), torch.float32, False),
        ((1004, 2048), torch.bfloat16, False), ((1024, 2044), torch.bfloat16, False),
    ],
)  # fmt: skip
def test_rows_begin_at_multiples_of_16_bytes(monkeypatch, shape, dtype, fits) -> None:
    monkeypatch.setattr(preload, "_here", lambda index: True)
    weight = SimpleNamespace(is_cuda=True, dtype=dtype, shape=torch.Size(shape), device=SimpleNamespace(index=0))
    assert preload.can_run(weight) == fits
    weight.is_cuda = False
    assert not preload.can_run(weight)


class Base:
    def load_tma(self, pipeline, producer_state, copy_fns, k_tile_cnt, k_tile_start=0): ...

    def kernel(self): ...


class Newer(Base):
    def load_tma(self, pipeline, producer_state, copy_fns): ...


def package(base: type, tables: dict[str, dict[int, type]]) -> dict[str, ModuleType | None]:
    """As much of quack and of its compiler as hopper.py looks at. tables: what epilogues are compiled on."""
    names = ("cutlass", "cutlass.cute", "quack", "quack.epilogue", "quack.epilogue.frontend", "quack.gemm_sm90")
    made: dict[str, Any] = {name: ModuleType(name) for name in names}
    made["cutlass.cute"].jit = lambda f: f
    made["cutlass"].cute = made["cutlass.cute"]
    made["quack.gemm_sm90"].GemmSm90 = base
    made["quack.epilogue"].frontend = made["quack.epilogue.frontend"]
    vars(made["quack.epilogue.frontend"]).update(tables)
    return made


KNOWN = package(Base, {"_SM_BASE": {9: Base}})


@pytest.mark.parametrize(
    ("modules", "why"),
    [
        (KNOWN, None),
        (KNOWN | {"cutlass": None}, "ModuleNotFoundError: "),
        (KNOWN | {"quack.gemm_sm90": None}, "ModuleNotFoundError: "),
        (package(Base, {}), "AttributeError: .*_SM_BASE"),
        (package(Base, {"_SM_BASE": {10: Base}}), "KeyError: 9"),
        (package(Base, {"_SM_BASE": {9: Newer}}), "TypeError: its Hopper kernel is another"),
        (
            package(Newer, {"_SM_BASE": {9: Newer}}),
            r"TypeError: its load_tma\(\) takes self, pipeline, producer_state, copy_fns$",
        ),
    ],
)
def test_where_the_package_is_another_its_products_are_left_out(monkeypatch, caplog, modules, why) -> None:
    monkeypatch.setattr(quack, "here", lambda index: True)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "hortus.rose.kernels.hopper", raising=False)
    preload._here.cache_clear()
    try:
        assert [preload._here(0) for _ in range(2)] == [why is None] * 2
    finally:
        preload._here.cache_clear()
        sys.modules.pop("hortus.rose.kernels.hopper", None)
    told = [r.getMessage() for r in caplog.records]
    assert len(told) == (why is not None)
    assert why is None or re.search("small steps: quack's products are not used.*" + why, told[0])
