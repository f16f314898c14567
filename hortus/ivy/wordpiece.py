"""BERT's tokenizing of plain ASCII texts in one call of C (wordpiece.c), where that is all that the tokenizer's file says.

Knows the tokenizers library and what its file says. Does not know requests or limits.
"""

from __future__ import annotations

import ctypes
import functools
import json
import re
import weakref
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers

from hortus import native
from hortus.types import Int32, TokenBatch

MOST_WORD = 256
"""Characters of a word for which C has room; BERT's files say 100."""
HELD_CHARS = 4096
"""For so many the GIL is kept: reading them takes 50 us, less than another thread may keep us waiting for it."""


class Encoding(Protocol):
    """What was read of one text: its length, and its ids as a list, made when asked for."""

    @property
    def ids(self) -> list[int]: ...

    def __len__(self) -> int: ...


class Ids:
    """An Encoding over a part of an array."""

    __slots__ = ("_array",)

    def __init__(self, array: Int32) -> None:
        self._array = array

    @property
    def ids(self) -> list[int]:
        found: list[int] = self._array.tolist()
        return found

    def __len__(self) -> int:
        return len(self._array)


@functools.cache
def _library(holding: bool) -> ctypes.CDLL | None:
    found = native.load(Path(__file__).with_suffix(".c"), holding=holding)
    if found is None:
        return None
    pointer, number, wide = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    found.hortus_wordpiece_new.argtypes = [
        ctypes.c_char_p, pointer, pointer, pointer, number,  # pieces
        ctypes.c_char_p, wide, number, number, number,  # added tokens, lower, most, unknown
        pointer, number, number,  # frame
    ]  # fmt: skip
    found.hortus_wordpiece_new.restype = pointer
    found.hortus_wordpiece_free.argtypes = [pointer]
    found.hortus_wordpiece_free.restype = None
    found.hortus_wordpiece_run.argtypes = [pointer, ctypes.c_char_p, pointer, wide, number, pointer, pointer]
    found.hortus_wordpiece_run.restype = wide
    return found


def plain(inner: tokenizers.Tokenizer) -> WordPiece | None:
    """The tokenizer made faster; None where it does anything that wordpiece.c does not, or that was not built."""
    told = json.loads(inner.to_str())
    model, normalizer, splitter = told["model"], told["normalizer"] or {}, told["pre_tokenizer"] or {}
    if (
        (held := _library(True)) is None
        or (free := _library(False)) is None
        or (model.get("type"), splitter.get("type")) != ("WordPiece", "BertPreTokenizer")
        or (normalizer.get("type"), normalizer.get("clean_text")) != ("BertNormalizer", True)
        or not 0 < model["max_input_chars_per_word"] <= MOST_WORD
        or (unknown := model["vocab"].get(model["unk_token"])) is None
        or (frame := _frame(inner)) is None
    ):
        return None
    return WordPiece(inner, (held, free), model, unknown, frame, told["added_tokens"], lower=normalizer["lowercase"])


