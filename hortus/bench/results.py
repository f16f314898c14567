"""One measured case = one JSON line. Tables, plots and the README's figures are drawn from these lines only.

Does not know what was measured or how.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from hortus.bench.pace import RunError
from hortus.cores import usable_cores
from hortus.types import Float32


def hardware() -> str:
    """The processor (and its usable cores) that this process runs on, for people."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    return f"{name}, {usable_cores()} cores"


def gpu() -> str | None:
    """Name of the GPU that an engine here runs on; None where there is none, or no PyTorch to run on it."""
    try:
        import torch
    except ModuleNotFoundError:
        return None
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def commit() -> str | None:
    """Short commit of the checkout, with `+` when it has local changes; None outside git."""
    here = Path(__file__).parent
    try:
        out = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude", "*"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return out.stdout.strip() or None


NOT_200 = "not answered with 200: "
"""Begins the part of a note that says which answers were none."""


def command(words: Sequence[str]) -> str:
    """The command line as a shell takes it, without what is secret: results are for others to read. Pure."""
    shown = [re.sub(r"(--api-keys?[ =]+)\S+", r"\1...", word) for word in words]
    for n, word in enumerate(words):
        if word == "--header" and n + 1 < len(words):
            shown[n + 1] = words[n + 1].partition(":")[0] + ": ..."
        elif word.startswith("--header="):
            shown[n] = word.partition(":")[0] + ": ..."
    return shlex.join(["hortus", "bench", *shown])


@dataclass(kw_only=True, slots=True)
class Record:
    """One case. None where a field does not apply."""

    suite: str
    target: str
    """hortus, sentence-transformers, vllm, ..."""
    model: str
    hardware: str = field(default_factory=hardware)
    dtype: str | None = None
    batch: int | None = None
    tokens: int | None = None
    """Tokens an input, or in all where inputs differ in length (then `batch` x mean)."""
    clients: int | None = None
    median_ms: float | None = None
    p99_ms: float | None = None
    best_ms: float | None = None
    """Least of the rounds' medians: what the target takes while nothing else wants the machine, which is shared more often than
    not. Two runs agree in it first."""
    tokens_per_s: float | None = None
    requests_per_s: float | None = None
    rounds: int | None = None
    ratio: float | None = None
    """Speed against another target of the same run, pair by pair, above 1 where this one is faster: the peer (cpu, grpc), or
    the first target (all that take --target)."""
    offered_per_s: float | None = None
    """Requests a second that fell due, in an open loop."""
    client_cores: float | None = None
    """Processor time that the load generator itself took, in cores."""
    cpu_ms: float | None = None
    """Processor time, of all threads, that a request cost the target: in process, or a server started for the run. Where a
    machine is shared it says more than the clock."""
    cosine: float | None = None
    """Least cosine to the reference, before the case was timed and in answers that were."""
    at_s: float | None = None
    """Seconds since the beginning, for what changes over time."""
    hit_rate: float | None = None
    """Share of steps that replayed a graph since the last line."""
    note: str | None = None
    commit: str | None = field(default_factory=commit)
    command: str | None = field(default_factory=lambda: command(sys.argv[2:]))
    date: str | None = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))


def cosines(a: Float32, b: Float32) -> Float32:
    """[rows] cosine of each pair of rows; NaN where a value is not finite, or all of a row are 0."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        value: Float32 = (x * y).sum(1) / np.sqrt((x * x).sum(1) * (y * y).sum(1))
    return value


def median_p99(ms: Sequence[float]) -> tuple[float, float]:
    """(median, 99th percentile) of latencies in milliseconds."""
    return float(np.median(ms)), float(np.percentile(ms, 99))


_OPTIONAL = ("best_ms", "offered_per_s", "client_cores", "cpu_ms", "cosine", "at_s", "hit_rate")
"""Fields that few suites have: left out of a line where they are None."""


def append(path: Path, records: Sequence[Record]) -> None:
    """Add records to a JSON-lines file. RunError names the file that cannot be written."""
    lines = []
    for r in records:
        row = {k: _rounded(k, v) if isinstance(v, float) else v for k, v in asdict(r).items()}
        lines.append(json.dumps({k: v for k, v in row.items() if v is not None or k not in _OPTIONAL}))
    if lines:
        add_line(path, "\n".join(lines))


def _rounded(name: str, value: float) -> float | None:
    """What is no number is no figure, and would make the whole file unreadable."""
    return round(value, 6 if name == "cosine" else 4) if math.isfinite(value) else None


def add_line(path: Path, text: str) -> None:
    """Append to a file of lines, made with the folders above it, on a line of its own: the last one there may have been cut
    short. RunError names the file that cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = True
        if path.is_file() and path.stat().st_size:
            with path.open("rb") as f:
                f.seek(-1, os.SEEK_END)
                whole = f.read(1) == b"\n"
        with path.open("a", encoding="utf-8") as f:
            f.write(("" if whole else "\n") + text + "\n")
    except OSError as e:
        raise RunError(f"{path} cannot be written: {e.strerror or e}") from None


