"""From the engine's rows to what goes into an answer: cut, normalise, quantise, check, write. Pure; numpy only.

Does not know HTTP or the shape of any API's answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import pybase64

from hortus.errors import InvalidInput, NonFinite, StartError
from hortus.ivy import decimals
from hortus.types import Float32, all_finite

EPSILON = 1e-12
"""Least norm divided by, as in torch.nn.functional.normalize: a zero vector stays zero instead of turning into NaN."""

Rows = npt.NDArray[Any]
Codes = npt.NDArray[np.int8] | npt.NDArray[np.uint8]


def check_finite(rows: Float32, name: Callable[[int], str] = "input[{}]".format) -> None:
    """Raise NonFinite, naming the first input at fault. `name`: what the request calls the input of a row.

    Checked on the whole row, before it is cut, and whatever the encoding: base64 would hide a NaN.
    """
    if not all_finite(rows) and not np.isfinite(rows).all():
        at = name(int(np.flatnonzero(~np.isfinite(rows).all(axis=1))[0]))
        raise NonFinite(
            f"the model gave NaN or Inf for {at}; its number format may not fit the model (--dtype)", param=at
        )


def finish(rows: Float32, dimensions: int | None, normalize: bool) -> Float32:
    """[n, width] float32 -> [n, dimensions or width] float32: cut first, then divided by the L2 norm (Matryoshka order).

    Norms are summed in float64: squares of large float32 values overflow float32.
    """
    if dimensions is not None and dimensions < rows.shape[1]:
        rows = rows[:, :dimensions]
    if normalize:
        wide = rows.astype(np.float64)
        if len(wide) == 1:  # the same in fewer calls: most requests have one row
            flat = wide.reshape(-1)
            wide /= max(math.sqrt(flat.dot(flat)), EPSILON)
        else:
            norms = np.sqrt(np.vecdot(wide, wide))
            wide /= np.maximum(norms, EPSILON)[:, None]
        rows = wide.astype(np.float32)
    return rows


def normal(rows: Float32) -> Float32:
    """Divided by their norms, uncut."""
    return finish(rows, None, True)


def as_base64(rows: Rows) -> list[bytes]:
    """One base64 text a row: little-endian float32, as OpenAI has it, or the bytes of the codes."""
    if rows.dtype == np.float32:
        rows = rows.astype("<f4", copy=False)
    if len(rows) == 1:
        return [pybase64.b64encode(rows.data)]
    packed = rows.tobytes()
    size = len(packed) // max(len(rows), 1)
    return [pybase64.b64encode(packed[at : at + size]) for at in range(0, len(packed), size)]


def as_numbers(rows: Rows) -> list[bytes]:
    """One JSON array a row, without its brackets.

    Each float is the shortest decimal that reads back as the same float32, so that both encodings carry the same bits,
    in 40 % fewer bytes than the float64 digits would take. NaN is not representable: check_finite comes first.
    """
    if rows.dtype == np.float32 and (found := decimals.texts(rows)) is not None:
        return found
    text = orjson.dumps(np.ascontiguousarray(rows), option=orjson.OPT_SERIALIZE_NUMPY)
    # The matrix is written in one call; `],[` can only stand between two rows.
    return text[2:-2].split(b"],[")


class Form(NamedTuple):
    """One way to write a vector down."""

    precision: str
    """float32, int8, uint8, binary, ubinary; lsb: ubinary with the first value in the lowest bit."""
    text: Callable[[Rows], list[bytes]]
    left: bytes
    right: bytes


def _numbers(precision: str) -> Form:
    return Form(precision, as_numbers, b"[", b"]")


def _base64(precision: str) -> Form:
    return Form(precision, as_base64, b'"', b'"')


FORMS: dict[str, Form] = {
    "float": _numbers("float32"),
    "base64": _base64("float32"),
    "int8": _numbers("int8"),
    "uint8": _numbers("uint8"),
    "binary": _numbers("binary"),
    "ubinary": _numbers("ubinary"),
    "base64_int8": _base64("int8"),
    "base64_binary": _base64("lsb"),  # the bit order that Perplexity documents for this name
}


class Quantizer:
    """A model's rule from floats to small codes. Two rules:

    tanh: pplx-embed's own. int8 is round(127 tanh(x)), halves to even, bits are x >= 0, both of the vector as pooled, not
    normalised (https://huggingface.co/perplexity-ai/pplx-embed-v1-0.6b, st_quantize.py). No uint8.

    Otherwise what sentence-transformers' quantize_embeddings does with the finished vector: bits are x > 0; int8 and uint8
    are its 256 equal steps between a least and a greatest value for each dimension. Those `ranges` come from texts like the
    ones to be embedded. sentence-transformers takes them from the batch at hand when it is given none, so that a vector's
    codes depend on its neighbours; a server cannot, and refuses int8 and uint8 without them.
    """

    def __init__(self, *, tanh: bool = False, ranges: Float32 | None = None) -> None:
        """ranges: [2, dimensions], least and greatest value."""
        self.tanh, self.ranges = tanh, ranges

    def check(self, precision: str, dimensions: int) -> None:
        """InvalidInput when this model has no such codes."""
        if precision not in ("int8", "uint8"):
            return
        if self.tanh and precision == "uint8":
            raise InvalidInput("this model defines int8 and binary codes, and no uint8", param="encoding_format")
        if not self.tanh and self.ranges is None:
            raise InvalidInput(
                f"{precision} needs the range of every dimension, which nobody has given (--int8-ranges); "
                "binary and ubinary need none",
                param="encoding_format",
            )
        if not self.tanh and self.ranges is not None and self.ranges.shape[1] != dimensions:
            raise InvalidInput(
                f"the ranges for {precision} (--int8-ranges) are those of {self.ranges.shape[1]} dimensions, not of "
                f"{dimensions}: cutting changes every value of a normalised vector",
                param="dimensions",
            )

    def codes(self, rows: Float32, precision: str, dimensions: int | None, normalize: bool) -> Codes:
        """[n, width] as pooled -> int8 or uint8 codes, [n, dimensions] or, for bits, [n, dimensions / 8 rounded up]."""
        x = finish(rows, dimensions, normalize and not self.tanh)
        if precision in ("binary", "ubinary", "lsb"):
            bits = x >= 0 if self.tanh else x > 0
            packed = np.packbits(bits, axis=-1, bitorder="little" if precision == "lsb" else "big")
            signed: Codes = (packed ^ np.uint8(128)).view(np.int8)
            return signed if precision == "binary" else packed
        if self.tanh:
            codes: Codes = np.rint(np.tanh(x) * np.float32(127)).astype(np.int8)
            return codes
        assert self.ranges is not None, "check() comes first"
        least = self.ranges[0]
        steps = (self.ranges[1] - least) / 255
        steps = np.where(steps == 0, 1, steps)
        places = np.clip(np.floor((x - least) / steps), 0, 255)
        scaled: Codes = places.astype(np.uint8) if precision == "uint8" else (places - 128).astype(np.int8)
        return scaled


def read_ranges(file: str) -> Float32:
    """[2, dimensions] float32 from a .npy file; StartError says what is wrong with it."""
    wanted = f"--int8-ranges {file}: expected an .npy file of finite floats [2, dimensions], got "
    try:
        told = np.load(Path(file), allow_pickle=False)
    except (OSError, ValueError, EOFError) as e:
        raise StartError(f"--int8-ranges {file}: {e}") from None
    if not isinstance(told, np.ndarray):
        raise StartError(wanted + "several arrays (.npz)")
    if told.ndim != 2 or told.shape[0] != 2 or told.dtype.kind != "f":
        raise StartError(f"{wanted}{told.dtype} {told.shape}")
    with np.errstate(over="ignore"):
        ranges: Float32 = told.astype(np.float32)
        steps = ranges[1] - ranges[0]
    if not (np.isfinite(ranges).all() and np.isfinite(steps).all()):
        raise StartError(wanted + "some that are not finite in float32")
    if (steps < 0).any():
        raise StartError(f"--int8-ranges {file}: the first row must be the least values, the second the greatest")
    if not steps.any():
        raise StartError(
            f"--int8-ranges {file}: every dimension's least value is its greatest; all codes would be the same"
        )
    return ranges


def texts_of(rows: Float32, form: Form, quantizer: Quantizer, dimensions: int | None, normalize: bool) -> list[bytes]:
    """Every row as it stands in an answer, without the form's brackets or quotes."""
    if form.precision == "float32":
        return form.text(finish(rows, dimensions, normalize))
    return form.text(quantizer.codes(rows, form.precision, dimensions, normalize))


def sigmoid(logits: Float32) -> Float32:
    """1 / (1 + exp(-x)), without overflow."""
    chances: Float32 = (0.5 * (1 + np.tanh(0.5 * logits))).astype(np.float32)
    return chances


def activation(name: str | None) -> Callable[[Float32], Float32]:
    """What a reranker's score is of its logit, by the name of torch's class. StartError for one that we do not know."""
    if name in (None, "Sigmoid"):
        return sigmoid
    if name == "Identity":
        return lambda logits: logits
    raise StartError(f"activation function {name} of this CrossEncoder is not supported; supported: Sigmoid, Identity")


def softmax(logits: Float32) -> Float32:
    """Over the last axis, without overflow."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    chances: Float32 = (powers / powers.sum(axis=-1, keepdims=True)).astype(np.float32)
    return chances


def cosines(one: Float32, many: Float32) -> Float32:
    """[n] cosine of each row of `many` with `one` ([width], or [n, width] for each its own), in float64 inside; 0 for a
    zero vector."""
    a, b = one.astype(np.float64), many.astype(np.float64)
    norms = np.sqrt(np.vecdot(a, a)) * np.sqrt(np.vecdot(b, b))
    found: Float32 = (np.vecdot(a, b) / np.maximum(norms, EPSILON**2)).clip(-1, 1).astype(np.float32)
    return found
