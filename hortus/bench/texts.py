"""Real text to measure with, cut to exact token counts by the served model's own tokenizer.

By default Lee's background corpus, 300 news items, read from the installed gensim package; or the user's own files. Does
not know what is measured.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from hortus.errors import StartError
from hortus.types import TokenBatch

Encode = Callable[[Sequence[str]], TokenBatch]
"""Texts to ids, special tokens included."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of one request, as text and as ids."""

    texts: tuple[str, ...]
    ids: TokenBatch


@cache
def lee_sentences() -> tuple[str, ...]:
    """The corpus cut into sentences, in order."""
    spec = find_spec("gensim")
    if spec is None or not spec.submodule_search_locations:
        raise StartError(
            "the benchmark texts come from gensim: pip install 'hortus[bench]', or give your own with --texts"
        )
    path = Path(next(iter(spec.submodule_search_locations)), "test", "test_data", "lee_background.cor")
    return sentences(path.read_text())


def sentences(text: str) -> tuple[str, ...]:
    """Lines cut where a sentence ends."""
    return tuple(s for line in text.splitlines() for s in re.split(r"(?<=[.!?])\s+", line.strip()) if s)


def mixed(count: int, *, seed: int = 0, most: int = 11) -> list[str]:
    """`count` texts of 1 to `most` consecutive sentences, the same for the same seed."""
    rng, lines = random.Random(seed), lee_sentences()
    texts = []
    for _ in range(count):
        start = rng.randrange(len(lines) - most)
        texts.append(" ".join(lines[start : start + rng.randint(1, most)]))
    return texts


class Corpus:
    """Words of real text (characters, where it has no spaces), in order, from which inputs of exact lengths are cut."""

    def __init__(self, encode: Encode, files: Sequence[Path] = (), *, seed: int = 0) -> None:
        """files: plain text; none: the Lee corpus. StartError when there is too little text."""
        lines = [s for f in files for s in sentences(f.read_text(encoding="utf-8"))] if files else lee_sentences()
        self._words, self._between = " ".join(lines).split(), " "
        if len(self._words) < sum(map(len, self._words)) / 20:  # a script without spaces is cut between characters
            self._words, self._between = [*"".join(self._words)], ""
        if len(self._words) < 100:
            raise StartError(
                f"--texts: {len(self._words)} {'words' if self._between else 'characters'} are too few to measure with; "
                "give at least 100"
            )
        self._encode, self._rng = encode, random.Random(seed)

    def exact(self, tokens: int) -> str:
        """A text of exactly so many tokens, special tokens included, that begins at a random word."""
        start = self._rng.randrange(len(self._words))
        # A word is at least one token, nearly always; a character, a quarter of one. Where the corpus ends it begins again.
        most = tokens + 1 if self._between else 4 * tokens + 1
        words = [self._words[(start + i) % len(self._words)] for i in range(most)]

        def count(n: int) -> int:
            return self._encode([self._between.join(words[:n])]).total_tokens

        low, high = 1, len(words)
        while low < high:  # the most words that fit
            middle = (low + high + 1) // 2
            low, high = (middle, high) if count(middle) <= tokens else (low, middle - 1)
        text = self._between.join(words[:low])
        # The next word has more tokens than are left: one-token words fill the rest. A first word that is too long gives way.
        if count(low) > tokens:
            text = "a"
        for filler in ("a", "I", "."):
            have = self._encode([text]).total_tokens
            if have < tokens:
                filled = text + f" {filler}" * (tokens - have)
                text = filled if self._encode([filled]).total_tokens == tokens else text
        if self._encode([text]).total_tokens != tokens:
            raise StartError(f"no text of exactly {tokens} tokens found with this tokenizer; choose another --tokens")
        return text

    def inputs(self, batch: int, tokens: int) -> Inputs:
        """`batch` different texts of exactly `tokens` tokens each."""
        return self.of([self.exact(tokens) for _ in range(batch)])

    def several(self, batch: int, tokens: int, count: int) -> list[Inputs]:
        """`count` requests of that size, the first two of different texts, as their answers are compared.
        StartError when the words give no two."""
        found = [self.inputs(batch, tokens) for _ in range(count)]
        other = next((i for i, r in enumerate(found) if r.texts != found[0].texts), None)
        if other is None:
            raise StartError(
                f"--texts: every text of {tokens} tokens comes out alike ({found[0].texts[0][:60]!r}); give more different words"
            )
        found[1], found[other] = found[other], found[1]
        return found

    def of(self, texts: Sequence[str]) -> Inputs:
        return Inputs(tuple(texts), self._encode(texts))
