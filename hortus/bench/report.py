"""`hortus bench report` and `hortus bench readme`: what is made of result files. Nothing else says what was measured.

Figures come from bench/results/*.jsonl only, so a page can always be made again. Of several runs of one case the latest
counts, and the page says how far apart they are. Does not know how anything was measured; plots.py draws.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from hortus.bench.flags import text_file, written_folder
from hortus.bench.pace import RunError
from hortus.bench.results import NOT_200, Record, cell, grid, read

Key = tuple[object, ...]
SIZED = ("latency", "scoring", "throughput", "cases")


def label(r: Record) -> str:
    """The name of a target in pictures and tables. `hortus bench engine` measures the same as target `engine`."""
    return "engine" if r.suite == "engine" and r.target == "hortus" else r.target


def case(r: Record) -> Key:
    """What makes two records the same case, measured twice."""
    words = (r.note or "").split("; ")
    if r.suite == "arrivals":  # the offered load itself is another in each run
        kind = next((w for w in words if w.endswith(" of the best")), "")
    elif r.suite == "graphs":
        kind = str(r.at_s)
    else:
        kind = "" if r.suite in (*SIZED, "concurrency", "short") else words[0]
    return (r.suite, label(r), r.model, r.hardware, r.dtype, r.batch, r.tokens, r.clients, kind)


def sized(r: Record) -> bool:
    """A step or request of one size: the suites' own, and the engine's whole steps."""
    whole = r.suite == "engine" and (r.note or "").partition(";")[0] in ("replay", "cpu", "peer")
    return (r.suite in SIZED or whole) and r.median_ms is not None and r.batch is not None and r.tokens is not None


def latest(records: Iterable[Record]) -> dict[Key, list[Record]]:
    """Each case's runs, the latest last: by date, whatever the order of the files; those of one second as they come."""
    found: dict[Key, list[Record]] = {}
    for r in sorted(records, key=lambda r: r.date or ""):
        found.setdefault(case(r), []).append(r)
    return found


@dataclass(frozen=True, slots=True)
class Group:
    """One machine, model and number format: what may stand in one picture."""

    hardware: str
    model: str
    dtype: str | None
    """Told where there are several."""
    records: tuple[Record, ...]
    """The latest of each case."""
    slug: str
    """Its part of file names, of no other group."""

    @property
    def title(self) -> str:
        return f"{self.model} on {self.hardware}" + (f", {self.dtype}" if self.dtype else "")


def groups(records: Sequence[Record]) -> list[Group]:
    """By machine, model and number format, in order of appearance. Whoever does not say its format stands with the first."""
    found: dict[tuple[str, str], list[Record]] = {}
    for runs in latest(records).values():
        found.setdefault((runs[-1].hardware, runs[-1].model), []).append(runs[-1])
    every: list[Group] = []
    for (hardware, model), rows in found.items():
        known: list[str | None] = [*dict.fromkeys(r.dtype for r in rows if r.dtype)] or [None]
        for dtype in known:
            mine = tuple(r for r in rows if (r.dtype or known[0]) == dtype)
            told = dtype if len(known) > 1 else None
            slug = _slug(f"{hardware} {model} {told or ''}", {g.slug for g in every})
            every.append(Group(hardware, model, told, mine, slug))
    return every


def _slug(text: str, taken: Collection[str]) -> str:
    """Letters and digits of a text, and another number where that name is taken: names differ by more than those. Pure."""
    short = "-".join("".join(c if c.isalnum() else " " for c in text.lower()).split())[:100]
    return next(name for n in count(1) if (name := short if n == 1 else f"{short}-{n}") not in taken)


def spreads(records: Sequence[Record]) -> list[tuple[Record, float, float | None]]:
    """(latest, largest relative difference of medians, and of best rounds) of every case measured more than once."""
    found = []
    for runs in latest(records).values():
        median = _spread([r.median_ms for r in runs])
        if median is not None:
            found.append((runs[-1], median, _spread([r.best_ms for r in runs])))
    return found


