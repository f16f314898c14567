"""A convolution over packed tokens against PyTorch's over each sequence alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hortus.rose.cpu import positions  # noqa: E402
from hortus.rose.models.convolution import as_matrix, beside  # noqa: E402


@pytest.mark.parametrize("width", [1, 3, 7])
def test_each_sequence_by_itself(width: int) -> None:
    torch.manual_seed(0)
    lengths = [1, 2, 9, 1, 1, 3]
    cu = np.cumsum([0, *lengths], dtype=np.int32)
    x, weight = torch.randn(int(cu[-1]), 6), torch.randn(4, 6, width)
    x[1] = torch.nan  # of the second sequence: it must not be seen in others
    packed = beside(x, torch.from_numpy(positions(cu)), width) @ as_matrix(weight).T
    for start, end in itertools.pairwise(cu):
        alone = torch.nn.functional.conv1d(x[start:end].T[None], weight, padding=width // 2)[0].T
        torch.testing.assert_close(packed[start:end], alone, equal_nan=True)
    assert packed.isnan().any(1).sum() == min(width, 2)
