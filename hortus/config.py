"""Every knob, in five frozen dataclasses; the CLI, the environment and the TOML file are built from their fields.

Order, the later wins: defaults, TOML file (`--config FILE`, tables [ivy] [tulip] [rose] [link] [corpus]), environment
(`HORTUS_<FIELD>`), command line (`--field`). Unknown names are refused in all three. Checked once, here; nothing reads
the environment later.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hortus.errors import StartError

ENV_PREFIX = "HORTUS_"
MOST = {int: 10**12, float: 10**9}
"""No setting is larger, where its knob says nothing else: clocks, sockets and C's integers end somewhere above. In seconds that
is thirty years."""
MOST_THREADS = 4096


def knob(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    step: int | None = None,
    many: bool = False,
    secret: bool = False,
) -> Any:
    """A dataclass field with what a person needs to choose it: `help` says what it does and how to choose.

    step: values are multiples of it. many: the flag may be given several times; its texts are joined by commas. secret: never
    shown.
    """
    about = {"help": help, "choices": choices, "low": low, "high": high, "step": step, "many": many}
    return dataclasses.field(default=default, metadata=about, repr=not secret)


@dataclass(frozen=True, kw_only=True, slots=True)
class IvyConfig:
    """The HTTP gateway."""

    host: str = knob("127.0.0.1", "Address to listen on. 0.0.0.0 to be reached from other machines.")
    port: int = knob(8080, "Port to listen on; 0 takes a free one and prints it.", low=0)
    reuse_port: bool = knob(
        False, "Share the port with other gateways that set this too; the kernel deals connections out among them."
    )
    served_model_name: str | None = knob(
        None, "Name that requests must give as `model`. Default: the hub id, or the folder's name."
    )
    max_inputs: int = knob(
        8192,
        "Most inputs in one request. Large requests are cut into chunks inside: this bounds memory, not batches.",
        low=1,
    )
    max_body_bytes: int = knob(
        32 * 1024 * 1024,
        "Largest request body in bytes. Bounds the memory one request can take.",
        low=1024,
    )
    max_input_chars: int = knob(
        1_000_000,
        "Most characters of one text; a longer one is refused, or cut where it is to be truncated. Bounds the time that "
        "tokenising a text can take, before any limit of tokens is met.",
        low=1,
    )
    max_answer_values: int = knob(
        2**25,
        "Most numbers in one answer: rows times values a row. Bounds the memory of one answer, where a row is a token or a "
        "chunk.",
        low=1,
    )
    auto_truncate: bool = knob(
        False,
        "Cut inputs longer than the model takes, at the end, instead of refusing them with 400. A request's own "
        "`truncate` field wins. Turn on to behave as sentence-transformers does.",
    )
    timeout_s: float = knob(
        60.0, "Answer 504 when a request has taken this long. Set it a little under your client's timeout.", low=0.001
    )
    drain_s: float = knob(
        30.0,
        "After SIGTERM, seconds to finish requests in flight before exiting. The orchestrator's grace time must be ten longer.",
        low=0,
    )
    tokenize_inline_chars: int = knob(
        1024,
        "Requests with at most this many characters are tokenised on the event loop (fastest for short queries); "
        "longer ones in a thread, so that they never hold up others. Sixteen times as many of plain ASCII, where a "
        "BERT vocabulary is read by compiled code.",
        low=0,
    )
    tokenize_threads: int | None = knob(
        None,
        "Threads for tokenising long requests. Default: 2; in `hortus embed` and hortus.Engine beside a GPU, which waits for "
        "tokens, all cores but two, at most 16.",
        low=1,
        high=MOST_THREADS,
    )
    tokenize_apart: bool = knob(
        True,
        "Read long texts (16k characters and more at once) in a process beside each of those threads, started when the first one "
        "comes, so that short requests do not wait for Python's lock. Each holds the tokenizer once more: 60 MB, and some "
        "hundreds for vocabularies of 250k entries.",
    )
    templates: str | None = knob(
        None,
        "TOML file of prompts (table [prompts]), `default` prompt and `pair` template; adds to the model's own. Read again "
        "on SIGHUP.",
    )
    rerank_documents: str = knob(
        "object",
        'How rerank answers repeat a document: object is {"text": ...}, as Cohere, Jina and vLLM have it; text is the plain '
        "text, for clients of Infinity, whose requests look the same.",
        choices=("object", "text"),
    )
    int8_ranges: str | None = knob(
        None,
        ".npy file [2, dimensions] of the least and greatest value of each dimension, from texts like yours: what int8 and "
        "uint8 answers are scaled by. Not needed for binary ones, nor for pplx-embed, which has its own rule.",
    )
    api_keys: str | None = knob(
        None,
        "Keys that clients must show as `Authorization: Bearer KEY`, on every route but /health, /ready and the page's files. "
        "Better set in the environment (HORTUS_API_KEYS) or in --api-keys-file, where other users do not see them.",
        many=True,
        secret=True,
    )
    api_keys_file: str | None = knob(None, "File with one key a line, beside those of --api-keys.")
    tls_cert: str | None = knob(None, "PEM file of this server's certificate, with its chain: serve HTTPS.")
    tls_key: str | None = knob(None, "PEM file of the private key of --tls-cert.")
    cors_origins: str | None = knob(
        None,
        "Origins whose pages may call this server from a browser, such as https://example.org; `*` for all of them.",
        many=True,
    )
    gzip: bool = knob(
        False,
        "Compress answers of 64 KiB or more for clients that accept it, in a thread. Worth it on slow networks only: halves "
        "float answers, at about 20 ms of a core a megabyte.",
    )
    no_page: bool = knob(
        False,
        "Do not serve the page at / (and what feeds it, /watch). The page holds nothing of its own: what it shows, it asks the "
        "API for, with the key of whoever looks.",
    )
    access_log: str | None = knob(
        None, "Write one JSON line a request to this file (`-`: standard output), from a thread of its own."
    )
    otlp_endpoint: str | None = knob(
        None,
        "Send OpenTelemetry traces to this OTLP/HTTP address, such as http://127.0.0.1:4318/v1/traces. Needs the `otel` extra.",
    )
    log_level: str = knob("info", "Least severe log line to print.", choices=("debug", "info", "warning", "error"))


@dataclass(frozen=True, kw_only=True, slots=True)
class TulipConfig:
    """The scheduler."""

    max_batch_tokens: int | None = knob(
        None,
        "Most tokens in one step. Default: what the engine advises for its device. Lower it for a steadier p99 of "
        "short queries under bulk load; higher adds throughput only while the device is not saturated.",
        low=1,
    )
    max_batch_sequences: int = knob(1024, "Most sequences in one step.", low=1)
    max_queue_tokens: int = knob(
        1_000_000,
        "Refuse (429 with Retry-After) when this many tokens wait: about tokens/s times the seconds clients wait.",
        low=1,
    )
    lanes: bool = knob(
        True,
        "Let short requests overtake bulk ones (those of more than a quarter of a step): a step takes the short ones first, "
        "and bulk fills at most half a step. Turn off for strict first come, first served and full steps of bulk.",
    )
    in_flight: int = knob(
        2, "Batches handed to the engine and not yet answered. 2 hides the host's work behind the device's.", low=1
    )
    overlap_sequences: int = knob(
        32,
        "While one batch runs, hand over the next only once this many sequences (or half a batch of tokens) wait. "
        "Lower trades batch density for latency.",
        low=1,
    )
    step_timeout_s: float = knob(
        60.0,
        "A step unanswered for this long means the engine hangs: everything waiting is answered 503 until it moves "
        "again. Set it well above the longest step (a full batch on a CPU can take seconds).",
        low=0.001,
    )
    fake_delay_ms: float | None = knob(
        None,
        "Replace the engine by a fake that answers meaningless but deterministic vectors after this many milliseconds a "
        "step. For load tests of everything else; needs no torch and no weights.",
        low=0,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RoseConfig:
    """The engine."""

    revision: str | None = knob(None, "Hub revision (commit, tag or branch) to pin. Ignored for a local folder.")
    cache_dir: str | None = knob(None, "Where hub downloads are kept. Default: Hugging Face's own cache.")
    offline: bool = knob(False, "Never ask the hub; serve from the cache or fail at start.")
    hub_token: str | None = knob(None, "Token for gated hub models. Default: Hugging Face's own login or HF_TOKEN.")
    device: str = knob("auto", "Where to compute: auto takes cuda when there is one.", choices=("auto", "cpu", "cuda"))
    dtype: str = knob(
        "auto",
        "Number format of weights and activations. auto: float32 on the CPU, bfloat16 on a GPU. fp8: the layers' products in "
        "8 bits on a Hopper GPU or a later one, all else in bfloat16; for throughput, from about 1,000 tokens a step on.",
        choices=("auto", "float32", "bfloat16", "float16", "fp8"),
    )
    threads: int | None = knob(
        None, "CPU threads for tensor work. Default: all cores the process may use.", low=1, high=MOST_THREADS
    )
    max_length: int | None = knob(
        None, "Longest input in tokens. Default: the model folder's own limit, which it may not exceed.", low=1
    )
    load_format: str = knob(
        "auto",
        "auto reads the folder's weights; dummy makes random ones of the true shape from config.json alone, for speed "
        "work.",
        choices=("auto", "dummy"),
    )
    kind: str = knob(
        "auto",
        "What a row is: embed (a vector), classify (logits: rerankers and classifiers), sparse (SPLADE), rerank (one score: "
        "also of a language model that answers yes or no, such as Qwen3-Reranker, whose files do not say what they are "
        "for). auto: as the model's files say.",
        choices=("auto", "embed", "classify", "sparse", "rerank"),
    )
    attention: str = knob(
        "auto",
        "Attention backend. auto follows the measured table; a name forces one and fails at start if it cannot run.",
        choices=("auto", "twin", "varlen", "fa4", "flashinfer_fa2", "flashinfer_fa3"),
    )
    products: str = knob(
        "auto",
        "Who multiplies on a GPU. auto: kernels of this project and of quack where they were measured to be the faster. "
        "library: PyTorch's products alone, to find a fault, or for a first start that compiles less.",
        choices=("auto", "library"),
    )
    cuda_graphs: bool = knob(True, "Replay captured CUDA graphs for small steps. Turn off to find a fault.")
    graph_max_tokens: int = knob(
        17408, "No graph is captured for steps of more tokens than this; eager is as fast there.", low=64
    )
    graph_bucket: int = knob(
        64,
        "Tokens of a step are rounded up to multiples of this (itself one of 16) up to 1,024, of four times this above; a "
        "graph serves all that come to the same. Larger: fewer graphs to capture, more rows in vain.",
        low=16,
        high=1024,
        step=16,  # Triton makes kernels of their own for sizes that 16 does not divide, which no start would rehearse
    )
    graph_cap: int = knob(256, "Most graphs kept; the least recently used is dropped.", low=1)
    warm: str | None = knob(
        None,
        "Capture graphs at start: `all`, or shapes as SEQUENCESxTOKENS, the tokens of each sequence, such as 1x128,8x512. "
        "Default: at first use.",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkConfig:
    """Several processes or machines: how many, and what runs between Ivy and Tulip (gRPC; needs the `grpc` extra)."""

    gateways: int = knob(
        0,
        "`hortus serve` with this many gateway processes on one port, apart from the engine. 0: all in one process, which "
        "answers a single client fastest. More once one core of HTTP is not enough: about 10,000 short queries a second.",
        low=0,
    )
    replicas: int = knob(
        1, "`hortus serve` with this many engine processes: one a GPU; on a CPU they share its cores.", low=1
    )
    replica: str | None = knob(
        None,
        "`hortus ivy`: where the schedulers are, as HOST:PORT or unix:PATH; give it several times, or separated by commas. "
        "A host name that resolves to several addresses stands for all of them and is looked up again every "
        "--resolve-s.",
        many=True,
    )
    listen: str = knob(
        "127.0.0.1:50051",
        "`hortus tulip`: where to listen, as HOST:PORT or unix:PATH. 0.0.0.0:50051 to be reached from other machines: set "
        "the --link-* flags then.",
    )
    metrics_port: int | None = knob(
        None,
        "Serve this process's metrics on a port of their own; with `hortus serve --gateways` the first of one port a "
        "process, engines first. Default: only the gateway's /metrics.",
        low=0,
    )
    resolve_s: float = knob(5.0, "Look host names of --replica up again every so many seconds.", low=0.1)
    silence_s: float = knob(
        5.0,
        "A replica that sends nothing for this long, not even an answer to a ping, counts as lost: what it had is sent to "
        "another. Longer than the engine's host code ever holds Python up.",
        low=0.5,
    )
    slow_start_s: float = knob(
        10.0, "A replica that comes up gets a growing share of the work for this long, so that it can warm up.", low=0
    )
    link_ca: str | None = knob(
        None,
        "PEM file of the authority that signed the other side's certificate. Ivy then speaks TLS; Tulip then wants a "
        "certificate of every gateway (mutual TLS).",
    )
    link_cert: str | None = knob(None, "PEM file of this side's certificate. Tulip then speaks TLS.")
    link_key: str | None = knob(None, "PEM file of the private key of --link-cert.")
    link_token: str | None = knob(
        None,
        "Secret that gateways must show the scheduler; the same on both sides. Better set in the environment "
        "(HORTUS_LINK_TOKEN), where other users do not see it.",
        secret=True,
    )


_ONLY_BETWEEN_PROCESSES = ("silence_s", "slow_start_s", "link_ca", "link_cert", "link_key", "link_token")


def without_link(link: LinkConfig) -> list[str]:
    """The flags that were set although they mean nothing to `hortus serve` in one process. Pure."""
    unset = LinkConfig()
    return [
        "--" + name.replace("_", "-") for name in _ONLY_BETWEEN_PROCESSES if getattr(link, name) != getattr(unset, name)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusConfig:
    """`hortus embed`: whole corpora, from files to vectors."""

    out: str | None = knob(
        None,
        "Folder (or fsspec URL) for the vectors, the rejects and the manifest. A killed run goes on from what is there.",
    )
    format: str = knob(
        "auto",
        "What the inputs are. auto: by their names, and a folder's others are passed over.",
        choices=("auto", "parquet", "jsonl", "csv", "text"),
    )
    text: str = knob("text", "Column of the texts. Plain text files have none: each line is a text.")
    id: str | None = knob(
        None, "Column that names a row; kept in the output and in the rejects. Default: a column `id` of FILE:ROW."
    )
    keep: str | None = knob(
        None,
        "Further columns to keep in the output, separated by commas. NAME:TYPE gives the type (price:float64).",
        many=True,
    )
    precision: str = knob(
        "float32",
        "What a vector is stored as. float16 halves the space and keeps three digits; int8 and binary are the "
        "server's codes (int8 needs --int8-ranges but for pplx-embed), for indexes that take them.",
        choices=("float32", "float16", "int8", "uint8", "binary", "ubinary"),
    )
    dimensions: int | None = knob(
        None, "Keep the first so many values of each vector (Matryoshka). Default: all.", low=1
    )
    prompt_name: str | None = knob(
        None, "The model's prompt to put before each text. Default: its default prompt; `none`: no prompt."
    )
    chunk_tokens: int | None = knob(
        None,
        "Cut texts into chunks of at most this many tokens, special ones included: a row a chunk, with its number and where "
        "it begins and ends in the text, in characters. Default: a row a text.",
        low=1,
    )
    chunk_overlap: int = knob(0, "Tokens that a chunk repeats of the one before it.", low=0)
    contextual: bool = knob(
        False, "Embed the chunks of a text together, each in the context of the others. For models trained for it."
    )
    part_rows: int = knob(65_536, "Input rows an output file: what a killed run has to do again at most.", low=1)
    window_rows: int = knob(
        8192,
        "Rows sorted by length together, so that steps are dense; of long texts fewer. Three windows are in memory at a time: "
        "lower it where memory is short.",
        low=1,
    )
    server: str | None = knob(
        None,
        "URL of a running Hortus server to use in place of an engine here; give it several times for several servers.",
        many=True,
    )
    server_key: str | None = knob(
        None, "Key that the servers want. Better set in the environment (HORTUS_SERVER_KEY).", secret=True
    )
    into: str | None = knob(
        None,
        "Put the rows into a database in place of Parquet files: lancedb:FOLDER#TABLE, qdrant:URL#COLLECTION or "
        "postgresql://USER@HOST/DB#TABLE (pgvector). --out still takes the manifest and the rejects. Ids must be unique.",
        secret=True,
    )
    ray: str | None = knob(
        None,
        "Run over a Ray cluster: its address, `auto` for the one this machine is of, or `local` for several engines on this "
        "machine. Inputs and --out must be reachable from every node.",
    )
    actors: int | None = knob(
        None, "Engines in the Ray cluster. Default: one a GPU; without GPUs one for every --threads (1) cores.", low=1
    )
    progress: str = knob(
        "auto",
        "What to tell while it runs. auto: a bar on a terminal, else a JSON line on standard output every few seconds.",
        choices=("auto", "bar", "json", "none"),
    )


Section = type[IvyConfig] | type[TulipConfig] | type[RoseConfig] | type[LinkConfig] | type[CorpusConfig]
SECTIONS: dict[str, Section] = {
    "ivy": IvyConfig,
    "tulip": TulipConfig,
    "rose": RoseConfig,
    "link": LinkConfig,
    "corpus": CorpusConfig,
}


def field_type(section: Section, name: str) -> tuple[type, bool]:
    """(base type, may be None) of one knob."""
    hint = typing.get_type_hints(section)[name]
    if isinstance(hint, types.UnionType):
        base = next(a for a in typing.get_args(hint) if a is not type(None))
        return base, True
    return hint, False


BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
"""How a switch may be written, in any case."""


def parse(section: Section, name: str, raw: object, source: str) -> Any:
    """One knob's value from a string (environment, command line) or a TOML value; StartError names the source."""
    base, optional = field_type(section, name)
    spec = next(f for f in dataclasses.fields(section) if f.name == name)

    def refuse(wanted: str) -> StartError:
        return StartError(f"{source}: {repr(raw) if spec.repr else 'what is given'} is not {wanted}")

    if raw is None and optional:
        return None
    value: Any
    if base is bool:
        value = raw if isinstance(raw, bool) else BOOLEANS.get(str(raw).strip().lower())
        if value is None:
            raise refuse("true or false")
    elif base in (int, float):
        if not isinstance(raw, int | float | str) or isinstance(raw, bool):
            raise refuse("a number")
        try:
            value = base(raw)
        except (TypeError, ValueError, OverflowError):
            raise refuse("a whole number" if base is int else "a number") from None
        if base is int and isinstance(raw, float) and raw != value:
            raise refuse("a whole number")
        if value != value or value in (float("inf"), float("-inf")):
            raise refuse("a finite number")
    else:
        if not isinstance(raw, str):
            raise refuse("text")
        if not raw.strip() or not raw.isprintable():
            raise refuse("a line of text")
        value = raw
    choices, low, high, step = (spec.metadata[word] for word in ("choices", "low", "high", "step"))
    if choices and value not in choices:
        raise refuse("one of " + ", ".join(choices))
    if low is not None and value < low:
        raise refuse(f"at least {low:g}")
    if base in (int, float) and value > (high := high or MOST[base]):
        raise refuse(f"at most {high:g}")
    if step is not None and value % step:
        raise refuse(f"a multiple of {step}")
    return value


