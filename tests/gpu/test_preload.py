"""Products whose weights are in shared memory before their input is there, on a Hopper GPU with quack, against PyTorch."""

from __future__ import annotations

import pytest
import torch

from hortus.rose.kernels import heads, twin

BF16, EPS, HEADS, KV_HEADS = torch.bfloat16, 1e-6, 16, 8
TOKENS = [1, 16, 63, 64, 65, 100, 128, 129, 192, 193, 256, 257, 300, 448, 449, 512]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # the compiler's, of its own code
]
if torch.cuda.is_available():
    from hortus.rose.kernels import biased, preload


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    if not preload._here(None):
        pytest.skip("needs a Hopper GPU and quack")


def weight(width: int, depth: int) -> torch.Tensor:
    return (torch.randn(width, depth, device="cuda") / depth**0.5).to(BF16)


def rows(tokens: int, depth: int) -> torch.Tensor:
    """[T, K] of a tensor whose further rows are not numbers, as memory may hold anything there."""
    return torch.cat([torch.randn(tokens, depth), torch.full((200, depth), torch.nan)]).cuda().to(BF16)[:tokens]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    gap = float((got.float() - want).norm() / want.norm())
    assert gap < 6e-3, f"relative error {gap:.1e}"
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("tokens", [*TOKENS, 513, 700, 768])
@pytest.mark.parametrize("depth", [2048, 3072])
def test_products(tokens: int, depth: int) -> None:
    w = weight(1024, depth)
    assert preload.can_add(w)
    tile = preload.added(tokens, 1024, depth)
    if tile is None:
        assert tokens <= 64, "skinny.py's"
        assert depth > 2048
        return
    x = rows(tokens, depth)
    got = preload.product(x, w, tile)
    assert torch.equal(got, preload.product(x, w, tile)), "the same bits at every run"
    assert got.shape == ((tokens, 1024) if tile.parts == 1 else (tile.parts, tokens, 1024))
    close(got if tile.parts == 1 else got.sum(0), x.float() @ w.float().t())


@pytest.mark.parametrize("tokens", TOKENS)
def test_gated_products(tokens: int) -> None:
    w, x = weight(6144, 1024), rows(tokens, 1024)
    assert preload.can_gate(w)
    tile = preload.gated(tokens, 3072, 1024)
    got = preload.gated_product(x, w, tile)
    assert torch.equal(got, preload.gated_product(x, w, tile))
    gate, up = (x.float() @ w.float().t()).view(tokens, -1, 2).unbind(2)
    close(got, torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("tokens", [t for t in TOKENS if t > 64])
def test_products_with_norm_and_rotation(tokens: int) -> None:
    turned = HEADS + KV_HEADS
    w, x = weight(128 * (turned + KV_HEADS), 1024), rows(tokens, 1024)
    assert preload.can_turn(w, turned, EPS)
    tile = preload.turned(tokens, *w.shape)
    assert tile is not None
    phase = torch.rand(600, 64, device="cuda")
    rotary = heads.Rotary(phase.cos(), phase.sin())
    rotary.keep_rows(1)
    positions = torch.randint(600, (tokens,), dtype=torch.int32, device="cuda")
    angles = rotary.at(positions)
    norm = torch.ones(len(w), device="cuda")
    norm[: 128 * turned] += torch.rand(128 * turned, device="cuda")
    got = preload.turned_product(x, w, angles.rows, norm, turned, EPS, tile)
    assert torch.equal(got, preload.turned_product(x, w, angles.rows, norm, turned, EPS, tile))
    y = (x.float() @ w.float().t()).view(tokens, -1, 128)
    y = torch.cat([twin.rms_norm(y[:, :turned], torch.ones(128, device="cuda"), EPS), y[:, turned:]], 1)
    y = (y.flatten(1) * norm).view(tokens, -1, 64, 2)
    c, s = phase.cos()[positions][:, None], phase.sin()[positions][:, None]
    a, b = y[:, :turned].unbind(3)
    want = torch.cat([torch.stack([a * c - b * s, a * s + b * c], 3), y[:, turned:]], 1).flatten(1)
    close(got, want)


@pytest.mark.parametrize("tokens", [*TOKENS, 513, 8192])
@pytest.mark.parametrize(
    ("width", "depth"), [(768, 768), (768, 3072), (3072, 768), (384, 384), (384, 1536), (1152, 384)]
)
def test_products_with_a_bias(tokens: int, width: int, depth: int) -> None:
    w, x, bias = weight(width, depth), rows(tokens, depth), torch.randn(width, device="cuda").to(BF16)
    want = x.float() @ w.float().t() + bias.float()
    for made, truth in (
        (biased.linear(w, bias), want),
        (biased.linear(w, bias, "gelu"), torch.nn.functional.gelu(want)),
        (biased.added(w, bias), want),
    ):
        got = made(x)
        assert torch.equal(got, made(x))
        close(got if got.dim() == 2 else got.sum(0), truth)


def test_a_kernel_of_the_package_is_as_it_was() -> None:
    """Its epilogues are compiled on our class, but only ours load weights first."""
    from hortus.rose.kernels import epilogue

    x, w = rows(300, 512), weight(256, 512)
    out = x.new_empty(300, 256)
    epilogue.plain.gemm(x, w.t(), out, epi_args={}, tile_M=128, tile_N=128, cluster_M=1, cluster_N=1, b_kn=True)
    close(out, x.float() @ w.float().t())
