"""The pure parts of picking an attention backend: the table, what may run, and the messages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hortus.config import RoseConfig
from hortus.errors import StartError
from hortus.rose.attention import Heads, fa4, flashinfer, varlen
from hortus.rose.attention.choose import Gpu, choose
from hortus.rose.attention.measured import TABLE, Row
from hortus.rose.attention.pick import Picked, allowed, refusals
from hortus.rose.attention.relative import alibi
from hortus.rose.attention.twin import TwinAttention
from hortus.rose.engine import _described, _kit

H200 = Gpu("NVIDIA H200", (9, 0))
QWEN = Heads(heads=16, kv_heads=8, head_dim=128)
OTHERS = ("varlen", "flashinfer_fa3", "flashinfer_fa2")
ALL = ("fa4", *OTHERS)


@pytest.mark.parametrize(
    ("tokens", "longest", "best"),
    [(128, 128, "fa4"), (512, 512, "fa4"), (4096, 4096, "fa4"), (51200, 512, "fa4"), (32768, 32768, "fa4")],
)
def test_the_table_decides(tokens, longest, best):
    choice = choose(TABLE, H200, QWEN, tokens, longest, ALL)
    assert choice.name == best
    assert "NVIDIA H200" in choice.reason
    assert f"{tokens} tokens" in choice.reason


def test_only_what_is_available_is_chosen():
    assert choose(TABLE, H200, QWEN, 51200, 512, OTHERS).name == "flashinfer_fa3"
    assert choose(TABLE, H200, QWEN, 51200, 512, ["varlen"]).name == "varlen"
    assert choose(TABLE, H200, QWEN, 51200, 512, ["twin"]).reason.startswith("twin: not measured")


def test_nearest_row_by_gpu_then_heads_then_size():
    table = [
        Row("A", 16, 8, 128, 512, 512, {"fa4": 1, "varlen": 2}),
        Row("A", 16, 8, 64, 512, 512, {"fa4": 2, "varlen": 1}),
        Row("A", 16, 8, 128, 65536, 512, {"fa4": 9, "varlen": 3}),
        Row("B", 16, 8, 128, 512, 512, {"fa4": 5, "varlen": 4}),
    ]
    a, b, new = Gpu("A", (9, 0)), Gpu("B", (9, 0)), Gpu("C", (9, 0))
    assert choose(table, a, QWEN, 700, 300, ALL).name == "fa4"
    assert choose(table, a, QWEN, 30000, 512, ALL).name == "varlen"
    assert choose(table, a, Heads(heads=12, kv_heads=12, head_dim=64), 700, 300, ALL).name == "varlen"
    assert choose(table, b, QWEN, 65536, 512, ALL).name == "varlen"
    assert "on A" in choose(table, new, QWEN, 700, 300, ALL).reason


@pytest.mark.parametrize("longest", [16, 64, 128, 512, 8192])
@pytest.mark.parametrize("tokens", [8192, 16384])
@pytest.mark.parametrize("shape", [(12, 12, 64), (12, 12, 80), (32, 8, 64), (14, 2, 64), (16, 8, 128), (28, 4, 128)])
def test_large_steps_go_by_large_rows(shape, tokens, longest):
    """A row of 1,024 tokens is as near to 8,192 of short texts as one of 4,096, and tells of a GPU that is half empty."""
    heads = Heads(heads=shape[0], kv_heads=shape[1], head_dim=shape[2])
    choice = choose(TABLE, H200, heads, tokens, longest, ALL)
    assert choice.name == "fa4", choice.reason


def test_refusals_name_the_reason():
    turing, ampere = Gpu("Tesla T4", (7, 5)), Gpu("NVIDIA A100", (8, 0))
    odd = Heads(heads=4, kv_heads=4, head_dim=36)
    assert "Tesla T4 has 7.5" in (varlen.refuse(QWEN, turing, torch.float16) or "")
    assert "not torch.float32" in (varlen.refuse(QWEN, H200, torch.float32) or "")
    assert "not 36" in (varlen.refuse(odd, H200, torch.bfloat16) or "")
    assert varlen.refuse(QWEN, ampere, torch.bfloat16) is None
    assert "Hopper or Blackwell" in (fa4.refuse(QWEN, ampere, torch.bfloat16) or "")
    assert "needs Hopper" in (flashinfer.refuse("fa3", QWEN, ampere, torch.bfloat16) or "")
    window = Heads(heads=4, kv_heads=4, head_dim=64, window=8)
    assert "both sides" in (flashinfer.refuse("fa2", window, ampere, torch.bfloat16) or "")


def test_missing_packages_are_refused_with_the_extra_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "hortus[gpu]" in (fa4.refuse(QWEN, H200, torch.bfloat16) or "")
    assert "hortus[gpu]" in (flashinfer.refuse("fa2", QWEN, H200, torch.bfloat16) or "")
    assert refusals(QWEN, H200, torch.bfloat16)["varlen"] is None


def test_what_may_run():
    every = dict.fromkeys((*ALL, "twin"))
    assert allowed("auto", every, 4096) == (["fa4"], [*ALL])
    assert allowed("varlen", every, 4096) == (["varlen"], ["varlen"])
    assert allowed("flashinfer_fa3", every, 0) == (["flashinfer_fa3"], ["flashinfer_fa3"])
    none = {**dict.fromkeys(ALL, "needs bfloat16"), "twin": None}
    assert allowed("auto", none, 0) == (["twin"], ["twin"])
    with pytest.raises(StartError, match=r"needs bfloat16.*--cuda-graphs false"):
        allowed("auto", none, 4096)
    with pytest.raises(StartError, match=r"--attention flashinfer_fa2 works on the host.*--graph-max-tokens"):
        allowed("flashinfer_fa2", every, 4096)
    with pytest.raises(StartError, match="--attention twin"):
        allowed("twin", every, 4096)
    with pytest.raises(StartError, match=r"--attention fa4 cannot run here: it needs bfloat16"):
        allowed("fa4", none, 0)


class Noted:
    """A backend that notes its calls."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self._notes = name, notes

    def plan(self, cu_seqlens_cpu, cu_seqlens, max_seqlen):
        self._notes.append(f"{self.name} {cu_seqlens_cpu[-1]}")

    def run(self, q, k, v):
        return q


