"""An engine without a model: rows that depend on the token ids alone, device time on a clock, faults on demand.

It obeys the Engine protocol of types.py, so that everything above ROSE can be tested and measured without torch. Knows
numpy and the clock. Does not know text or the scheduler.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from functools import cache
from hashlib import blake2b
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from hortus.folder import ModelFolder
from hortus.types import Float32, Int32, ModelInfo, TokenBatch


def fake_rows(batch: TokenBatch, width: int) -> Float32:
    """[rows, width] float32: each row a pure function of its own ids, their order, their token types and its span.

    A sequence's bytes are hashed to 64 bits, and the row is that seed times fixed odd numbers, the top halves of the
    products read as numbers in [-1, 1). Rows are finite, never zero, of length about 1. A span over a whole sequence gives
    the row that the sequence has without spans.
    """
    raw, cu = batch.ids.tobytes(), batch.cu_seqlens.tolist()
    seeds = [blake2b(raw[4 * a : 4 * b], digest_size=8).digest() for a, b in pairwise(cu)]
    if batch.token_types is not None:
        types = batch.token_types.tobytes()
        for i, (a, b) in enumerate(pairwise(cu)):
            if any(types[a:b]):  # all zero is the same as none
                seeds[i] = blake2b(seeds[i] + types[a:b], digest_size=8).digest()
    if batch.spans is not None:
        owners = owners_of(batch).tolist()
        seeds = [
            seeds[i] if (a, b) == (cu[i], cu[i + 1]) else _mixed(seeds[i], a - cu[i], b - cu[i])
            for i, (a, b) in zip(owners, batch.spans.tolist(), strict=True)
        ]
    odd = np.frombuffer(b"".join(seeds), "<u8") | np.uint64(1)
    products = odd[:, None] * _factors(width)
    scale = np.float32((3.0 / width) ** 0.5 / 2**31)
    rows: Float32 = products.view("<i4")[:, 1::2].astype(np.float32)
    rows *= scale
    return rows


def owners_of(batch: TokenBatch) -> Int32:
    """[rows] int32: the sequence that each row comes from."""
    owners = np.arange(len(batch), dtype=np.int32)
    return owners if batch.span_counts is None else np.repeat(owners, batch.span_counts)


def _mixed(seed: bytes, first: int, end: int) -> bytes:
    return blake2b(seed + b"%d,%d" % (first, end), digest_size=8).digest()


@cache
def _factors(width: int) -> npt.NDArray[np.uint64]:
    return np.random.PCG64(width).random_raw(width) | np.uint64(1)


class FakeEngine:
    """Steps take `delay_s + per_token_s * tokens`, one after the other, as on one device stream.

    asynchronous: True is a GPU (step returns at once, the result comes later), False a CPU (step computes, then
    returns a finished result).

    Faults, which tests set at any time:

    - `step_errors[n]`, `result_errors[n]`: what step number n (from 0) raises, at once or when its result is read;
    - `fail_id`: a batch holding this token id raises RuntimeError when its result is read;
    - `nan_id`: sequences holding this token id get a row of NaN;
    - `hold()`: steps hang, as a stuck device does, until `release()`.
    """

    def __init__(
        self,
        *,
        width: int = 384,
        vocab_size: int = 30522,
        max_tokens: int = 512,
        delay_s: float = 0.0,
        per_token_s: float = 0.0,
        asynchronous: bool = True,
        batch_tokens: int = 16384,
        name: str = "fake",
        normalize: bool = False,
        kind: str = "embed",
        labels: tuple[str, ...] = (),
    ) -> None:
        """kind, labels: as in ModelInfo. A classifier's width is the number of its labels."""
        self._info = ModelInfo(
            name=name,
            width=len(labels) or width,
            kind=kind,
            labels=labels,
            max_tokens=max_tokens,
            vocab_size=vocab_size,
            batch_tokens=batch_tokens,
            normalize=normalize,
        )
        self.delay_s, self.per_token_s, self.asynchronous = delay_s, per_token_s, asynchronous
        self.step_errors: dict[int, BaseException] = {}
        self.result_errors: dict[int, BaseException] = {}
        self.fail_id: int | None = None
        self.nan_id: int | None = None
        self.steps = 0
        """Steps begun."""
        self.shapes: deque[tuple[int, int]] = deque(maxlen=10_000)
        """(sequences, tokens) of the latest steps, oldest first."""
        self.closed = False
        self._free_at = 0.0
        self._released = threading.Event()
        self._released.set()

    @classmethod
    def like(cls, folder: ModelFolder, *, delay_s: float = 0.0, asynchronous: bool = True) -> FakeEngine:
        """A fake with the name, the width, the limits and the normalising of the model in `folder`."""
        dense = [m.config["out_features"] for m in folder.modules if m.kind == "Dense" and "out_features" in m.config]
        return cls(
            width=int(dense[-1] if dense else folder.config.get("hidden_size", 384)),
            vocab_size=int(folder.config.get("vocab_size", 30522)),
            max_tokens=folder.max_tokens,
            delay_s=delay_s,
            asynchronous=asynchronous,
            name=folder.name,
            normalize=any(m.kind == "Normalize" for m in folder.modules),
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    def quick(self, batch: TokenBatch) -> bool:
        """As on a GPU that holds a graph of every shape."""
        return self.asynchronous

    def step(self, batch: TokenBatch) -> _FakeTensor:
        number = self.steps
        self.steps += 1
        self.shapes.append((len(batch.cu_seqlens) - 1, len(batch.ids)))
        if number in self.step_errors:
            raise self.step_errors[number]
        rows = fake_rows(batch, self._info.width)
        if self.nan_id is not None:
            hits = np.add.reduceat(batch.ids == self.nan_id, batch.cu_seqlens[:-1], dtype=np.int32)
            rows[(hits > 0)[owners_of(batch)]] = np.nan
        error = self.result_errors.get(number)
        if self.fail_id is not None and (batch.ids == self.fail_id).any():
            error = RuntimeError(f"token id {self.fail_id} fails on purpose")
        due = 0.0
        if self.delay_s or self.per_token_s:
            start = max(time.monotonic(), self._free_at)
            self._free_at = due = start + self.delay_s + self.per_token_s * len(batch.ids)
        lazy = _FakeTensor(rows, error, due, self._released)
        if not self.asynchronous:
            lazy.wait()
        return lazy

    def hold(self) -> None:
        """From now on steps hang until release()."""
        self._released.clear()

    def release(self) -> None:
        self._released.set()

    def close(self) -> None:
        self.closed = True
        self._released.set()


class _FakeTensor:
    """The LazyTensor of a fake step: there at `due`, and not while the engine is held."""

    __slots__ = ("_due", "_error", "_released", "_rows")

    def __init__(self, rows: Float32, error: BaseException | None, due: float, released: threading.Event) -> None:
        self._rows, self._error, self._due, self._released = rows, error, due, released

    def ready(self) -> bool:
        return self._released.is_set() and (not self._due or time.monotonic() >= self._due)

    def wait(self) -> None:
        if not self._released.is_set():
            self._released.wait()
        if self._due and (left := self._due - time.monotonic()) > 0:
            time.sleep(left)

    def result(self) -> Float32:
        self.wait()
        if self._error is not None:
            raise self._error
        return self._rows
