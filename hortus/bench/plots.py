"""The report's pictures, each as SVG and PNG. Knows matplotlib and Records; imported by report.py alone.

Colours follow the target, not its place in the list, so that the same target looks alike in every picture of a group, and no
two do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from hortus.bench.report import Group, label, sized
from hortus.bench.results import Record

_COLOURS = {
    "engine": "#1b7f4b", "hortus": "#55b27f", "hortus-http": "#0b4f2e", "serve": "#0b4f2e", "vllm": "#d1495b",
    "infinity": "#e08e2b", "sentence-transformers": "#3d6fb6", "transformers": "#8a9bb8", "transformers-compile": "#6d5ba8",
}  # fmt: skip
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: small files, and it can be searched
    "svg.hashsalt": "hortus",  # the same picture, the same bytes
    "text.parse_math": False,  # names may hold a $
    "font.size": 10,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
}

Colours = dict[str, str]


def draw(group: Group, folder: Path) -> list[str]:
    """Every picture the group has records for; returns the stems of the files written."""
    made, colours = [], _colours(group.records)
    with plt.rc_context(_STYLE):
        for kind, drawing in _KINDS.items():
            figure, axes = plt.subplots(figsize=(7.5, 4.2))
            if drawing(axes, group.records, colours):
                axes.set_title(group.title, fontsize=9, loc="left")
                if axes.get_legend_handles_labels()[0]:
                    axes.legend(frameon=False, fontsize=8)
                stem = f"{kind}-{group.slug}"
                figure.savefig(folder / f"{stem}.svg", bbox_inches="tight", metadata={"Date": None})
                figure.savefig(folder / f"{stem}.png", bbox_inches="tight", dpi=130, metadata={"Software": None})
                made.append(stem)
            plt.close(figure)
    return made


def _plain(value: float, position: float) -> str:
    """4096 and 0.5, not powers of ten."""
    return f"{value:,.10g}"


def _colours(records: Sequence[Record]) -> dict[str, str]:
    """Of each target: its own, or another where that is taken, as long as there are others."""
    cycle = [to_hex(c) for c in plt.rcParams["axes.prop_cycle"].by_key()["color"]]  # words or numbers, by the version
    rest = [c for c in cycle if c not in _COLOURS.values()]
    found: dict[str, str] = {}
    for name in sorted({_shown(r) for r in records}, key=lambda name: (name not in _COLOURS, name)):
        own = sum(map(ord, name)) % len(rest)
        wanted = [*([_COLOURS[name]] if name in _COLOURS else []), *rest[own:], *rest[:own]]
        found[name] = next((c for c in wanted if c not in found.values()), wanted[0])
    return found


def _shown(r: Record) -> str:
    """A target's name for a legend, which leaves out what begins with _."""
    name = label(r)
    return f" {name}" if name.startswith("_") else name


