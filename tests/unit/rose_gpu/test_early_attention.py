"""Our form of FlashAttention 4's Hopper kernel: its package, played by a stand-in, keeps working whatever it looks like."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hortus.rose.attention import Heads, fa4
from hortus.rose.attention.choose import Gpu

MULTIPROCESSORS = 10


class Scheduler:
    """Of one tile a program, until it is told otherwise."""

    def __init__(self, params: Any, tile: int, split: int, *, loc: Any = None, ip: Any = None) -> None:
        self._tile_idx = tile


class Kernel:
    """Tells what is done to it, in order."""

    def __init__(
        self, told: list[Any], *, num_threads: int = 384, tile: tuple[int, int] = (128, 128), dim: int = 128,
        mma_pv_is_rs: bool = True,
    ) -> None:  # fmt: skip
        self.told, self.num_stages, self.mma_pv_is_rs = told, 2, mma_pv_is_rs
        (self.tile_m, self.tile_n), self.tile_hdim, self.tile_hdimv = tile, dim, dim
        self.sQ_layout = "queries"

    def _get_shared_storage_cls(self) -> Any:
        return self.sQ_layout

    def load(self, *args: Any) -> str:
        self.told.append(("load", args))
        return "loaded"

    def mma(self, tiled_mma_qk, tiled_mma_pv, mO, mLSE, sQ, sK, sVt, sP, sO, *rest) -> Any:
        return sO

    def kernel(self, *args: Any) -> Any:
        return SimpleNamespace(launch=lambda **how: self.told.append(("launch", args, how)))


@pytest.fixture
def package(monkeypatch):
    """(the module that the package looks its kernel up in, what was told)."""
    told: list[Any] = []
    parts: dict[str, dict[str, Any]] = {
        "flash_attn": {},
        "flash_attn.cute": {},
        "flash_attn.cute.interface": {"FlashAttentionForwardSm90": Kernel},
        "flash_attn.cute.flash_fwd_sm90": {"FlashAttentionForwardSm90": Kernel},
        "flash_attn.cute.tile_scheduler": {"SingleTileVarlenScheduler": Scheduler},
        "cutlass": {"min": min},
        "cutlass.cute": {
            "arch": SimpleNamespace(
                griddepcontrol_wait=lambda: told.append("wait"),
                griddepcontrol_launch_dependents=lambda: told.append("go on"),
                block_idx=lambda: (3, 0, 0),
                grid_dim=lambda: (MULTIPROCESSORS, 1, 1),
            ),
            "make_layout": lambda values: values,
            "make_tensor": lambda iterator, layout: (iterator, layout),
        },
    }
    for name, what in parts.items():
        module = ModuleType(name)
        vars(module).update(what)
        monkeypatch.setitem(sys.modules, name, module)
        owner, _, part = name.rpartition(".")
        if owner:
            setattr(sys.modules[owner], part, module)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda: SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    )
    monkeypatch.delitem(sys.modules, "hortus.rose.attention.hopper", raising=False)
    fa4._changed.cache_clear()
    fa4._failed.clear()
    yield sys.modules["flash_attn.cute.interface"], told
    fa4._failed.clear()
    fa4._changed.cache_clear()
    sys.modules.pop("hortus.rose.attention.hopper", None)


def test_it_waits_before_it_reads_and_is_launched_early(package):
    interface, told = package
    assert fa4._changed()
    assert fa4._changed()
    kernel = interface.FlashAttentionForwardSm90(told, num_threads=fa4.ONE_TILE)
    assert isinstance(kernel, Kernel)
    assert kernel.load(1, 2) == "loaded"
    assert told == ["go on", "wait", ("load", (1, 2))]
    kernel.kernel(3, Scheduler).launch(grid=(400, 1, 1), block=5)
    assert told[-1] == ("launch", (3, Scheduler), {"grid": (400, 1, 1), "block": 5, "use_pdl": True})
    assert kernel._get_shared_storage_cls() == "queries"
    assert kernel.mma(*range(10)) == 8
    assert type(kernel).__mro__[1] is Kernel, "derived once"


@pytest.mark.parametrize(("tiles", "programs"), [(400, MULTIPROCESSORS), (7, 7)])
def test_its_programs_go_on(package, tiles, programs):
    interface, told = package
    assert fa4._changed()
    kernel = interface.FlashAttentionForwardSm90(told, num_threads=fa4.GOES_ON)
    kernel.kernel(3, Scheduler).launch(grid=(tiles, 1, 1))
    (_, (_, scheduler), how) = told[-1]
    assert how["grid"] == (programs, 1, 1)
    walk = scheduler.create("params")
    walk.advance_to_next_work()
    assert walk._tile_idx == 3 + MULTIPROCESSORS
    # A tile's output has a place of its own, behind its queries.
    assert kernel._get_shared_storage_cls() == 128 * 256
    assert kernel.sQ_layout == "queries"
    assert kernel.mma(*range(8), SimpleNamespace(iterator=1000, layout="output")) == (1000 + 128 * 128, "output")


@pytest.mark.parametrize(
    ("tile", "dim", "in_registers", "room"),
    [
        ((128, 128), 128, True, True),
        ((128, 176), 128, True, False),
        ((192, 128), 64, True, True),
        ((192, 128), 96, False, True),
        ((192, 144), 96, False, False),
        ((128, 80), 256, True, False),
    ],
)
def test_they_do_not_where_there_is_no_room_for_both(package, tile, dim, in_registers, room):
    """Queries, output, two keys and values, and weights that do not stay in registers: 227 kB. Tiles are the package's own."""
    interface, told = package
    assert fa4._changed()
    kernel = interface.FlashAttentionForwardSm90(
        told, num_threads=fa4.GOES_ON, tile=tile, dim=dim, mma_pv_is_rs=in_registers
    )
    kernel.kernel(3, Scheduler).launch(grid=(400, 1, 1))
    assert told[-1][2]["grid"] == ((MULTIPROCESSORS if room else 400), 1, 1)


