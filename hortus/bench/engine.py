"""`hortus bench engine`: is the GPU engine right, then how fast, on the shapes of pplx-embed. For a machine lent by the minute.

The physics first. A 0.6B model reads 0.9 GB of matrices a step: 0.2 ms at 4.3 TB/s, while a step of 128 tokens has some
230 kernels, so below 256 tokens the gaps between kernels decide. From 512 tokens on the matrices' arithmetic does: 0.9
GFLOP a token, 790 TFLOP/s at best. One launch a step, few kernels, and no bytes moved twice are what there is to gain.

Parts (`--parts a,b`; each is short, so that one call is full): check, times, host, capture, crossover, pieces, waits,
slots, overlap, random, profile. Prints a table last; `--out FILE` appends JSON lines. On the CPU: `--shape tiny`, where
only check and times apply.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hortus.bench import reference
from hortus.bench.results import Record, append, median_p99, table
from hortus.config import RoseConfig
from hortus.folder import open_folder
from hortus.metrics import Metrics
from hortus.rose.device import CudaDevice
from hortus.rose.engine import open_engine
from hortus.rose.gpu import GpuEngine
from hortus.types import Engine, TokenBatch

CASES = ((1, 16), (1, 128), (1, 512), (1, 4096), (5, 512), (25, 512), (50, 512), (100, 512))
CASES_4B = ((1, 512), (25, 512))
MIXES = ([1], [16], [128], [1, 7, 33, 128, 511, 64, 2], [1, 2048, 3, 300], [16] * 32, [5, 4000], [512] * 10, [1] * 70)


class Bench:
    """One opened model and the records of what was measured on it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.shape = reference.SHAPES[args.shape]
        if args.layers:
            self.shape = self.shape._replace(layers=args.layers)
        self.gpu = torch.cuda.is_available()
        self.hardware = torch.cuda.get_device_name() if self.gpu else None
        self.dtype = "bfloat16" if self.gpu else "float32"
        self.rng = np.random.default_rng(0)
        self.records: list[Record] = []
        self.work = Path(tempfile.mkdtemp(prefix="hortus-bench-"))
        self._device: CudaDevice | None = None
        self._engine: Engine | None = None

    @property
    def device(self) -> CudaDevice:
        if self._device is None:
            self._device = CudaDevice()
        return self._device

    def open(self, folder: Path, *, dummy: bool, **knobs: Any) -> Engine:
        config = RoseConfig(
            load_format="dummy" if dummy else "auto", attention=self.args.attention, **({"max_length": 8192} | knobs)
        )
        started = time.perf_counter()
        opened = open_folder(str(folder), max_length=8192)
        engine = open_engine(opened, config, Metrics())
        print(f"opened in {time.perf_counter() - started:.1f} s: {engine.info}", flush=True)
        return engine

    @property
    def engine(self) -> Engine:
        """The model with dummy weights, opened once."""
        if self._engine is None:
            folder = reference.write_folder(self.work / "dummy", self.shape, causal=False)
            self._engine = self.open(folder, dummy=True)
        return self._engine

    def again(self, engine: Engine | None = None, *, device: CudaDevice | None = None, **knobs: Any) -> GpuEngine:
        """The same weights under other rules."""
        base = engine or self.engine
        assert isinstance(base, GpuEngine), "this part needs a GPU"
        step = knobs.pop("step_tokens", 4096)
        return GpuEngine(
            base.network, base.info, RoseConfig(**knobs), Metrics(), device=device or self.device, step_tokens=step
        )

    def batch(self, *lengths: int) -> TokenBatch:
        return reference.batch_of(self.rng, lengths, self.shape.vocab)

    def add(self, case: str, *, ms: Sequence[float] = (), batch: TokenBatch | None = None, **values: Any) -> None:
        """Note one case and print it at once: a call that runs out of time still leaves what it had."""
        if ms:
            values["median_ms"], values["p99_ms"] = median_p99(ms)
            values["rounds"] = len(ms)
            if batch is not None:
                values["tokens_per_s"] = batch.total_tokens / values["median_ms"] * 1e3
        if batch is not None:
            values["batch"], values["tokens"] = len(batch), round(batch.total_tokens / len(batch))
        record = Record(
            suite="engine",
            target="hortus",
            model=f"qwen3-{self.args.shape}-random",
            dtype=self.dtype,
            note=case,
            **values,
        )
        if self.hardware:
            record.hardware = self.hardware
        self.records.append(record)
        print(table([record]).splitlines()[-1], flush=True)


