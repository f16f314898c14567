"""What the corpus tests share: one fake model with the real tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import hortus


@pytest.fixture(scope="session")
def fake() -> Iterator[hortus.Engine]:
    with hortus.Engine("demo", fake_delay_ms=0.0) as engine:
        yield engine
