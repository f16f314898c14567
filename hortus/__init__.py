"""Hortus: a fast, trusted open server for text-embedding and ranking models."""

__version__ = "0.1.0"
__all__ = ["__version__"]