def _by_target(records: Sequence[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for r in records:
        found.setdefault(_shown(r), []).append(r)
    order = [*_COLOURS]
    return dict(sorted(found.items(), key=lambda x: order.index(x[0]) if x[0] in order else len(order)))


def _peers_last(records: Sequence[Record]) -> list[Record]:
    """A size may be in several suites, of which the last counts: one run beside peers rather than `engine`, ours alone."""
    return sorted(records, key=lambda r: r.suite != "engine")


def latency(axes: Axes, records: Sequence[Record], colours: Colours) -> bool:
    """A group of bars a size: median, with a line up to the 99th percentile."""
    rows = [r for r in _peers_last(records) if sized(r) and r.suite != "throughput"]
    sizes = sorted({(r.batch or 0, r.tokens or 0) for r in rows})
    targets = _by_target(rows)
    width = 0.8 / max(len(targets), 1)
    for i, (name, mine) in enumerate(targets.items()):
        by_size = {(r.batch or 0, r.tokens or 0): r for r in mine}
        at = [k + (i - (len(targets) - 1) / 2) * width for k, s in enumerate(sizes) if s in by_size]
        shown = [by_size[s] for s in sizes if s in by_size]
        ms = [r.median_ms or 0.0 for r in shown]
        tails = [max((r.p99_ms or 0.0) - m, 0.0) for r, m in zip(shown, ms, strict=True)]
        axes.bar(at, ms, width, label=name, color=colours[name], yerr=[[0.0] * len(ms), tails], error_kw={"lw": 0.8})
    if rows:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_plain)
        axes.set_xticks(range(len(sizes)), [f"{b} x {t}" for b, t in sizes], fontsize=8)
        axes.set(xlabel="inputs x tokens", ylabel="ms a request: median, line to p99")
    return bool(rows)


def throughput(axes: Axes, records: Sequence[Record], colours: Colours) -> bool:
    """Tokens a second by the tokens of one request."""
    rows = [r for r in _peers_last(records) if sized(r) and r.tokens_per_s]
    for name, mine in _by_target(rows).items():
        points = sorted({(r.batch or 0) * (r.tokens or 0): r.tokens_per_s or 0.0 for r in mine}.items())
        axes.plot(*zip(*points, strict=True), marker="o", ms=4, label=name, color=colours[name])
    if rows:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(_plain)
        axes.yaxis.set_major_formatter(_plain)
        axes.set_ylim(bottom=0)
        axes.set(xlabel="tokens a request", ylabel="tokens/s")
    return bool(rows)


def clients(axes: Axes, records: Sequence[Record], colours: Colours) -> bool:
    """Requests a second by number of clients, a line a target and size."""
    rows = [r for r in records if r.suite in ("concurrency", "short") and r.clients and r.requests_per_s]
    for name, mine in _by_target(rows).items():
        for tokens, style in zip(sorted({r.tokens or 0 for r in mine}, reverse=True), ("-", "--", ":"), strict=False):
            points = sorted((r.clients or 0, r.requests_per_s or 0.0) for r in mine if r.tokens == tokens)
            if len(points) > 1:
                text = f"{name}, {tokens} tokens"
                axes.plot(*zip(*points, strict=True), style, marker="o", ms=4, label=text, color=colours[name])
    if rows:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(_plain)
        axes.set_ylim(bottom=0)
        axes.set(xlabel="clients", ylabel="requests/s")
    return bool(rows)


def arrivals(axes: Axes, records: Sequence[Record], colours: Colours) -> bool:
    """Latency against offered load: median and 99th percentile."""
    rows = [r for r in records if r.suite == "arrivals" and r.offered_per_s and r.median_ms]
    for name, mine in _by_target(rows).items():
        mine.sort(key=lambda r: r.offered_per_s or 0.0)
        x = [r.offered_per_s or 0.0 for r in mine]
        axes.plot(x, [r.median_ms or 0.0 for r in mine], marker="o", ms=4, label=f"{name}, median", color=colours[name])
        axes.plot(
            x, [r.p99_ms or math.nan for r in mine], "--", marker="o", ms=4, label=f"{name}, p99", color=colours[name]
        )
    if rows:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_plain)
        axes.set(xlabel="requests/s that fall due (Poisson)", ylabel="ms from when each was due")
    return bool(rows)


def graphs(axes: Axes, records: Sequence[Record], colours: Colours) -> bool:
    """Share of steps that replay a graph, over time."""
    rows = [r for r in records if r.suite == "graphs" and r.hit_rate is not None]
    for name, mine in _by_target(rows).items():
        points = sorted((r.at_s or 0.0, 100 * (r.hit_rate or 0.0)) for r in mine)
        axes.plot(*zip(*points, strict=True), marker="o", ms=3, label=name, color=colours[name])
    if rows:
        axes.set_ylim(0, 102)
        axes.set(xlabel="seconds", ylabel="steps that replay a graph, %")
    return bool(rows)


_KINDS: dict[str, Callable[[Axes, Sequence[Record], Colours], bool]] = {
    f.__name__: f for f in (latency, throughput, clients, arrivals, graphs)
}