def _other(self, mO, sQ, sO):
    pass


@pytest.mark.parametrize("name", ["load", "kernel", "mma", "_get_shared_storage_cls"])
def test_a_package_that_looks_otherwise_is_left_alone(package, name, caplog, monkeypatch):
    interface, _ = package
    if name == "mma":
        monkeypatch.setattr(Kernel, name, _other)
    else:
        monkeypatch.delattr(Kernel, name)
    with caplog.at_level("INFO"):
        assert not fa4._changed()
    assert interface.FlashAttentionForwardSm90 is Kernel
    assert "neither launched early" in caplog.text


@pytest.mark.parametrize("fault", ["compiling ours", "memory", "capture", "all"])
def test_a_kernel_that_fails_only_when_called_gives_way_to_the_packages(package, monkeypatch, caplog, fault):
    interface, _ = package
    asked: list[int] = []

    def forward(q: Any, k: Any, v: Any, *, num_threads: int, **options: Any) -> tuple[str]:
        asked.append(num_threads)
        if fault == "memory":
            raise torch.OutOfMemoryError("full")
        if fault == "all" or interface.FlashAttentionForwardSm90 is not Kernel:
            raise ValueError("mma() has no sO")
        return ("attended",)

    interface._flash_attn_fwd = forward
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fault == "capture")
    first, second = (fa4.Fa4Attention(Heads(heads=16, kv_heads=8, head_dim=128)) for _ in range(2))
    cu, q = torch.tensor([0, 4096]), torch.zeros(4096, 1)
    for attention in (first, second):
        attention.plan(cu.int().numpy(), cu, 4096)
    if fault == "compiling ours":
        assert first.run(q, q, q) == second.run(q, q, q) == "attended"
        assert asked == [fa4.GOES_ON, fa4.ONE_TILE, fa4.ONE_TILE]
        assert caplog.text.count("ValueError: mma() has no sO") == 1
    else:
        with pytest.raises(torch.OutOfMemoryError if fault == "memory" else ValueError):
            first.run(q, q, q)
        assert asked == [fa4.GOES_ON] + [fa4.ONE_TILE] * (fault == "all")
        assert (interface.FlashAttentionForwardSm90 is Kernel) == (fault == "all")


def test_a_package_of_another_version_is_refused_and_not_tried(package, monkeypatch):
    interface, _ = package
    heads, gpu = Heads(heads=16, kv_heads=8, head_dim=128), Gpu("NVIDIA H200", (9, 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)

    def refused() -> str | None:
        return fa4.refuse(heads, gpu, torch.bfloat16)

    assert "_flash_attn_fwd" in (refused() or ""), "it has no such function"

    def older(
        q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, softmax_scale=None, causal=False,
        window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        pass

    interface._flash_attn_fwd = older
    assert "tile_mn" in (refused() or ""), "it leaves no choice of tiles"
    interface._flash_attn_fwd = lambda q, k, v, tile_mn=None, num_threads=384, **options: None
    assert refused() is None

    def broken(name: str) -> None:
        raise ImportError(f"{name}: undefined symbol")

    monkeypatch.setattr("importlib.util.find_spec", broken)
    assert "undefined symbol" in (refused() or ""), "FlashAttention 2 of another PyTorch"
