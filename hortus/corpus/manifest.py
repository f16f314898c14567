"""What a run is, and how far it has come: the difference between going on and mixing two runs in one folder.

    OUT/_manifest.json          what the run is: model, options, inputs; at its end also what came of it
    OUT/_parts/NAME.json        a part that is done, written after everything of it is there
    OUT/NAME.parquet            its rows
    OUT/_rejects/NAME.jsonl     its rows without vectors, where there are any

Nothing in them tells of time or machine, so that a run that was killed and went on leaves the same bytes as one that was not.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from hortus import __version__
from hortus.corpus.files import File
from hortus.corpus.plan import part_name
from hortus.corpus.store import Store
from hortus.errors import StartError
from hortus.types import ModelInfo

MANIFEST = "_manifest.json"
PARTS, REJECTS = "_parts", "_rejects"
_SHOWN = 3
_WRITTEN = re.compile(
    r"_manifest\.json|_lock|part-\d{5,}-\d{5,}\.parquet|(_parts|_rejects)/part-.*|(.*/)?\..*\.\d+\.partial"
)


@dataclass(frozen=True, slots=True)
class Record:
    """One part, done."""

    name: str
    unit: int
    part: int
    rows_in: int
    rows: int
    rejected: int
    tokens: int
    bytes: int
    """Of its Parquet file; 0 where there is none."""
    sha256: str
    ends_unit: bool
    """No part of its unit comes after it."""
    engine: str
    """What made it, as engine_name says."""


def is_written(name: str) -> bool:
    """Whether a run leaves such a file in its folder, or has one there for a time. Pure."""
    return _WRITTEN.fullmatch(name) is not None


def fingerprint(folder: Path) -> str:
    """SHA-256 over the model's files: names and bytes. About a second a gigabyte."""
    whole = hashlib.sha256()
    for file in sorted(f for f in folder.rglob("*") if f.is_file()):
        name = file.relative_to(folder)
        if any(part.startswith(".") for part in name.parts):
            continue
        if file.suffix in (".json", ".txt", ".model", ".jinja", ".safetensors", ".bin"):
            with file.open("rb") as f:
                whole.update(f"{name}\0{hashlib.file_digest(f, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()


def identity(model: Mapping[str, Any], options: Mapping[str, Any], files: Sequence[File]) -> dict[str, Any]:
    """What must be the same for a run to go on."""
    return {
        "hortus": __version__,
        "model": dict(model),
        "options": dict(options),
        "inputs": [{"url": f.url, "format": f.format, "size": f.size, "changed": f.changed} for f in files],
    }


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs, for a person. Pure."""
    told = []
    for section in ("model", "options"):
        a, b = old.get(section, {}), new.get(section, {})
        told += [f"{section} {k}: was {a.get(k)!r}, is {b.get(k)!r}" for k in sorted({*a, *b}) if a.get(k) != b.get(k)]
    if old.get("hortus") != new.get("hortus"):
        told.append(f"hortus: was {old.get('hortus')}, is {new.get('hortus')}")
    before = {f["url"]: f for f in old.get("inputs", [])}
    after = {f["url"]: f for f in new.get("inputs", [])}
    told += [f"input {u}: no longer there" for u in before if u not in after]
    told += [f"input {u}: new" for u in after if u not in before]
    told += [f"input {u}: changed" for u in after if u in before and before[u] != after[u]]
    if not told and old.get("inputs") != new.get("inputs"):
        told.append("inputs: in another order")
    return told


def begin(store: Store, what: Mapping[str, Any]) -> None:
    """Begin the run that `what` is, or go on with it. StartError when the folder holds another, and what differs."""
    raw = store.get(MANIFEST)
    if raw is None:
        if store.sizes(PARTS):
            raise StartError(f"--out {store.url}: has parts and no {MANIFEST}; give another folder, or empty it")
        store.put(MANIFEST, _json({**what, "result": None}))
        return
    try:
        told = orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise StartError(f"--out {store.url}: its {MANIFEST} is not JSON; give another folder, or empty it") from None
    if differ := differences(told, what):
        more = f" and {len(differ) - _SHOWN} more" if len(differ) > _SHOWN else ""
        raise StartError(
            f"--out {store.url}: holds another run ({'; '.join(differ[:_SHOWN])}{more}); give another folder, or empty it"
        )


def records(store: Store, unit: int | None = None) -> list[Record]:
    """The parts that are done (of one unit, or of all), in order. One whose file is gone or of another size is not."""
    files, found = store.sizes(""), []
    of = "part-" if unit is None else part_name(unit, 0).rpartition("-")[0]
    for name in sorted(n for n in store.sizes(PARTS) if n.startswith(of)):
        raw = store.get(f"{PARTS}/{name}")
        record = Record(**orjson.loads(raw)) if raw is not None else None
        if record is not None and (not record.bytes or files.get(record.name + ".parquet") == record.bytes):
            found.append(record)
    return found


def engine_name(info: ModelInfo) -> str:
    """Number format and device: engines of one name give the same vectors."""
    return f"{info.dtype} on {info.device}"


def same_engine(store: Store, done: Sequence[Record], engine: str) -> None:
    """StartError when parts that are done came from another kind of engine: half a corpus in bfloat16 is a trap."""
    if other := next((r for r in done if r.engine != engine), None):
        raise StartError(
            f"--out {store.url}: {other.name} was made by {other.engine}, this is {engine}; go on there, or give another folder"
        )


def finish(store: Store, what: Mapping[str, Any], done: Sequence[Record]) -> dict[str, Any]:
    """Write down that the run is over; the totals."""
    names = ("rows_in", "rows", "rejected", "tokens")
    totals = {name: sum(getattr(r, name) for r in done) for name in names}
    parts = [{"name": r.name, "rows": r.rows, "rejected": r.rejected, "sha256": r.sha256} for r in done]
    store.put(MANIFEST, _json({**what, "result": {**totals, "parts": parts}}))
    return totals


def write(store: Store, record: Record) -> None:
    """From here on the part is done."""
    store.put(f"{PARTS}/{part_name(record.unit, record.part)}.json", _json(asdict(record)))


def _json(told: Mapping[str, Any]) -> bytes:
    return orjson.dumps(told, option=orjson.OPT_INDENT_2) + b"\n"
