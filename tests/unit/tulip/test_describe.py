"""The fingerprint: replicas with the same one give the same vectors."""

from __future__ import annotations

from pathlib import Path

from hortus.folder import ModelFolder, Module
from hortus.tulip.describe import describe
from hortus.types import ModelInfo

INFO = ModelInfo(name="m", width=4, max_tokens=100, vocab_size=50)


def folder(where: Path) -> ModelFolder:
    for name, data in (
        ("config.json", b"{}"),
        ("model.safetensors", b"trunk"),
        ("2_Dense/model.safetensors", b"dense"),
    ):
        path = where / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    modules = (Module("Transformer", where, {}), Module("Normalize", where / "3_Normalize", {}))
    return ModelFolder(where, "m", None, where, {}, (*modules, Module("Dense", where / "2_Dense", {})))


def test_every_file_with_weights_counts(tmp_path: Path):
    ours = folder(tmp_path)
    seen = {describe(ours, INFO)[0].fingerprint}
    for name in ("model.safetensors", "2_Dense/model.safetensors", "config.json"):
        (tmp_path / name).write_bytes(b"{ }")
        seen.add(describe(ours, INFO)[0].fingerprint)
    assert len(seen) == 4


def test_what_is_described_is_at_hand(tmp_path: Path):
    told, contents = describe(folder(tmp_path), INFO)
    assert [f.path for f in told.files] == list(contents) == ["config.json"]
    assert contents["config.json"] == b"{}"
