"""Reading texts without holding anybody up: at once when short, in a thread when long, in a process beside it when very long.

Knows threads and sizes. What becomes of a text is the Reader's (reading.py, compose.py). Does not know HTTP, prompts or engines.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import orjson
import tokenizers

from hortus.errors import Draining, InvalidInput, bare
from hortus.folder import ModelFolder
from hortus.ivy.apart import Apart, Gone
from hortus.ivy.assemble import Truncate
from hortus.ivy.compose import Composer
from hortus.ivy.reading import REFUSE
from hortus.ivy.split import cut
from hortus.types import TokenBatch

THREADS = 2
"""Of the pool, unless --tokenize-threads says otherwise."""
SLICE_CHARS = 256 * 1024
"""Characters a thread tokenises before others get their turn; a request that has gone stops there too."""
LEAST_CHARS = 4096
"""Fewer characters are not worth another thread."""
NICE = 10
"""Priority of the threads: what a long text takes longer by, short ones do not wait."""
APART_CHARS = 16 * 1024
"""From so many characters on a slice is read in another process (apart.py): for fewer, the way there costs more than it saves."""
INLINE_IDS = 4096
"""Token ids packed at once."""
SLICE_IDS = 16 * 1024
"""Token ids that a thread packs or decodes at a time: making numbers of Python's holds its lock."""
TOLD_CHARS = 32 * 1024
"""Characters whose tokens are told at a time: some 70 bytes of JSON a token."""
FRAME_CHARS = 8
"""What a text's special tokens count as: many empty texts are work too."""
T = TypeVar("T")
Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A method of Composer, and what to call it with."""

# The library's own pool has no bound but the machine, and a short text that is tokenised at once would wait in it behind long
# ones. Ours is the pool (--tokenize-threads).
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def sealed(folder: ModelFolder) -> list[tuple[str, int, int]]:
    """What changes when somebody writes into a small file of the folder: each one's path, size and time."""
    files = {file for place in (folder.path, folder.transformer) for file in place.glob("*.json")}
    return [(str(file), stat.st_size, stat.st_mtime_ns) for file in sorted(files) for stat in [file.stat()]]


def unchanged(folder: ModelFolder, seal: list[tuple[str, int, int]], **named: Any) -> Composer:
    """The Composer that another process has made of this folder, or none (SystemExit): one of other files would read long
    texts otherwise than short ones."""
    made = Composer(folder, **named)
    if sealed(folder) != seal:
        sys.exit(
            f"hortus: {folder.path}: files have changed since this server read them; restart it to serve what is there now"
        )
    return made