def timed(run: Callable[[], object], *, rounds: int, seconds: float = 3.0) -> list[float]:
    """Milliseconds of each call, up to `rounds` of them or so many seconds, at least 5."""
    ms: list[float] = []
    end = time.perf_counter() + seconds
    while len(ms) < rounds and (len(ms) < 5 or time.perf_counter() < end):
        started = time.perf_counter()
        run()
        ms.append((time.perf_counter() - started) * 1e3)
    return ms


def gauge(engine: GpuEngine, name: str) -> float:
    return engine.metrics.registry.get_sample_value(name) or 0.0


# Parts -----------------------------------------------------------------------------------------------------------------


def check(b: Bench) -> None:
    """Against transformers in float32; replay = eager; alone = in a mix; poisoned memory."""
    two_ways = reference.write_folder(b.work / "mean", b.shape, causal=False)
    one_way = reference.write_folder(b.work / "last", b.shape, causal=True)
    model = reference.random_model(b.shape, [two_ways, one_way], device="cuda" if b.gpu else "cpu")
    bar = 0.999 if b.gpu else 0.99999
    for folder, causal in ((two_ways, False), (one_way, True)):
        engine = b.open(folder, dummy=False)
        worst = 1.0
        for lengths in MIXES:
            batch = b.batch(*lengths)
            want = reference.truth(model, batch, causal=causal)
            got = [engine.step(batch).result() for _ in range(3)]  # on a GPU: eager, capture, replay
            least = min(float(reference.cosines(rows, want).min()) for rows in got)
            worst = min(worst, least) if least == least else least
            same = all(np.array_equal(rows, got[0]) for rows in got)
            verdict = "ok" if least >= bar and same else "WRONG"
            print(
                f"  {verdict}: causal={causal} {str(lengths)[:40]}: cosine {least:.6f}, bit for bit {same}", flush=True
            )
        alone, mixed = 1.0, b.batch(*[int(n) for n in b.rng.integers(1, 600, 24)])
        rows = engine.step(mixed).result()
        for i in range(len(mixed)):
            alone = min(
                alone, float(reference.cosines(engine.step(mixed.slice(i, i + 1)).result(), rows[i : i + 1])[0])
            )
        name = "causal, last token" if causal else "both ways, mean"
        b.add(f"check {name}: least cosine", ratio=worst)
        b.add(f"check {name}: least cosine alone against in a mix", ratio=alone)
        if b.gpu:
            b.add(f"check {name}: rows unchanged by poisoned memory", ratio=float(poisoned(b, engine)))
        engine.close()


def poisoned(b: Bench, engine: Engine) -> bool:
    """Whether rows stay the same when all the memory a step may use held NaN before it ran."""
    device = CudaDevice()
    device.enter()
    size = 1 << 30
    with torch.inference_mode():
        poison = device.capture(lambda: torch.full((size,), torch.nan, dtype=torch.float16, device="cuda"))
    poison.rows = torch.empty(0)  # gives the memory back to the graphs' pool, where the next captures find it
    under_test = b.again(engine, device=device)
    good = True
    for lengths in ([1], [5, 90], [3, 200, 77, 1], [16] * 20, [700, 900, 1, 33]):
        batch = b.batch(*lengths)
        clean = engine.step(batch).result()
        for _ in range(4):
            device.enter()
            poison.graph.replay()
            with torch.inference_mode():
                torch.full((size,), torch.nan, dtype=torch.float16, device="cuda")  # freed at once: eager's memory
            rows = under_test.step(batch).result()
            good &= bool(np.isfinite(rows).all()) and float(reference.cosines(rows, clean).min()) > 0.99999
    under_test.close()
    torch.cuda.empty_cache()
    return good


def times(b: Bench) -> None:
    """Host to host: ids in numpy to rows in numpy."""
    cases = CASES_4B if b.args.shape == "4b" else CASES
    ways: list[tuple[str, Engine]] = [("cpu", b.engine)]
    if b.gpu:
        ways = [("replay", b.again()), ("eager", b.again(cuda_graphs=False))]
    for how, engine in ways:
        for count, tokens in cases:
            batch = b.batch(*[tokens] * count)
            for _ in range(3):
                engine.step(batch).result()
            b.add(how, ms=timed(lambda: engine.step(batch).result(), rounds=b.args.rounds), batch=batch)  # noqa: B023
        engine.close()