def _spread(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v]
    return (max(known) - min(known)) / min(known) if len(known) > 1 else None


def page(records: Sequence[Record], pictures: dict[str, list[str]]) -> str:
    """The Markdown page. pictures: file stems by group."""
    parts = ["# Benchmark report", "Made by `hortus bench report` from JSON lines; the latest run of each case."]
    for g in groups(records):
        parts.append(f"## {g.title}")
        parts += [f"![{name}]({name}.svg)" for name in pictures.get(g.slug, [])]
        for title, rows, columns in (
            ("One request of one size", [r for r in g.records if sized(r)], _SIZED_COLUMNS),
            ("By number of clients", [r for r in g.records if r.suite in ("concurrency", "short")], _CLIENT_COLUMNS),
            ("Poisson arrivals", [r for r in g.records if r.suite == "arrivals"], _ARRIVAL_COLUMNS),
            ("Queries beside a bulk load", [r for r in g.records if r.suite == "mixed"], _MIXED_COLUMNS),
            ("Start and first answers", [r for r in g.records if r.suite in ("start", "first-hit")], _START_COLUMNS),
            ("Everything else", [r for r in g.records if _other(r)], _OTHER_COLUMNS),
        ):
            if rows:
                parts += [
                    f"### {title}",
                    grid([c for c, _ in columns], [[cell(f(r)) for _, f in columns] for r in rows]),
                ]
    if repeats := spreads(records):
        far = sorted(repeats, key=lambda x: -x[1])
        again = [
            [label(r), r.suite, r.model, _size(r), cell(r.clients), str(case(r)[-1]), f"{s:.1%}",
             "-" if best is None else f"{best:.1%}"]
            for r, s, best in far[:20]
        ]  # fmt: skip
        parts += [
            f"## Repeated cases\n\n{len(far)} cases were measured more than once; the median case differs by "
            f"{far[len(far) // 2][1]:.1%}. Those that differ most:",
            grid(["target", "suite", "model", "size", "clients", "what", "medians differ by", "best rounds by"], again),
        ]
    return "\n\n".join(parts) + "\n"


def _size(r: Record) -> str:
    return f"{r.batch} x {r.tokens}" if r.batch and r.tokens else "-"


def _note(r: Record) -> str:
    return (r.note or "").partition(";")[0]


def _not_200(r: Record) -> str | None:
    """How many requests of an open loop had no good answer, and which they had."""
    return next((w.removeprefix(NOT_200) for w in (r.note or "").split("; ") if w.startswith(NOT_200)), None)


def _other(r: Record) -> bool:
    shown = sized(r) or r.suite in ("concurrency", "short", "arrivals", "mixed", "start", "first-hit", "graphs")
    return not shown and (r.median_ms is not None or r.cosine is not None)


_Column = tuple[str, Callable[[Record], object]]
_WHO: tuple[_Column, ...] = (("target", label), ("size", _size))
_TIMES: tuple[_Column, ...] = (("median ms", lambda r: r.median_ms), ("p99 ms", lambda r: r.p99_ms))
_CLIENTS: _Column = ("clients", lambda r: r.clients)
_RATE: _Column = ("requests/s", lambda r: r.requests_per_s)
_CPU: _Column = ("processor ms", lambda r: r.cpu_ms)
_CORES: _Column = ("client cores", lambda r: r.client_cores)
_SIZED_COLUMNS = (
    ("suite", lambda r: r.suite), *_WHO, _CLIENTS, *_TIMES, ("best round ms", lambda r: r.best_ms),
    ("tokens/s", lambda r: r.tokens_per_s), ("against the first", lambda r: r.ratio), _CPU, ("least cosine", lambda r: r.cosine),
    ("commit", lambda r: r.commit),
)  # fmt: skip
_CLIENT_COLUMNS = (*_WHO, _CLIENTS, _RATE, *_TIMES, _CPU, _CORES)
_ARRIVAL_COLUMNS = (
    *_WHO,
    ("offered/s", lambda r: r.offered_per_s),
    ("answered/s", lambda r: r.requests_per_s),
    *_TIMES,
    ("not answered with 200", _not_200),
    _CORES,
)
_MIXED_COLUMNS = (*_WHO, ("what", _note), _RATE, *_TIMES, ("not answered with 200", _not_200))
_START_COLUMNS = (*_WHO, ("what", lambda r: "ready" if r.suite == "start" else _note(r)), ("ms", lambda r: r.median_ms))
_OTHER_COLUMNS = (("suite", lambda r: r.suite), *_WHO, _CLIENTS, *_TIMES, ("what", lambda r: r.note))


