"""From what a person typed (files, folders, globs, fsspec URLs) to a list of files, in an order that is always the same.

s3:// and gs:// go through pyarrow, which holds their clients; other schemes through fsspec's own. Credentials and endpoints
come from the environment, as each client documents it. Does not know what is in a file.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, cast

import fsspec
import pyarrow as pa
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.local import LocalFileSystem
from pyarrow import fs as arrow_fs

from hortus.errors import StartError

ENDINGS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".txt": "text",
    ".text": "text",
}
COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_ARROWS = ("s3", "gs", "gcs")
_BUFFER = 1 << 20


@dataclass(frozen=True, slots=True)
class File:
    """One input file."""

    url: str
    """As people write it; goes into ids, rejects and the manifest."""
    path: str
    """As its file system knows it."""
    format: str
    compression: str | None
    size: int
    changed: str
    """When it was changed, as its file system tells."""

    def open(self) -> BinaryIO:
        """Its bytes, unpacked. The file system is found again, so that a File may travel to another process."""
        where, _ = file_system(self.url)
        raw = cast(BinaryIO, where.open(self.path, "rb"))
        return raw if self.format == "parquet" else Stream(raw, self.compression)


class Stream(io.BufferedReader):
    """A file read from its beginning on, unpacked; in large pieces, because each may be a request to a far store."""

    def __init__(self, file: BinaryIO, compression: str | None) -> None:
        self._file = _Counted(file)
        self._packed: io.BufferedReader | None = None
        self._unpacked = self._file
        if compression is not None:
            packed = self._packed = io.BufferedReader(self._file, _BUFFER)
            plain: Any = (
                gzip.GzipFile(fileobj=packed) if compression == "gzip" else pa.CompressedInputStream(packed, "zstd")
            )
            self._unpacked = _Counted(plain)
        super().__init__(self._unpacked, _BUFFER)

    @property
    def taken(self) -> float:
        """Bytes of the file itself, as it is stored, that what has been given out took; of a compressed one about."""
        given = self.tell()
        if self._packed is None:
            return float(given)
        return self._packed.tell() * given / max(self._unpacked.tell(), 1)

    def close(self) -> None:
        super().close()
        self._file.close()


class _Counted(io.RawIOBase):
    """A file, and how much of it has been read: buffers over it then know how much of that they have given out."""

    def __init__(self, file: BinaryIO) -> None:
        self._inner, self._taken = file, 0

    def tell(self) -> int:
        return self._taken

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        data = self._inner.read(len(into))
        into[: len(data)] = data
        self._taken += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._inner.close()
        super().close()


def file_system(url: str) -> tuple[Any, str]:
    """(fsspec file system, path in it). StartError when nothing here can read such a URL."""
    scheme = url.partition("://")[0] if "://" in url else ""
    try:
        if scheme in _ARROWS:
            found, path = arrow_fs.FileSystem.from_uri(url)
            return ArrowFSWrapper(found), path
        return cast("tuple[Any, str]", fsspec.core.url_to_fs(url))
    except (ImportError, ValueError, OSError, pa.ArrowException) as e:
        raise StartError(f"{url}: {e}") from None


def listed(
    inputs: Sequence[str], *, format: str = "auto", ours: Callable[[Any, str], bool] = lambda where, path: False
) -> list[File]:
    """The files that the inputs name: each input in the order given, the files of a glob or a folder by name.

    A folder stands for the files in it, at any depth, whose names say a format; names that begin with `.` or `_` are passed
    over, as other readers of data sets do. A file named twice is read once. ours: whether a path of a file system is one that
    the run itself writes; a folder or glob passes such over. StartError: nothing there, no format, or one of ours by name.
    """
    found: dict[str, File] = {}
    for given in inputs:
        where, path = file_system(given)
        local = isinstance(where, LocalFileSystem)
        scheme = "" if local else given.partition("://")[0] + "://"
        query = "?" + given.partition("?")[2] if not local and "?" in given.rpartition("/")[2] and scheme else ""
        try:
            for name, info in _there(where, path, given, partial(ours, where)):
                # A local path as it was typed: relative ones stay so, and a corpus may move with its folder.
                url = _as_typed(given, path, name) if local else scheme + name + query
                found.setdefault(name if local else url, _file(url, name, info, format))
        except (OSError, pa.ArrowException) as e:
            raise StartError(f"{given}: {e}") from None
    if not found:
        raise StartError("no input: name at least one file, folder, glob or URL")
    return list(found.values())


def _there(where: Any, path: str, given: str, ours: Callable[[str], bool]) -> list[tuple[str, dict[str, Any]]]:
    """(path, what the file system says of it) of the files that a path, folder or glob names, but for ours."""
    if any(c in path for c in "*?[") and not where.exists(path):
        hits = where.glob(path, detail=True)
        files = {n: i for n, i in hits.items() if i["type"] == "file" and not ours(n)}
        if not files:
            raise StartError(
                f"{given}: matches no file" + (" but what runs into --out write" if any(map(ours, hits)) else "")
            )
    elif where.isdir(path):
        hits = where.find(path, detail=True)
        inside = path.rstrip("/") + "/"
        files = {n: i for n, i in hits.items() if i["type"] == "file" and not _hidden(n.removeprefix(inside))}
        files = {n: i for n, i in files.items() if kind_of(n)[0] is not None and not ours(n)}
        if not files:
            raise StartError(f"{given}: a folder without files of a known kind ({', '.join(ENDINGS)})")
    elif where.isfile(path):
        if ours(path):
            raise StartError(f"{given}: is what a run into --out writes; give another --out")
        files = {path: where.info(path)}
    else:
        raise StartError(f"{given}: no such file")
    return sorted(files.items())


def _hidden(path: str) -> bool:
    return any(part.startswith((".", "_")) for part in path.split("/"))


def _as_typed(given: str, path: str, name: str) -> str:
    if given == path or given.startswith("file:"):
        return name
    stem = _fixed(given)
    full = _fixed(path)
    return stem + name.removeprefix(full) if name.startswith(full) else name


def _fixed(path: str) -> str:
    """What of a pattern comes before its first wildcard's folder; of a plain path, all."""
    at = min((path.find(c) for c in "*?[" if c in path), default=len(path))
    return path if at == len(path) else path[: path.rfind("/", 0, at) + 1]


def _file(url: str, path: str, info: dict[str, Any], format: str) -> File:
    by_name, compression = kind_of(path)
    chosen = by_name if format == "auto" else format
    if chosen is None:
        raise StartError(f"{url}: its name says no format ({', '.join(ENDINGS)}, with .gz or .zst); give --format")
    if chosen == "parquet" and compression is not None:
        raise StartError(f"{url}: a compressed Parquet file; Parquet compresses inside, unpack it first")
    changed = info.get("mtime", info.get("LastModified", info.get("ETag", "")))
    return File(url, path, chosen, compression, int(info["size"] or 0), str(changed))


def kind_of(name: str) -> tuple[str | None, str | None]:
    """(format, compression) that a file's name says. Pure."""
    name = name.lower()
    compression = next((c for ending, c in COMPRESSED.items() if name.endswith(ending)), None)
    if compression is not None:
        name = name.rpartition(".")[0]
    return next((f for ending, f in ENDINGS.items() if name.endswith(ending)), None), compression