def host(b: Bench) -> None:
    """What the host spends in step() on a replay, the device being idle; then in result() once the rows are there."""
    engine = b.again()
    for lengths in ([16], [128], [16] * 32, [512] * 8, [512] * 25):
        batch = b.batch(*lengths)
        for _ in range(3):
            engine.step(batch).result()
        enqueue, collect = [], []
        for _ in range(300):
            started = time.perf_counter()
            lazy = engine.step(batch)
            enqueue.append((time.perf_counter() - started) * 1e3)
            torch.cuda.synchronize()
            started = time.perf_counter()
            lazy.result()
            collect.append((time.perf_counter() - started) * 1e3)
        b.add("host: step()", ms=enqueue, batch=batch)
        b.add("host: result()", ms=collect, batch=batch)
    engine.close()


def capture(b: Bench) -> None:
    """Milliseconds and memory of captures: the pool, and all that the device lost."""
    engine = b.again()
    for lengths in (
        [64],
        [128],
        [16] * 32,
        [512],
        [512] * 2,
        [512] * 4,
        [512] * 8,
        [64] * 64,
        [4096],
        [128] * 32,
        [300] * 5,
    ):
        batch = b.batch(*lengths)
        engine.step(batch).result()
        before, free = gauge(engine, "hortus_graph_memory_bytes"), torch.cuda.mem_get_info()[0]
        ms = timed(lambda: engine.step(batch).result(), rounds=1, seconds=0)[:1]  # noqa: B023
        pool = (gauge(engine, "hortus_graph_memory_bytes") - before) / 2**20
        lost = (free - torch.cuda.mem_get_info()[0]) / 2**20
        b.add(f"capture: pool +{pool:.1f} MiB, device +{lost:.1f} MiB", ms=ms, batch=batch)
    engine.close()