def _unknown(name: str, where: str, known: list[str]) -> StartError:
    if name.removeprefix(ENV_PREFIX).lower() == "model":
        return StartError(
            f"{where}: {name} is no setting: the model is named on the command line alone (MODEL; --model for `hortus embed`)"
        )
    near = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}"
    return StartError(f"{where}: unknown setting {name!r}{hint}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All sections, resolved."""

    ivy: IvyConfig = dataclasses.field(default_factory=IvyConfig)
    tulip: TulipConfig = dataclasses.field(default_factory=TulipConfig)
    rose: RoseConfig = dataclasses.field(default_factory=RoseConfig)
    link: LinkConfig = dataclasses.field(default_factory=LinkConfig)
    corpus: CorpusConfig = dataclasses.field(default_factory=CorpusConfig)


def load(
    *, file: Path | None = None, environ: Mapping[str, str] | None = None, flags: Mapping[str, object] | None = None
) -> Config:
    """Resolve file, environment and flags (field name -> text or value) into one Config; StartError names the fault."""
    values: dict[str, dict[str, Any]] = {s: {} for s in SECTIONS}
    home = {f.name: s for s, section in SECTIONS.items() for f in dataclasses.fields(section)}
    if file is not None:
        try:
            table = tomllib.loads(file.read_bytes().decode("utf-8-sig"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
            raise StartError(f"--config {file}: {e}") from None
        for section, entries in table.items():
            if section not in SECTIONS:
                raise _unknown(section, str(file), list(SECTIONS))
            if not isinstance(entries, dict):
                raise StartError(f"{file}: {section} must be a table, as in [{section}]")
            fields = [f.name for f in dataclasses.fields(SECTIONS[section])]
            for name, raw in entries.items():
                if name not in fields:
                    raise _unknown(name, f"{file} [{section}]", fields)
                values[section][name] = parse(SECTIONS[section], name, raw, f"{file} [{section}] {name}")
    for key, text in sorted((environ or {}).items()):
        if not key.startswith(ENV_PREFIX):
            continue
        name = key[len(ENV_PREFIX) :].lower()
        if name not in home:
            raise _unknown(key, "environment", [ENV_PREFIX + n.upper() for n in home])
        values[home[name]][name] = parse(SECTIONS[home[name]], name, text, key)
    for name, raw in (flags or {}).items():
        if name not in home:
            raise _unknown(name, "settings", list(home))
        values[home[name]][name] = parse(SECTIONS[home[name]], name, raw, "--" + name.replace("_", "-"))
    return Config(
        ivy=IvyConfig(**values["ivy"]),
        tulip=TulipConfig(**values["tulip"]),
        rose=RoseConfig(**values["rose"]),
        link=LinkConfig(**values["link"]),
        corpus=CorpusConfig(**values["corpus"]),
    )
