"""`hortus bench fp8`: what `--dtype fp8` costs in the quality of rankings, by its plain twin on the CPU: no GPU is needed.

The same real weights twice: all in float32, and with the layers' products in e4m3 (rose/kernels/fp8_twin.py). Two tasks. Lee:
each of 50 news texts asks for the others, judged by people. WordNet: a noun asks for its own gloss among many. nDCG@10 of
both, the cosine of each vector to float32's, and how far the score moved.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hortus.bench.flags import whole, written_file
from hortus.bench.inprocess import Ours
from hortus.bench.results import Record, append, cosines
from hortus.config import RoseConfig
from hortus.engines import open_model
from hortus.errors import StartError
from hortus.rose.attention.twin import TwinAttention
from hortus.rose.cpu import CpuEngine
from hortus.rose.kernels import fp8_twin, linear, twin
from hortus.rose.kernels.linear import LinearFactory
from hortus.rose.modelcfg import build_network, read_spec
from hortus.rose.models import Kit
from hortus.types import Float32

Floats = np.ndarray[Any, np.dtype[np.float64]]

PRODUCTS: dict[str, LinearFactory] = {"float32": linear.plain, "fp8": fp8_twin.linear}
"""All else is float32: not every processor multiplies bfloat16, and what that costs is known to be little."""


class Task(NamedTuple):
    """Queries, documents, and how much each document is worth to each query: [queries, documents], at least 0."""

    name: str
    queries: list[str]
    documents: list[str]
    gains: Float32


def lee() -> Task:
    """Each of Lee's 50 texts against the 49 others (a text is worth nothing to itself)."""
    spec = find_spec("gensim")
    if spec is None or not spec.submodule_search_locations:
        raise StartError("the texts come from gensim: pip install 'hortus[bench]'")
    at = Path(next(iter(spec.submodule_search_locations)), "test", "test_data")
    texts = (at / "lee.cor").read_text("latin-1").splitlines()
    judged = np.loadtxt(at / "similarities0-1.txt", dtype=np.float32)  # each pair once, above the diagonal
    gains = np.maximum(judged, judged.T)
    np.fill_diagonal(gains, 0)
    return Task("lee", texts, texts, gains)


def wordnet(folder: Path, *, queries: int, documents: int) -> Task:
    """Nouns against glosses, both drawn by chance, the same at every run. A gloss of any sense of the noun is worth 1."""
    senses: list[tuple[set[str], str]] = []
    try:
        for line in (folder / "data.noun").read_text("ascii").splitlines():
            if line.startswith(" "):  # the licence
                continue
            data, _, gloss = line.partition(" | ")
            words = data.split(" ")
            lemmas = {words[4 + 2 * n].replace("_", " ").lower() for n in range(int(words[3], 16))}
            senses.append((lemmas, gloss.partition('; "')[0].strip()))
    except (OSError, ValueError, IndexError) as e:
        raise StartError(f"--wordnet {folder}: expected WordNet 3.0's data.noun there ({e})") from None
    rng = random.Random(0)
    drawn = rng.sample(senses, min(documents, len(senses)))
    nouns = sorted({lemma for lemmas, _ in drawn for lemma in lemmas})
    asked = rng.sample(nouns, min(queries, len(nouns)))
    gains = np.array([[noun in lemmas for lemmas, _ in drawn] for noun in asked], np.float32)
    return Task("wordnet", asked, [gloss for _, gloss in drawn], gains)


def ndcg(scores: Float32, gains: Float32, most: int = 10) -> Floats:
    """[queries] gains of the `most` best, discounted by rank, over the most there could be.

    Järvelin & Kekäläinen 2002. scores, gains: [queries, documents].
    """
    discount = 1 / np.log2(np.arange(2, most + 2))
    best = np.argsort(-scores, axis=1, kind="stable")[:, :most]
    got = np.take_along_axis(gains, best, 1) @ discount[: best.shape[1]]
    ideal = -np.sort(-gains, axis=1)[:, :most] @ discount[: best.shape[1]]
    found: Floats = got / ideal
    return found


def score(ours: Ours, task: Task) -> tuple[Floats, Float32]:
    """(nDCG@10 of each query, the vectors of queries and documents)."""
    rows = ours.embed([*task.queries, *task.documents])
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    scores = rows[: len(task.queries)] @ rows[len(task.queries) :].T
    if task.queries is task.documents:
        np.fill_diagonal(scores, -np.inf)
    return ndcg(scores, task.gains), rows


def opened(model: str, form: str) -> Ours:
    """The model on the CPU with one of PRODUCTS."""
    folder = open_model(model, None, RoseConfig(), weights=True)
    ours = Ours(folder, RoseConfig(device="cpu"))
    family, spec = read_spec(folder.config)
    kit = Kit(ops=twin, linear=PRODUCTS[form], attention=TwinAttention)
    with torch.inference_mode():
        network = build_network(folder, family, spec, kit, device=torch.device("cpu"), dtype=torch.float32)
    ours.engine = CpuEngine(network, dataclasses.replace(ours.engine.info, dtype=form))
    return ours


def measured(model: str, tasks: Sequence[Task]) -> list[Record]:
    """A record a task and format, told as they come."""
    engines = {form: opened(model, form) for form in PRODUCTS}
    records = []
    for task in tasks:
        base, exact = score(engines["float32"], task)
        for form, ours in engines.items():
            each, rows = (base, exact) if form == "float32" else score(ours, task)
            close, moved, about = cosines(rows, exact), (each - base) / base.mean(), len(each) ** 0.5
            note = (
                f"nDCG@10 {each.mean():.4f}, {100 * moved.mean():+.2f} % (standard error {100 * moved.std() / about:.2f}); "
                f"cosine to float32 {close.mean():.5f} on average"
            )
            record = Record(
                suite=f"fp8 {task.name}", target="hortus", model=ours.name, dtype=form, batch=len(rows),
                ratio=float(each.mean() / base.mean()), cosine=float(close.min()), note=note,
            )  # fmt: skip
            print(f"  {task.name:<8} {form:<9} {note}, {close.min():.5f} at least", flush=True)
            records.append(record)
    return records


def main(argv: Sequence[str]) -> int:
    """Entry point of `hortus bench fp8`."""
    parser = argparse.ArgumentParser(prog="hortus bench fp8", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="demo", help="a folder, hub id or demo, on the CPU [demo]")
    parser.add_argument(
        "--wordnet",
        type=Path,
        metavar="DIR",
        help="where data.noun is, such as /usr/share/wordnet of Debian's wordnet-base",
    )
    parser.add_argument("--queries", type=whole, default=6000, help="nouns [6000]")
    parser.add_argument("--documents", type=whole, default=6000, help="glosses [6000]")
    parser.add_argument("--out", type=written_file, help="append JSON lines to this file")
    args = parser.parse_args(argv)
    try:
        tasks = [lee()]
        if args.wordnet is not None:
            tasks.append(wordnet(args.wordnet, queries=args.queries, documents=args.documents))
        records = measured(args.model, tasks)
    except StartError as e:
        parser.error(str(e))
    if args.out:
        append(args.out, records)
    return 0
