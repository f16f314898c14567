"""The plain PyTorch bodies against formulas written out token by token."""

from __future__ import annotations

import itertools
import math

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402

from hortus.rose.attention import Heads, disentangled, relative  # noqa: E402
from hortus.rose.attention.twin import TwinAttention, runs  # noqa: E402
from hortus.rose.kernels import linear, twin  # noqa: E402

LENGTHS = [3, 3, 1, 7, 7, 7, 2]


def cu_of(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def test_runs() -> None:
    assert runs(cu_of(LENGTHS).tolist()) == [(0, 2, 3), (6, 1, 1), (7, 3, 7), (28, 1, 2)]
    assert runs([0, 2, 2, 4, 4]) == [(0, 2, 2)], "empty sequences are no one's"
    assert runs([0]) == []


@pytest.mark.parametrize("lengths", [LENGTHS, [4, 4], [5], [1, 1, 1]])
@pytest.mark.parametrize(
    ("kv", "causal", "window"), [(4, False, None), (2, False, None), (4, True, None), (2, True, 2), (4, False, 1)]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_attention(lengths: list[int], kv: int, causal: bool, window: int | None, transposed: bool) -> None:
    heads = Heads(heads=4, kv_heads=kv, head_dim=8, causal=causal, window=window)
    torch.manual_seed(0)
    cu = cu_of(lengths)
    qkv = torch.randn(int(cu[-1]), 4 + 2 * kv, 8)
    if transposed:
        qkv = qkv.flatten(1).t().contiguous().t().view(qkv.shape)
    q, k, v = qkv.split([4, kv, kv], 1)
    attention = TwinAttention(heads)
    attention.plan(cu, torch.from_numpy(cu), max(lengths))
    got = attention.run(q, k, v)
    for a, b in itertools.pairwise(cu.tolist()):
        for h in range(4):
            for i in range(a, b):
                see = [
                    j for j in range(a, b)
                    if (not causal or j <= i) and (window is None or abs(i - j) <= window)
                ]  # fmt: skip
                score = torch.stack([q[i, h] @ k[j, h * kv // 4] for j in see]) / math.sqrt(8)
                want = score.softmax(0) @ torch.stack([v[j, h * kv // 4] for j in see])
                torch.testing.assert_close(got[i, h], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["learned", "alibi", "disentangled"])
def test_a_bias_on_scores(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every score by its own distance; and the same when a long sequence takes its queries in parts."""
    torch.manual_seed(0)
    lengths, d = [5, 5, 1, 12, 9], 8
    cu = cu_of(lengths)
    q, k, v = torch.randn(int(cu[-1]), 3, 3, d).unbind(1)
    table, ids = torch.randn(32, 3), relative.buckets(torch.arange(-15, 16), 32)  # key minus query
    rows, at = torch.randn(2, 3, 8, d), disentangled.buckets(16, 4, 12, torch.device("cpu"))  # query minus key

    def wanted(h: int, i: int, j: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if kind == "learned":
            return table[ids[j - i + 15], h]
        if kind == "alibi":
            return torch.tensor(-relative.slopes(3)[h] * abs(j - i))
        return 0.25 * (x @ rows[0, h, at[i - j + 15]] + y @ rows[1, h, at[i - j + 15]])

    bias = {
        "learned": lambda: relative.learned(table, 16),
        "alibi": lambda: relative.alibi(3, 16, device=torch.device("cpu"), dtype=torch.float32),
        "disentangled": lambda: disentangled.DisentangledBias(rows[0], rows[1], at, 0.25),
    }[kind]()
    attention = TwinAttention(Heads(heads=3, kv_heads=3, head_dim=d, scaled=0.25), bias)
    for most in (1 << 24, 3 * 12 * 5, 1):
        monkeypatch.setattr("hortus.rose.attention.twin.MOST_BIASES", most)
        attention.plan(cu, torch.from_numpy(cu), 12)
        got = attention.run(q, k, v)
        for a, b in itertools.pairwise(cu.tolist()):
            for h, i in itertools.product(range(3), range(a, b)):
                scores = [q[i, h] @ k[j, h] * 0.25 + wanted(h, i, j, q[i, h], k[j, h]) for j in range(a, b)]
                torch.testing.assert_close(got[i, h], torch.stack(scores).softmax(0) @ v[a:b, h], rtol=1e-5, atol=1e-6)


def test_a_square_bias_is_the_same_in_order() -> None:
    bias = relative.alibi(2, 9, device=torch.device("cpu"), dtype=torch.float32)
    q = torch.zeros(1, 2, 5, 4)
    assert torch.equal(bias(q, q, 0).flip(3)[0], bias.square(5))
    assert bias.square(5)[1, 0].tolist() == [-relative.slopes(2)[1] * n for n in range(5)]


def test_slopes_are_the_authors() -> None:
    assert relative.slopes(8) == [2.0**-n for n in range(1, 9)]
    assert relative.slopes(12)[8:] == [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]
    assert relative.slopes(1) == [2.0**-8]


@pytest.mark.parametrize("mode", ["mean", "cls", "last", "max", "mean_sqrt_len", "weightedmean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pool(mode: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    cu = cu_of([*LENGTHS, 0])
    x = torch.randn(int(cu[-1]), 16).to(dtype)
    rows = twin.pool(x, torch.from_numpy(cu), mode)
    assert rows.dtype == torch.float32
    assert rows[-1].abs().max() == 0, "a sequence of no tokens"
    for row, a, b in zip(rows[:-1], cu[:-2], cu[1:-1], strict=True):
        part = x[a:b].float()
        weight = torch.arange(1.0, b - a + 1)[:, None]
        want = {
            "mean": part.mean(0),
            "cls": part[0],
            "last": part[-1],
            "max": part.amax(0),
            "mean_sqrt_len": part.sum(0) / math.sqrt(b - a),
            "weightedmean": (part * weight).sum(0) / weight.sum(),
        }[mode]
        torch.testing.assert_close(row, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, linear.FEW, linear.FEW + 1])
@pytest.mark.parametrize("activation", [None, *linear.ACTIVATIONS])
@pytest.mark.parametrize("bias", [True, False])
def test_swapped_is_plain(tokens: int, activation: str | None, bias: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(24, 16), torch.randn(tokens, 16)
    b = torch.randn(24) if bias else None
    got = linear.swapped(weight, b, activation)(x)
    assert got.shape == (tokens, 24)
    torch.testing.assert_close(got, linear.plain(weight, b, activation)(x), rtol=1e-5, atol=1e-5)


def test_swapped_takes_its_own_result() -> None:
    a, b, x = torch.randn(24, 16), torch.randn(16, 24), torch.randn(5, 16)
    got = linear.swapped(b)(linear.swapped(a)(x))
    torch.testing.assert_close(got, x @ a.t() @ b.t(), rtol=1e-5, atol=1e-5)
