"""The command line: parses, wires the parts together, and prints what a person wants to see. No logic of its own.

    hortus serve MODEL [--flags]     Ivy, Tulip and ROSE; in one process, or several (--gateways, --replicas)
    hortus tulip MODEL [--flags]     Tulip and ROSE behind gRPC
    hortus ivy --replica HOST:PORT   a gateway over such schedulers
    hortus embed INPUT... --out DIR  whole corpora: files to vectors
    hortus models                    what can be served; `hortus models check MODEL`: whether a folder would be
    hortus bench SUITE [...]         measure (hortus/bench)

Flags are the fields of the config dataclasses in kebab-case, so `hortus serve --help` is their documentation.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import logging
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from hortus import __version__, config
from hortus.child import fail, tie_to_parent
from hortus.errors import StartError
from hortus.start import arm, say

_EPILOG = """\
settings:
  Every flag is also an environment variable (HORTUS_PORT=8081) and a line in a TOML file (--config FILE, tables
  [ivy] [tulip] [rose] [link]). The command line wins over the environment, the environment over the file. MODEL is
  no flag: it is named on the command line alone; HORTUS_CONFIG may name the file.

how to choose:
  short queries, lowest latency    the defaults; keep --overlap-sequences
  building an index                the defaults on a GPU; on a CPU raise --max-batch-tokens
  steadier p99 under bulk load     lower --max-batch-tokens
  behave as sentence-transformers  --auto-truncate

