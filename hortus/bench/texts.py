"""Real text to measure with: Lee's background corpus of 300 news items, read from the installed gensim package."""

from __future__ import annotations

import random
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from hortus.errors import StartError


@cache
def lee_sentences() -> tuple[str, ...]:
    """The corpus cut into sentences, in order."""
    spec = find_spec("gensim")
    if spec is None or not spec.submodule_search_locations:
        raise StartError("the benchmark texts come from gensim: pip install 'hortus[dev]'")
    path = Path(next(iter(spec.submodule_search_locations)), "test", "test_data", "lee_background.cor")
    return tuple(s for line in path.read_text().splitlines() for s in re.split(r"(?<=[.!?])\s+", line.strip()) if s)


def mixed(count: int, *, seed: int = 0, most: int = 11) -> list[str]:
    """`count` texts of 1 to `most` consecutive sentences, the same for the same seed."""
    rng, sentences = random.Random(seed), lee_sentences()
    texts = []
    for _ in range(count):
        start = rng.randrange(len(sentences) - most)
        texts.append(" ".join(sentences[start : start + rng.randint(1, most)]))
    return texts
