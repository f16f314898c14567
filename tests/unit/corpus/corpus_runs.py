"""A run of `hortus embed` in this process over the fake engine, and what it left."""

from __future__ import annotations

from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from hortus import config
from hortus.corpus import command

WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "saw",
    "nothing",
    "of",
    "note",
]


def texts(count: int, most: int = 12) -> list[str]:
    """Texts that differ, of 1 to `most` words and a number."""
    return [" ".join(WORDS[(i + j) % len(WORDS)] for j in range(i % most + 1)) + f" {i}" for i in range(count)]


def settings(out: Path, **flags: object) -> config.Config:
    fake: dict[str, object] = {"fake_delay_ms": 0.0, "progress": "none", "log_level": "error"}
    return config.load(flags={**fake, "out": str(out), **flags})


def embed(inputs: Path | str | list[str], out: Path, **flags: object) -> int:
    given = inputs if isinstance(inputs, list) else [str(inputs)]
    return command.embed(given, "demo", settings(out, **flags))


def table(out: Path) -> pa.Table:
    """Every part, in order."""
    return pa.concat_tables([pq.read_table(p) for p in sorted(out.glob("part-*.parquet"))])


def rejects(out: Path) -> list[dict]:
    return [orjson.loads(line) for p in sorted(out.glob("_rejects/*")) for line in p.read_bytes().splitlines()]


def result(out: Path) -> dict:
    return orjson.loads((out / "_manifest.json").read_bytes())["result"]


def everything(out: Path) -> dict[str, bytes]:
    """All files of an output folder, by name."""
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}
