"""How the residual of a pre-norm model is kept on the GPU: a 64th of its value, in float16.

Why: a block adds to it twice, and what that rounds away in bfloat16 is more than all other roundings of a step together, ten
times more for a single token (decisions/013). float16 has eight times the resolution in the same bytes. A 64th, so that it holds
numbers up to 4 million: pplx-embed is known to pass float16's own end, 65,504. What is greater still becomes infinite, and fails
its own text. A power of two costs no digit and, in kernels that wait for memory, no time. A float32 model keeps float32.

Does not know who adds or norms.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

PART = tl.constexpr(1 / 64)
WHOLE = tl.constexpr(64.0)


def form(dtype: torch.dtype) -> torch.dtype:
    """The format of the residual in a model of this one."""
    return torch.float16 if dtype.itemsize == 2 else dtype


def residual(x: Tensor) -> Tensor:
    """x [T, H], kept."""
    part: float = PART.value
    return (x * part).to(form(x.dtype))


def value(kept: Tensor) -> Tensor:
    """What is kept, [T, H] float32."""
    whole: float = WHOLE.value
    return kept.float() * whole
