"""What holds for all tests."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """The modules that tests import are a million objects that stay. Looking through them again and again for garbage took a
    fifth of the time of some files."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_000, 10, 10)
