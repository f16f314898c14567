"""Models that installed packages hold."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest


def package_folder(module: str, *parts: str) -> Path:
    """A folder inside an installed package, without importing it."""
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{module} is not installed")
    return Path(next(iter(spec.submodule_search_locations))).joinpath(*parts)