def main(argv: Sequence[str]) -> int:
    """Entry point of `hortus bench report`."""
    parser = argparse.ArgumentParser(prog="hortus bench report", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("files", type=text_file, nargs="+", help="JSON lines that suites wrote")
    parser.add_argument(
        "--to",
        type=written_folder,
        default=Path("bench/report"),
        help="folder for report.md, SVG and PNG [bench/report]",
    )
    args = parser.parse_args(argv)
    try:
        from hortus.bench import plots
    except ModuleNotFoundError as e:
        print(f"plots need the package {e.name}: pip install 'hortus[bench]'")
        return 1
    try:
        records = read(args.files)
    except ValueError as e:
        parser.error(str(e))
    if not records:
        parser.error(f"no record in {', '.join(map(str, args.files))}: no line has a target")
    try:
        args.to.mkdir(parents=True, exist_ok=True)
        pictures = {g.slug: plots.draw(g, args.to) for g in groups(records)}
        (args.to / "report.md").write_text(page(records, pictures), encoding="utf-8")
    except OSError as e:
        raise RunError(f"--to {args.to}: {e}") from None
    print(f"{args.to / 'report.md'}: {len(records)} records, {sum(map(len, pictures.values()))} pictures")
    return 0


# README's table.

BEGIN = "<!-- figures: written by `hortus bench readme`, do not edit -->"
END = "<!-- end of figures -->"


SHARED = "shared with other work"
"""Said of hardware in lines whose figures compare only within their run: for the report, not for the README."""


@dataclass(frozen=True, slots=True)
class Table:
    """One table of the README: which machine and model, a column a target, a row a case."""

    title: str
    hardware: str
    model: str
    dtype: str
    columns: tuple[tuple[str, str], ...]
    """(heading, label)"""
    rows: tuple[tuple[str, tuple[str, ...], int, int, int | None, str], ...]
    """(heading, suites, batch, tokens, clients or None for any, field)"""


_ENGINES = (("Hortus", "engine"), ("transformers", "transformers"), ("sentence-transformers", "sentence-transformers"))
_ENCODER_ROWS = tuple(
    (f"{batch} x {tokens} tokens", ("cases", "latency", "throughput"), batch, tokens, None, "median_ms")
    for batch, tokens in ((1, 32), (1, 128), (1, 512), (32, 512), (64, 128))
)
TABLES = (
    Table(
        "NVIDIA H200, 0.6B shape, bf16, in process", "H200", "qwen3-0.6b-random", "bfloat16",
        (("Hortus", "engine"), ("vLLM 0.22.0", "vllm"), ("transformers", "transformers")),
        (
            ("1 x 128 tokens", ("latency", "engine"), 1, 128, None, "median_ms"),
            ("1 x 512 tokens", ("latency", "engine"), 1, 512, None, "median_ms"),
            ("25 x 512 tokens", ("scoring", "engine"), 25, 512, None, "median_ms"),
            ("100 x 512 tokens", ("throughput", "engine"), 100, 512, None, "tokens_per_s"),
        ),
    ),
    Table("NVIDIA H200, bge-base shape, bf16, in process", "H200", "bge-base-random", "bfloat16", _ENGINES, _ENCODER_ROWS),
    Table("NVIDIA H200, ModernBERT-base shape", "H200", "modernbert-base-random", "bfloat16", _ENGINES, _ENCODER_ROWS),
    Table("NVIDIA H200, MiniLM shape", "H200", "minilm-random", "bfloat16", _ENGINES, _ENCODER_ROWS),
    Table(
        "CPU, all-MiniLM-L6-v2, float32", "cores", "all-MiniLM-L6-v2", "float32",
        (
            ("Hortus, HTTP", "hortus-http"), ("Infinity, HTTP", "infinity"), ("Hortus, in process", "hortus"),
            ("sentence-transformers", "sentence-transformers"),
        ),
        (
            ("1 x 16 tokens", ("short",), 1, 16, 1, "median_ms"),
            ("1 x 128 tokens", ("latency",), 1, 128, 1, "median_ms"),
            ("25 x 128 tokens", ("scoring",), 25, 128, 1, "median_ms"),
            ("100 x 128 tokens, 4 clients over HTTP", ("throughput",), 100, 128, None, "tokens_per_s"),
            ("16 clients, 16 tokens each", ("short",), 1, 16, 16, "requests_per_s"),
        ),
    ),
)  # fmt: skip
_UNITS = {"median_ms": "ms", "tokens_per_s": "tokens/s", "requests_per_s": "requests/s"}


def figures(records: Sequence[Record]) -> str:
    """README's tables between their markers. Pure. A case or target without a record is left out."""
    newest = [runs[-1] for runs in latest(records).values()]
    parts = [BEGIN]
    for t in TABLES:
        rows = []
        for heading, suites, batch, tokens, clients, name in t.rows:
            values = []
            for _, who in t.columns:
                found = [
                    r for r in newest
                    if t.hardware in r.hardware and SHARED not in r.hardware
                    and (r.model, r.dtype or t.dtype) == (t.model, t.dtype)
                    and label(r) == who and r.suite in suites
                    and (r.suite != "engine" or sized(r)) and (r.batch, r.tokens) == (batch, tokens)
                    and (clients is None or r.clients == clients)
                ]  # fmt: skip
                # In a run beside peers (latency, scoring, ...) if there is one; `engine` measures Hortus alone.
                best = min(found, key=lambda r: suites.index(r.suite), default=None)
                value = getattr(best, name) if best else None
                values.append("" if value is None else f"{cell(float(f'{value:.3g}'))} {_UNITS[name]}")
            if any(values):
                rows.append([heading, *values])
        if rows:
            parts.append(grid([t.title, *(heading for heading, _ in t.columns)], rows))
    return "\n\n".join([*parts, END])


def with_figures(readme: str, records: Sequence[Record]) -> str:
    """The README with its tables made anew. ValueError when it has no place for them. Pure."""
    if BEGIN not in readme or END not in readme:
        raise ValueError(f"README has no lines {BEGIN} and {END}")
    return readme[: readme.index(BEGIN)] + figures(records) + readme[readme.index(END) + len(END) :]


def readme(argv: Sequence[str]) -> int:
    """Entry point of `hortus bench readme`, from the root of a checkout."""
    parser = argparse.ArgumentParser(
        prog="hortus bench readme", description="Write README's tables from bench/results."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail when README differs")
    args = parser.parse_args(argv)
    path, files = Path("README.md"), sorted(Path("bench/results").glob("*.jsonl"))
    if not (path.is_file() and files):
        parser.error("there is no README.md beside bench/results/*.jsonl here; run it from the root of a checkout")
    try:
        old = path.read_text(encoding="utf-8")
        new = with_figures(old, read(files))
    except ValueError as e:
        parser.error(str(e))
    if args.check and old != new:
        print("README.md does not say what bench/results say: run hortus bench readme")
        return 1
    if old != new:
        path.write_text(new, encoding="utf-8")
    return 0
