"""`hortus bench`: measure, print a table, and append JSON lines. Each suite is a function that returns Records.

Suites are imported when chosen: most need torch or the peer they compare with.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

SUITES = {
    "parity": ("hortus.bench.cpu", "vectors against sentence-transformers, 1000 real texts"),
    "cpu": ("hortus.bench.cpu", "throughput and latency against sentence-transformers, in process, alternating"),
    "grpc": ("hortus.bench.grpc", "one process against gateways over gRPC, fake engine"),
    "http": ("hortus.bench.http", "what HTTP adds over a fake engine that takes no time"),
}
SCRIPTS = {
    "engine": ("hortus.bench.engine", "GPU: checks, then step times of the pplx-embed shapes"),
    "kernels": ("hortus.bench.kernels", "GPU: each fused kernel and attention backend; the source of the choice table"),
}


def main(argv: Sequence[str]) -> int:
    """Entry point of `hortus bench`."""
    if argv[:1] and argv[0] in SCRIPTS:  # these take options of their own
        return int(importlib.import_module(SCRIPTS[argv[0]][0]).main(list(argv[1:])) or 0)
    listing = "\n".join(f"  {k:<9} {v[1]}" for k, v in (SUITES | SCRIPTS).items())
    parser = argparse.ArgumentParser(
        prog="hortus bench",
        description=f"suites:\n{listing}\n  all       every suite that needs no GPU",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("suite", choices=[*SUITES, *SCRIPTS, "all"])
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    args = parser.parse_args(argv)
    from hortus.bench.results import append, table

    records = []
    for name in SUITES if args.suite == "all" else [args.suite]:
        print(f"{name}: {SUITES[name][1]} ...", flush=True)
        records += getattr(importlib.import_module(SUITES[name][0]), name)()
    print(table(records))
    if args.out:
        append(args.out, records)
    return 0
