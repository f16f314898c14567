"""How far a run is and how fast: a line for a terminal, or JSON lines for a program. Does not know what is embedded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from hortus.start import spill

log = logging.getLogger("hortus.corpus")

EVERY_S = {"bar": 0.25, "json": 5.0}


@dataclass(slots=True)
class Counts:
    """Since this process began."""

    rows: int = 0
    rejected: int = 0
    tokens: int = 0
    bytes: float = 0.0


class Progress:
    """Told of every window; says something now and then, at the end in any case."""

    def __init__(
        self,
        how: str,
        *,
        total_bytes: int,
        done_bytes: float = 0.0,
        total_rows: int | None = None,
        done_rows: int = 0,
        busy_s: Callable[[], float | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """how: bar, json, none, or auto (a bar on a terminal). done_*: what earlier runs have done. total_rows: None when
        the inputs do not say."""
        self._out = sys.stdout
        self._how = ("bar" if sys.stderr.isatty() else "json") if how == "auto" else how
        self._total_bytes, self._done_bytes = total_bytes, done_bytes
        self._total_rows, self._done_rows = total_rows, done_rows
        self._busy_s, self._clock = busy_s, clock
        self._begun = self._told = clock()
        self.counts = Counts()

    def add(self, *, rows: int, rejected: int, tokens: int, bytes: float, skipped: float = 0.0) -> None:
        """A window is done. skipped: bytes before it that an earlier run has done."""
        self._done_bytes += skipped
        c = self.counts
        c.rows, c.rejected, c.tokens, c.bytes = c.rows + rows, c.rejected + rejected, c.tokens + tokens, c.bytes + bytes
        self.tell()

    def tell(self) -> None:
        """Say how far it is, where that was last said long enough ago."""
        now = self._clock()
        if self._how != "none" and now - self._told >= EVERY_S[self._how]:
            self._told = now
            self._say(self.state("progress"))

    @contextlib.asynccontextmanager
    async def telling(self) -> AsyncIterator[None]:
        """Inside, it is said also while no window is done: the first one may take minutes."""

        async def now_and_then() -> None:
            while self._how != "none":
                await asyncio.sleep(EVERY_S[self._how])
                self.tell()

        task = asyncio.create_task(now_and_then())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    def end(self, event: str, **more: Any) -> None:
        """The last word: `done` or `stopped`."""
        if self._how != "none":
            self._say({**self.state(event), **more})
        if self._how == "bar":
            sys.stderr.write("\n")

    def state(self, event: str) -> dict[str, Any]:
        """Everything there is to say, as the JSON line has it. Rates are of this process; shares and rows of the whole run."""
        c, seconds = self.counts, max(self._clock() - self._begun, 1e-9)
        share = (self._done_bytes + c.bytes) / self._total_bytes if self._total_bytes else 1.0
        if self._total_rows:
            share = (self._done_rows + c.rows + c.rejected) / self._total_rows
        if event == "done":
            share = 1.0  # also where the last of a file held no rows
        left = max(1.0 - share, 0.0)
        speed = (share - (self._done_rows / self._total_rows if self._total_rows else self._first_share())) / seconds
        busy = self._busy_s()
        return {
            "event": event,
            "seconds": round(seconds, 3),
            "rows": self._done_rows + c.rows + c.rejected,
            "total_rows": self._total_rows,
            "rejected": c.rejected,
            "tokens": c.tokens,
            "rows_per_s": round((c.rows + c.rejected) / seconds, 2),
            "tokens_per_s": round(c.tokens / seconds, 1),
            "share": round(min(share, 1.0), 4),
            "eta_s": round(left / speed, 1) if speed > 0 else None,
            "device_busy": None if busy is None else round(min(busy / seconds, 1.0), 3),
        }

    def _first_share(self) -> float:
        return self._done_bytes / self._total_bytes if self._total_bytes else 0.0

    def _say(self, state: dict[str, Any]) -> None:
        try:
            self._write(json.dumps(state) + "\n" if self._how == "json" else "\r\x1b[K" + line(state))
        except OSError as e:  # a full disk, or a reader that has gone: the vectors are worth more than the telling
            log.warning("progress is told no more: %s", e)
            self._how = "none"

    def _write(self, text: str) -> None:
        stream = self._out if self._how == "json" else sys.stderr
        try:
            stream.write(text)
            stream.flush()
        except OSError:
            spill(stream)
            raise


def line(state: dict[str, Any]) -> str:
    """For a terminal, within 100 columns. Pure."""
    share, width = state["share"], 20
    bar = "#" * round(share * width)
    of = f"/{state['total_rows']:,}" if state["total_rows"] else ""
    busy = "" if state["device_busy"] is None else f"  device {state['device_busy']:.0%}"
    rejected = f"  {state['rejected']:,} rejected" if state["rejected"] else ""
    left = "" if state["eta_s"] is None or state["event"] != "progress" else f"  {_clock(state['eta_s'])} left"
    return (
        f"[{bar:<{width}}] {share:4.0%}  {state['rows']:,}{of} rows  {state['rows_per_s']:,.0f} rows/s  "
        f"{state['tokens_per_s']:,.0f} tokens/s{busy}{left}{rejected}"
    )


def _clock(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
