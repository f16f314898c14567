"""`hortus bench`: measure Hortus and any other server side by side, print a table, append JSON lines; draw reports.

Suites of suites.py run over targets (targets.py). The rest are programs of their own with flags of their own: parts of
Hortus by themselves (cpu, http, grpc, beside, engine, fp8, kernels), and what is made of results (report, readme). All are
imported when chosen: most need torch or the peer they compare with.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hortus.errors import StartError

ENVIRON = dict(os.environ)
"""What peers' servers start with: without what ROSE sets for itself when it is imported."""

import hortus.rose  # noqa: E402, F401  sets OpenMP's spinning, which counts only before torch is imported

SUITES = {
    "latency": "one input of {} tokens",
    "scoring": "5, 25, 50 inputs of {} tokens",
    "throughput": "batches of 100 x {} tokens from 4 client processes",
    "cases": "inputs x tokens as --cases says, one client",
    "concurrency": "1 to {most} clients with {} tokens each, over HTTP",
    "short": "queries of 16 tokens, from one client to full rate",
    "arrivals": "Poisson arrivals: latency against offered load, over HTTP",
    "mixed": "short queries beside an index being built, over HTTP",
    "start": "seconds to ready; first, second, third and later answers of a size",
    "graphs": "share of steps that replay a CUDA graph, over time (Hortus on a GPU)",
    "parity": "vectors against the reference",
}
SIZES = {
    "latency": (128, 512, 4096),
    "scoring": (512,),
    "throughput": (512,),
    "concurrency": (128,),
    "mixed": (256,),
    "start": (24, 90, 150, 210, 400),
}
"""Tokens of each suite's inputs, where --tokens may say otherwise; those of `start` no other suite asks for, so that each is a
graph of its own on a GPU."""
MOST_CLIENTS = 256
PROGRAMS = {
    "cpu": ("hortus.bench.cpu", "against sentence-transformers in process: vectors, throughput, latency"),
    "http": ("hortus.bench.http", "what HTTP adds over a fake engine that takes no time"),
    "grpc": ("hortus.bench.http", "one process against gateways over gRPC, fake engine"),
    "beside": ("hortus.bench.beside", "short texts beside ones that are slow to tokenise, fake engine"),
    "corpus": ("hortus.bench.corpus", "`hortus embed` against the engine alone; two Ray actors against one"),
    "watch": ("hortus.bench.watch", "what an open Watch view of the page costs, fake engine"),
    "engine": ("hortus.bench.engine", "GPU: checks, then step times of the pplx-embed shapes"),
    "fp8": ("hortus.bench.fp8", "what --dtype fp8 costs in the quality of rankings, by its twin on the CPU"),
    "kernels": ("hortus.bench.kernels", "GPU: each fused kernel and attention backend; the source of the choice table"),
    "report": ("hortus.bench.report", "plots and a page from result files"),
    "readme": ("hortus.bench.report", "README's table from bench/results (--check: only compare)"),
}


def about(suite: str, sizes: Sequence[int] = (), most: int = MOST_CLIENTS) -> str:
    """What a suite does. sizes: tokens of its inputs; none: those that it has by itself. most: clients. Pure."""
    return SUITES[suite].format(", ".join(map(str, sizes or SIZES.get(suite, ()))), most=min(most, MOST_CLIENTS))


def main(argv: Sequence[str]) -> int:
    """Entry point of `hortus bench`. 0 done, 1 a target was left out or could not be had, or the output cannot be written;
    2 bad usage; 128 and its number when stopped by Ctrl-C, SIGTERM or SIGHUP, after ending all that was started."""
    from hortus.bench.pace import NoFigureError

    stopped: list[int] = []
    try:
        with _stops(stopped):
            return _main(argv)
    except (StartError, NoFigureError) as e:
        print(f"hortus bench: {e}", file=sys.stderr)
        return 1
    except OSError as e:  # of the output, which nobody reads any more or whose disk is full
        print(f"hortus bench: {e}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is still to be written when Python ends
        return 1
    except KeyboardInterrupt:
        print("hortus bench: stopped", file=sys.stderr)
        return 128 + (stopped or [signal.SIGINT])[0]


@contextmanager
def _stops(seen: list[int]) -> Iterator[None]:
    """Inside, SIGTERM and a terminal's end (unless nohup keeps that off) end the run as Ctrl-C does, so that servers and clients
    that were started end with it."""

    def stop(number: int, frame: object) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {n: signal.signal(n, stop) for n in numbers}
    try:
        yield
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)