class Tokenizer(Composer):
    """A Composer with its threads, and their processes."""

    def __init__(
        self,
        folder: ModelFolder,
        *,
        max_tokens: int | None = None,
        vocab_size: int | None = None,
        inline_chars: int = 1024,
        threads: int | None = None,
        max_chars: int = 1_000_000,
        apart: bool = False,
    ) -> None:
        """inline_chars: of a request, up to which it is read at once. apart: give each thread a process for long texts, once
        there are some. The others, and StartError: see Reader."""
        seal = sealed(folder)
        super().__init__(folder, max_tokens=max_tokens, vocab_size=vocab_size, max_chars=max_chars)
        named = {"max_tokens": max_tokens, "vocab_size": vocab_size, "max_chars": max_chars}
        self._recipe = (unchanged, (folder, seal), named) if apart else None
        self._of_thread = threading.local()
        self._apart: list[Apart] = []
        self._inline_chars = inline_chars
        self._closed = False
        self.threads = threads or THREADS
        """How many long requests are read at once."""
        self._threads = ThreadPoolExecutor(self.threads, thread_name_prefix="tokenize", initializer=_stand_back)

    def close(self) -> None:
        """Stop the threads; what they are at is finished first, what waits is dropped."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for apart in self._apart:
            apart.stop()

    # All raise InvalidInput and TooLong.

    async def batch(self, texts: Sequence[str], *, truncate: Truncate = REFUSE, field: str = "input") -> TokenBatch:
        """Tokens of every text, special ones added. field: what the request calls the texts, for errors."""
        chars = sum(map(len, texts))
        if chars <= self._inline_chars or (effort := self.effort(texts)) <= self._inline_chars:
            return self.encode(texts, truncate=truncate, field=field)  # as _sliced would do, in fewer calls
        return await self._sliced(
            [len(t) for t in texts],
            lambda lo, hi: ("encode", (texts[lo:hi], lo), {"truncate": truncate, "field": field}),
            effort=effort,
        )

    async def sift(
        self, texts: Sequence[str], *, truncate: Truncate = REFUSE
    ) -> tuple[TokenBatch, dict[int, InvalidInput]]:
        """As `batch`, but a text that is refused is left out and told by index: one must not stop the others."""
        refused: dict[int, InvalidInput] = {}
        batch = await self._sliced(
            [len(t) for t in texts],
            lambda lo, hi: ("encode", (texts[lo:hi], lo), {"truncate": truncate, "refused": refused}),
            apart=False,  # `refused` is written to
        )
        return batch, refused

    async def pairs(
        self,
        lefts: Sequence[str],
        rights: Sequence[str],
        *,
        truncate: Truncate = REFUSE,
        most_left: int | None = None,
        most_right: int | None = None,
        field: str = "documents",
    ) -> TokenBatch:
        """One sequence a pair, as the model's tokenizer frames pairs. One left text may stand for all.

        most_left, most_right: tokens kept of each text, whatever its length and before anything else.
        """
        one = len(lefts) == 1
        lefts = [*lefts] * len(rights) if one else lefts
        return await self._sliced(
            [len(b) for b in rights],
            lambda lo, hi: ("_pairs", (lefts[lo:hi], rights[lo:hi], lo, truncate, (most_left, most_right), field), {}),
            effort=self.effort(lefts[:1] if one else lefts) + self.effort(rights),
        )

    async def pieces(
        self,
        texts: Sequence[Sequence[str]],
        cut: int,
        tails: Sequence[str],
        *,
        truncate: Truncate = REFUSE,
        field: str = "documents",
    ) -> TokenBatch:
        """One sequence an entry: its texts tokenised apart and joined, after what the tokenizer puts before a text; nothing
        follows. cut: the one of them that ends in the entry's tail and loses of it where the whole is too long."""
        return await self._sliced(
            [sum(map(len, t)) for t in texts],
            lambda lo, hi: ("_pieces", (texts[lo:hi], cut, tails[lo:hi], lo, truncate, field), {}),
        )

    async def joined(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        join: Callable[[str, str], str],
        *,
        truncate: Truncate = REFUSE,
        field: str = "documents",
    ) -> TokenBatch:
        """One sequence a pair: the text that `join` makes of it. Of one that is too long the two texts are cut, never the words
        around them (see fit.py)."""
        return await self._sliced(
            [len(q) + len(d) for q, d in zip(queries, documents, strict=True)],
            lambda lo, hi: ("_joined", (queries[lo:hi], documents[lo:hi], lo, join, truncate, field), {}),
        )

    async def documents(
        self, documents: Sequence[Sequence[str]], *, truncate: Truncate = REFUSE, field: str = "input"
    ) -> TokenBatch:
        """One sequence a document, one span a chunk (see assemble.documents). Text that spells a special token is text here,
        so that no chunk can pose as a separator."""
        return await self._sliced(
            [sum(map(len, d)) for d in documents],
            lambda lo, hi: ("_documents", (documents[lo:hi], lo, truncate, field), {}),
        )

    async def shorten(self, texts: Sequence[str], most: int) -> list[str]:
        """The beginnings of the texts, of at most so many tokens each."""

        def work() -> list[str]:
            found = self._inner.encode_batch(texts, add_special_tokens=False)
            return [t if len(e.ids) <= most else t[: e.offsets[most - 1][1]] for t, e in zip(texts, found, strict=True)]

        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _sliced(
        self, sizes: list[int], of: Callable[[int, int], Call], *, effort: int | None = None, apart: bool = True
    ) -> TokenBatch:
        """effort: of all together, where it is not the sum of their sizes."""
        if (sum(sizes) if effort is None else effort) <= self._inline_chars:
            name, args, named = of(0, len(sizes))
            return cast(TokenBatch, getattr(self, name)(*args, **named))

        def work(lo: int, hi: int) -> TokenBatch:
            return cast(TokenBatch, self._work(of(lo, hi), apart and sum(sizes[lo:hi]) >= APART_CHARS))

        size = min(SLICE_CHARS, max(LEAST_CHARS, sum(sizes) // self._threads._max_workers))
        parts = self._shared(cut(sizes, size, len(sizes)), work)
        return TokenBatch.merge([part async for part in parts])

    async def _shared(self, slices: list[tuple[int, int]], work: Callable[[int, int], T]) -> AsyncIterator[T]:
        """What the threads make of the slices, in order."""
        loop, at_once = asyncio.get_running_loop(), self._threads._max_workers
        # The library releases the GIL, so the loop runs on meanwhile. Of one request there are never more slices in the pool
        # than threads, so that another's wait for no more than that.
        for i in range(0, len(slices), at_once):
            work_now = [loop.run_in_executor(self._threads, work, lo, hi) for lo, hi in slices[i : i + at_once]]
            all_done = await asyncio.gather(*work_now, return_exceptions=True)
            for error in all_done:
                if isinstance(error, BaseException):
                    bare(error)
            for done in all_done:
                if isinstance(done, BaseException):
                    raise done  # of several the first in order, so that a request gets the same answer each time
                yield done

    def _work(self, call: Call, apart: bool) -> Any:
        """In a thread of the pool: the call, in the thread's own process if it has one by now."""
        name, args, named = call
        if apart and self._recipe is not None:
            process: Apart | None = getattr(self._of_thread, "process", None)
            if process is None:
                process = self._of_thread.process = Apart(self._recipe)
                self._apart.append(process)
            if self._closed:
                process.stop()
            try:
                if process.ready():
                    return process.call(name, *args, **named)
            except Gone:
                if self._closed:
                    raise Draining("shut down before the texts were read (--drain-s); send the request again") from None
        return getattr(self, name)(*args, **named)

    async def packed(
        self, sequences: Sequence[list[int]], *, truncate: Truncate = REFUSE, flat: bool = False, field: str = "input"
    ) -> TokenBatch:
        """As `pack`; many ids in a thread."""
        sizes = [*map(len, sequences)]
        if sum(sizes) <= INLINE_IDS:
            return self.pack(sequences, truncate=truncate, flat=flat, field=field)

        def work(lo: int, hi: int) -> TokenBatch:
            return self.pack(sequences[lo:hi], lo, truncate=truncate, flat=flat, field=field)

        return TokenBatch.merge([part async for part in self._shared(cut(sizes, SLICE_IDS, len(sizes)), work)])

    async def told(self, texts: Sequence[str], *, special: bool, field: str) -> AsyncIterator[bytes]:
        """The tokens of each text as JSON, slice by slice (see `tokens_of`)."""
        sizes = [len(t) + FRAME_CHARS for t in texts]
        if sum(sizes) <= self._inline_chars:
            yield self.tokens_of(texts, special=special, field=field)
            return

        def work(lo: int, hi: int) -> bytes:
            named = {"special": special, "field": field}
            told: bytes = self._work(("tokens_of", (texts[lo:hi], lo), named), sum(sizes[lo:hi]) >= APART_CHARS)
            return told

        async for part in self._shared(cut(sizes, TOLD_CHARS, len(sizes)), work):
            yield part

    async def spelt(
        self, sequences: Sequence[list[int]], *, skip_special: bool, flat: bool = False, field: str = "ids"
    ) -> AsyncIterator[bytes]:
        """The texts that ids spell as JSON, slice by slice."""

        def work(lo: int, hi: int) -> bytes:
            part = sequences[lo:hi]
            self.check_ids(part, lo, flat=flat, field=field)
            return orjson.dumps(self.texts(part, skip_special=skip_special))[1:-1]

        sizes = [*map(len, sequences)]
        if sum(sizes) <= self._inline_chars:
            yield work(0, len(sizes))
            return
        async for part in self._shared(cut(sizes, SLICE_IDS, len(sizes)), work):
            yield part

    async def tokens(self, texts: Sequence[str], *, special: bool, literal: bool = False) -> list[tokenizers.Encoding]:
        """Encodings with their offsets; special: add special tokens; literal: text that spells one is text."""
        inner = self._literal if literal else self._inner
        work = functools.partial(inner.encode_batch, texts, add_special_tokens=special)
        if sum(map(len, texts)) <= self._inline_chars:
            return list(work())
        return list(await asyncio.get_running_loop().run_in_executor(self._threads, work))


def _stand_back() -> None:
    """Let the event loop go first where cores are few. A priority of the thread alone, where the system has those."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
