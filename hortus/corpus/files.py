"""From what a person typed (files, folders, globs, fsspec URLs) to a list of files, in an order that is always the same.

s3:// and gs:// go through pyarrow, which holds their clients; other schemes through fsspec's own. Credentials and endpoints
come from the environment, as each client documents it. Does not know what is in a file.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO, cast

import fsspec
import pyarrow as pa
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.local import LocalFileSystem
from pyarrow import fs as arrow_fs

from hortus.errors import StartError

log = logging.getLogger("hortus.corpus")

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


@dataclass(slots=True)
class _Passed:
    """What folders and globs hold and is not read, by reason."""

    by_reason: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, name: str) -> None:
        self.by_reason.setdefault(reason, []).append(name)

    def __str__(self) -> str:
        return "; ".join(f"{len(n)} {reason.format(min(n))}" for reason, n in sorted(self.by_reason.items()))


_NO_FORMAT = "whose names say no format (such as {}; give --format to have them read)"
_HIDDEN = "whose names, or whose folders', begin with . or _ (such as {}; name them to have them read)"
_IRREGULAR = "that are no regular files (such as {})"
_BARRED = "that may not be read, with all that is in them (such as {})"
_FOLDERS = "that are folders, or links to some (such as {}; name them to have what is in them read)"


def listed(
    inputs: Sequence[str], *, format: str = "auto", ours: Callable[[Any, str], bool] = lambda where, path: False
) -> list[File]:
    """The files that the inputs name: each input in the order given, the files of a glob or a folder by name.

    A folder stands for the files in it, at any depth, whose names say a format, or all when a format is given; names that begin
    with `.` or `_` are passed over, as other readers of data sets do. What is passed over is told, once. A file named twice is
    read once, also where its folder is written in another way. ours: whether a path of a file system is one that the run itself
    writes; a folder or glob passes such over, untold. StartError: nothing there, no format, or one of ours by name.
    """
    found: dict[object, File] = {}
    passed = _Passed()
    folders: dict[str, str] = {}  # as written, to where it is

    def key(path: str) -> tuple[str, str]:
        folder, base = os.path.split(path)
        if folder not in folders:
            folders[folder] = os.path.realpath(folder)
        return folders[folder], base

    for given in inputs:
        if not given.strip():
            raise StartError("an input is empty: name a file, folder, glob or URL (`.` for this folder)")
        where, path = file_system(given)
        local = isinstance(where, LocalFileSystem)
        scheme = "" if local else given.partition("://")[0] + "://"
        query = "?" + given.partition("?")[2] if not local and "?" in given.rpartition("/")[2] and scheme else ""

        def named(name: str, given: str = given, path: str = path, before: str = scheme, after: str = query) -> str:
            # A local path as it was typed: relative ones stay so, and a corpus may move with its folder.
            return before + name + after if before else _as_typed(given, path, name)

        try:
            there = _there(where, path, given, format, partial(ours, where))
            for name, info, reason in there:
                if reason is not None:
                    passed.add(reason, named(name))
                    continue
                url = named(name)
                found.setdefault(key(name) if local else url, _file(url, name, info, format))
        except (OSError, pa.ArrowException) as e:
            raise StartError(f"{given}: {e}") from None
    if not found:
        raise StartError("no input: name at least one file, folder, glob or URL")
    if passed.by_reason:
        log.warning("passed over, of what the inputs hold: %s", passed)
    return list(found.values())


_There = tuple[str, dict[str, Any], str | None]
"""(path, what the file system says of it, why it is passed over)"""


class _Walk(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Lists local folders, and keeps what hindered it: fsspec passes over a folder that it cannot list, untold."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.hindered: list[tuple[str, OSError]] = []

    def ls(self, path: str, detail: bool = False, **more: Any) -> Any:
        try:
            return super().ls(path, detail=detail, **more)
        except FileNotFoundError:  # gone meanwhile
            raise
        except OSError as e:
            self.hindered.append((path, e))
            raise

    def barred(self) -> list[_There]:
        """Folders that may not be read. OSError: one could not be, though it may."""
        for _, error in self.hindered:
            if not isinstance(error, PermissionError):
                raise error
        return [(path, {}, _BARRED) for path, _ in self.hindered]


def _there(where: Any, path: str, given: str, format: str, ours: Callable[[str], bool]) -> list[_There]:
    """What a path, folder or glob names, by name, but for ours. StartError when no file is among it."""
    if isinstance(where, LocalFileSystem):
        where = _Walk()
    if any(c in path for c in "*?[") and not where.exists(path):
        hits = _followed(where, where.glob(path, detail=True))
        found = [(n, i, _unread(i)) for n, i in sorted(hits.items()) if not ours(n)]
        none = "matches no file" + (" but what runs into --out write" if any(map(ours, hits)) else "")
    elif where.isdir(path):
        hits = _followed(where, where.find(path, detail=True))
        inside = path.rstrip("/") + "/"
        found = []
        for name, info in sorted(hits.items()):
            reason = _unread(info) or (_HIDDEN if _hidden(name.removeprefix(inside)) else None)
            if reason is None and format == "auto" and kind_of(name)[0] is None:
                reason = _NO_FORMAT
            if not ours(name):
                found.append((name, info, reason))
        none = "a folder without files" + (f" of a known kind ({', '.join(ENDINGS)})" if format == "auto" else "")
    elif where.isfile(path):
        if ours(path):
            raise StartError(f"{given}: is what a run into --out writes; give another --out")
        return [(path, where.info(path), None)]
    else:
        raise StartError(f"{given}: {'is no regular file' if where.exists(path) else 'no such file'}")
    if isinstance(where, _Walk):
        found += [folder for folder in where.barred() if not ours(folder[0])]
    if all(reason is not None for _, _, reason in found):
        passed = _Passed()
        for name, _, reason in found:
            passed.add(str(reason), name)
        raise StartError(f"{given}: {none}" + (f"; passed over: {passed}" if found else ""))
    return found


def _followed(where: Any, hits: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The same, of links on a disk what they lead to: folders of models and data sets are often made of links."""
    for name, info in hits.items():
        if info.get("islink"):
            with contextlib.suppress(OSError):
                info |= where.info(name)
    return hits


def _unread(info: dict[str, Any]) -> str | None:
    """Why nothing can be read of what a file system speaks of so; None of a file."""
    return {"file": None, "directory": _FOLDERS}.get(info["type"], _IRREGULAR)


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
    try:
        url.encode()
    except UnicodeEncodeError:
        raise StartError(f"{url!r}: its name is not UTF-8, and ids and rejects tell of rows by it; rename it") from None
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


class named:
    """What goes wrong inside is about this file."""

    def __init__(self, file: File) -> None:
        self.file = file

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, StartError) and self.file.url not in str(error):
            raise StartError(f"{self.file.url}: {error}") from None
        if isinstance(error, OSError | EOFError | pa.ArrowException | UnicodeDecodeError):
            raise StartError(f"{self.file.url}: cannot be read as {self.file.format}: {error}") from error
