"""fp8's plain twin: its numbers, what becomes of rows that are zero or not finite, and where --dtype fp8 is refused."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hortus.config import RoseConfig  # noqa: E402
from hortus.errors import StartError  # noqa: E402
from hortus.folder import open_folder  # noqa: E402
from hortus.rose.engine import check_engine, open_engine, pick_dtype, refused_fp8  # noqa: E402
from hortus.rose.kernels import fp8_twin  # noqa: E402
from hortus.rose.kernels.linear import plain  # noqa: E402

CUDA = torch.device("cuda")


def test_a_row_is_scaled_by_its_greatest_magnitude():
    x = torch.tensor([[1.0, -2.0, 0.5], [448.0, 17.0, 0.0], [-3e38, 1e38, 1.0]])
    found = fp8_twin.quantise(x)
    torch.testing.assert_close(found.scale[:, 0], torch.tensor([2 / 448, 1.0, 3e38 / 448]))
    assert found.values.float().tolist() == [[224.0, -448.0, 112.0], [448.0, 16.0, 0.0], [-448.0, 144.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_bits_are_kept(dtype):
    torch.manual_seed(0)
    x = torch.randn(50, 300).to(dtype)
    gap = (fp8_twin.quantise(x).exact() - x.float()).abs()
    # Half of the last of three bits, or of the least number there is.
    assert (gap <= torch.maximum(x.float().abs() / 16, fp8_twin.quantise(x).scale * 2**-10) * 1.0001).all()


def test_rows_of_nothing_and_rows_that_are_not_finite():
    x = torch.ones(5, 4)
    x[0], x[1], x[2, 1], x[3, 2] = 0, 1e-40, torch.nan, -torch.inf
    found = fp8_twin.quantise(x)
    assert found.values.float().isfinite().all()
    assert found.exact()[:2].abs().max() < 1e-30
    assert found.exact()[2:4].isnan().all()
    assert found.exact()[4].eq(1).all()
    y = fp8_twin.linear(torch.ones(3, 4))(x)
    assert y[2:4].isnan().all()
    assert y[[0, 1, 4]].sum(1).tolist() == [0, 0, 12], "neighbours are as if alone"


def test_a_product_is_close_to_the_exact_one():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(40, 512), torch.randn(96, 512) / 512**0.5, torch.randn(96)
    for activation in (None, "gelu"):
        got, want = fp8_twin.linear(weight, bias, activation)(x), plain(weight, bias, activation)(x)
        assert (got - want).norm() / want.norm() < 0.05
    assert fp8_twin.linear(weight.bfloat16())(x.bfloat16()).dtype == torch.bfloat16


def test_the_library_is_asked_for_what_it_takes():
    """PyTorch checks layouts and scales of its product without a GPU, on tensors that hold nothing."""
    pytest.importorskip("triton")
    from torch._subclasses.fake_tensor import FakeTensorMode

    from hortus.rose.kernels import fp8

    with FakeTensorMode():
        x, weight, bias = (
            torch.empty(*shape, device=CUDA, dtype=torch.bfloat16) for shape in ((80, 256), (96, 256), (96,))
        )
        for b in (None, bias):
            y = fp8._multiplied(fp8_twin.quantise(x), fp8_twin.quantise(weight), b, torch.bfloat16)
            assert (y.shape, y.dtype) == ((80, 96), torch.bfloat16)


def test_where_it_is_refused(monkeypatch: pytest.MonkeyPatch):
    assert refused_fp8(torch.device("cpu")) == "this is the CPU; use --dtype float32"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda d: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: (8, 0))
    assert refused_fp8(CUDA) == "NVIDIA A100 has 8.0; use --dtype bfloat16"
    for capability in ((9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d, c=capability: c)
        assert refused_fp8(CUDA) is None
    assert pick_dtype("fp8", CUDA) == torch.bfloat16


@pytest.mark.parametrize("opened", [open_engine, check_engine])
def test_a_start_on_the_cpu_is_refused_before_weights_are_read(opened, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(
        StartError, match=r"--dtype fp8 needs a GPU of capability 9\.0 .*this is the CPU; use --dtype float32"
    ):
        opened(open_folder(str(tmp_path)), RoseConfig(dtype="fp8", device="cpu"))
