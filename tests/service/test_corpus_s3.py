"""`hortus embed` from and to an object store: a real client against a local server that speaks S3."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import boto3
import numpy as np
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer
from pyarrow import fs

from hortus import config
from hortus.corpus import command, pipeline
from hortus.errors import StartError

TEXTS = [f"the cat {i} sat on a mat" for i in range(300)]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": endpoint,
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="corpus")
    return "s3://corpus"


def embed(given: list[str], out: str) -> int:
    flags = {"out": out, "fake_delay_ms": 0.0, "progress": "none", "part_rows": 100, "window_rows": 40}
    return command.embed(given, "demo", config.load(flags=flags))


def test_from_a_bucket_into_a_bucket(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    where, root = fs.FileSystem.from_uri(bucket)
    for i in range(3):
        with where.open_output_stream(f"{root}/in/{i}.txt") as f:
            f.write("\n".join(TEXTS[i * 100 : i * 100 + 100]).encode())
    (tmp_path / "in.txt").write_text("\n".join(TEXTS))
    assert embed([str(tmp_path / "in.txt")], str(tmp_path / "out")) == 0
    wanted = np.concatenate(
        [pq.read_table(p)["embedding"].to_numpy() for p in sorted((tmp_path / "out").glob("part*"))]
    )

    take, taken = pipeline.Parts.take, []

    def crash(self, window, vectors):
        taken.append(window)
        if len(taken) == 5:
            raise RuntimeError("on purpose")
        return take(self, window, vectors)

    monkeypatch.setattr(pipeline.Parts, "take", crash)
    with pytest.raises(RuntimeError, match="on purpose"):
        embed([f"{bucket}/in/*.txt"], f"{bucket}/out")
    monkeypatch.setattr(pipeline.Parts, "take", take)
    there = {f.base_name for f in where.get_file_info(fs.FileSelector(f"{root}/out", recursive=True)) if f.is_file}
    assert there == {"_manifest.json", "part-00000-00000.parquet", "part-00000-00000.json"}  # nothing by halves
    assert embed([f"{bucket}/in/*.txt"], f"{bucket}/out") == 0
    parts = [pq.read_table(f"{root}/out/part-00000-0000{i}.parquet", filesystem=where) for i in range(3)]
    assert np.array_equal(np.stack(np.concatenate([t["embedding"].to_numpy() for t in parts])), np.stack(wanted))
    ids = [i for t in parts for i in t["id"].to_pylist()]
    assert ids == [f"{bucket}/in/{f}.txt:{i}" for f in range(3) for i in range(100)]


def test_what_is_not_there_is_named(bucket: str, tmp_path: Path):
    with pytest.raises(StartError, match=r"s3://corpus/none\.txt: no such file"):
        embed([f"{bucket}/none.txt"], str(tmp_path / "out"))
    with pytest.raises(StartError, match="matches no file"):
        embed([f"{bucket}/none/*.txt"], str(tmp_path / "out"))
    with pytest.raises(StartError, match="nope://"):
        embed(["nope://x/y.txt"], str(tmp_path / "out"))
