"""Plain ASCII texts read by C, all others by the tokenizers library: the same ids, several times as fast.

What C reads a text by is given: wordpiece.py, bytepairs.py. Does not know requests or limits.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Sequence
from ctypes import byref, c_char, c_int64
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers

from hortus import native
from hortus.types import Int32, TokenBatch, bounds_of_one

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


class Library:
    """C that reads texts: hortus_NAME_new makes a vocabulary, _run reads texts by it, _free ends it."""

    def __init__(self, name: str, held: ctypes.CDLL, free: ctypes.CDLL) -> None:
        """The same library twice: calls of `held` keep the GIL, those of `free` let go of it."""
        pointer, number, wide = ctypes.c_void_p, ctypes.c_int32, c_int64
        self.new: Any = held[f"hortus_{name}_new"]
        """What it is given is its module's to know."""
        self.new.restype = pointer
        self.close: Any = held[f"hortus_{name}_free"]
        self.close.argtypes, self.close.restype = [pointer], None
        self.held: Any
        self.free: Any
        self.held, self.free = (library[f"hortus_{name}_run"] for library in (held, free))
        for run in (self.held, self.free):
            run.argtypes = [pointer, ctypes.c_char_p, pointer, wide, number, pointer, pointer]
            run.restype = wide


@functools.cache
def library(name: str) -> Library | None:
    """Of name.c, which stands beside this module; None where it was not built."""
    source = Path(__file__).with_name(f"{name}.c")
    held, free = native.load(source, holding=True), native.load(source)
    return None if held is None or free is None else Library(name, held, free)


def frame(inner: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """Ids that are put before and after every text; None where it is anything else that is done."""
    bare, framed = ([*inner.encode("a b", add_special_tokens=special).ids] for special in (False, True))
    for before in range(len(framed) - len(bare) + 1):
        end = before + len(bare)
        if len(framed) <= len(bare) + 16 and framed[before:end] == bare:
            return framed[:before], framed[end:]
    return None


class Plain:
    """Reads plain texts by C and gives the others to the tokenizer. Never changed once made: every thread may use it."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        library: Library,
        vocabulary: int | None,
        around: int,
        foreign: Callable[[str], object],
    ) -> None:
        """vocabulary: what `new` returned, ended with this. around: ids put around a text. foreign: whether a glance at an
        ASCII text tells that it may be the tokenizer's to read."""
        if not vocabulary:
            raise MemoryError("no memory for a tokenizer's vocabulary")
        self._inner, self._library, self._vocabulary, self._around = inner, library, vocabulary, around
        self._foreign = foreign
        weakref.finalize(self, library.close, vocabulary)

    def sure(self, texts: Sequence[str]) -> bool:
        """Whether a glance tells that none of the texts is the tokenizer's to read. (A control character is not seen.)"""
        return all(map(str.isascii, texts)) and not any(map(self._foreign, texts))

    def packed(self, texts: Sequence[str], most: int) -> TokenBatch | None:
        """All texts in one batch, framed; None unless all are plain and of 1 to `most` tokens."""
        if not texts or not all(map(str.isascii, texts)):
            return None
        if len(texts) == 1:  # the same in fewer calls: most requests have one
            text = texts[0].encode()
            ids = np.empty(len(text) + self._around + 1, np.int32)
            run = self._library.held if len(text) <= HELD_CHARS else self._library.free
            count = run(
                self._vocabulary,
                text,
                byref(c_int64(len(text))),
                1,
                True,
                byref(c_char.from_buffer(ids.data)),
                byref(c_int64()),
            )
            return TokenBatch(ids[:count], bounds_of_one(count)) if 0 < count <= most else None
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
        ids = np.empty(len(text) + self._around * count + 1, np.int32)
        sizes, counts = (c_int64 * count)(*map(len, texts)), (c_int64 * count)()
        run = self._library.held if len(text) <= HELD_CHARS else self._library.free
        run(self._vocabulary, text, sizes, count, framed, byref(c_char.from_buffer(ids.data)), counts)
        return ids, counts[:]
