"""Byte-level BPE of plain ASCII texts in one call of C (bytepairs.c), where that is all that the tokenizer's file says: Qwen's,
GPT-2's and whatever is made as those are (ModernBERT, RoBERTa).

Knows the tokenizers library and what its file says. Does not know requests or limits.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

import numpy as np
import tokenizers

from hortus.ivy import plain
from hortus.ivy.plain import Plain

MOST_PIECE = 128
"""Bytes of a piece that C joins."""
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""What its tokenizer.json cuts texts by; GPT-2's expression is in the library."""
_PLAIN = {c: chr(c) for c in range(33, 127)} | {c: chr(256 + c) for c in b"\t\n\r "}
"""Plain bytes as byte-level vocabularies write them."""
_words = re.compile(f"[{re.escape(''.join(_PLAIN.values()))}]+").fullmatch
_long = re.compile(
    rf"[A-Za-z]{{{MOST_PIECE}}}|[0-9]{{{MOST_PIECE}}}|\s{{{MOST_PIECE}}}|[^A-Za-z0-9\s]{{{MOST_PIECE}}}"
).search


def reader(inner: tokenizers.Tokenizer, told: dict[str, Any]) -> Plain | None:
    """The tokenizer made faster; None where it does anything that bytepairs.c does not, or that was not built.

    told: its tokenizer.json.
    """
    model, normalizer = told["model"], told["normalizer"] or {"type": "NFC"}
    if (
        model.get("type") != "BPE"
        or normalizer["type"] != "NFC"  # which leaves ASCII as it is
        or (qwen := _cuts_as_qwen(told["pre_tokenizer"])) is None
        or any(
            model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
        )
        or not model["vocab"].keys() >= {*_PLAIN.values()}
        or (library := plain.library("bytepairs")) is None
        or (frame := plain.frame(inner)) is None
    ):
        return None
    vocab = model["vocab"]
    ids = np.array([vocab[_PLAIN[c]] if c in _PLAIN else -1 for c in range(256)], np.int32)
    pairs = [(*m.split(" "),) if isinstance(m, str) else (*m,) for m in model["merges"]]
    merges = np.array(
        [(vocab[a], vocab[b], vocab[a + b]) for a, b in pairs if _words(a) and _words(b)], np.int32
    ).reshape(-1, 3)
    # Whoever spells a longer one spells the shorter that it begins with.
    added: list[str] = []
    for text in sorted(t["content"] for t in told["added_tokens"]):
        if text and text.isascii() and not (added and text.startswith(added[-1])):
            added.append(text)
    spelt = b"".join(text.encode() + b"\0" for text in added)
    around = np.array([*frame[0], *frame[1], 0], np.int32)
    pointer, number, wide = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    library.new.argtypes = [pointer, pointer, wide, ctypes.c_char_p, wide, number, pointer, number, number]
    vocabulary = library.new(
        ids.ctypes.data, merges.ctypes.data, len(merges), spelt, len(spelt), qwen,
        around.ctypes.data, len(frame[0]), len(frame[1]),
    )  # fmt: skip
    spells = re.compile("|".join(map(re.escape, added)) or r"(?!)").search

    def foreign(text: str) -> object:
        return spells(text) or (len(text) >= MOST_PIECE and _long(text))

    return Plain(inner, library, vocabulary, len(frame[0]) + len(frame[1]), foreign)


def _cuts_as_qwen(told: dict[str, Any] | None) -> bool | None:
    """Whether texts are cut into pieces as Qwen does or as GPT-2 does; None: otherwise."""
    if told is None:
        return None
    *steps, last = told["pretokenizers"] if told["type"] == "Sequence" else [told]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    if not steps:
        return False if last["use_regex"] else None
    split = {"type": "Split", "pattern": {"Regex": QWEN}, "behavior": "Isolated", "invert": False}
    return True if steps == [split] and not last["use_regex"] else None