def _main(argv: Sequence[str]) -> int:
    if argv[:1] and argv[0] in PROGRAMS:
        module = importlib.import_module(PROGRAMS[argv[0]][0])
        entry = "readme" if argv[0] == "readme" else "main"
        words = [*argv] if argv[0] in ("http", "grpc") else [*argv[1:]]
        return int(getattr(module, entry)(words) or 0)
    flags = parser()
    args = flags.parse_args(argv)
    try:
        specs = _specs(args)
    except StartError as e:
        flags.error(str(e))
    return _run(args, specs)


def parser() -> argparse.ArgumentParser:
    """The flags of the suites."""
    from hortus.bench.flags import at_most, duration, header, inputs_tokens, text_file, whole, written_file
    from hortus.bench.targets import KINDS

    def listing(rows: dict[str, str]) -> str:
        return "\n".join(f"  {k:<22} {v}" for k, v in rows.items())

    p = argparse.ArgumentParser(
        prog="hortus bench",
        usage="hortus bench SUITE[,SUITE...] [flags]   or   hortus bench PROGRAM --help",
        description=f"suites:\n{listing({name: about(name) for name in SUITES})}\n\nprograms with flags of their own:\n"
        + listing({k: v[1] for k, v in PROGRAMS.items()})
        + f"\n\ntargets, [NAME=]KIND[:WHERE]:\n{listing(KINDS)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("suites", help="comma-separated")
    p.add_argument(
        "--target", action="append", metavar="T", help="may be given several times; ratios are to the first [serve]"
    )
    one = p.add_mutually_exclusive_group()
    one.add_argument("--model", default="demo", help="a folder, hub id or demo; its tokenizer counts the tokens [demo]")
    one.add_argument(
        "--shape",
        metavar="NAME",
        help="instead of --model: random weights of a published shape, and a tokenizer; "
        "0.6b and 4b are Qwen3's, the rest encoders: minilm, bge-base, modernbert-base; tiny, tiny-bert, tiny-modernbert",
    )
    p.add_argument("--reference", choices=("auto", "none"), default="auto",
                   help="auto: sentence-transformers (else transformers) in float32; none: the first target")  # fmt: skip
    p.add_argument("--dtype", default="auto", help="as `hortus serve` has it, for all that run here [auto]")
    p.add_argument("--attention", default="auto", help="for `engine` and `hortus` [auto]")
    p.add_argument("--threads", type=at_most(1024), metavar="N", help="CPU threads of each target that runs here [all]")
    p.add_argument(
        "--texts", type=text_file, nargs="+", default=[], metavar="FILE", help="plain text to cut inputs from"
    )
    p.add_argument("--tokens", type=whole, nargs="+", default=[], metavar="N", help="instead of the suites' sizes")
    p.add_argument(
        "--cases", type=inputs_tokens, nargs="+", default=[(1, 512), (32, 512)], metavar="NxT",
        help="of the suite of that name [1x512 32x512]",
    )  # fmt: skip
    p.add_argument(
        "--most-clients", type=whole, default=MOST_CLIENTS, metavar="N", help="of the suites over HTTP [256]"
    )
    p.add_argument("--processes", type=at_most(256), default=4, metavar="N", help="client processes at most [4]")
    p.add_argument("--rounds", type=whole, default=5, metavar="N", help="of each case, targets in turn [5]")
    p.add_argument("--seconds", type=duration, default=2.0, metavar="S", help="of each round of each target [2]")
    p.add_argument(
        "--header",
        type=header,
        action="append",
        default=[],
        metavar="LINE",
        help="for servers: 'authorization: Bearer ...'",
    )
    p.add_argument("--note", metavar="TEXT", help="what else is to be known of the run, for every line of --out")
    p.add_argument("--out", type=written_file, metavar="FILE", help="append JSON lines to this file")
    p.add_argument(
        "--raw",
        type=written_file,
        metavar="FILE",
        help="append every latency, a JSON line a round; an open loop's count from when each request was due",
    )
    return p


def _specs(args: argparse.Namespace) -> list[Spec]:
    """The targets as typed. StartError names what is wrong with them or with words that argparse takes as they come."""
    from hortus import config
    from hortus.bench.targets import missing, parse

    if unknown := [s for s in args.suites.split(",") if s not in SUITES]:
        raise StartError(f"no suite {unknown[0]!r}; there are {', '.join([*SUITES, *PROGRAMS])}")
    for name in ("dtype", "attention"):
        config.parse(config.RoseConfig, name, getattr(args, name), f"--{name}")
    if args.shape:
        from hortus.bench.shapes import SHAPES

        if args.shape not in SHAPES:
            raise StartError(f"--shape {args.shape}: there are {', '.join(SHAPES)}")
    if args.out and args.raw and args.out.resolve() == args.raw.resolve():
        raise StartError("--raw and --out are one file; records and latencies are read from two")
    specs = [parse(t) for t in args.target or ["serve"]]
    if len({s.name for s in specs}) < len(specs):
        raise StartError("--target: two of one name; write NAME=KIND:WHERE")
    for spec in specs:
        if absent := missing(spec):
            raise StartError(f"--target {spec.kind}:{spec.where}: there is no program {absent}")
    return specs


def _run(args: argparse.Namespace, specs: Sequence[Spec]) -> int:
    suites = args.suites.split(",")
    from hortus.bench import suites as all_suites
    from hortus.bench.results import append, table

    records: list[Record] = []
    work = Path(tempfile.mkdtemp(prefix="hortus-bench-"))
    try:
        run = _open(args, specs, work)
        try:
            for name in suites:
                print(f"{name}: {about(name, all_suites.sizes(run, name), run.most_clients)}", flush=True)
                run.suite = name
                run.told.clear()
                done: list[Record] = []
                try:
                    done = all_suites.SUITES[name](run)
                except BaseException:  # a run that is cut short leaves what it had
                    done = [r for r in run.told if r.target not in run.refused]
                    raise
                finally:
                    for record in done if args.note else []:
                        record.note = f"{record.note}; {args.note}" if record.note else args.note
                    records += done
                    if args.out:
                        append(args.out, done)
        finally:
            run.close()
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if records:  # also of a run that is cut short
            print("\n" + table(records), flush=True)
    if not records:
        print("nothing was measured", file=sys.stderr)
    return 1 if run.refused or not records else 0


def _open(args: argparse.Namespace, specs: Sequence[Spec], work: Path) -> Run:
    """Model, text and targets, ready. A target that cannot be had is told and left out; StartError when none is left."""
    from hortus.bench.load import Clients
    from hortus.bench.measure import Run
    from hortus.bench.results import gpu
    from hortus.bench.targets import Setting, open_target
    from hortus.bench.texts import Corpus
    from hortus.config import RoseConfig
    from hortus.engines import open_model
    from hortus.ivy.embed import WHAT
    from hortus.ivy.tokenize import Tokenizer

    if args.shape:
        from hortus.bench.shapes import shape_folder

        device = "cuda" if gpu() else "cpu"
        args.model = str(shape_folder(work, args.shape, texts=args.texts, device=device))
    folder = open_model(args.model, None, RoseConfig(), weights=False)
    if folder.kind != "embed":  # peers would make vectors of its trunk, and be right
        raise StartError(f"--model {args.model} is {WHAT[folder.kind]}; the suites measure embedding models")
    # Not the model's limit: a count that stops there could not tell a text that is too long.
    tokenizer = Tokenizer(folder, max_tokens=1 << 20)
    least = tokenizer.encode(["a"]).total_tokens
    if few := [n for n in (*args.tokens, *(tokens for _, tokens in args.cases)) if n < least]:
        raise StartError(
            f"{few[0]} tokens: this tokenizer makes at least {least} of a text; choose larger --tokens or --cases"
        )
    setting = Setting(
        folder=folder, dtype=args.dtype, threads=args.threads, attention=args.attention, headers=tuple(args.header),
        clients=Clients(), processes=args.processes,
    )  # fmt: skip
    run = Run(
        setting, [], Corpus(tokenizer.encode, args.texts), None, rounds=args.rounds, seconds=args.seconds,
        only_tokens=tuple(args.tokens), given=tuple(args.cases), most_clients=args.most_clients, raw=args.raw,
    )  # fmt: skip
    try:
        for spec in specs:
            print(f"opening {spec.name} ...", flush=True)
            try:
                run.targets.append(open_target(spec, setting))
            except Exception as e:  # noqa: BLE001  of a peer's library, anything; the others' figures must not be lost
                run.refused[spec.name] = str(e) if isinstance(e, StartError) else f"{type(e).__name__}: {e}"
                print(f"  LEFT OUT: {spec.name}: {run.refused[spec.name]}", flush=True)
        if not run.targets:
            raise StartError("no target is left to measure")
        if args.reference == "auto":
            from hortus.bench.inprocess import reference as exact

            try:
                run.reference = exact(setting)
            except Exception as e:
                raise StartError(
                    f"the reference cannot be loaded ({type(e).__name__}: {e}); --reference none takes the first target"
                ) from e
        run.hardware = gpu()
        run.dtype = _dtype(args.dtype, run.hardware)
    except BaseException:
        run.close()
        raise
    return run


def _dtype(asked: str, gpu: str | None) -> str | None:
    """The number format of an engine here; None where there is no PyTorch and the server decides."""
    if asked != "auto":
        return asked
    return "bfloat16" if gpu else "float32" if importlib.util.find_spec("torch") else None


if TYPE_CHECKING:
    from hortus.bench.measure import Run
    from hortus.bench.results import Record
    from hortus.bench.targets import Spec
