"""Hortus: a fast, trusted open server for text-embedding and ranking models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hortus.local import Engine

__version__ = "0.1.0"
__all__ = ["Engine", "__version__"]


def __getattr__(name: str) -> Any:
    """`hortus.Engine`, imported when asked for, so that `import hortus` stays light."""
    if name == "Engine":
        from hortus.local import Engine

        return Engine
    raise AttributeError(f"module 'hortus' has no attribute {name!r}")
