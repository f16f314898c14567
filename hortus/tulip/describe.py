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


def small_files(folder: ModelFolder) -> dict[str, Path]:
    """Path inside the folder -> file: the JSON of the folder itself and of every module. Weight indexes are left out."""
    places = {folder.path, folder.transformer, *(m.path for m in folder.modules)}
    return {
        file.relative_to(folder.path).as_posix(): file
        for place in sorted(places)
        if place.is_dir()
        for file in sorted([*place.glob("*.json"), *place.glob(METADATA)])
        if not file.name.endswith(".index.json")
    }


def describe(folder: ModelFolder, info: ModelInfo) -> Description:
    """Reads the files once. The fingerprint covers them whole, and each weight file in samples spread over it: reading
    gigabytes would cost a start more than it tells, and training changes every tensor."""
    whole = hashlib.sha256()
    files = []
    for name, path in small_files(folder).items():
        data = path.read_bytes()
        files.append(File(name, len(data), hashlib.sha256(data).hexdigest()))
        whole.update(f"{name} {files[-1].sha256}\n".encode())
    for path in sorted(p for p in folder.transformer.iterdir() if p.suffix in _WEIGHTS):
        whole.update(f"{path.name} {_sampled(path)}\n".encode())
    return Description(info, whole.hexdigest(), tuple(files))


def _sampled(path: Path) -> str:
    size = path.stat().st_size
    seen = hashlib.sha256(str(size).encode())
    with path.open("rb") as f:
        for i in range(_SAMPLES):
            f.seek(max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
            seen.update(f.read(_SAMPLE_BYTES))
    return seen.hexdigest()
