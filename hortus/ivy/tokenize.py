"""Text, or token ids, to a TokenBatch; whatever must not reach a device is refused here, by index and name.

Knows the model's tokenizer.json and its limits. Does not know HTTP, prompts or large requests' chunks.

Truncation and padding that are baked into a tokenizer file are switched off: they belong to whoever trained or exported
it, and silently win over the model's own limit otherwise. Truncation is done here, on ids, with special tokens kept, the
way transformers does it: the text's tokens are cut to what the special tokens leave, of a pair the longer text first.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any, cast

import numpy as np
import tokenizers

from hortus.errors import Draining, InvalidInput, StartError, TooLong
from hortus.folder import ModelFolder, read_json
from hortus.ivy import assemble, vocabulary
from hortus.ivy.apart import Apart, Gone
from hortus.ivy.assemble import Frame, Truncate, longest_first, shortened
from hortus.ivy.fit import fit
from hortus.ivy.split import cut
from hortus.types import TokenBatch

SLICE_CHARS = 256 * 1024
"""Characters a thread tokenises before others get their turn; a request that has gone stops there too."""
LEAST_CHARS = 4096
"""Fewer characters are not worth another thread."""
NICE = 10
"""Priority of the threads: what a long text takes longer by, short ones do not wait."""
APART_CHARS = 16 * 1024
"""From so many characters on a slice is read in another process (apart.py): for fewer, the way there costs more than it saves."""
REFUSE = Truncate()
Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A method of Tokenizer, and what to call it with."""

# The library's own pool has no bound but the machine, and a short text that is tokenised at once would wait in it behind long
# ones. Ours is the pool (--tokenize-threads).
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _throw(i: int, error: InvalidInput) -> None:
    raise error


