"""Every attention backend that can run here, against the twin in float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hortus.rose.attention import Attention, Heads, fa4, flashinfer, varlen
from hortus.rose.attention.choose import Gpu
from hortus.rose.attention.pick import CAPTURABLE, open_attention, refusals
from hortus.rose.attention.twin import TwinAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16
BACKENDS = ["fa4", "varlen", "flashinfer_fa3", "flashinfer_fa2"]
SHAPES = [
    Heads(heads=16, kv_heads=8, head_dim=128),
    Heads(heads=16, kv_heads=8, head_dim=128, causal=True),
    Heads(heads=32, kv_heads=8, head_dim=128),
    Heads(heads=12, kv_heads=12, head_dim=64),
    Heads(heads=12, kv_heads=12, head_dim=64, window=64),
    Heads(heads=14, kv_heads=2, head_dim=64, causal=True),  # 7 queries a key, which no tile is a multiple of
    Heads(heads=8, kv_heads=8, head_dim=96),
]
MIXES = {
    "one token": [1],
    "singles": [1] * 9,
    "ragged": [7, 1, 130, 64, 65, 300, 2],
    "empty slots, padding last": [5, 60, 0, 0, 0, 63],
    "one long": [4096],
    "many": list(np.random.default_rng(1).integers(1, 512, 300)),
    "a hundred": [128] * 99 + [0, 0, 127],
    "long, then short": [2000, 1, 700, 0] + [48] * 60,
    "many short": [5] * 300 + [0, 1, 3],
}


def make(name: str, heads: Heads) -> Attention:
    gpu = Gpu(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
    if (why := refusals(heads, gpu, BF16)[name]) is not None:
        pytest.skip(f"{name} {why}")
    if name == "fa4":
        return fa4.Fa4Attention(heads)
    if name == "varlen":
        return varlen.VarlenAttention(heads)
    return flashinfer.FlashInferAttention(name.removeprefix("flashinfer_"), heads, torch.device("cuda"), BF16)


def qkv_of(heads: Heads, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Strided views of one fused matrix, as a model gives them."""
    n = heads.heads + 2 * heads.kv_heads
    qkv = torch.randn(tokens, n * heads.head_dim, device="cuda", dtype=BF16)
    return torch.split(qkv.view(tokens, n, heads.head_dim), [heads.heads, heads.kv_heads, heads.kv_heads], 1)


def cu_of(lengths: list[int]) -> np.ndarray:
    return np.cumsum([0, *lengths]).astype(np.int32)


def truth(heads: Heads, lengths: list[int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    twin = TwinAttention(heads)
    twin.plan(cu_of(lengths), torch.from_numpy(cu_of(lengths)).cuda(), max(lengths))
    return twin.run(q.float(), k.float(), v.float())


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.float() - exact).norm() / exact.norm())


@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_agrees_with_the_twin(name, heads):
    if name.startswith("flashinfer") and heads.head_dim == 64 and heads.causal:
        pytest.skip("not among the kernels built ahead")
    torch.manual_seed(0)
    backend = make(name, heads)
    for what, lengths in MIXES.items():
        cu = cu_of(lengths)
        q, k, v = qkv_of(heads, int(cu[-1]))
        # Memory the result is likely to be given: a row that is not written shows as NaN.
        torch.full((2 * q.numel(),), float("nan"), dtype=BF16, device="cuda")
        backend.plan(cu, torch.from_numpy(cu).cuda(), max(lengths))
        out = backend.run(q, k, v)
        assert out.shape == q.shape
        assert out.is_contiguous()
        gap = error(out, truth(heads, lengths, q, k, v))
        assert gap < 6e-3, f"{name}, {what}: relative error {gap:.1e}"