def test_picked_takes_the_tables_choice_a_step():
    notes: list[str] = []
    picked = Picked(
        gpu=H200,
        heads=QWEN,
        in_graph=["fa4"],
        eager=list(OTHERS),
        graph_max_tokens=4096,
        make=lambda name: Noted(name, notes),
    )
    for lengths in ([100], [512] * 8, [512] * 100, [20000]):
        cu = np.cumsum([0, *lengths]).astype(np.int32)
        picked.plan(cu, torch.from_numpy(cu), max(lengths))
        q = torch.zeros(int(cu[-1]), 1, 1)
        assert picked.run(q, q, q) is q
    assert notes == ["fa4 100", "fa4 4096", "flashinfer_fa3 51200", "flashinfer_fa3 20000"]
    assert not picked.longest_matters
    assert "H200" in picked.describe()
    with pytest.raises(AssertionError, match="every row belongs to a sequence"):
        picked.run(q[1:], q, q)


def test_a_backend_that_fails_where_no_start_has_tried_it_gives_way(caplog):
    def make(name: str) -> Noted:
        if name.startswith("flashinfer"):
            raise ImportError("no compiler")
        return Noted(name, notes)

    notes: list[str] = []
    cu = np.arange(0, 51201, 512, dtype=np.int32)
    picked = Picked(gpu=H200, heads=QWEN, in_graph=["fa4"], eager=list(OTHERS), graph_max_tokens=4096, make=make)
    for _ in range(2):
        picked.plan(cu, torch.from_numpy(cu), 512)
    assert notes == ["varlen 51200"] * 2
    assert caplog.text.count("flashinfer_fa3 is not used any more: ImportError: no compiler") == 1
    alone = Picked(gpu=H200, heads=QWEN, in_graph=["fa4"], eager=["flashinfer_fa3"], graph_max_tokens=4096, make=make)
    with pytest.raises(ImportError, match="no compiler"):
        alone.plan(cu, torch.from_numpy(cu), 512)


def test_a_full_memory_costs_no_backend():
    def make(name: str) -> Noted:
        if full.pop():
            raise torch.OutOfMemoryError("full")
        return Noted(name, notes)

    notes: list[str] = []
    full = [False, True]
    cu = np.arange(0, 51201, 512, dtype=np.int32)
    picked = Picked(gpu=H200, heads=QWEN, in_graph=["fa4"], eager=list(OTHERS), graph_max_tokens=4096, make=make)
    with pytest.raises(torch.OutOfMemoryError):
        picked.plan(cu, torch.from_numpy(cu), 512)
    picked.plan(cu, torch.from_numpy(cu), 512)
    assert notes == ["flashinfer_fa3 51200"]


def test_a_bias_on_scores_is_the_twins_on_a_gpu_too():
    device, heads = torch.device("cuda"), Heads(heads=2, kv_heads=2, head_dim=8)
    bias = alibi(2, 300, device=torch.device("cpu"), dtype=torch.float32)
    for wanted in ("auto", "twin"):
        kit, made = _kit(RoseConfig(attention=wanted), device, torch.bfloat16)
        assert isinstance(kit.attention(heads, bias), TwinAttention)
        assert len(made) == 1
        assert "no CUDA graphs" in _described(made, device)
    kit, _ = _kit(RoseConfig(attention="fa4"), device, torch.bfloat16)
    with pytest.raises(StartError, match=r"--attention fa4 cannot run this model .*adds a bias.*use auto or twin"):
        kit.attention(heads, bias)
