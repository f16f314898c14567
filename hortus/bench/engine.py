"""`hortus bench engine`: is the GPU engine right, then how fast, on the shapes of pplx-embed. For a machine paid by the minute.

The physics first. A 0.6B model reads 0.9 GB of matrices a step: 0.2 ms at 4.3 TB/s, while a step of 128 tokens has some
230 kernels, so below 256 tokens the gaps between kernels decide. From 512 tokens on the matrices' arithmetic does: 0.9
GFLOP a token, 790 TFLOP/s at best. One launch a step, few kernels, and no bytes moved twice are what there is to gain.

Parts (`--parts a,b`; each is short, so that one call is full): check, times, host, python, spans, capture, crossover, pieces,
waits, slots, overlap, random, profile, tiles. Prints a line a case; `--out FILE` appends JSON lines. On the CPU: `--shape tiny`,
where only check, times and python apply.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hortus.bench import reference
from hortus.bench.flags import duration, whole, written_file
from hortus.bench.measure import LEAST_COSINE_FP8
from hortus.bench.results import Record, append, gpu, median_p99
from hortus.config import RoseConfig
from hortus.folder import open_folder
from hortus.metrics import Metrics
from hortus.rose.device import CudaDevice
from hortus.rose.engine import open_engine
from hortus.rose.gpu import PIECE_TOKENS, GpuEngine
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
        self.hardware = gpu()
        self.gpu = self.hardware is not None
        self.dtype = args.dtype or ("bfloat16" if self.gpu else "float32")
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
            load_format="dummy" if dummy else "auto",
            attention=self.args.attention,
            dtype=self.dtype,
            **({"max_length": 8192} | knobs),
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
        step = knobs.pop("piece_tokens", PIECE_TOKENS)
        return GpuEngine(
            base.network, base.info, RoseConfig(**knobs), Metrics(), device=device or self.device, piece_tokens=step
        )

    def batch(self, *lengths: int) -> TokenBatch:
        return reference.batch_of(self.rng, lengths, self.shape.vocab)

    def add(
        self,
        case: str,
        *,
        ms: Sequence[float] = (),
        batch: TokenBatch | None = None,
        speed: bool = True,
        **values: Any,
    ) -> None:
        """Note one case and print it at once: a call that runs out of time still leaves what it had.

        speed: the milliseconds are a whole step's, so tokens/s follows from them.
        """
        if ms:
            values["median_ms"], values["p99_ms"] = median_p99(ms)
            values["rounds"] = len(ms)
            if batch is not None and speed:
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
        size = f"{record.batch} x {record.tokens}" if record.batch else ""
        spent = f"{record.median_ms:9.3f} ms, p99 {record.p99_ms:9.3f}" if record.median_ms is not None else ""
        speed_text = f"{record.tokens_per_s:11,.0f} tokens/s" if record.tokens_per_s else ""
        print(f"  {size:>10} {spent} {speed_text:>20}  {case}", flush=True)


def timed(run: Callable[[], object], *, rounds: int, seconds: float = 3.0, pause_s: float = 0.0) -> list[float]:
    """Milliseconds of each call, up to `rounds` of them or so many seconds, at least 5; pause_s before each."""
    ms: list[float] = []
    end = time.perf_counter() + seconds
    while len(ms) < rounds and (len(ms) < 5 or time.perf_counter() < end):
        if pause_s:
            time.sleep(pause_s)
        started = time.perf_counter()
        run()
        ms.append((time.perf_counter() - started) * 1e3)
    return ms


def check(b: Bench) -> None:
    """Against transformers in float32; replay = eager; alone = in a mix; poisoned memory."""
    two_ways = reference.write_folder(b.work / "mean", b.shape, causal=False)
    one_way = reference.write_folder(b.work / "last", b.shape, causal=True)
    model = reference.random_model(b.shape, [two_ways, one_way], device="cuda" if b.gpu else "cpu")
    bar = LEAST_COSINE_FP8 if b.dtype == "fp8" else 0.999 if b.gpu else 0.99999
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
        b.add(f"check {name}: least cosine {worst:.7f}", ratio=worst)
        b.add(f"check {name}: least cosine alone against in a mix {alone:.7f}", ratio=alone)
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
            step = lambda: engine.step(batch).result()  # noqa: B023, E731
            b.add(how, ms=timed(step, rounds=b.args.rounds), batch=batch)
            if count == 1 and how == "replay":
                # Steps in a row run into the GPU's power limit, which lowers its clock; single requests do not.
                b.add(
                    f"{how}, one every 50 ms",
                    ms=timed(step, rounds=b.args.rounds, pause_s=0.05),
                    batch=batch,
                    speed=False,
                )
        engine.close()


PARTS: dict[str, Callable[[Bench], None]] = {"check": check, "times": times}
WITHOUT_GPU = (*PARTS, "python")


def parts() -> dict[str, Callable[[Bench], None]]:
    """All parts by name: the two above and those of engine_parts, which builds on this file."""
    from hortus.bench import engine_parts

    return PARTS | engine_parts.PARTS


def main(argv: Sequence[str]) -> int:
    """Entry point of `hortus bench engine`."""
    known = parts()
    parser = argparse.ArgumentParser(
        prog="hortus bench engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="check,times", help="comma-separated: " + ", ".join(known))
    parser.add_argument("--shape", default="0.6b", choices=list(reference.SHAPES))
    parser.add_argument("--layers", type=whole, help="fewer layers than the shape has, for a quick look")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "fp8"), help="[bfloat16; float32 on the CPU]")
    parser.add_argument("--rounds", type=whole, default=50)
    parser.add_argument("--minutes", type=duration, default=2.0, help="how long `random` runs")
    parser.add_argument("--profile", help="cases of `profile`, such as 1x128,25x512")
    parser.add_argument("--out", type=written_file, help="append JSON lines to this file")
    args = parser.parse_args(argv)
    wanted = args.parts.split(",")
    if unknown := [p for p in wanted if p not in known]:
        parser.error(f"unknown part {unknown[0]!r}; known: {', '.join(known)}")
    if not torch.cuda.is_available() and (refused := [p for p in wanted if p not in WITHOUT_GPU]):
        parser.error(f"part {refused[0]!r} needs a GPU; {', '.join(WITHOUT_GPU)} do not")
    if args.profile and not re.fullmatch(r"[1-9]\d*x[1-9]\d*(,[1-9]\d*x[1-9]\d*)*", args.profile):
        parser.error(f"--profile {args.profile!r}: write COUNTxTOKENS, such as 1x128,25x512")
    bench = Bench(args)
    try:
        for name in wanted:
            started = time.perf_counter()
            print(f"\n{name}: {(known[name].__doc__ or '').splitlines()[0]}", flush=True)
            known[name](bench)
            print(f"({name}: {time.perf_counter() - started:.0f} s)", flush=True)
    finally:
        shutil.rmtree(bench.work, ignore_errors=True)
        if args.out:
            append(args.out, bench.records)
    return 0
