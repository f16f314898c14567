"""One run: its targets, and how every case of every suite is warmed up, checked against the reference, and timed.

Nothing is timed before the target's vectors for inputs of the case are within 0.1 % cosine of the reference's, and after each
round the same is asked of answers that were timed: what is right at first, run eagerly, may be wrong once a graph replays it.
Where a request is one text, two different ones are compared: a target that says the same of all is right of one.
A target that is further off is left out from there on, and the run ends with an error. Rounds alternate, so drift of the
machine hits all alike. Does not know what the suites ask for.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np

from hortus.bench.pace import KEPT, UNANSWERED, Closed, Load, NoFigureError, Open, Plan, RunError, told
from hortus.bench.results import NOT_200, Record, add_line, cosines
from hortus.bench.targets import Setting, Target
from hortus.bench.texts import Corpus, Inputs
from hortus.errors import StartError
from hortus.types import Float32

T = TypeVar("T", bound=Target)
V = TypeVar("V")
P = ParamSpec("P")
LEAST_COSINE, LEAST_COSINE_FP8 = 0.999, 0.975
"""To the reference. For fp8: docs/decisions/012-fp8.md."""
WARM_CALLS, WARM_S = 4, 1.0
"""Requests before timing, and the seconds, from the second request on, after which fewer will do. A CUDA graph replays from a
shape's third step on."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Rounds of one case and target, put together."""

    median_ms: float | None
    p99_ms: float | None
    requests_per_s: float | None
    """Median over rounds."""
    answers: int
    spread: float | None
    """(largest - least) / median of the rounds' medians."""
    client_cores: float
    failed: dict[int, int]
    cpu_ms: float | None = None
    """The target's processor time an answer."""
    best_ms: float | None = None
    """Least median of a round."""


def summary(rounds: Sequence[Load]) -> Summary:
    """Latencies of all rounds together; rates by round. What had no good answer counts as later than any: a median or p99 that
    falls on it is None. Pure."""
    every = Load.join(rounds, after_another=True)
    if not len(every.latencies_ms):
        return Summary(None, None, None, 0, None, 0.0, every.failed)
    median, p99 = (_among(every, q) for q in (50, 99))
    medians = [float(np.median(x.latencies_ms)) for x in rounds if len(x.latencies_ms)]
    spread = (max(medians) - min(medians)) / median if median and len(medians) > 1 else None
    rate = float(np.median([x.requests_per_s for x in rounds]))
    cores = every.client_cpu_s / every.seconds if every.seconds else 0.0
    cpu = None if every.target_cpu_s is None else 1000 * every.target_cpu_s / len(every.latencies_ms)
    best = min([m for x in rounds if len(x.latencies_ms) and (m := _among(x, 50)) is not None], default=None)
    return Summary(median, p99, rate, len(every.latencies_ms), spread, cores, every.failed, cpu, best)


def _among(load: Load, percent: float) -> float | None:
    """A percentile of the latencies, where every failure is one without end; None where it is among those."""
    if not (failures := sum(load.failed.values())):
        return float(np.percentile(load.latencies_ms, percent))
    every = np.concatenate([load.latencies_ms, np.full(failures, np.inf)])
    value = float(np.percentile(every, percent, method="higher"))
    return value if np.isfinite(value) else None