def read(paths: Sequence[Path]) -> list[Record]:
    """The records of JSON-lines files, in order, but for lines of another shape (`kernels`). ValueError names a bad line."""
    known = {f.name for f in fields(Record)}
    records = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as e:
            raise ValueError(f"{path}: not UTF-8 at byte {e.start}") from None
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as e:
                raise ValueError(f"{path}:{number}: not JSON ({e})") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: no record")
            if "target" not in row:
                continue
            if isinstance(row.get("ms"), list):
                raise ValueError(f"{path}:{number}: latencies, as --raw writes them; records are in the file of --out")
            if unknown := row.keys() - known:
                raise ValueError(f"{path}:{number}: unknown field {min(unknown)}")
            if lacking := [name for name in ("suite", "model") if name not in row]:
                raise ValueError(f"{path}:{number}: no field {lacking[0]}")
            for name, value in row.items():
                if wrong := _wrong(name, value):
                    raise ValueError(f"{path}:{number}: {name}: {wrong}")
            records.append(Record(**row))
    return records


_KINDS = {f.name: str(f.type).removesuffix(" | None") for f in fields(Record)}


def _wrong(name: str, value: object) -> str | None:
    """What is wrong with the value of a field; None where nothing is. Pure."""
    kind = _KINDS[name]
    if value is None:
        return "may not be null" if name in ("suite", "target", "model", "hardware") else None
    if kind == "str":
        return None if isinstance(value, str) else f"{value!r} is no text"
    if isinstance(value, bool) or not isinstance(value, int | float) or (kind == "int" and not isinstance(value, int)):
        return f"{value!r} is no {'whole ' if kind == 'int' else ''}number"
    if not abs(value) <= sys.float_info.max:  # NaN as well
        return f"{value if isinstance(value, float) else 'that many digits'} is no figure"
    if name.endswith("_ms") and value < 0:
        return f"{value} is less than 0"
    return None


_COLUMNS = (
    ("suite", "suite"),
    ("target", "target"),
    ("batch", "batch"),
    ("tokens", "tokens"),
    ("clients", "clients"),
    ("median_ms", "median ms"),
    ("p99_ms", "p99 ms"),
    ("best_ms", "best round"),
    ("tokens_per_s", "tokens/s"),
    ("requests_per_s", "req/s"),
    ("ratio", "ratio"),
    ("offered_per_s", "offered/s"),
    ("client_cores", "client cores"),
    ("cpu_ms", "cpu ms"),
    ("cosine", "cosine"),
    ("at_s", "at s"),
    ("hit_rate", "hits"),
    ("note", "note"),
)


def cell(value: object) -> str:
    """A value for a table."""
    if value is None:
        return "-"
    if isinstance(value, float):
        if 0.99 < value < 1:  # a cosine
            return f"{value:.5f}"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


def table(records: Sequence[Record]) -> str:
    """Records as a Markdown table that also reads well in a terminal; columns without a value are left out."""
    keep = [(k, title) for k, title in _COLUMNS if any(getattr(r, k) is not None for r in records)]
    return grid([title for _, title in keep], [[cell(getattr(r, k)) for k, _ in keep] for r in records])


def grid(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A Markdown table with its columns in line."""
    rows = [[" ".join(c.split()).replace("|", "\\|") for c in row] for row in (titles, *cells)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(titles))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)
