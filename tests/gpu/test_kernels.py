"""Every fused kernel against its twin: on a GPU, or under Triton's interpreter on the CPU (TRITON_INTERPRET=1).

tests/unit/rose_gpu runs this same file the second way, so one set of tests holds both.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from hortus.rose.kernels import twin

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:index_reduce.*beta"),
]
if INTERPRETED or torch.cuda.is_available():
    from hortus.rose.kernels import dense, fused, heads, rms, skinny
    from hortus.rose.kernels import residual as kept
    from hortus.rose.kernels.linear import plain
else:
    rms = SimpleNamespace(MANY=0, TOGETHER=0)

# The interpreter cuts a bfloat16 short where the GPU rounds it, and multiplies it wrongly.
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]
# The interpreter takes about 10 ms a program, so its cases are small; the shapes that matter are the same.
TOKENS = [3] if INTERPRETED else [1, 5, 64, 130, 4099]
FEW = 3 if INTERPRETED else 67
HIDDEN = [384, 2560] if INTERPRETED else [384, 768, 1024, 2560]
MODES = ["mean", "cls", "last", "max", "mean_sqrt_len", "weightedmean"]
EPS = 1e-6


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def close(ours: torch.Tensor, truth: torch.Tensor) -> None:
    """Within rounding of one value: the relative error of the whole, and no single value astray."""
    assert ours.shape == truth.shape
    assert ours.dtype == truth.dtype
    exact = ours.dtype == torch.float32
    tolerance = 2e-6 if exact else 6e-3
    gap = (ours.float() - truth.float()).norm() / truth.float().norm().clamp(min=1e-30)
    assert gap < tolerance, f"relative error {gap:.2e}"
    torch.testing.assert_close(ours, truth, rtol=1e-4 if exact else 2e-2, atol=1e-5 if exact else 2e-2)


def grows(residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A residual as the kernels keep it, and as their twins do."""
    ours = fused.residual(residual)
    return ours, kept.value(ours)


def grown(ours: torch.Tensor, truth: torch.Tensor) -> None:
    """float16 keeps 11 binary digits, however small the number down to 0.004."""
    exact = ours.dtype == torch.float32
    torch.testing.assert_close(kept.value(ours), truth, rtol=1e-5 if exact else 2**-10, atol=1e-5 if exact else 2**-17)


def ids(tokens: int, most: int) -> torch.Tensor:
    return torch.randint(most, (tokens,), dtype=torch.int32).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("tokens", TOKENS)
def test_row_kernels(tokens, hidden, dtype):
    x, residual = random(tokens, hidden, dtype=dtype), random(tokens, hidden, dtype=dtype)
    weight, bias = random(hidden, dtype=dtype), random(hidden, dtype=dtype)
    close(fused.rms_norm(x, weight, EPS), twin.rms_norm(x, weight, EPS))
    for b in (bias, None):
        close(fused.add_layer_norm(x, residual, weight, b, EPS), twin.add_layer_norm(x, residual, weight, b, EPS))
        ours, truth = grows(residual)
        close(fused.add_layer_norm_(x, ours, weight, b, EPS), twin.add_layer_norm_(x, truth, weight, b, EPS))
        grown(ours, truth)
    ours, truth = grows(residual)
    close(fused.add_rms_norm_(x, ours, weight, EPS), twin.add_rms_norm_(x, truth, weight, EPS))
    grown(ours, truth)


