"""Hortus: a fast, trusted open server for text-embedding and ranking models.

Setting one variable of the OpenMP library has to happen before anything imports torch, and so happens here. Its idle worker
threads spin for the next loop, for ever when they think that each has a core of its own. With anything else on those
cores (our own event loop is enough) every small loop then waits for a thread that is not running: measured on two cores
beside other work, a 16-token text took 428 ms in place of 10. Spinning for about a millisecond bounds that, and still
spans the gaps between the loops of one step. A program that imports torch first does well to set it itself.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hortus.local import Engine

os.environ.setdefault("GOMP_SPINCOUNT", "60000")

__version__ = "0.1.0"
__all__ = ["Engine", "__version__"]


def __getattr__(name: str) -> Any:
    """`hortus.Engine`, imported when asked for, so that `import hortus` stays light."""
    if name == "Engine":
        from hortus.local import Engine

        return Engine
    raise AttributeError(f"module 'hortus' has no attribute {name!r}")
