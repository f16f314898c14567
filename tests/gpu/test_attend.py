"""Norms of heads, rotation and attention in one kernel against the twins.

On a GPU, or under Triton's interpreter (TRITON_INTERPRET=1): tests/unit/rose_gpu runs this same file the second way.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from hortus.rose.attention import Heads
from hortus.rose.attention.twin import TwinAttention
from hortus.rose.kernels import linear, twin
from hortus.rose.network import Inputs, ranges

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
HERE = INTERPRETED or torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HERE, reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),  # the interpreter's
]
if HERE:
    from hortus.rose.kernels import attend, heads, skinny

DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
EPS = 1e-6
SHAPES = [Heads(heads=2, kv_heads=1, head_dim=64), Heads(heads=1, kv_heads=1, head_dim=64, causal=True, scaled=0.2)]
if not INTERPRETED:
    SHAPES += [Heads(heads=16, kv_heads=8, head_dim=128), Heads(heads=32, kv_heads=8, head_dim=128, causal=True)]
MIXES = {
    "one": [1],
    "few": [5, 11],
    "ragged": [7, 1, 30, 16, 1],
    "empty slots, padding last": [5, 0, 40, 0, 0, 3],
    "long": [2, 53],
}
if not INTERPRETED:
    MIXES |= {"singles": [1] * 55, "many": [11] * 5, "all": [64]}


def step(lengths: list[int], padding: int = 0) -> tuple[np.ndarray, Inputs]:
    """cu_seqlens on the host, and a step's inputs; padding tokens all have position 0, and are one sequence to cu_seqlens."""
    positions, cu = ranges(np.zeros(len(lengths), np.int32), np.array(lengths, np.int32))
    if padding:
        positions, cu = (
            np.append(positions, np.zeros(padding, np.int32)),
            np.append(cu, cu[-1] + padding).astype(np.int32),
        )
    on = [torch.from_numpy(a).to(DEVICE) for a in (np.zeros_like(positions), positions, cu)]
    return cu, Inputs(on[0], on[1], None, on[2])


class Layer:
    """A product that gives what it is given, with the rest of it as the kernels and as the twins have it."""

    def __init__(self, shape: Heads, *, norm: bool) -> None:
        torch.manual_seed(0)
        self.shape, d = shape, shape.head_dim
        width = (shape.heads + 2 * shape.kv_heads) * d
        angle = torch.randn(1024, d // 2)
        self.norms = [torch.rand(d) + 0.5 for _ in range(2)] if norm else [None, None]
        tables = angle.cos().to(DEVICE), angle.sin().to(DEVICE)
        on = [None if w is None else w.to(DEVICE, DTYPE) for w in self.norms]
        one = torch.eye(width, device=DEVICE, dtype=DTYPE)
        sizes = (shape.heads, shape.kv_heads, EPS)
        self.ours = heads.turned(one, None, *on, heads.Rotary(*tables), *sizes, linear.plain)
        exact = [None if w is None else w.float() for w in on]
        self.twin = twin.turned(one.float(), None, *exact, twin.Rotary(*tables), *sizes, linear.plain)

    def run(self, x: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        layer, tile = self.ours, skinny.Tile(64, 32, 128 if x.shape[1] % 128 == 0 else 64, 1, 4, 5)
        made = attend.turned(
            x, layer.weight, layer.q_norm, layer.k_norm, layer.rotary, inputs.positions, self.shape, tile
        )
        return attend.attend(*made, inputs.positions, self.shape, EPS)

    def truth(self, x: torch.Tensor, cu: np.ndarray, inputs: Inputs) -> torch.Tensor:
        attention = TwinAttention(self.shape)
        attention.plan(cu, inputs.cu_seqlens, int(np.diff(cu).max()))
        h = self.shape
        qkv = self.twin(x.float(), inputs.positions).view(len(x), -1, h.head_dim)
        return attention.run(*torch.split(qkv, [h.heads, h.kv_heads, h.kv_heads], 1)).flatten(1)

    def random(self, tokens: int) -> torch.Tensor:
        width = (self.shape.heads + 2 * self.shape.kv_heads) * self.shape.head_dim
        return torch.randn(tokens, width, device=DEVICE).to(DTYPE)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mix", MIXES)
def test_it_is_norm_rotation_and_attention(mix: str, shape: Heads, norm: bool) -> None:
    layer, lengths = Layer(shape, norm=norm), MIXES[mix]
    for padding in (0, 9)[: 2 if sum(lengths) < 56 else 1]:
        cu, inputs = step(lengths, padding)
        x, real = layer.random(len(inputs.positions)), sum(lengths)
        got, want = layer.run(x, inputs)[:real].float(), layer.truth(x, cu, inputs)[:real]
        gap = float((got - want).norm() / want.norm())
        assert gap < (1e-5 if INTERPRETED else 8e-3), f"relative error {gap:.1e}"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_broken_token_breaks_those_who_see_it(shape: Heads) -> None:
    """Whichever of q, k and v is not finite; and the others' rows keep their bits."""
    layer, (_, inputs) = Layer(shape, norm=True), step([3, 40, 20])
    x, d = layer.random(63), shape.head_dim
    clean = layer.run(x, inputs)
    for bad in (float("nan"), float("inf")):
        for at in (0, shape.heads * d, (shape.heads + shape.kv_heads) * d):
            y = x.clone()
            y[20, at + 3] = bad
            rows = layer.run(y, inputs)
            assert torch.equal(rows[:3], clean[:3])
            assert torch.equal(rows[43:], clean[43:])
            if at:
                seen = rows[20:43] if shape.causal else rows[3:43]
                assert not seen[:, :d].isfinite().all(1).any(), "all who see a broken token are broken"
            else:
                assert not rows[20, :d].isfinite().all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_text_does_not_hang_on_its_neighbours(shape: Heads) -> None:
    layer, (_, inputs) = Layer(shape, norm=True), step([30, 20, 5])
    x = layer.random(55)
    alone = layer.run(x[30:50].contiguous(), step([20])[1])
    exact = {"rtol": 1e-5, "atol": 1e-5} if INTERPRETED else {"rtol": 2**-7, "atol": 2**-9}
    torch.testing.assert_close(layer.run(x, inputs)[30:50], alone, **exact)


def test_what_does_not_fit() -> None:
    wide = Heads(heads=32, kv_heads=8, head_dim=64)
    made = [Layer(wide, norm=True).ours]
    assert attend.attended(made, wide, EPS) is None, "3,072 values are too deep for a program"
    made[0].weight = made[0].weight[:, :1024].contiguous()
    assert (attend.attended(made, wide, EPS) is None) == INTERPRETED, "float32 has no fast product"
    assert attend.attended([lambda x, angles: x], wide, EPS) is None
    assert attend.attended(made, replace(wide, window=8), EPS) is None
    assert attend.attended(made, replace(wide, head_dim=96), EPS) is None