class Tokenizer:
    """A model's tokenizer with its limits. Never changed after it is made, so every thread may use it."""

    def __init__(
        self,
        folder: ModelFolder,
        *,
        max_tokens: int | None = None,
        vocab_size: int | None = None,
        inline_chars: int = 1024,
        threads: int = 2,
        max_chars: int = 1_000_000,
        apart: bool = False,
    ) -> None:
        """max_tokens, vocab_size: the engine's; default, what the folder says. max_chars: of one text, whatever its tokens.
        apart: give each thread a process for long texts, once there are some. StartError when it cannot serve."""
        self._recipe = (
            (
                Tokenizer,
                (folder,),
                {"max_tokens": max_tokens, "vocab_size": vocab_size, "max_chars": max_chars},
            )
            if apart
            else None
        )
        self._of_thread = threading.local()
        self._apart: list[Apart] = []
        self._file = folder.transformer / "tokenizer.json"
        self._inner = vocabulary.load(self._file)
        if vocabulary.wants_lower_case(folder):
            self._inner.normalizer = vocabulary.lower_first(self._inner.normalizer)
        settings = read_json(folder.transformer / "tokenizer_config.json")
        self._cut_left = settings.get("truncation_side") == "left"
        self.max_tokens = folder.max_tokens if max_tokens is None else max_tokens
        if folder.late is not None:
            vocabulary.teach(self._inner, folder.late.markers)
        self._reader = vocabulary.reader(self._inner)
        self._prefix, self._suffix = vocabulary.special_tokens(self._inner, self._file)
        if self.max_tokens <= self._prefix + self._suffix:
            raise StartError(
                f"a limit of {self.max_tokens} tokens (--max-length) leaves no room beside the "
                f"{self._prefix + self._suffix} special tokens of {self._file}"
            )
        largest = max(self._inner.get_vocab(with_added_tokens=True).values(), default=0)
        self.vocab_size = int(folder.config.get("vocab_size", largest + 1)) if vocab_size is None else vocab_size
        # Some tokenizers hold added tokens that the embedding table has no row for: only then are text's ids checked.
        self._may_exceed = largest >= self.vocab_size
        self._types = int(folder.config.get("type_vocab_size", 0)) > 1
        self._separator_text = vocabulary.token_text(settings.get("sep_token"))
        self._inline_chars, self.max_chars = inline_chars, max_chars
        self._closed = False
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenize", initializer=_stand_back)

    def close(self) -> None:
        """Stop the threads; what they are at is finished first, what waits is dropped."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for apart in self._apart:
            apart.stop()

    # Asynchronous: at once when short, else slice by slice in a thread. All raise InvalidInput and TooLong.

    async def batch(self, texts: Sequence[str], *, truncate: Truncate = REFUSE, field: str = "input") -> TokenBatch:
        """Tokens of every text, special ones added. field: what the request calls the texts, for errors."""
        return await self._sliced(
            [len(t) for t in texts],
            lambda lo, hi: ("encode", (texts[lo:hi], lo), {"truncate": truncate, "field": field}),
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
        lefts = [*lefts] * len(rights) if len(lefts) == 1 else lefts
        return await self._sliced(
            [len(b) for b in rights],
            lambda lo, hi: ("_pairs", (lefts[lo:hi], rights[lo:hi], lo, truncate, (most_left, most_right), field), {}),
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

    def prepare_documents(self) -> None:
        """Make at start what `documents` needs: it takes as long as reading the tokenizer. StartError when it cannot serve."""
        try:
            _ = (self._literal, self.around, self.separator)
        except InvalidInput as e:
            raise StartError(f"{self._file}: {e.message}") from None

    async def shorten(self, texts: Sequence[str], most: int) -> list[str]:
        """The beginnings of the texts, of at most so many tokens each."""

        def work() -> list[str]:
            found = self._inner.encode_batch(texts, add_special_tokens=False)
            return [t if len(e.ids) <= most else t[: e.offsets[most - 1][1]] for t, e in zip(texts, found, strict=True)]

        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _sliced(self, sizes: list[int], of: Callable[[int, int], Call], *, apart: bool = True) -> TokenBatch:
        if sum(sizes) <= self._inline_chars:
            name, args, named = of(0, len(sizes))
            return cast(TokenBatch, getattr(self, name)(*args, **named))

        def work(lo: int, hi: int) -> TokenBatch:
            return self._work(of(lo, hi), apart and sum(sizes[lo:hi]) >= APART_CHARS)

        loop, at_once = asyncio.get_running_loop(), self._threads._max_workers
        # The library releases the GIL, so the loop runs on meanwhile. Of one request there are never more slices in the pool
        # than threads, so that another's wait for no more than that.
        slices = cut(sizes, min(SLICE_CHARS, max(LEAST_CHARS, sum(sizes) // at_once)), len(sizes))
        parts: list[TokenBatch] = []
        for i in range(0, len(slices), at_once):
            work_now = [loop.run_in_executor(self._threads, work, lo, hi) for lo, hi in slices[i : i + at_once]]
            for done in await asyncio.gather(*work_now, return_exceptions=True):
                if isinstance(done, BaseException):
                    raise done  # of several the first in order, so that a request gets the same answer each time
                parts.append(done)
        return TokenBatch.merge(parts)

    def _work(self, call: Call, apart: bool) -> TokenBatch:
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
                    return cast(TokenBatch, process.call(name, *args, **named))
            except Gone:
                if self._closed:
                    raise Draining(
                        "this server shut down before the request was finished (--drain-s); send it again"
                    ) from None
        return cast(TokenBatch, getattr(self, name)(*args, **named))

    # Synchronous. `first`: the index that the request gave to the first text, for errors.

    def encode(
        self,
        texts: Sequence[str],
        first: int = 0,
        *,
        truncate: Truncate = REFUSE,
        field: str = "input",
        refused: dict[int, InvalidInput] | None = None,
    ) -> TokenBatch:
        """Tokens of every text. InvalidInput: a text of no tokens. TooLong: more than the limit and not to be cut.

        refused: is given what would be raised, by index, and the texts at fault are left out of the batch.
        """
        most, left = self._limit(truncate)

        def refuse(i: int, error: InvalidInput) -> None:
            if refused is None:
                raise error
            refused.setdefault(first + i, error)

        found = self._reader.encode_batch_fast(self._capped(texts, first, truncate, field, refuse))
        for i, length in enumerate(map(len, found)):  # before any list of ids is made: that holds the GIL
            if not length:
                refuse(i, self._empty(first + i, field))
            elif length > most and not truncate.on:
                refuse(i, self._too_long(f"input {first + i}", length, most, f"{field}[{first + i}]"))
        lists: list[list[int]] = [e.ids for i, e in enumerate(found) if not refused or first + i not in refused]
        for i, ids in enumerate(lists):
            if len(ids) > most:
                end = len(ids) - self._suffix
                kept = shortened(ids[self._prefix : end], most - self._prefix - self._suffix, left)
                lists[i] = ids[: self._prefix] + kept + ids[end:]
        if refused is not None and self._may_exceed:
            left_in = [i for i in range(first, first + len(texts)) if i not in refused]
            for i, ids in zip(left_in, lists, strict=True):
                if max(ids) >= self.vocab_size:
                    refused[i] = self._foreign(i, field)
            lists = [ids for ids in lists if max(ids) < self.vocab_size]
        return TokenBatch.of(lists) if refused is not None else self._checked(TokenBatch.of(lists), first, field)

    def _pairs(
        self,
        lefts: Sequence[str],
        rights: Sequence[str],
        first: int,
        truncate: Truncate,
        most_each: tuple[int | None, int | None],
        field: str,
    ) -> TokenBatch:
        most, left = self._limit(truncate)
        room = most - self._frame.special
        if room < 2:
            raise InvalidInput(f"a limit of {most} tokens leaves no room for a pair", param="truncate_prompt_tokens")
        once = {t: shortened(ids, most_each[0], left) for t, ids in self._plain(dict.fromkeys(lefts))}
        many = [
            shortened(ids, most_each[1], left) for _, ids in self._plain(self._capped(rights, first, truncate, field))
        ]
        ones = [once[t] for t in lefts]
        for i, (a, b) in enumerate(zip(ones, many, strict=True)):
            if len(a) + len(b) <= room:
                continue
            if not truncate.on:
                tokens = len(a) + len(b) + self._frame.special
                raise self._too_long(f"pair {first + i}", tokens, most, f"{field}[{first + i}]")
            keep_a, keep_b = longest_first(len(a), len(b), room)
            ones[i], many[i] = shortened(a, keep_a, left), shortened(b, keep_b, left)
        batch = assemble.pairs(ones, many, self._frame)
        if (batch.cu_seqlens[1:] == batch.cu_seqlens[:-1]).any():
            raise InvalidInput("a pair of two texts without tokens", param=field)
        return self._checked(batch, first, field)

    def _pieces(
        self,
        texts: Sequence[Sequence[str]],
        cut: int,
        tails: Sequence[str],
        first: int,
        truncate: Truncate,
        field: str,
    ) -> TokenBatch:
        most, _ = self._limit(truncate)
        capped = self._capped([t[cut] for t in texts], first, truncate._replace(left=False), field)
        whole = [[*t[:cut], c, *t[cut + 1 :]] for t, c in zip(texts, capped, strict=True)]
        flat = iter(self._reader.encode_batch_fast([p for t in whole for p in t], add_special_tokens=False))
        before, _ = self.around
        sequences = []
        for i, t in enumerate(whole):
            parts = [next(flat).ids for _ in t]
            tokens = len(before) + sum(map(len, parts))
            if (over := tokens - most) > 0:
                kept = len(parts[cut]) - over
                head = texts[i][cut].removesuffix(tails[i])
                # Something must be left of the tail: a score of no document would look like one.
                if not truncate.on or kept <= len(self._inner.encode(head, add_special_tokens=False).ids):
                    raise self._too_long(f"pair {first + i}", tokens, most, f"{field}[{first + i}]")
                parts[cut] = parts[cut][:kept]
            sequences.append([*before, *chain.from_iterable(parts)])
        return self._checked(TokenBatch.of(sequences), first, field)

    def _joined(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        first: int,
        join: Callable[[str, str], str],
        truncate: Truncate,
        field: str,
    ) -> TokenBatch:
        uncut = Truncate(False, truncate.limit)
        try:
            return self.encode(
                [join(q, d) for q, d in zip(queries, documents, strict=True)], first, truncate=uncut, field=field
            )
        except TooLong:
            if not truncate.on:
                raise
        most, left = self._limit(truncate)
        queries, documents = (self._capped(texts, first, truncate, field) for texts in (queries, documents))
        whole = []
        for i, (query, document) in enumerate(zip(queries, documents, strict=True)):
            text = fit(
                query,
                document,
                join=join,
                count=lambda text: len(self._inner.encode(text).ids),
                offsets=lambda text: self._inner.encode(text, add_special_tokens=False).offsets,
                most=most,
                left=left,
            )
            if text is None:
                raise TooLong(
                    f"pair {first + i}: within {most} tokens the template around it (--templates) leaves no room for both texts",
                    param=f"{field}[{first + i}]",
                )
            whole.append(text)
        return self.encode(whole, first, truncate=uncut, field=field)

    def _documents(self, documents: Sequence[Sequence[str]], first: int, truncate: Truncate, field: str) -> TokenBatch:
        most, _ = self._limit(truncate)
        flat = iter(self._literal.encode_batch_fast([c for d in documents for c in d], add_special_tokens=False))
        chunks = [[next(flat).ids for _ in d] for d in documents]
        before, after = self.around
        fixed = len(before) + len(after)
        for i, document in enumerate(chunks):
            for j, ids in enumerate(document):
                if not ids:
                    where = f"{field}[{first + i}][{j}]"
                    raise InvalidInput(
                        f"chunk {where} is empty: this model's tokenizer makes no token of it", param=where
                    )
            tokens = fixed + sum(map(len, document)) + len(self.separator) * (len(document) - 1)
            over = tokens - most
            if over > 0:
                # Only the last chunk can be cut: one that is gone altogether would have no vector.
                if not truncate.on or len(document[-1]) <= over:
                    raise self._too_long(f"document {first + i}", tokens, most, f"{field}[{first + i}]")
                document[-1] = document[-1][:-over]
        return self._checked(assemble.documents(chunks, before, self.separator, after), first, field)

    def pack(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        truncate: Truncate = REFUSE,
        flat: bool = False,
        field: str = "input",
    ) -> TokenBatch:
        """Token ids as given: nothing is added to them.

        flat: the request wrote one list of numbers, so errors name input[position].
        InvalidInput: an empty list, a negative id, an id outside the vocabulary. TooLong as in `encode`.
        """
        most, left = self._limit(truncate)
        for i, ids in enumerate(sequences):
            if not ids:
                raise InvalidInput(f"input {i} is an empty list of token ids", param=field if flat else f"{field}[{i}]")
            if len(ids) > most and not truncate.on:
                raise self._too_long(f"input {i}", len(ids), most, f"{field}[{i}]")
        try:
            numbers = np.fromiter(chain.from_iterable(sequences), np.int64)
            bad = (numbers < 0) | (numbers >= self.vocab_size)
        except OverflowError:
            bad = np.fromiter((not 0 <= n < self.vocab_size for n in chain.from_iterable(sequences)), bool)
        if bad.any():
            cu = np.cumsum([0, *map(len, sequences)])
            at = int(bad.argmax())
            seq = int(np.searchsorted(cu, at, side="right")) - 1
            position = at - int(cu[seq])
            raise InvalidInput(
                f"token id {_short(sequences[seq][position])} of input {seq} at position {position} is outside this model's "
                f"vocabulary, 0 to {self.vocab_size - 1}",
                param=f"{field}[{position}]" if flat else f"{field}[{seq}][{position}]",
            )
        if truncate.on:
            sequences = [shortened(list(s), most, left) for s in sequences]
        return TokenBatch.of(sequences)

    def token_id(self, token: str) -> int | None:
        """The id of one token; None where there is none."""
        found: int | None = self._inner.token_to_id(token)
        return found

    async def tokens(self, texts: Sequence[str], *, special: bool, literal: bool = False) -> list[tokenizers.Encoding]:
        """Encodings with their offsets; special: add special tokens; literal: text that spells one is text."""
        inner = self._literal if literal else self._inner
        work = functools.partial(inner.encode_batch, texts, add_special_tokens=special)
        if sum(map(len, texts)) <= self._inline_chars:
            return list(work())
        return list(await asyncio.get_running_loop().run_in_executor(self._threads, work))

    def texts(self, sequences: Sequence[Sequence[int]], *, skip_special: bool) -> list[str]:
        """The texts that ids spell. They are within the vocabulary: `pack` has seen them."""
        return list(self._inner.decode_batch(sequences, skip_special_tokens=skip_special))

    # Parts

    def _limit(self, truncate: Truncate) -> tuple[int, bool]:
        """(most tokens, cut on the left)."""
        most = self.max_tokens
        if truncate.limit is not None:
            least = self._prefix + self._suffix + 1
            if not least <= truncate.limit <= most:
                raise InvalidInput(
                    f"a limit of {truncate.limit} tokens an input; this model takes {least} to {most} (--max-length)",
                    param="truncate_prompt_tokens",
                )
            most = truncate.limit
        return most, self._cut_left if truncate.left is None else truncate.left

    def _capped(
        self,
        texts: Sequence[str],
        first: int,
        truncate: Truncate,
        field: str,
        refuse: Callable[[int, InvalidInput], None] = _throw,
    ) -> Sequence[str]:
        """The texts, none longer than max_chars: time must be bounded also where no limit of tokens has been met yet.

        A text that `refuse` was told of and that it lets pass is empty afterwards.
        """
        if max(map(len, texts), default=0) <= self.max_chars:
            return texts
        if not truncate.on:
            for i, text in enumerate(texts):
                if len(text) > self.max_chars:
                    refuse(i, self._too_large(first + i, len(text), field))
            return [t if len(t) <= self.max_chars else "" for t in texts]
        _, left = self._limit(truncate)
        return [t[-self.max_chars :] if left else t[: self.max_chars] for t in texts]

    def plain_ids(self, text: str) -> list[int]:
        """The ids of one text, nothing added."""
        return self._plain([text])[0][1]

    def _plain(self, texts: Sequence[str] | dict[str, None]) -> list[tuple[str, list[int]]]:
        """Each text with its ids, nothing added."""
        found = self._reader.encode_batch_fast(list(texts), add_special_tokens=False)
        return [(t, e.ids) for t, e in zip(texts, found, strict=True)]

    def _checked(self, batch: TokenBatch, first: int, field: str) -> TokenBatch:
        if self._may_exceed and batch.ids.max() >= self.vocab_size:
            seq, _ = _locate(batch, batch.ids >= self.vocab_size)
            raise self._foreign(first + seq, field)
        return batch

    @functools.cached_property
    def _frame(self) -> Frame:
        """What goes around two texts, learnt from one pair."""
        probe = self._inner.encode("a", "a")
        owner = probe.sequence_ids
        if 0 not in owner or 1 not in owner:
            raise InvalidInput("this model's tokenizer cannot frame pairs of texts")
        a, b = owner.index(0), owner.index(1)
        end_a = len(owner) - owner[::-1].index(0)
        end_b = len(owner) - owner[::-1].index(1)
        ids, types = probe.ids, probe.type_ids
        told = (types[:a], types[a], types[end_a:b], types[b], types[end_b:])
        return Frame(ids[:a], ids[end_a:b], ids[end_b:], told if self._types and any(types) else None)

    @functools.cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """Special tokens before and after one text."""
        if self._prefix + self._suffix == 0:
            return [], []
        ids = self._inner.encode("a").ids
        return ids[: self._prefix], ids[len(ids) - self._suffix :]

    @functools.cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """The same tokenizer, which reads text that spells a special token as text."""
        inner = tokenizers.Tokenizer.from_str(self._inner.to_str())
        inner.encode_special_tokens = True
        return inner

    @functools.cached_property
    def separator(self) -> list[int]:
        """The id between the chunks of a document."""
        found = None if self._separator_text is None else self._inner.token_to_id(self._separator_text)
        if found is None:
            raise InvalidInput("this model's tokenizer has no separator token to put between chunks")
        return [found]

    def _empty(self, i: int, field: str) -> InvalidInput:
        return InvalidInput(f"input {i} is empty: this model's tokenizer makes no token of it", param=f"{field}[{i}]")

    def _foreign(self, i: int, field: str) -> InvalidInput:
        text = f"input {i} spells a special token that this model has no embedding for"
        return InvalidInput(text, param=f"{field}[{i}]")

    def _too_large(self, i: int, chars: int, field: str) -> TooLong:
        return TooLong(
            f"input {i} has {chars} characters, this server reads at most {self.max_chars} (--max-input-chars)",
            param=f"{field}[{i}]",
        )

    def _too_long(self, what: str, tokens: int, most: int, param: str) -> TooLong:
        return TooLong(
            f"{what} has {tokens} tokens, "
            + (
                f"this model takes at most {most} (--max-length)"
                if most == self.max_tokens
                else f"the limit given is {most}"
            )
            + "; shorten it, or send `truncate`: true (for every request: --auto-truncate) to cut its end off",
            param=param,
        )


def _locate(batch: TokenBatch, bad: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[int, int]:
    """(sequence, position) of the first True."""
    at = int(bad.argmax())
    seq = int(np.searchsorted(batch.cu_seqlens, at, side="right")) - 1
    return seq, at - int(batch.cu_seqlens[seq])


def _stand_back() -> None:
    """Let the event loop go first where cores are few. A priority of the thread alone, where the system has those."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def _short(number: int) -> str:
    """A number for an error: one too long to read is told by its length."""
    return str(number) if abs(number) < 10**30 else f"of more than 30 digits ({number.bit_length()} bits)"
