"""What a replica says of its model: the small files that a gateway needs, and one fingerprint for all of it.

Knows files. Does not know gRPC or tensors.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from hortus.folder import ModelFolder
from hortus.late import METADATA
from hortus.protocol.wire import Description, File
from hortus.types import ModelInfo

_WEIGHTS = (".safetensors", ".bin", ".pt")
_SAMPLES, _SAMPLE_BYTES = 64, 16 * 1024


def _places(folder: ModelFolder) -> list[Path]:
    places = {folder.path, folder.transformer, *(m.path for m in folder.modules)}
    return sorted(place for place in places if place.is_dir())


def small_files(folder: ModelFolder) -> dict[str, Path]:
    """Path inside the folder -> file: the JSON of the folder itself and of every module. Weight indexes are left out."""
    return {
        file.relative_to(folder.path).as_posix(): file
        for place in _places(folder)
        for file in sorted([*place.glob("*.json"), *place.glob(METADATA)])
        if not file.name.endswith(".index.json")
    }


def describe(folder: ModelFolder, info: ModelInfo) -> tuple[Description, dict[str, bytes]]:
    """The description, and what is in the files that it names, read once. The fingerprint covers them whole, and each weight
    file, of modules too, in samples spread over it: reading gigabytes would cost a start more than it tells, and training
    changes every tensor."""
    whole = hashlib.sha256()
    files, contents = [], {}
    for name, path in small_files(folder).items():
        data = contents[name] = path.read_bytes()
        files.append(File(name, len(data), hashlib.sha256(data).hexdigest()))
        whole.update(f"{name} {files[-1].sha256}\n".encode())
    for place in _places(folder):
        for path in sorted(p for p in place.iterdir() if p.suffix in _WEIGHTS):
            # The trunk's by their names alone: so schedulers that knew no others agree about most models.
            name = path.name if place == folder.transformer else path.relative_to(folder.path).as_posix()
            whole.update(f"{name} {_sampled(path)}\n".encode())
    return Description(info, whole.hexdigest(), tuple(files)), contents


def _sampled(path: Path) -> str:
    size = path.stat().st_size
    seen = hashlib.sha256(str(size).encode())
    with path.open("rb") as f:
        for i in range(_SAMPLES):
            f.seek(max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
            seen.update(f.read(_SAMPLE_BYTES))
    return seen.hexdigest()
