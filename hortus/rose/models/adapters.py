"""Low-rank adapters, one a task, chosen token by token: jina-embeddings-v3's (arXiv 2409.10173; Hu et al., arXiv 2106.09685).

Every matrix W of the trunk, embeddings too, stands for W + s B_t A_t, where t is the text's task, or for W alone. All tasks'
A are one narrow matrix here, and all B are joined to W, so that texts of different tasks run in one step, in one product:

    y = [x, m A x] [W, s B]^T       m: one where a value belongs to the token's task, else zero

The task travels as the token type: 0 is none, t the adapter number t - 1. Does not know families, names of tasks or files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Shapes = dict[str, tuple[int, ...]]
_A, _B = ".lora_A", ".lora_B"
_EVEN = 32
"""A product's inputs are a multiple of so many, as kernels like them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapters:
    """As config.json has them."""

    count: int
    rank: int
    scale: float
    """s: alpha / rank."""
    tables: tuple[str, ...]
    """Names of embeddings, whose A has a row a token. Without `.weight`."""

    def shapes(self, trunk: Shapes) -> Shapes:
        """Tensors of the adapters of all of the trunk's matrices."""
        found: Shapes = {}
        for name, shape in trunk.items():
            if len(shape) == 2:
                at, n, r = name.removesuffix(".weight"), self.count, self.rank
                rows, width = shape
                found[at + _A] = (n, rows, r) if at in self.tables else (n, r, width)
                found[at + _B] = (n, r, width) if at in self.tables else (n, rows, r)
        return found


class Adapted:
    """The adapters, ready to run: made before the trunk takes its matrices out of `weights`, which become wider here."""

    def __init__(self, spec: Adapters, weights: dict[str, Tensor]) -> None:
        word, segment = spec.tables
        n, r = spec.count, spec.rank
        self._wide = -(-n * r // _EVEN) * _EVEN
        device = weights[word + ".weight"].device
        owner = torch.full((self._wide,), -1, dtype=torch.int32)  # of no token: what fills the width up
        owner[: n * r] = torch.arange(1, n + 1, dtype=torch.int32).repeat_interleave(r)
        self._owner = owner.to(device)
        a, b = weights.pop(segment + _A), weights.pop(segment + _B)  # [n, 1, r], [n, r, hidden]
        plain = weights[segment + ".weight"]
        self._segment = torch.cat([plain, plain + spec.scale * (a @ b)[:, 0]])  # [1 + n, hidden], by token type
        self._rows = weights.pop(word + _A)  # [n, vocabulary, r]
        self._back = self._filled(spec.scale * weights.pop(word + _B).flatten(0, 1))  # [wide, hidden]
        self._narrow: dict[str, Tensor] = {}
        for name in [name for name in weights if name.endswith(_A)]:
            at = name.removesuffix(_A)
            self._narrow[at] = self._filled(weights.pop(name).flatten(0, 1))  # [wide, in]
            back = spec.scale * weights.pop(at + _B).transpose(0, 1).flatten(1)  # [out, n r]
            whole = weights[at + ".weight"]
            weights[at + ".weight"] = torch.cat([whole, self._filled(back.T).T], 1)  # [out, in + wide]
        self._mask: Tensor | None = None

    def _filled(self, rows: Tensor) -> Tensor:
        """Zeros added below, up to the common width."""
        return F.pad(rows, (0, 0, 0, self._wide - len(rows)))

    def begin(self, types: Tensor | None) -> None:
        """[T] int32 token types of the step that comes; None: all 0."""
        if types is None:
            self._mask = None
        else:
            self._mask = (types[:, None] == self._owner).to(self._back.dtype)  # [T, wide]

    def only(self, rows: Tensor) -> None:
        """The tokens that go on in this step."""
        if self._mask is not None:
            self._mask = self._mask.index_select(0, rows)

    def embedded(self, word: Tensor, ids: Tensor, types: Tensor | None) -> Tensor:
        """[T, hidden]: word and segment embeddings, summed."""
        x = F.embedding(ids, word)
        if types is None or self._mask is None:
            return x + self._segment[0]
        n, vocabulary, r = self._rows.shape
        rows = F.embedding((types - 1).clamp(0, n - 1) * vocabulary + ids, self._rows.view(-1, r))  # [T, r]
        each = F.pad(rows.repeat(1, n), (0, self._wide - n * r)) * self._mask
        return x + F.embedding(types, self._segment) + each @ self._back

    def wide(self, run: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
        """What takes a matrix's widened input, as a function of the input itself."""
        narrow = self._narrow.pop(name)

        def widened(x: Tensor, *more: Any) -> Tensor:
            if self._mask is None:
                return run(F.pad(x, (0, self._wide)), *more)
            return run(torch.cat([x, F.linear(x, narrow) * self._mask], 1), *more)

        return widened
