"""FlashAttention 4's kernel, taught to start early: its package, played by a stand-in, keeps working whatever it looks like."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hortus.rose.attention import Heads, fa4
from hortus.rose.attention.choose import Gpu


class Kernel:
    """Tells what is done to it, in order."""

    def __init__(self, told: list[Any]) -> None:
        self.told = told

    def load(self, *args: Any) -> str:
        self.told.append(("load", args))
        return "loaded"

    def kernel(self, *args: Any) -> Any:
        return SimpleNamespace(launch=lambda **how: self.told.append(("launch", args, how)))


@pytest.fixture
def package(monkeypatch):
    """(the module that the package looks its kernel up in, what was told)."""
    told: list[Any] = []
    interface: Any = ModuleType("flash_attn.cute.interface")
    interface.FlashAttentionForwardSm90 = Kernel
    cute: Any = ModuleType("cutlass.cute")
    cute.arch = SimpleNamespace(
        griddepcontrol_wait=lambda: told.append("wait"),
        griddepcontrol_launch_dependents=lambda: told.append("go on"),
    )
    for module in (ModuleType("flash_attn"), ModuleType("flash_attn.cute"), interface, ModuleType("cutlass"), cute):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    fa4._launch_early.cache_clear()
    yield interface, told
    fa4._launch_early.cache_clear()


def test_it_waits_before_it_reads_and_is_launched_early(package):
    interface, told = package
    fa4._launch_early()
    fa4._launch_early()
    kernel = interface.FlashAttentionForwardSm90(told)
    assert isinstance(kernel, Kernel)
    assert kernel.load(1, 2) == "loaded"
    assert told == ["go on", "wait", ("load", (1, 2))]
    kernel.kernel(3).launch(grid=4)
    assert told[-1] == ("launch", (3,), {"grid": 4, "use_pdl": True})
    assert type(kernel).__mro__[1] is Kernel, "wrapped once"


@pytest.mark.parametrize("missing", ["load", "kernel"])
def test_a_package_that_looks_otherwise_is_left_alone(package, missing, caplog, monkeypatch):
    interface, _ = package
    monkeypatch.delattr(Kernel, missing)
    with caplog.at_level("INFO"):
        fa4._launch_early()
    assert interface.FlashAttentionForwardSm90 is Kernel
    assert "not launched early" in caplog.text


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
    interface._flash_attn_fwd = lambda q, k, v, tile_mn=None, **options: None
    assert refused() is None

    def broken(name: str) -> None:
        raise ImportError(f"{name}: undefined symbol")

    monkeypatch.setattr("importlib.util.find_spec", broken)
    assert "undefined symbol" in (refused() or ""), "FlashAttention 2 of another PyTorch"