def _frame(inner: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """Ids that are put before and after every text; None where it is anything else that is done."""
    bare, framed = ([*inner.encode("a b", add_special_tokens=special).ids] for special in (False, True))
    for before in range(len(framed) - len(bare) + 1):
        end = before + len(bare)
        if len(framed) <= len(bare) + 16 and framed[before:end] == bare:
            return framed[:before], framed[end:]
    return None


class WordPiece:
    """Reads plain texts itself and gives the others to the tokenizer. Never changed once made: every thread may use it."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        libraries: tuple[ctypes.CDLL, ctypes.CDLL],
        model: dict[str, Any],
        unknown: int,
        frame: tuple[list[int], list[int]],
        added: list[dict[str, Any]],
        *,
        lower: bool,
    ) -> None:
        """libraries: one that keeps the GIL, and one that lets go of it. frame: see _frame. added: as tokenizer.json has them."""
        self._inner, self._frame = inner, len(frame[0]) + len(frame[1])
        self._held, self._free = (library.hortus_wordpiece_run for library in libraries)
        prefix = model["continuing_subword_prefix"]
        pieces = [(word, False, i) for word, i in model["vocab"].items()]
        pieces += [
            (word.removeprefix(prefix), True, i) for word, i in model["vocab"].items() if word.startswith(prefix)
        ]
        pieces = [(word, goes_on, i) for word, goes_on, i in pieces if word.isascii()]
        words, goes_on, ids = zip(*pieces, strict=True)
        # What a text may spell of an added token: as it is written, and as the normalizer would write it.
        forms = {form.lower() for t in added for form in (t["content"], inner.normalizer.normalize_str(t["content"]))}
        spelt = b"".join(form.encode() + b"\0" for form in sorted(forms) if form.isascii() and form)
        lengths = np.array([*map(len, words)], np.int32)
        inside, numbers = np.array(goes_on, np.uint8), np.array(ids, np.int32)
        around = np.array([*frame[0], *frame[1], 0], np.int32)
        first = {c for form in forms if form for c in (form[0], form[0].upper())}
        self._may_spell = re.compile(f"[{re.escape(''.join(sorted(first)))}]" if first else r"(?!)").search
        self._vocabulary = libraries[0].hortus_wordpiece_new(
            "".join(words).encode(), lengths.ctypes.data, inside.ctypes.data, numbers.ctypes.data, len(words),
            spelt, len(spelt), lower, model["max_input_chars_per_word"], unknown,
            around.ctypes.data, len(frame[0]), len(frame[1]),
        )  # fmt: skip
        if not self._vocabulary:
            raise MemoryError("no memory for a tokenizer's vocabulary")
        weakref.finalize(self, libraries[0].hortus_wordpiece_free, self._vocabulary)

    def sure(self, texts: Sequence[str]) -> bool:
        """Whether a glance tells that none of the texts is the tokenizer's to read. (A control character is not seen.)"""
        return all(map(str.isascii, texts)) and not any(map(self._may_spell, texts))

    def packed(self, texts: Sequence[str], most: int) -> TokenBatch | None:
        """All texts in one batch, framed; None unless all are plain and of 1 to `most` tokens."""
        if not texts or not all(map(str.isascii, texts)):
            return None
        ids, counts = self._run(texts, True)
        if not 0 < min(counts) <= max(counts) <= most:
            return None
        ends = [0, *accumulate(counts)]
        return TokenBatch(ids[: ends[-1]], np.array(ends, np.int32))

    def encode_batch_fast(self, input: Sequence[str], /, *, add_special_tokens: bool = True) -> list[Encoding]:
        """Ids of every text, those that the tokenizer gives."""
        ours = [text for text in input if text.isascii()]
        read = self._read(ours, add_special_tokens)
        if len(read) == len(input) and None not in read:
            return read  # type: ignore[return-value]
        given = iter(read)
        found = [next(given) if text.isascii() else None for text in input]
        left = [text for text, ids in zip(input, found, strict=True) if ids is None]
        others = iter(self._inner.encode_batch_fast(left, add_special_tokens=add_special_tokens))
        return [next(others) if ids is None else ids for ids in found]

    def _read(self, texts: list[str], framed: bool) -> list[Ids | None]:
        """ASCII texts; None for one that is not plain."""
        if not texts:
            return []
        ids, counts = self._run(texts, framed)
        found: list[Ids | None] = []
        at = 0
        for length in counts:
            found.append(Ids(ids[at : at + length]) if length >= 0 else None)
            at += max(length, 0)
        return found

    def _run(self, texts: Sequence[str], framed: bool) -> tuple[Int32, list[int]]:
        """(ids of all plain texts one after the other, how many of each; -1 for one that is not plain)."""
        count, text = len(texts), "".join(texts).encode()
        ids = np.empty(len(text) + self._frame * count + 1, np.int32)
        sizes, counts = (ctypes.c_int64 * count)(*map(len, texts)), (ctypes.c_int64 * count)()
        run = self._held if len(text) <= HELD_CHARS else self._free
        run(self._vocabulary, text, sizes, count, framed, ctypes.byref(ctypes.c_char.from_buffer(ids.data)), counts)
        return ids, counts[:]
