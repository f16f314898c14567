"""Long texts cut into chunks by tokens. Pure; does not know a tokenizer, an engine or a file."""

from __future__ import annotations

from collections.abc import Sequence


def cut(length: int, most: int, overlap: int = 0) -> list[tuple[int, int]]:
    """(first, end) of each chunk of a text of `length` tokens: `most` tokens, the last perhaps fewer, each but the first
    beginning `overlap` tokens before the end of the one before. No chunk lies inside another."""
    assert 0 <= overlap < most, "checked where the options are read"
    return [(at, min(at + most, length)) for at in range(0, max(length - overlap, 1), most - overlap)]


def together(lengths: Sequence[int], room: int, separator: int = 1) -> list[tuple[int, int]]:
    """Runs (lo, hi) of neighbouring chunks that share a sequence of at most `room` tokens, with `separator` tokens between
    two of them. Filled greedily. A chunk alone always fits: chunks are cut no longer than that."""
    runs, lo, tokens = [], 0, 0
    for i, length in enumerate(lengths):
        more = length + (separator if i > lo else 0)
        if i > lo and tokens + more > room:
            runs.append((lo, i))
            lo, tokens, more = i, 0, length
        tokens += more
    return [*runs, (lo, len(lengths))] if lengths else []
