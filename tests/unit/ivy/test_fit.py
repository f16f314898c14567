"""A pair inside a template: whatever the texts, the whole fits, the template stays, and what is cut is at one side."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from hortus.ivy.fit import fit

TEXTS = st.text("abc dé", max_size=40)


def offsets(text: str) -> list[tuple[int, int]]:
    """Tokens of up to three letters, so that cutting and joining change how the rest falls into tokens."""
    return [m.span() for m in re.finditer(r"\S{1,3}", text)]


def join(query: str, document: str) -> str:
    return f"<q{query}|d{document}>"


@given(TEXTS, TEXTS, st.integers(1, 30), st.booleans())
def test_whatever_is_cut_fits_and_keeps_the_template(query, document, most, left):
    whole = fit(
        query,
        document,
        join=join,
        count=lambda text: len(offsets(text)),
        offsets=offsets,
        most=most,
        left=left,
    )
    if len(offsets(join(query, document))) <= most:
        assert whole == join(query, document)
        return
    if whole is None:
        return
    assert len(offsets(whole)) <= most
    kept_query, kept_document = re.fullmatch(r"<q(.*)\|d(.*)>", whole, re.S).groups()
    for kept, text in ((kept_query, query), (kept_document, document)):
        assert kept.strip() or not text.strip()
        assert text.endswith(kept) if left else text.startswith(kept)


def test_nothing_left_of_a_text_is_none():
    assert fit("a", "b " * 20, join=join, count=lambda t: len(t.split()), offsets=offsets, most=1, left=False) is None
    told = fit("", "b " * 20, join=join, count=lambda t: len(t.split()), offsets=offsets, most=3, left=False)
    assert told == "<q|db b>"
