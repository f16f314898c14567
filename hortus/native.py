"""Libraries in C that stand beside their modules: built when the package is installed, where there is a C compiler.

Without them everything works, more slowly. They are C alone and know no Python.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import logging
from pathlib import Path

log = logging.getLogger(__name__)


def load(source: Path, *, holding: bool = False) -> ctypes.CDLL | None:
    """What was built of a .c file; None where it was not, or cannot be loaded. holding: its calls keep the GIL, which short ones
    should: giving it up may mean to wait for it."""
    names = [source.with_name(f"_{source.stem}{suffix}") for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    if (file := next((name for name in names if name.exists()), None)) is None:
        log.info("%s was not built at installation, for want of a C compiler: the slower way is taken", source.name)
        return None
    try:
        return (ctypes.PyDLL if holding else ctypes.CDLL)(str(file))
    except OSError as e:
        log.warning("%s cannot be loaded, the slower way is taken: %s", file, e)
        return None