@dataclass
class Run:
    """The targets of one call of `hortus bench`, and what to measure them with."""

    setting: Setting
    targets: list[Target]
    corpus: Corpus
    reference: Target | None
    """None: targets are held against the first of them."""
    rounds: int = 5
    seconds: float = 2.0
    """Of each round of each target."""
    only_tokens: tuple[int, ...] = ()
    given: tuple[tuple[int, int], ...] = ((1, 512), (32, 512))
    """(inputs, tokens of each) of the suite `cases`."""
    most_clients: int = 256
    hardware: str | None = None
    dtype: str | None = None
    raw: Path | None = None
    """Every latency goes to this file, a JSON line a round."""
    refused: dict[str, str] = field(default_factory=dict)
    suite: str | None = None
    """The one that runs."""
    told: list[Record] = field(default_factory=list)
    _cosine: dict[str, float] = field(default_factory=dict)
    _wants: deque[tuple[Inputs, list[Float32]]] = field(default_factory=lambda: deque(maxlen=2))
    """The first inputs of requests last held against the reference, and what it made of those that are compared: two sizes take
    turns in `mixed`."""

    @property
    def longest(self) -> int:
        return self.setting.folder.max_tokens

    def sizes(self, wanted: Sequence[int]) -> list[int]:
        """The wanted token counts (or --tokens'), those over the model's limit as one of that limit."""
        return sorted({min(n, self.longest) for n in (self.only_tokens or wanted)})

    def clients(self, wanted: Sequence[int]) -> list[int]:
        return sorted({min(n, self.most_clients) for n in wanted})

    def turn(self, targets: Sequence[T], number: int) -> list[T]:
        """The targets in another order each round."""
        at = number % max(len(targets), 1)
        return [*targets[at:], *targets[:at]]

    def ready(self, requests: Sequence[Inputs], *, served: bool = False) -> list[Target]:
        """The targets that may be timed on these requests: warmed up, and right. Those that are not are left out for good."""
        asked = [t for t in self.targets if t.served or not served]
        if not asked:
            return []
        self.nothing_held()
        wants = self._truths(requests) if self.reference else []
        good = []
        for t in asked:
            try:
                answers = self._warmed(t, requests)
                wanted = wants or answers[: len(_compared(requests))]
                for rows, want in zip(answers, wanted, strict=False):
                    self.hold(t, rows, want)
            except Exception as e:  # noqa: BLE001  whatever a target does, the others' figures must not be lost
                self.failed(t, _size(requests[0]), e)
                continue
            wants = wanted  # where there is no reference, of the first that is right
            good.append(t)
        self._wants.append((requests[0], wants))
        return good

    def _warmed(self, target: Target, requests: Sequence[Inputs]) -> list[Float32]:
        """What it answers to the first requests, at least KEPT of them, before anything is timed."""
        answers: list[Float32] = []
        begin = 0.0
        for i in range(WARM_CALLS):
            if i == 1:  # the first may compile kernels: it says nothing of how long the others take
                begin = time.perf_counter()
            elif i >= KEPT and time.perf_counter() - begin > WARM_S:
                break
            answers.append(target.vectors(requests[i % len(requests)]))
        return answers

    def nothing_held(self) -> None:
        """What was compared until now says nothing of what comes: records have the least cosine of their own case."""
        self._cosine.clear()

    def hold(self, target: Target, rows: Float32, want: Float32) -> None:
        """NoFigureError unless every vector is as near to the one that is wanted as it must be."""
        if rows.shape != want.shape:
            raise NoFigureError(f"vectors of shape {rows.shape}, the reference has {want.shape}")
        cosine = float(cosines(rows, want).min())
        least = LEAST_COSINE_FP8 if self.setting.dtype == "fp8" else LEAST_COSINE
        if not cosine >= least:  # NaN as well
            raise NoFigureError(f"cosine {cosine:.5f} to the reference, least wanted {least}")
        self._cosine[target.name] = min(cosine, self._cosine.get(target.name, cosine))

    def still_right(self, target: Target, requests: Sequence[Inputs], load: Load) -> Load:
        """The load, if answers that it timed are as right as those before it. NoFigureError otherwise."""
        wants = next((rows for inputs, rows in self._wants if inputs is requests[0]), [])
        if not wants and load.answers:
            wants = self._truths(requests)
            self._wants.append((requests[0], wants))
        for number, answer in load.answers:
            if number < len(wants):
                try:
                    self.hold(target, target.rows(answer), wants[number])
                except Exception as e:
                    raise NoFigureError(f"an answer while it was timed: {e}") from e
        return load

    def attempt(self, target: Target, what: str, call: Callable[P, V], *args: P.args, **kwargs: P.kwargs) -> V | None:
        """What the call returns. None when it fails: the target is left out, and the others go on."""
        try:
            return call(*args, **kwargs)
        except RunError:
            raise
        except Exception as e:  # noqa: BLE001  whatever a target does, the others' figures must not be lost
            self.failed(target, what, e)
            return None

    def failed(self, target: Target, what: str, e: Exception) -> None:
        """Leave the target out, and say why."""
        words = str(e) if isinstance(e, NoFigureError | StartError) else f"{type(e).__name__}: {e}"
        self._leave_out(target, f"at {what}: {words}")

    def passed_over(self, suite: str) -> None:
        """Say of which targets a suite over HTTP asks nothing."""
        for t in self.targets:
            if not t.served:
                print(f"  {suite}: {t.name} is no server; passed over", flush=True)

    def _leave_out(self, target: Target, why: str) -> None:
        print(f"  LEFT OUT: {target.name}: {why}", flush=True)
        self.refused[target.name] = why
        if target in self.targets:
            self.targets.remove(target)
        target.close()

    def truth(self, inputs: Inputs) -> Float32:
        """[inputs, width] the reference's rows, or those of the first target that gives any. RunError when there are none."""
        while self.reference or self.targets:
            source = self.reference or self.targets[0]
            try:
                return source.vectors(inputs)
            except Exception as e:
                if source is self.reference:
                    raise RunError(
                        f"the reference fails at {_size(inputs)} ({type(e).__name__}: {e}); "
                        "--reference none takes the first target"
                    ) from e
                self.failed(source, _size(inputs), e)
        raise RunError("no target is left to measure")

    def _truths(self, requests: Sequence[Inputs]) -> list[Float32]:
        return [self.truth(r) for r in _compared(requests)]

    def timed(self, target: Target, requests: Sequence[Inputs], plan: Plan) -> Load:
        """A load whose answers are right. NoFigureError."""
        return self.keep(target, requests, plan, self.still_right(target, requests, target.load(requests, plan)))

    def keep(self, target: Target, requests: Sequence[Inputs], plan: Plan, load: Load, note: str | None = None) -> Load:
        """The load, its latencies written out when --raw asks for them, under the names that records have. What the target has
        still to do is done: it would take time from the next."""
        if self.raw:
            clients = plan.clients if isinstance(plan, Closed) else None
            line = {
                "suite": self.suite, "target": target.name, "model": self.setting.folder.name,
                "batch": len(requests[0].texts), "tokens": requests[0].ids.max_seqlen,
                "clients": clients,
                "offered_per_s": plan.rate if isinstance(plan, Open) else None,
                "failed": load.failed, "note": note, "ms": [round(float(x), 4) for x in load.latencies_ms],
            }  # fmt: skip
            add_line(self.raw, json.dumps(line))
        if UNANSWERED in load.failed:
            target.vectors(requests[0])
        return load

    def case(self, suite: str, batch: int, tokens: int, clients: int, *, served: bool = False) -> list[Record]:
        """One size by so many clients on every target that can take it, in alternating rounds. One Record a target."""
        requests = self.corpus.several(batch, tokens, 64 if batch == 1 else 8 if batch <= 25 else 4)
        targets = self.ready(requests, served=served)
        loads: dict[str, list[Load]] = {t.name: [] for t in targets}
        for number in range(-1, self.rounds):  # round -1 is not counted: graphs of larger steps, grown pools
            for t in self.turn(targets, number):
                n = clients if t.served else 1
                what = f"{_size(requests[0])} from {n} clients"
                if number >= 0:
                    load = self.attempt(t, what, self.timed, t, requests, Closed(n, self.seconds))
                    loads[t.name] += [load] if load else []
                elif n > 1:
                    self.attempt(t, what, t.load, requests, Closed(n, min(1.0, 2 * self.seconds)))
            targets = [t for t in targets if t in self.targets]
        records = []
        for t in targets:
            record = self.record(suite, t, summary(loads[t.name]), batch, tokens, clients if t.served else 1)
            if t is not targets[0]:
                pairs = zip(loads[targets[0].name], loads[t.name], strict=True)
                record.ratio = float(np.median([b.requests_per_s / a.requests_per_s for a, b in pairs]))
            records.append(self.tell(record))
        return records

    def tell(self, record: Record) -> Record:
        """Print a line of it at once, and return it."""
        self.kept(record)
        size = f"{record.batch or '-'} x {record.tokens or '-'}"
        print(
            f"  {record.suite:<11} {record.target:<22} {size:>9}, {record.clients or '-':>3} clients "
            f"{_told(record.median_ms)} ms, p99 {_told(record.p99_ms)}, {_told(record.tokens_per_s, 9, 0)} tokens/s",
            flush=True,
        )
        return record

    def kept(self, record: Record) -> Record:
        """The record, which is not lost when its suite is cut short."""
        self.told.append(record)
        return record

    def record(
        self, suite: str, target: Target, s: Summary, batch: int | None, tokens: int | None, clients: int | None = 1
    ) -> Record:
        """What all suites say of a case."""
        notes = [target.about]
        if s.spread is not None:
            notes.append(f"rounds' medians within {s.spread:.0%}")
        if 0 < s.answers < 100:
            notes.append(f"p99 of {s.answers} answers")
        if s.failed:
            notes.append(NOT_200 + told(s.failed))
        record = Record(
            suite=suite, target=target.name, model=self.setting.folder.name, dtype=self.dtype, batch=batch, tokens=tokens,
            clients=clients, median_ms=s.median_ms, p99_ms=s.p99_ms, requests_per_s=s.requests_per_s,
            rounds=s.answers or None, note="; ".join(notes), cosine=self._cosine.get(target.name),
            cpu_ms=s.cpu_ms, best_ms=s.best_ms,
        )  # fmt: skip
        if s.requests_per_s and batch and tokens:
            record.tokens_per_s = s.requests_per_s * batch * tokens
        if target.served and s.answers:
            record.client_cores = s.client_cores
        if self.hardware:
            record.hardware = self.hardware
        if not target.in_format:
            record.dtype = None
        if target.elsewhere and target.elsewhere not in (
            "127.0.0.1",
            "localhost",
            "::1",
        ):  # on what it computes, it does not say
            record.hardware = f"that of {target.elsewhere}, asked from {record.hardware}"
        return record

    def close(self) -> None:
        with ExitStack() as closing:  # each, whatever becomes of the others
            for t in [*self.targets, *([self.reference] if self.reference else [])]:
                closing.callback(t.close)
            closing.callback(self.setting.clients.close)


def _told(value: float | None, width: int = 10, digits: int = 3) -> str:
    """A figure for the line of a case; what was not measured is no 0."""
    return f"{'-':>{width}}" if value is None else f"{value:{width},.{digits}f}"


def _compared(requests: Sequence[Inputs]) -> Sequence[Inputs]:
    """Those whose answers are held against the reference, which is slow: two texts, or the many of one request."""
    return requests[: KEPT if len(requests[0].texts) == 1 else 1]


def _size(inputs: Inputs) -> str:
    return f"{len(inputs.texts)} x {inputs.ids.max_seqlen} tokens"
