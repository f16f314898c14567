"""Values of `hortus bench`'s flags, checked before anything is loaded: functions for argparse's `type=`, which names the flag.

Knows no suite and no target.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable
from pathlib import Path


def whole(text: str) -> int:
    """A count of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def at_most(most: int) -> Callable[[str], int]:
    """A count of at least 1 and at most so many."""

    def count(text: str) -> int:
        if (value := whole(text)) > most:
            raise argparse.ArgumentTypeError(f"{text} is more than {most}, which is the most")
        return value

    return count


def inputs_tokens(text: str) -> tuple[int, int]:
    """(inputs a request, tokens an input) of `32x512`."""
    inputs, x, tokens = text.partition("x")
    if not x:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write INPUTSxTOKENS, such as 32x512")
    return whole(inputs), whole(tokens)


def cores(text: str) -> frozenset[int]:
    """Processor cores that this process may use, as taskset takes them: `0,1` or `0-3,8`."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part)
        some = range(int(match[1]), int(match[2] or match[1]) + 1) if match else ()
        if not some:
            raise argparse.ArgumentTypeError(f"{text!r} is no list of cores; write numbers such as 0,1 or 0-3,8")
        found.update(some)
    if not hasattr(os, "sched_getaffinity"):
        raise argparse.ArgumentTypeError("this system binds no process to cores")
    if unknown := sorted(found - os.sched_getaffinity(0)):
        raise argparse.ArgumentTypeError(f"core {unknown[0]} is not one that this process may use")
    return frozenset(found)


def duration(text: str) -> float:
    """Seconds or minutes, at least 0: a round of no length still has one answer."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def more_than_0(text: str) -> float:
    """A rate, or seconds in which something must happen."""
    if not (value := duration(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not more than 0")
    return value


def text_file(text: str) -> Path:
    """A file of UTF-8 that can be read."""
    path = Path(text)
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise argparse.ArgumentTypeError(f"{text}: not UTF-8 at byte {e.start}") from None
    except (OSError, ValueError) as e:
        raise argparse.ArgumentTypeError(f"{text}: {getattr(e, 'strerror', None) or e}") from None
    return path


def written_file(text: str) -> Path:
    """A file that can be added to, or made with the folders above it."""
    return _writable(text, folder=False)


def written_folder(text: str) -> Path:
    """A folder that files can be put into, or that can be made."""
    return _writable(text, folder=True)


def _writable(text: str, *, folder: bool) -> Path:
    path = Path(text)
    there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if there == path.absolute() and path.is_dir() != folder:
        raise argparse.ArgumentTypeError(f"{text} is {'no folder' if folder else 'a folder'}")
    if there != path.absolute() and not there.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: {there} is no folder")
    if not os.access(there, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: {there} may not be written to")
    return path


def header(text: str) -> str:
    """One line of an HTTP request's head, `name: value`."""
    if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[ \t]*[\x21-\x7e\x80-\xff][\x20-\x7e\x80-\xff]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no header line; write 'name: value'")
    if (name := text.partition(":")[0].lower()) in _OWN_HEADERS:
        raise argparse.ArgumentTypeError(f"{name} is written for each request by itself")
    return text


_OWN_HEADERS = ("host", "content-type", "content-length", "transfer-encoding", "connection")