try it without a model download:   hortus serve demo     (needs the extra: pip install 'hortus[cpu,demo]')
"""


_EMBED_EPILOG = """\
output:
  OUT/part-*.parquet holds the kept columns and `embedding`, in the order of the input. OUT/_rejects/*.jsonl has the rows without
  a vector (null, too long, not text) with the reason. The same command again goes on where a run was stopped or killed.

exit status:
  0 every row has a vector   3 done, some rows rejected   1 could not start or go on   130, 143 stopped by a signal

how to choose:
  texts longer than the model takes    --auto-truncate to cut them, --chunk-tokens N to embed all of them, else rejected
  less space                           --precision float16, or --dimensions N for Matryoshka models
  a GPU out of memory                  lower --max-batch-tokens
  this machine out of memory           lower --window-rows
  less to do again after a crash       lower --part-rows
  vectors in a database                --into lancedb:FOLDER#TABLE, qdrant:..., postgresql://...
  several GPUs, or machines            --ray local, or --ray ADDRESS
  engines that run already             --server URL, once for each, in place of --model

Every flag but --model is also an environment variable (HORTUS_OUT=DIR; HORTUS_CONFIG=FILE) and, but for --config, a line in a
TOML file.
"""


class _Help(argparse.RawDescriptionHelpFormatter):
    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width)


_ONLY_TULIP = ("listen",)
_ONLY_IVY = ("replica", "resolve_s")
_ONLY_SERVE = ("gateways", "replicas")
_EMBED_IVY = ("auto_truncate", "max_input_chars", "templates", "int8_ranges", "tokenize_threads", "log_level")
_EMBED_TULIP = ("max_batch_tokens", "step_timeout_s", "fake_delay_ms")
_MODELS_IVY = ("served_model_name", "templates", "int8_ranges", "log_level")
_TULIP_TOO = ("served_model_name", "drain_s", "log_level", "otlp_endpoint")


def takes(command: str, section: str, name: str) -> bool:
    """Whether a knob means anything to a command. Pure."""
    if command == "embed":
        return section in ("rose", "corpus") or name in _EMBED_IVY + _EMBED_TULIP
    if section == "corpus":
        return False
    if command == "models":
        return section == "rose" or name in _MODELS_IVY
    if command == "serve":
        return name not in _ONLY_TULIP + _ONLY_IVY
    if command == "tulip":
        return (
            section in ("tulip", "rose")
            or name in _TULIP_TOO
            or (section == "link" and name not in (*_ONLY_IVY, *_ONLY_SERVE, "silence_s", "slow_start_s"))
        )
    return (section == "ivy" and name != "served_model_name") or (
        section == "link" and name not in _ONLY_TULIP + _ONLY_SERVE
    )


def _add_knobs(parser: argparse.ArgumentParser, command: str) -> None:
    titles = {
        "ivy": "Ivy, the HTTP gateway",
        "tulip": "Tulip, the scheduler",
        "rose": "ROSE, the engine",
        "link": "Several processes or machines",
        "corpus": "The corpus",
    }
    for section, cls in sorted(config.SECTIONS.items(), key=lambda s: s[0] != "corpus"):
        if not any(takes(command, section, f.name) for f in dataclasses.fields(cls)):
            continue
        group = parser.add_argument_group(titles[section])
        for f in dataclasses.fields(cls):
            if not takes(command, section, f.name):
                continue
            base, _ = config.field_type(cls, f.name)
            choices = f.metadata["choices"]
            default = f.default.__str__().lower() if base is bool else f.default
            group.add_argument(
                "--" + f.name.replace("_", "-"),
                dest=f.name,
                default=argparse.SUPPRESS,
                # A bare `--auto-truncate` means true; the value is checked by config.parse, like every other source.
                **({"nargs": "?", "const": "true"} if base is bool else {}),  # type: ignore[arg-type]
                action="append" if f.metadata["many"] else "store",
                metavar="{" + ",".join(choices) + "}" if choices else {bool: "BOOL", int: "N"}.get(base, "VALUE"),
                help=f.metadata["help"].replace("%", "%%") + (f" [{default}]" if f.default is not None else ""),
            )


def _parent(text: str) -> tuple[int, int]:
    """The supervisor's process id, and the descriptor of its standard output, out of NAME@ID:OUT; the name is for people who
    list processes."""
    process, _, out = text.rpartition("@")[2].partition(":")
    return int(process), int(out)


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="hortus", description="A fast, trusted open server for text-embedding models.", allow_abbrev=False
    )
    top.add_argument("--version", action="version", version=f"hortus {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    model_help = "a folder, a Hugging Face hub id, or `demo` (all-MiniLM-L6-v2 from a package)"
    for name, what, more, model in (
        ("serve", "serve one model over HTTP", "Gateway, scheduler and engine, in one process or several.", True),
        ("tulip", "the scheduler and engine alone, behind gRPC", "For `hortus ivy` on other machines.", True),
        ("ivy", "the HTTP gateway alone", "Over `hortus tulip` processes, which --replica names.", False),
    ):
        command = commands.add_parser(
            name,
            help=what,
            description=f"{what[0].upper()}{what[1:]}. {more}",
            epilog=_EPILOG,
            formatter_class=_Help,
            allow_abbrev=False,
        )
        if model:
            command.add_argument("model", metavar="MODEL", help=model_help)
        command.add_argument(
            "--config", type=Path, metavar="FILE", help="TOML file with tables [ivy] [tulip] [rose] [link]"
        )
        command.add_argument("--supervised", type=_parent, default=None, help=argparse.SUPPRESS)
        _add_knobs(command, name)
    embed = commands.add_parser(
        "embed",
        help="files to vectors: whole corpora, exactly once",
        description="Files to vectors: Parquet, JSON lines, CSV and plain text (also .gz, .zst), to Parquet beside a manifest.",
        epilog=_EMBED_EPILOG,
        formatter_class=_Help,
        allow_abbrev=False,
    )
    embed.add_argument("inputs", nargs="+", metavar="INPUT", help="files, folders, globs (quoted) or URLs (s3://...)")
    embed.add_argument("--model", metavar="MODEL", help=model_help)
    embed.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file with tables [corpus] [ivy] [tulip] [rose]"
    )
    _add_knobs(embed, "embed")
    models = commands.add_parser(
        "models",
        help="list model families, or check whether a folder would be served",
        description="List the model families, or say whether a folder would be served, how, and why not. Reads no weights.",
        epilog="exit status: 0 it would be served, 1 it would not (the reason is on standard error), 2 bad usage",
        formatter_class=_Help,
        allow_abbrev=False,
    )
    models.add_argument(
        "what", nargs="?", choices=("check",), metavar="check", help="check a model; without: list families"
    )
    models.add_argument("model", nargs="?", metavar="MODEL", help=model_help)
    models.add_argument("--config", type=Path, metavar="FILE", help="TOML file with tables [ivy] [rose]")
    _add_knobs(models, "models")
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


def _spelt_out(words: list[str]) -> list[str]:
    """A bare switch takes no word that is no boolean: `--offline MODEL` is `--offline=true MODEL`."""
    switches = {
        "--" + f.name.replace("_", "-")
        for cls in config.SECTIONS.values()
        for f in dataclasses.fields(cls)
        if config.field_type(cls, f.name)[0] is bool
    }
    bare = [w in switches and after.lower() not in config.BOOLEANS for w, after in zip(words, [*words[1:], ""])]  # noqa: B905
    return [w + "=true" if alone else w for w, alone in zip(words, bare, strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status: 0 done, 1 could not start, 2 bad usage."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["bench"]:  # suites parse their own flags
        from hortus.bench import main as bench_main

        return bench_main(words[1:])
    if argv is None:  # not when called by a test or a program, whose handlers stay
        arm(words)
    everything = parser()
    args = vars(everything.parse_args(_spelt_out(words)))
    command, model, file, parent = (args.pop(name, None) for name in ("command", "model", "config", "supervised"))
    inputs, what = args.pop("inputs", ()), args.pop("what", None)
    if command == "models" and (what is None) != (model is None):
        everything.error(
            "hortus models check needs a MODEL" if what else "a model is checked by: hortus models check MODEL"
        )
    flags = {name: ",".join(text) if isinstance(text, list) else text for name, text in args.items()}
    environ = dict(os.environ)
    if (named := environ.pop(config.ENV_PREFIX + "CONFIG", None)) and file is None:
        file = Path(named)
    try:
        settings = config.load(file=file, environ=environ, flags=flags)
        configure_logging(settings.ivy.log_level)
        if parent:
            tie_to_parent(*parent)
        if command == "models":
            from hortus.check import check, families

            told = families() if what is None else check(model, settings)
            return 0 if say(told.rstrip("\n")) else 1
        if command == "embed":
            return _embed(inputs, model, settings)
        return _run(command, model, settings, bool(parent))
    except StartError as e:
        if parent:
            fail(str(e))
        else:
            print(f"hortus: {e}", file=sys.stderr)
        return 1


def _embed(inputs: Sequence[str], model: str | None, settings: config.Config) -> int:
    try:
        from hortus.corpus.command import embed
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] in ("pyarrow", "fsspec"):
            raise StartError(f"`hortus embed` needs the package {e.name}: pip install 'hortus[corpus]'") from None
        raise
    return embed(inputs, model, settings)


def _run(command: str, model: str, settings: config.Config, supervised: bool) -> int:
    """The chosen command. Only `serve` in one process starts without gRPC."""
    if command == "serve" and settings.link.gateways == 0 and settings.link.replicas == 1:
        if idle := config.without_link(settings.link):
            raise StartError(
                f"{idle[0]}: there is no link in one process; it needs --gateways or --replicas, or `hortus tulip` and "
                "`hortus ivy`"
            )
        from hortus.serve import serve

        return serve(model, settings)
    try:
        for name in ("grpc", "grpc_health", "grpc_reflection", "google.protobuf"):  # before any process is started
            if importlib.util.find_spec(name) is None:
                raise ModuleNotFoundError(name=name)
        if command == "tulip":
            from hortus.serve_tulip import serve_tulip

            return serve_tulip(model, settings, supervised=supervised)
        if command == "ivy":
            from hortus.serve_ivy import serve_ivy

            return serve_ivy(settings, supervised=supervised)
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] in ("grpc", "grpc_health", "grpc_reflection", "google"):
            raise StartError(f"several processes need the package {e.name}: pip install 'hortus[grpc]'") from None
        raise
    from hortus.supervise import supervise

    return supervise(model, settings)


if __name__ == "__main__":
    sys.exit(main())