@pytest.mark.parametrize("rows", [rms.TOGETHER + 1] if INTERPRETED else [rms.MANY, rms.MANY + 1])
def test_norms_of_several_rows_a_program(rows, monkeypatch):
    monkeypatch.setattr(rms, "MANY", min(rms.MANY, rows))
    x, residual, weight = random(rows, 384), random(rows, 384), random(384)
    close(rms.rms_norm(x, weight, EPS), twin.rms_norm(x, weight, EPS))
    ours, truth = grows(residual)
    close(rms.add_rms_norm_(x, ours, weight, EPS), twin.add_rms_norm_(x, truth, weight, EPS))
    grown(ours, truth)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_norm_of_a_sum_of_parts(parts):
    x, residual, weight = random(parts, 3, 1024), random(3, 1024), random(1024)
    ours, truth = grows(residual)
    close(rms.sum_rms_norm_(x, ours, weight, EPS), twin.add_rms_norm_(x.sum(0), truth, weight, EPS))
    grown(ours, truth)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_layer_norm_of_a_sum_of_parts(parts):
    x, residual, weight, bias = random(parts, 3, 384), random(3, 384), random(384), random(384)
    close(
        fused.add_layer_norm(x, residual, weight, bias, EPS), twin.add_layer_norm(x.sum(0), residual, weight, bias, EPS)
    )
    ours, truth = grows(residual)
    close(fused.add_layer_norm_(x, ours, weight, None, EPS), twin.add_layer_norm_(x.sum(0), truth, weight, None, EPS))
    grown(ours, truth)


@pytest.mark.parametrize("tokens", [1, 8, 17] if INTERPRETED else [1, 8, 17, 64, 512, 4099])
def test_rows_of_angles_are_looked_up(tokens):
    table = random(50, 256, dtype=torch.float16)
    positions = torch.randint(50, (tokens,), dtype=torch.int32).to(DEVICE)
    assert torch.equal(heads.look_up(table, positions), table[positions])


FAST = DTYPES[-1]


@pytest.mark.parametrize("tokens", [3] if INTERPRETED else [1, 64, 65, 128, 200, 256, 300, 512])
@pytest.mark.parametrize(("width", "depth"), [(64, 512)] if INTERPRETED else [(1024, 2048), (1024, 3072)])
def test_products_in_parts(tokens, width, depth):
    x, weight = random(tokens, depth, dtype=FAST), random(width, depth, dtype=FAST) / depth**0.5
    cut = skinny.split(tokens, width, depth)
    if cut is None:
        assert tokens > 256, "the deeper of the two is the library's then"
        return
    parts = skinny.product(x, weight, cut)
    assert len(parts) == cut.parts > 1
    close(parts.sum(0).to(FAST), x @ weight.T)
    if not INTERPRETED:
        assert torch.equal(parts, skinny.product(x, weight, cut)), "the same bits at every run"


@pytest.mark.parametrize("tokens", [3] if INTERPRETED else [1, 64, 65, 128, 200, 256])
@pytest.mark.parametrize("depth", [256] if INTERPRETED else [1024, 512])
def test_whole_products(tokens, depth):
    width = 64 if INTERPRETED else 3072
    x, weight = random(tokens, depth, dtype=FAST), random(2 * width, depth, dtype=FAST) / depth**0.5
    cut = skinny.gated(tokens, width, depth)
    got = skinny.product(x, dense.paired(*weight.chunk(2)), cut, gated=True)
    close(got, twin.gated_silu(x @ weight.T))
    cut = skinny.Tile(64, 32, 128, 1, 4, 5) if INTERPRETED else skinny.whole(tokens, width, depth)
    close(skinny.product(x, weight[:width].contiguous(), cut), x @ weight[:width].T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "inner"), [(64, 96)] if INTERPRETED else [(1024, 3072), (2560, 9728), (1000, 24)])
@pytest.mark.parametrize("tokens", TOKENS if INTERPRETED else [1, 64, 130, 300, 384, 700, 4099])
def test_products_joined_with_what_follows(tokens, hidden, inner, dtype):
    x, residual = random(tokens, hidden, dtype=dtype), random(tokens, hidden, dtype=dtype)
    gate, up = (random(inner, hidden, dtype=dtype) / hidden**0.5 for _ in range(2))
    down, bias, norm = random(hidden, inner, dtype=dtype) / inner**0.5, random(hidden, dtype=dtype), random(hidden)
    norm = norm.to(dtype)
    exact = [t.float() for t in (gate, up, down, bias, norm)]
    allow = torch.backends.cuda.matmul.allow_tf32
    assert not allow, "the truth is float32"
    inside = dense.gated(gate, up, plain)(x)
    close(inside, twin.gated(exact[0], exact[1], plain)(x.float()).to(dtype))
    for b in (None, bias):
        ours, truth = grows(residual)
        got = dense.add_norm(down, b, norm, EPS, plain)(inside, ours)
        want = twin.add_norm(exact[2], None if b is None else exact[3], exact[4], EPS, plain)(inside.float(), truth)
        close(kept.value(ours).to(dtype), truth.to(dtype))
        close(got, want.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [384] if INTERPRETED else [384, 1024])
