"""Two texts inside a template, cut so that the whole fits. Pure; does not know a tokenizer, only what one says of a text.

The template's own words stay whole, whichever side is cut: a reranker that reads its question at the end would not answer it
otherwise. How many tokens the whole has cannot be added up from its parts, since words may run together where they meet, so it
is counted again after each cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hortus.ivy.assemble import longest_first

ROUNDS = 16
"""Each cuts off what was too much; the second is rarely needed."""

Offsets = Sequence[tuple[int, int]]


def fit(
    query: str,
    document: str,
    *,
    join: Callable[[str, str], str],
    count: Callable[[str], int],
    offsets: Callable[[str], Offsets],
    most: int,
    left: bool,
) -> str | None:
    """The template around as much of both texts as fits into `most` tokens, the longer text losing first; None when nothing
    would be left of the document, or of a query that says something.

    join: puts them into the template. count: tokens of a whole. offsets: where the tokens of a text lie in it. left: cut
    beginnings off instead of ends.
    """
    whole = join(query, document)
    over = count(whole) - most
    if over <= 0:
        return whole
    at_query, at_document = offsets(query), offsets(document)
    kept = len(at_query), len(at_document)
    for _ in range(ROUNDS):
        kept = longest_first(*kept, max(0, sum(kept) - over))
        if not (kept[0] or not at_query) or not kept[1]:
            return None
        whole = join(_part(query, at_query, kept[0], left), _part(document, at_document, kept[1], left))
        over = count(whole) - most
        if over <= 0:
            return whole
    return None


def _part(text: str, offsets: Offsets, kept: int, left: bool) -> str:
    """The text of so many tokens, from the side that is kept."""
    if kept >= len(offsets):
        return text
    return text[offsets[len(offsets) - kept][0] :] if left else text[: offsets[kept - 1][1]]