@pytest.mark.parametrize("heads", [h for h in SHAPES if h.window is None], ids=str)
def test_programs_that_go_on_give_the_same_bits(heads, monkeypatch):
    """As one program for each tile. A tile's output then lies next to the queries of the one after."""
    torch.manual_seed(0)
    backend, rng = make("fa4", heads), np.random.default_rng(5)
    for tokens in (900, 4096, 16384):
        for _ in range(4):
            cuts = np.sort(rng.integers(0, tokens, int(rng.integers(1, 250))))
            cu = np.concatenate([[0], cuts, [tokens]]).astype(np.int32)
            q, k, v = qkv_of(heads, tokens)
            backend.plan(cu, torch.from_numpy(cu).cuda(), tokens)
            found = []
            for many in (False, True):
                monkeypatch.setattr(fa4, "goes_on", lambda *size, causal, many=many: many)
                torch.full((2 * q.numel(),), float("nan"), dtype=BF16, device="cuda")
                found.append(backend.run(q, k, v).clone())
            assert torch.equal(*found)


@pytest.mark.parametrize("name", BACKENDS)
def test_neighbours_do_not_matter(name):
    """A sequence's rows are the same bits whatever follows it: large values in the next rows, or another sequence."""
    heads = SHAPES[0]
    backend = make(name, heads)
    q, k, v = qkv_of(heads, 256)
    found = []
    for scale in (1, 1000):
        for t in (q, k, v):
            t[70:].mul_(scale)
        cu = cu_of([70, 100, 86])
        backend.plan(cu, torch.from_numpy(cu).cuda(), 100)
        found.append(backend.run(q, k, v)[:70].clone())
    assert torch.equal(*found)


@pytest.mark.parametrize("name", CAPTURABLE)
def test_capture_and_replay_with_other_lengths(name):
    heads = SHAPES[0]
    backend = make(name, heads)
    tokens, first = 512, [512, 0, 0, 0, 0, 0, 0, 0, 0]
    q, k, v = qkv_of(heads, tokens)
    cu = torch.from_numpy(cu_of(first)).cuda()
    backend.plan(cu_of(first), cu, tokens)
    backend.run(q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.run(q, k, v)
    for lengths in (
        first,
        [64] * 7 + [1, 63],
        [1] * 8 + [504],
        [0, 200, 0, 311, 0, 0, 0, 0, 1],
        [300] + [0] * 7 + [212],
    ):
        for t, new in zip((q, k, v), qkv_of(heads, tokens), strict=True):
            t.copy_(new)
        cu.copy_(torch.from_numpy(cu_of(lengths)))
        out.fill_(float("nan"))
        graph.replay()
        gap = error(out, truth(heads, lengths, q, k, v))
        assert gap < 6e-3, f"{lengths}: relative error {gap:.1e}"


def test_plans_in_flight_do_not_mix():
    """Many batches enqueued without waiting: each gets its own plan."""
    heads = SHAPES[0]
    backend = open_attention("auto", heads, device=torch.device("cuda"), dtype=BF16, graph_max_tokens=0)
    rng = np.random.default_rng(2)
    batches = [list(rng.integers(1, 600, int(rng.integers(20, 60)))) for _ in range(12)]
    inputs = [qkv_of(heads, sum(b)) for b in batches]
    cus = [torch.from_numpy(cu_of(b)).cuda() for b in batches]
    outs = []
    for lengths, cu, (q, k, v) in zip(batches, cus, inputs, strict=True):
        backend.plan(cu_of(lengths), cu, max(lengths))
        outs.append([backend.run(q, k, v) for _ in range(8)][-1])
    for lengths, (q, k, v), out in zip(batches, inputs, outs, strict=True):
        assert error(out, truth(heads, lengths, q, k, v)) < 6e-3


def test_open_attention_tells_what_it_chose(caplog):
    caplog.set_level("INFO")
    picked = open_attention("auto", SHAPES[0], device=torch.device("cuda"), dtype=BF16, graph_max_tokens=4096)
    assert "attention: " in caplog.text
    assert picked.choice(128, 128).name in CAPTURABLE
