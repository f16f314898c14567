"""`hortus embed --into`: LanceDB, Qdrant (its local mode) and Postgres with pgvector, the real ones; cut off and gone on."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hortus
from hortus import config
from hortus.corpus import command, manifest
from hortus.errors import StartError

ROWS = 260
Read = Callable[[str], dict[int, np.ndarray]]


def lance(url: str) -> dict[int, np.ndarray]:
    import lancedb

    folder, _, name = url.removeprefix("lancedb:").rpartition("#")
    found = lancedb.connect(folder).open_table(name).to_arrow()
    rows = np.stack(found.column("embedding").to_numpy())
    ids = found.column("n").to_pylist()
    assert len(set(ids)) == len(ids)
    return dict(zip(ids, rows, strict=True))


def qdrant(url: str) -> dict[int, np.ndarray]:
    from qdrant_client import QdrantClient

    folder, _, name = url.removeprefix("qdrant:").rpartition("#")
    client = QdrantClient(path=folder)
    points, _ = client.scroll(name, limit=10_000, with_vectors=True)
    client.close()
    assert all(p.payload["lang"] == "en" for p in points)
    return {p.payload["n"]: np.array(p.vector, np.float32) for p in points}


def postgres(url: str) -> dict[int, np.ndarray]:
    import psycopg

    where, _, name = url.rpartition("#")
    with psycopg.connect(where) as connection:
        found = connection.execute(f"SELECT n, lang, embedding::text FROM {name}").fetchall()
    assert all(lang == "en" for _, lang, _ in found)
    return {n: np.array(text.strip("[]").split(","), np.float32) for n, _, text in found}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Postgres with pgvector, from a package."""
    os.environ.setdefault("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))  # it warns without
    import pgserver

    logging.getLogger("pgserver").setLevel(logging.CRITICAL)  # it speaks at exit, when nobody listens
    folder = tmp_path_factory.mktemp("pg")
    for last in (False, False, False, False, True):
        try:
            database = pgserver.get_server(folder, cleanup_mode="delete")
            break
        except (
            subprocess.TimeoutExpired
        ):  # it waits for ten seconds; a busy machine may take longer, and goes on meanwhile
            if last:
                raise
    yield database.get_uri()
    database.cleanup()


@pytest.fixture(params=["lancedb", "qdrant", "postgres"])
def sink(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Read]:
    if request.param == "postgres":
        return request.getfixturevalue("server") + "#vectors", postgres
    return f"{request.param}:{tmp_path / 'db'}#vectors", lance if request.param == "lancedb" else qdrant


def embed(given: Path, out: Path, into: str, **more: object) -> int:
    flags = {"out": str(out), "fake_delay_ms": 0.0, "progress": "none", "part_rows": 100, "window_rows": 40}
    return command.embed(
        [str(given)], "demo", config.load(flags={**flags, "id": "n", "keep": "lang", "into": into, **more})
    )


class Crash(Exception):
    """On purpose."""


def test_into_a_database_once_also_when_cut_off(
    sink: tuple[str, Read], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    url, read = sink
    texts = [f"the cat {i} sat on a mat" for i in range(ROWS)]
    pq.write_table(pa.table({"n": range(ROWS), "text": texts, "lang": ["en"] * ROWS}), tmp_path / "in.parquet")

    def crash(store, record):  # the second part's rows are there, its record is not
        if record.part == 1:
            raise Crash
        wrote(store, record)

    wrote = manifest.write
    monkeypatch.setattr(manifest, "write", crash)
    with pytest.raises(Crash):
        embed(tmp_path / "in.parquet", tmp_path / "out", url)
    monkeypatch.setattr(manifest, "write", wrote)
    assert len(read(url)) == 200
    assert embed(tmp_path / "in.parquet", tmp_path / "out", url) == 0
    found = read(url)
    with hortus.Engine("demo", fake_delay_ms=0.0) as engine:
        wanted = engine.embed(texts)
    assert sorted(found) == list(range(ROWS))
    assert np.allclose(np.stack([found[i] for i in range(ROWS)]), wanted, atol=1e-6)
    assert not list((tmp_path / "out").glob("*.parquet"))
    with pytest.raises(StartError, match=r"other columns|other vectors"):
        embed(tmp_path / "in.parquet", tmp_path / "other", url, dimensions=64)


@pytest.mark.parametrize("into", ["lancedb:x", "mysql://a#b", "qdrant:#"])
def test_what_is_no_database(tmp_path: Path, into: str):
    (tmp_path / "in.jsonl").write_text('{"n": 1, "text": "a", "lang": "en"}\n')
    with pytest.raises(StartError, match="--into"):
        embed(tmp_path / "in.jsonl", tmp_path / "out", into)
    with pytest.raises(StartError, match="--precision"):
        embed(tmp_path / "in.jsonl", tmp_path / "out", "lancedb:x#y", precision="binary")


def test_a_password_is_not_shown():
    from hortus.corpus.sinks import shown

    assert shown("postgresql://me:secret@host/db#t") == "postgresql://me:...@host/db#t"
