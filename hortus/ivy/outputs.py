"""From the engine's rows to what goes into an answer: cut, normalise, check, write. Pure; numpy only.

Does not know HTTP or the shape of any API's answer.
"""

from __future__ import annotations

import binascii

import numpy as np
import orjson

from hortus.errors import NonFinite
from hortus.types import Float32

EPSILON = 1e-12
"""Least norm divided by, as in torch.nn.functional.normalize: a zero vector stays zero instead of turning into NaN."""


def check_finite(rows: Float32, first: int = 0) -> None:
    """Raise NonFinite, naming the first input at fault. `first` is the index that the request gave to rows[0].

    Checked on the whole row, before it is cut, and whatever the encoding: base64 would hide a NaN.
    """
    if not np.isfinite(rows).all():
        at = first + int(np.flatnonzero(~np.isfinite(rows).all(axis=1))[0])
        raise NonFinite(
            f"the model gave NaN or Inf for input {at}; its number format may not fit the model (--dtype)",
            param=f"input[{at}]",
        )


def finish(rows: Float32, dimensions: int | None, normalize: bool) -> Float32:
    """[n, width] float32 -> [n, dimensions or width] float32: cut first, then divided by the L2 norm (Matryoshka order).

    Norms are summed in float64: squares of large float32 values overflow float32.
    """
    if dimensions is not None and dimensions < rows.shape[1]:
        rows = rows[:, :dimensions]
    if normalize:
        wide = rows.astype(np.float64)
        norms = np.sqrt(np.vecdot(wide, wide))
        wide /= np.maximum(norms, EPSILON)[:, None]
        rows = wide.astype(np.float32)
    return rows


def as_base64(rows: Float32) -> list[bytes]:
    """One base64 text a row: little-endian float32, as OpenAI has it."""
    packed = np.ascontiguousarray(rows, "<f4")
    return [binascii.b2a_base64(row, newline=False) for row in packed]


def as_numbers(rows: Float32) -> list[bytes]:
    """One JSON array a row, without its brackets.

    Each number is the shortest decimal that reads back as the same float32, so that both encodings carry the same bits,
    in 40 % fewer bytes than the float64 digits would take. NaN is not representable: check_finite comes first.
    """
    text = orjson.dumps(np.ascontiguousarray(rows), option=orjson.OPT_SERIALIZE_NUMPY)
    # The matrix is written in one call; `],[` can only stand between two rows.
    return text[2:-2].split(b"],[")
