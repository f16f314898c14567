"""BERT's tokenizing of plain ASCII texts in one call of C (wordpiece.c), where that is all that the tokenizer's file says.

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

MOST_WORD = 256
"""Characters of a word for which C has room; BERT's files say 100."""


def reader(inner: tokenizers.Tokenizer, told: dict[str, Any]) -> Plain | None:
    """The tokenizer made faster; None where it does anything that wordpiece.c does not, or that was not built.

    told: its tokenizer.json.
    """
    model, normalizer, splitter = told["model"], told["normalizer"] or {}, told["pre_tokenizer"] or {}
    if (
        (model.get("type"), splitter.get("type")) != ("WordPiece", "BertPreTokenizer")
        or (normalizer.get("type"), normalizer.get("clean_text")) != ("BertNormalizer", True)
        or not 0 < model["max_input_chars_per_word"] <= MOST_WORD
        or (unknown := model["vocab"].get(model["unk_token"])) is None
        or (library := plain.library("wordpiece")) is None
        or (frame := plain.frame(inner)) is None
    ):
        return None
    prefix = model["continuing_subword_prefix"]
    vocab = model["vocab"]
    begin = {word: i for word, i in vocab.items() if word.isascii()}
    later = {
        end: vocab[word] for word in vocab if word.startswith(prefix) and (end := word.removeprefix(prefix)).isascii()
    }
    words, goes_on = [*begin, *later], [False] * len(begin) + [True] * len(later)
    ids = [*begin.values(), *later.values()]
    # What a text may spell of an added token: as it is written, and as the normalizer would write it.
    added = [t["content"] for t in told["added_tokens"]]
    forms = {form.lower() for text in added for form in (text, inner.normalizer.normalize_str(text))}
    spelt = b"".join(form.encode() + b"\0" for form in sorted(forms) if form.isascii() and form)
    lengths = np.array([*map(len, words)], np.int32)
    inside, numbers = np.array(goes_on, np.uint8), np.array(ids, np.int32)
    around = np.array([*frame[0], *frame[1], 0], np.int32)
    pointer, number, wide = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    library.new.argtypes = [
        ctypes.c_char_p, pointer, pointer, pointer, number,  # pieces
        ctypes.c_char_p, wide, number, number, number,  # added tokens, lower, most, unknown
        pointer, number, number,  # frame
    ]  # fmt: skip
    vocabulary = library.new(
        "".join(words).encode(), lengths.ctypes.data, inside.ctypes.data, numbers.ctypes.data, len(words),
        spelt, len(spelt), normalizer["lowercase"], model["max_input_chars_per_word"], unknown,
        around.ctypes.data, len(frame[0]), len(frame[1]),
    )  # fmt: skip
    first = {c for form in forms if form for c in (form[0], form[0].upper())}
    may_spell = re.compile(f"[{re.escape(''.join(sorted(first)))}]" if first else r"(?!)").search
    return Plain(inner, library, vocabulary, len(frame[0]) + len(frame[1]), may_spell)
