"""The command line: parses, wires the parts together, and prints what a person wants to see. No logic of its own.

    hortus serve MODEL [--flags]     Ivy, Tulip and ROSE in one process
    hortus bench SUITE [...]         measure (hortus/bench)

Flags are the fields of the three config dataclasses in kebab-case, so `hortus serve --help` is their documentation.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from hortus import __version__, config
from hortus.errors import StartError

_EPILOG = """\
settings:
  Every flag is also an environment variable (HORTUS_PORT=8081) and a line in a TOML file (--config FILE, tables
  [ivy] [tulip] [rose]). The command line wins over the environment, the environment over the file.

how to choose:
  short queries, lowest latency    the defaults; keep --overlap-sequences
  building an index                the defaults on a GPU; on a CPU raise --max-batch-tokens
  steadier p99 under bulk load     lower --max-batch-tokens
  behave as sentence-transformers  --auto-truncate

try it without a model download:   hortus serve demo     (needs the extra: pip install 'hortus[cpu,demo]')
"""


class _Help(argparse.RawDescriptionHelpFormatter):
    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width)


def _add_knobs(parser: argparse.ArgumentParser) -> None:
    titles = {"ivy": "Ivy, the HTTP gateway", "tulip": "Tulip, the scheduler", "rose": "ROSE, the engine"}
    for section, cls in config.SECTIONS.items():
        group = parser.add_argument_group(titles[section])
        for f in dataclasses.fields(cls):
            base, _ = config.field_type(cls, f.name)
            choices = f.metadata["choices"]
            default = f.default.__str__().lower() if base is bool else f.default
            group.add_argument(
                "--" + f.name.replace("_", "-"),
                dest=f.name,
                default=argparse.SUPPRESS,
                # A bare `--auto-truncate` means true; the value is checked by config.parse, like every other source.
                **({"nargs": "?", "const": "true"} if base is bool else {}),  # type: ignore[arg-type]
                metavar="{" + ",".join(choices) + "}" if choices else {bool: "BOOL", int: "N"}.get(base, "VALUE"),
                help=f.metadata["help"].replace("%", "%%") + (f" [{default}]" if f.default is not None else ""),
            )


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="hortus", description="A fast, trusted open server for text-embedding models.", allow_abbrev=False
    )
    top.add_argument("--version", action="version", version=f"hortus {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve one model over HTTP, everything in one process",
        description="Serve one model over HTTP: gateway, scheduler and engine in one process.",
        epilog=_EPILOG,
        formatter_class=_Help,
        allow_abbrev=False,
    )
    serve.add_argument(
        "model", metavar="MODEL", help="a folder, a Hugging Face hub id, or `demo` (all-MiniLM-L6-v2 from a package)"
    )
    serve.add_argument("--config", type=Path, metavar="FILE", help="TOML file with tables [ivy] [tulip] [rose]")
    _add_knobs(serve)
    bench = commands.add_parser(
        "bench", help="measure Hortus; `hortus bench --help` lists the suites", add_help=False, allow_abbrev=False
    )
    bench.add_argument("rest", nargs=argparse.REMAINDER)
    return top


def configure_logging(level: str) -> None:
    """One line an event, on stderr."""
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status: 0 done, 1 could not start, 2 bad usage."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["bench"]:  # suites parse their own flags
        from hortus.bench import main as bench_main

        return bench_main(words[1:])
    args = vars(parser().parse_args(words))
    args.pop("command")
    model, file = args.pop("model"), args.pop("config")
    try:
        settings = config.load(file=file, environ=os.environ, flags=args)
        configure_logging(settings.ivy.log_level)
        from hortus.serve import serve

        return serve(model, settings)
    except StartError as e:
        print(f"hortus: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
