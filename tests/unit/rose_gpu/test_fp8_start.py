"""--dtype fp8's trial at a start, on a machine without such a GPU: what does not work is told in one sentence."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from hortus.errors import StartError  # noqa: E402
from hortus.rose.kernels import fp8, fp8_twin  # noqa: E402


@pytest.mark.parametrize("fault", ["fails", "is wrong", None])
def test_a_product_that_fails_or_is_wrong_stops_the_start(fault, monkeypatch):
    def product(x, weight, bias, dtype):
        if fault == "fails":
            raise NotImplementedError("no kernel")
        return fp8_twin.multiplied(x, weight, None if fault else bias, dtype)

    monkeypatch.setattr(fp8, "_multiplied", product)
    monkeypatch.setattr(fp8.quantise, "rows", fp8_twin.quantise)  # Triton needs a GPU, or its interpreter
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    if fault is None:
        fp8.prove(torch.device("cpu"))
        return
    with pytest.raises(
        StartError, match=r"--dtype fp8: PyTorch .* does not work on NVIDIA H200 .*; use --dtype bfloat16"
    ):
        fp8.prove(torch.device("cpu"))