def test_embeddings(hidden, dtype):
    tokens = FEW
    word, position, kind = (random(n, hidden, dtype=dtype) for n in (301, 128, 2))
    weight, bias = random(hidden, dtype=dtype), random(hidden, dtype=dtype)
    t, p, k = ids(tokens, 301), ids(tokens, 128), ids(tokens, 2)
    for scale in (1.0, 27.75):
        ours, normed = fused.embed_rms_norm(t, word, scale, weight, EPS)
        truth, want = twin.embed_rms_norm(t, word, scale, weight, EPS)
        grown(ours, truth)
        close(normed, want)
    for types, table in ((None, None), (None, kind), (k, kind)):
        for places in (position, None):
            for b in (bias, None):
                args = (t, p, types, word, places, table, weight, b, EPS)
                close(fused.embed_layer_norm(*args), twin.embed_layer_norm(*args))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim"),
    [(16, 8, 128), (32, 8, 128), (5, 1, 128), (12, 12, 64), (3, 1, 64), (3, 1, 256)],
)
@pytest.mark.parametrize(("norm", "biased"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("tokens", [3] if INTERPRETED else [1, 67, 256, 1536, 2000])
def test_heads_normed_and_turned(tokens, q_heads, kv_heads, head_dim, norm, biased, dtype):
    n, hidden = q_heads + 2 * kv_heads, 64
    x, weight = random(tokens, hidden, dtype=dtype), random(n * head_dim, hidden, dtype=dtype) / 8
    bias = random(n * head_dim, dtype=dtype) if biased else None
    q_norm, k_norm = ((random(head_dim, dtype=dtype) if norm else None) for _ in range(2))
    angle, at = random(64, head_dim // 2), ids(tokens, 64)
    rotary, plainly = heads.Rotary(angle.cos(), angle.sin()), twin.Rotary(angle.cos(), angle.sin())
    make = (q_heads, kv_heads, EPS, plain)
    got = heads.turned(weight, bias, q_norm, k_norm, rotary, *make)(x, rotary.at(at))
    exact = [None if t is None else t.float() for t in (weight, bias, q_norm, k_norm)]
    want = twin.turned(*exact, plainly, *make)(x.float(), at).to(dtype)
    v = (q_heads + kv_heads) * head_dim
    close(got[:, :v], heads.neighbours(want[:, :v].T, q_heads + kv_heads).T)
    close(got[:, v:], want[:, v:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1536, 100] if INTERPRETED else [1536, 3072, 9728, 100])
def test_activations(width, dtype):
    x = random(FEW, 2 * width, dtype=dtype)
    close(dense.silu_pairs(dense.paired(*x.T.chunk(2)).T.contiguous()), twin.gated_silu(x))
    for activation in ("gelu", "gelu_tanh", "silu", "relu"):
        for first in (0, 1):
            close(fused.glu(x * 2, activation, first), twin.glu(x.float() * 2, activation, first).to(dtype))
    x = random(FEW, width, dtype=dtype) * 3
    close(fused.gelu_(x.clone()), twin.gelu_(x))


def test_a_gate_keeps_a_nan():
    x = random(4, 64)
    x[1, 3] = x[2, 40] = float("nan")
    for activation in ("gelu", "gelu_tanh", "silu", "relu"):
        out = fused.glu(x, activation, 0)
        assert out[1, 3].isnan()
        assert out[2, 8].isnan()
        assert out.isnan().sum() == 2


BATCHES = {
    "one token": [1],
    "one text": [130],
    "ragged": [3, 1, 70, 64, 65, 2],
    "empty slots": [0, 5, 0, 9, 0, 0],
    "all empty": [0, 0],
    "long, in parts": [1500],
    "skewed, in parts": [1, 1300, 0, 999],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", list(BATCHES.values()), ids=list(BATCHES))
def test_pool(lengths, dtype):
    hidden = 384 if not INTERPRETED else 100 if sum(lengths) < 1000 else 24
    cu = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)
    # Rows of no sequence hold NaN: reading one shows.
    x = torch.full((max(1, sum(lengths)) + 9, hidden), float("nan"), dtype=dtype, device=DEVICE)
    x[: sum(lengths)] = random(sum(lengths), hidden, dtype=dtype)
    for mode in MODES:
        ours = fused.pool(x, cu, mode)
        close(ours, twin.pool(x, cu, mode))
        if not INTERPRETED:
            assert torch.equal(ours, fused.pool(x, cu, mode)), "the same batch gives the same bits"


@pytest.mark.parametrize("mode", ["cls", "last"])
@pytest.mark.parametrize("lengths", [[1024], [0, 500, 3, 0, 520, 1, 0], [4] * 255 + [4], [4] * 255 + [0]])
def test_picked(lengths, mode):
    cu = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)
    tokens = 1024
    rows, want = fused.picked(cu, tokens, mode), twin.picked(cu, tokens, mode)
    assert rows.dtype == torch.int32
    assert rows.shape[0] % 16 == 0, "as a step's tokens"
    assert torch.equal(rows[: len(lengths)], want)
    assert 0 <= int(rows.min()) <= int(rows.max()) < tokens
    assert fused.picked(cu, 1023, mode) is None
    assert fused.picked(torch.zeros(258, device=DEVICE, dtype=torch.int32), tokens, mode) is None


def test_pool_keeps_a_nan():
    """A broken row may not look whole: the answer is checked for NaN later, by row."""
    x = random(12, 64)
    x[5, 3] = float("nan")
    cu = torch.tensor([0, 4, 12], dtype=torch.int32, device=DEVICE)
    for mode in ("mean", "max", "mean_sqrt_len", "weightedmean"):
        out = fused.pool(x, cu, mode)
        assert out[1, 3].isnan()
        assert out.isnan().sum() == 1


def test_pool_of_a_view():
    x = random(12, 256)[:, 64:192]
    cu = torch.tensor([0, 4, 12], dtype=torch.int32, device=DEVICE)
    for mode in MODES:
        close(fused.pool(x, cu, mode), twin.pool(x, cu, mode))


def test_more_elements_than_int32_counts():
    """Row offsets are 64 bits wide; only a GPU has the memory and the speed to show it."""
    if INTERPRETED:
        pytest.skip("needs 13 GB of GPU memory")
    rows, width = 2**31 // 3072 + 100, 3072
    x = torch.zeros(rows, 2 * width, dtype=torch.bfloat16, device=DEVICE)
    x[-1] = 1
    last = dense.silu_pairs(x)[-1]
    close(last, twin.gated_silu(x[-1:])[0])
    cu = torch.tensor([0, rows - 1, rows], dtype=torch.int32, device=DEVICE)
    assert fused.pool(x, cu, "mean")[1].eq(1).all()


@pytest.mark.skipif(INTERPRETED, reason="graphs need a CUDA device")
def test_capture_and_replay_with_other_lengths():
    tokens, hidden = 256, 1024
    x, residual = random(tokens, hidden, dtype=torch.bfloat16), random(tokens, hidden, dtype=torch.bfloat16)
    weight = random(hidden, dtype=torch.bfloat16)
    cu = torch.tensor([0, 100, 200, 200, 256], dtype=torch.int32, device=DEVICE)

    def step() -> list[torch.Tensor]:
        y = fused.rms_norm(fused.gelu_(x + residual), weight, EPS)
        return [fused.pool(y, cu, mode) for mode in MODES]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = step()
    for lengths in ([256, 0, 0, 0], [1, 2, 3, 250], [64, 64, 64, 64]):
        x.copy_(random(tokens, hidden, dtype=torch.bfloat16))
        cu.copy_(torch.tensor([0, *lengths]).cumsum(0))
        graph.replay()
        y = twin.rms_norm(twin.gelu_(x + residual), weight, EPS)
        for mode, ours in zip(MODES, rows, strict=True):
            torch.testing.assert_close(ours, twin.pool(y, cu, mode), rtol=2e-2, atol=2e-2)
