"""The finer parts of `hortus bench engine`: where a step's time goes, and what each choice of the GPU engine costs.

Each part takes the Bench, measures by its own clock, and adds Records. All but `python` need a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hortus.bench import reference
from hortus.bench.engine import Bench, timed
from hortus.bench.tiles import tiles
from hortus.config import RoseConfig
from hortus.metrics import Metrics
from hortus.rose.device import CudaDevice
from hortus.rose.gpu import GpuEngine
from hortus.types import TokenBatch


def gauge(engine: GpuEngine, name: str) -> float:
    return engine.metrics.registry.get_sample_value(name) or 0.0


def host(b: Bench) -> None:
    """What the host spends in step() on a replay, the device being idle; then in result() once the rows are there."""
    engine = b.again()
    for lengths in ([16], [128], [16] * 32, [512] * 8, [512] * 25):
        batch = b.batch(*lengths)
        for _ in range(3):
            engine.step(batch).result()
        enqueue: list[float] = []
        collect: list[float] = []
        end = time.perf_counter() + 2
        while len(enqueue) < 300 and time.perf_counter() < end:
            started = time.perf_counter()
            lazy = engine.step(batch)
            enqueue.append((time.perf_counter() - started) * 1e3)
            torch.cuda.synchronize()
            started = time.perf_counter()
            lazy.result()
            collect.append((time.perf_counter() - started) * 1e3)
        b.add("host: step()", ms=enqueue, batch=batch, speed=False)
        if (graph := engine.graphs.latest()) is not None:
            launch: list[float] = []
            for _ in range(100):
                torch.cuda.synchronize()
                started = time.perf_counter()
                graph.replay()
                launch.append((time.perf_counter() - started) * 1e3)
            b.add("host: of it the driver's launch of the graph", ms=launch, batch=batch, speed=False)
        b.add("host: result()", ms=collect, batch=batch, speed=False)
    engine.close()


def spans(b: Bench) -> None:
    """Documents in chunks of 64 tokens, a row a chunk: pooled behind a graph, and eagerly."""
    for how, engine in (("replay", b.again()), ("eager", b.again(cuda_graphs=False))):
        for count, tokens in ((1, 128), (1, 512), (8, 512), (1, 4096)):
            whole = b.batch(*[tokens] * count)
            at = np.arange(0, whole.total_tokens, 64, dtype=np.int32)
            chunks = np.full(count, tokens // 64, np.int32)
            batch = TokenBatch(whole.ids, whole.cu_seqlens, None, np.stack([at, at + 64], 1), chunks)
            for _ in range(3):
                engine.step(batch).result()
            step = lambda: engine.step(batch).result()  # noqa: B023, E731
            b.add(f"spans, {how}", ms=timed(step, rounds=b.args.rounds), batch=batch)
        engine.close()


class _Still:
    """A Device that does nothing, at once: what a step takes on it is its Python alone. Also a graph and an event of it."""

    name, total_bytes = "none", 0

    def __init__(self, width: int) -> None:
        self._rows = torch.zeros(64, width)

    def pinned(self, *size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype)

    def empty(self, ints: int) -> torch.Tensor:
        return torch.empty(ints, dtype=torch.int32)

    def event(self) -> _Still:
        return self

    def query(self) -> bool:
        return True

    def run(self, body: Callable[[], torch.Tensor]) -> torch.Tensor:
        return self._rows

    def capture(self, body: Callable[[], torch.Tensor]) -> _Still:
        return self

    def replay(self) -> torch.Tensor:
        return self._rows

    def enter(self, *_: object) -> None:
        pass

    record = upload = download = drop_graphs = relieve = synchronize = enter

    def reserved_bytes(self) -> int:
        return 0


class _Planless:
    """A Network whose host work is left out too: that is the attention package's."""

    capturable, longest_matters = True, False

    def __init__(self, width: int) -> None:
        self.width = width

    def look(self, *_: object) -> None:
        pass

    plan = forward = look


def python(b: Bench) -> None:
    """What of step() and result() is Python, on a device that does nothing. Needs no GPU."""
    width = b.engine.info.width
    device: Any = _Still(width)
    network: Any = _Planless(width)
    engine = GpuEngine(network, b.engine.info, RoseConfig(), Metrics(), device=device)
    for lengths in ([16], [128], [16] * 32, [512] * 8, [512] * 25):
        batch = b.batch(*lengths)
        enqueue: list[float] = []
        collect: list[float] = []
        for n in range(1003):
            started = time.perf_counter()
            lazy = engine.step(batch)
            enqueued = time.perf_counter()
            lazy.result()
            if n > 2:  # seen, captured, replayed
                enqueue.append((enqueued - started) * 1e3)
                collect.append((time.perf_counter() - enqueued) * 1e3)
        b.add("python: step()", ms=enqueue, batch=batch, speed=False)
        b.add("python: result()", ms=collect, batch=batch, speed=False)


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
    ways = [b.again(opened, piece_tokens=16384, cuda_graphs=g, **knobs) for g in (True, False)]
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
            engine = b.again(piece_tokens=step, graph_max_tokens=max(4096, min(step, 16384)))
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
            ms: list[float] = []
            waiting = [engine.step(batch) for _ in range(depth - 1)]
            last = time.perf_counter()
            end = last + 2
            while len(ms) < 200 and last < end:
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


PARTS: dict[str, Callable[[Bench], None]] = {
    f.__name__: f
    for f in (host, python, spans, capture, crossover, pieces, waits, slots, overlap, random, profile, tiles)
}
