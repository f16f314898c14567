"""The output folder: a file is there whole, or not at all.

On a disk a file is written under another name, flushed to the disk and renamed; an object store shows an object only once it
is whole. One run at a time writes into a folder on a disk. What cannot be written ends the run with one line. Does not know what
the files hold.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from fsspec.implementations.local import LocalFileSystem

from hortus.corpus.files import file_system
from hortus.errors import StartError


@contextlib.contextmanager
def _writing(where: str) -> Iterator[None]:
    """What goes wrong inside ends the run, and no part is lost by it: StartError."""
    try:
        yield
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT)
        raise StartError(
            f"{where}: {'no room left' if full else f'cannot be written: {e}'}; once that is mended, the same command goes on "
            "from the last part that is whole"
        ) from e


class Writing:
    """A file while it is written: a file object that counts and hashes. StartError when it cannot be written."""

    def __init__(self, inner: BinaryIO, where: str) -> None:
        """where: the folder, for errors."""
        self._inner, self._where = inner, where
        self._hash = hashlib.sha256()
        self.size = 0
        self.closed = False

    def write(self, data: bytes | memoryview) -> int:
        self._hash.update(data)
        n = memoryview(data).nbytes
        with _writing(self._where):
            self._inner.write(data)
        self.size += n
        return n

    def tell(self) -> int:
        return self.size

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def flush(self) -> None:
        with _writing(self._where):
            self._inner.flush()

    def close(self) -> None:
        """Whoever writes Parquet closes its file; whether it is kept is decided elsewhere."""
        self.closed = True

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


class Store:
    """One output folder, by path or URL."""

    def __init__(self, url: str) -> None:
        """StartError when there is no such file system."""
        self.url = url
        self._fs, self._root = file_system(url)
        self._local = isinstance(self._fs, LocalFileSystem)
        self._lock: int | None = None

    def prepare(self, *folders: str) -> None:
        """Make the folder and take it for this run. StartError when another run has it, or it cannot be made."""
        try:
            for folder in ("", *folders):
                self._fs.makedirs(self._path(folder), exist_ok=True)
            if self._local:
                self._lock = os.open(self._path("_lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.sweep(*folders)
        except BlockingIOError:
            raise StartError(f"--out {self.url}: another `hortus embed` is writing there") from None
        except OSError as e:
            raise StartError(f"--out {self.url}: {e}") from None

    def sweep(self, *folders: str) -> None:
        """Take away what writers that were killed have begun: of a run before, or actors of this one. Nobody may be writing."""
        if self._local:
            for folder in ("", *folders):
                for left in Path(self._path(folder)).glob(".*.[0-9]*.partial"):
                    left.unlink()

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[Writing]:
        """A new file in place of the one of that name; nothing is there, or changed, when the block raises. StartError when it
        cannot be written."""
        where = f"--out {self.url}"
        if not self._local:
            # First here, then over in one go: a stream to an object store that is broken off may leave half an object.
            here = f"{tempfile.gettempdir()} (TMPDIR), where parts for {where} are made"
            with _writing(here), tempfile.NamedTemporaryFile() as raw:
                yield Writing(cast(BinaryIO, raw), here)
                raw.flush()
                with _writing(where):
                    self._fs.put_file(raw.name, self._path(name))
            return
        with _writing(where), self._created(self._path(name)) as raw:
            yield Writing(raw, where)

    @contextlib.contextmanager
    def _created(self, path: str) -> Iterator[BinaryIO]:
        folder, base = os.path.split(path)
        partial = os.path.join(folder, f".{base}.{os.getpid()}.partial")
        try:
            with open(partial, "wb") as raw:
                yield raw
                raw.flush()
                os.fsync(raw.fileno())
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def put(self, name: str, data: bytes) -> None:
        """A small file, whole."""
        with self.create(name) as f:
            f.write(data)

    def get(self, name: str) -> bytes | None:
        """A file's bytes; None when it is not there."""
        try:
            return cast(bytes, self._fs.cat_file(self._path(name)))
        except FileNotFoundError:
            return None

    def sizes(self, folder: str) -> dict[str, int]:
        """Name to size of the files in a folder."""
        with contextlib.suppress(FileNotFoundError):
            found: list[dict[str, Any]] = self._fs.ls(self._path(folder), detail=True)
            return {i["name"].rpartition("/")[2]: int(i["size"] or 0) for i in found if i["type"] == "file"}
        return {}

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def name_of(self, where: Any, path: str) -> str | None:
        """What a path of the file system `where` is called in this folder; None when it is not in it."""
        if type(where) is not type(self._fs) or getattr(where, "protocol", None) != getattr(self._fs, "protocol", None):
            return None
        root, path = (os.path.realpath(p) if self._local else p for p in (self._root, path))
        inside = root.rstrip("/") + "/"
        return path.removeprefix(inside) if path.startswith(inside) else None

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}".rstrip("/") or "/"