def crossover(b: Bench) -> None:
    """From which size on eager is as fast."""
    knobs: dict[str, Any] = {"graph_max_tokens": 16384}
    opened = b.open(reference.write_folder(b.work / "dummy", b.shape, causal=False), dummy=True, **knobs)
    ways = [b.again(opened, step_tokens=16384, cuda_graphs=g, **knobs) for g in (True, False)]
    for tokens in (64, 256, 1024, 2048, 4096, 6144, 8192, 16384):
        batch = b.batch(*[min(tokens, 512)] * max(1, tokens // 512))
        for how, engine in zip(("replay", "eager"), ways, strict=True):
            for _ in range(3):
                engine.step(batch).result()
            ms = timed(lambda: engine.step(batch).result(), rounds=30, seconds=1)  # noqa: B023
            b.add(f"crossover: {how}", ms=ms, batch=batch)
    for engine in ways:
        engine.close()


def pieces(b: Bench) -> None:
    """Into what pieces a large batch is best cut."""
    for count, tokens in ((100, 512), (25, 512), (400, 128)):
        batch = b.batch(*[tokens] * count)
        for step in (1024, 2048, 3072, 4096, 6144, 8192, 16384, 65536):
            engine = b.again(step_tokens=step, graph_max_tokens=max(4096, min(step, 16384)))
            for _ in range(3):
                engine.step(batch).result()
            ms = timed(lambda: engine.step(batch).result(), rounds=20, seconds=1.5)  # noqa: B023
            b.add(f"pieces of {step}", ms=ms, batch=batch)
            engine.close()


def waits(b: Bench) -> None:
    """Spinning on the event against sleeping in the driver: latency, and what of a core it burns."""
    for blocking in (False, True):
        engine = b.again(device=CudaDevice(blocking=blocking))
        for lengths in ([16], [128], [512] * 8):
            batch = b.batch(*lengths)
            for _ in range(3):
                engine.step(batch).result()
            cpu = time.process_time()
            ms = timed(lambda: engine.step(batch).result(), rounds=500, seconds=3)  # noqa: B023
            share = (time.process_time() - cpu) / (sum(ms) / 1e3)
            b.add(f"waits: {'sleep' if blocking else 'spin'}, {share:.0%} of a core", ms=ms, batch=batch)
        engine.close()


def slots(b: Bench) -> None:
    """What empty sequence slots cost: 33 sequences get 64 slots, 32 get 32."""
    engine = b.again()
    for lengths in (
        [16] * 30 + [24] * 2,
        [16] * 33,
        [512],
        [256] * 2,
        [256] * 2 + [1],
        [4] * 128,
        [4] * 129,
        [15] * 256,
        [15] * 257,
    ):
        batch = b.batch(*lengths)
        for _ in range(3):
            engine.step(batch).result()
        ms = timed(lambda: engine.step(batch).result(), rounds=100, seconds=1)  # noqa: B023
        b.add("slots", ms=ms, batch=batch)
    engine.close()


def overlap(b: Bench) -> None:
    """Steps in a row with one and with two in flight."""
    engine = b.again()
    for lengths in ([128], [16] * 32, [512] * 8):
        batch = b.batch(*lengths)
        for _ in range(3):
            engine.step(batch).result()
        for depth in (1, 2):
            ms, waiting = [], [engine.step(batch) for _ in range(depth - 1)]
            last = time.perf_counter()
            for _ in range(200):
                waiting.append(engine.step(batch))
                waiting.pop(0).result()
                now = time.perf_counter()
                ms.append((now - last) * 1e3)
                last = now
            for lazy in waiting:
                lazy.result()
            b.add(f"overlap: {depth} in flight, a step", ms=ms, batch=batch)
    engine.close()


def random(b: Bench) -> None:
    """Random shapes for --minutes; device memory must go flat."""
    engine = b.again()
    end = time.perf_counter() + 60 * b.args.minutes
    begin, seen, steps, tokens, bad = time.perf_counter(), [], 0, 0, 0
    after = begin
    while time.perf_counter() < end:
        n = int(2 ** b.rng.uniform(0, 7))
        lengths = np.minimum(2 ** b.rng.uniform(0, 11, n), 16384 / n + 1).astype(int)
        batch = b.batch(*[int(x) for x in np.maximum(lengths, 1)])
        bad += int(not np.isfinite(engine.step(batch).result()).all())
        steps, tokens = steps + 1, tokens + batch.total_tokens
        if time.perf_counter() > after:
            after += 60 * b.args.minutes / 8
            used = torch.cuda.mem_get_info()
            seen.append((used[1] - used[0]) / 2**20)
    spent = time.perf_counter() - begin
    hows = {h: int(engine.metrics.registry.get_sample_value("hortus_graph_steps_total", {"how": h}) or 0)
            for h in ("eager", "capture", "replay")}  # fmt: skip
    note = f"random: {steps} steps {hows}, not finite {bad}, device MiB over time " + " ".join(f"{x:.0f}" for x in seen)
    b.add(note, tokens_per_s=tokens / spent, rounds=steps)
    engine.close()


def profile(b: Bench) -> None:
    """Kernels of one replayed step: where its time goes, and how much of it is between kernels."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    engine = b.again()
    cases = b.args.profile or "1x128,25x512"
    for count, tokens in (map(int, word.split("x")) for word in cases.split(",")):
        batch = b.batch(*[tokens] * count)
        for _ in range(4):
            engine.step(batch).result()
        with profiler(activities=[ProfilerActivity.CUDA]) as seen:
            engine.step(batch).result()
            torch.cuda.synchronize()
        spans: dict[str, list[tuple[float, float]]] = {}
        for e in seen.events():
            if str(e.device_type).endswith("CUDA"):
                spans.setdefault(e.name, []).append((e.time_range.start, e.time_range.end))
        every = sorted(s for group in spans.values() for s in group)
        if not every:
            print("  the profiler saw no kernels")
            continue
        busy, whole = sum(z - a for a, z in every), every[-1][1] - every[0][0]
        print(f"\n  {count} x {tokens}: {len(every)} kernels, {busy:.0f} us in them, {whole:.0f} us from first to last")
        for name, group in sorted(spans.items(), key=lambda kv: -sum(z - a for a, z in kv[1]))[:22]:
            total = sum(z - a for a, z in group)
            print(f"  {total:9.1f} us {len(group):5} x {total / len(group):8.2f} us  {name[:110]}")
    engine.close()


PARTS = {
    f.__name__: f
    for f in (check, times, host, capture, crossover, pieces, waits, slots, overlap, random, profile)
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Entry point of `hortus bench engine`."""
    parser = argparse.ArgumentParser(
        prog="hortus bench engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="check,times", help="comma-separated: " + ", ".join(PARTS))
    parser.add_argument("--shape", default="0.6b", choices=list(reference.SHAPES))
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, for a quick look")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=2.0, help="how long `random` runs")
    parser.add_argument("--profile", help="cases of `profile`, such as 1x128,25x512")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    args = parser.parse_args(argv)
    wanted = args.parts.split(",")
    if unknown := [p for p in wanted if p not in PARTS]:
        parser.error(f"unknown part {unknown[0]!r}; known: {', '.join(PARTS)}")
    bench = Bench(args)
    try:
        for name in wanted:
            started = time.perf_counter()
            print(f"\n{name}: {(PARTS[name].__doc__ or '').splitlines()[0]}", flush=True)
            PARTS[name](bench)
            print(f"({name}: {time.perf_counter() - started:.0f} s)", flush=True)
    finally:
        shutil.rmtree(bench.work, ignore_errors=True)
        if args.out:
            append(args.out, bench.records)
    print("\n" + table(bench.records))
    return 0


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
