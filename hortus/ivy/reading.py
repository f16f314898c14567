"""Text, or token ids, to a TokenBatch; whatever must not reach a device is refused here, by index and name.

Knows the model's tokenizer.json and its limits. Does not know threads (tokenize.py), several texts
in one sequence (compose.py), HTTP, prompts or large requests' chunks.

Truncation and padding that are baked into a tokenizer file are switched off: they belong to whoever trained or exported
it, and silently win over the model's own limit otherwise. Truncation is done here, on ids, with special tokens kept, the
way transformers does it: the text's tokens are cut to what the special tokens leave, of a pair the longer text first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import chain, islice

import numpy as np
import orjson

from hortus.errors import InvalidInput, StartError, TooLong
from hortus.folder import ModelFolder, read_json
from hortus.ivy import vocabulary
from hortus.ivy.assemble import Truncate, shortened
from hortus.ivy.plain import Plain
from hortus.types import TokenBatch

REFUSE = Truncate()
SWIFT = 16
"""How much faster plain texts are read than others, where C reads them."""
AT_ONCE = 16 * 1024
"""Numbers of Python's turned into others in one go."""


def in_words(field: str, i: int) -> str:
    """What an error calls the i-th text of a field. A request that has several fields of texts must be told which."""
    return f"input {i}" if field in ("input", "inputs") else f"{field}[{i}]"


def _throw(i: int, error: InvalidInput) -> None:
    raise error


class Reader:
    """A model's tokenizer with its limits. Never changed after it is made, so every thread may use it."""

    def __init__(
        self,
        folder: ModelFolder,
        *,
        max_tokens: int | None = None,
        vocab_size: int | None = None,
        max_chars: int = 1_000_000,
    ) -> None:
        """max_tokens, vocab_size: the engine's; default, what the folder says. max_chars: of one text, whatever its tokens.
        StartError when it cannot serve."""
        self._config = folder.config
        self._file = folder.transformer / "tokenizer.json"
        self._settings = settings = read_json(folder.transformer / "tokenizer_config.json") | folder.tokenizer
        self._inner = vocabulary.as_told(vocabulary.load(self._file), folder, settings)
        if vocabulary.wants_lower_case(folder):
            self._inner.normalizer = vocabulary.lower_first(self._inner.normalizer)
        self._tells_types = vocabulary.tells_types(folder, settings)
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
        # Only where some special tokens have no embedding are text's ids checked.
        self._may_exceed = largest >= self.vocab_size and not vocabulary.all_have_rows(
            self._inner, self.vocab_size, self._file
        )
        self._swift = self._reader if isinstance(self._reader, Plain) and not self._may_exceed else None
        """Reads most batches as they stand in one go."""
        self.max_chars = max_chars

    def effort(self, texts: Sequence[str]) -> int:
        """Characters, by the time that reading them takes."""
        chars = sum(map(len, texts))
        if isinstance(self._reader, Plain) and self._reader.sure(texts):
            return chars // SWIFT
        return chars

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
        if self._swift is not None and max(map(len, texts), default=0) <= self.max_chars:
            packed = self._swift.packed(texts, most)
            if packed is not None:
                return packed

        def refuse(i: int, error: InvalidInput) -> None:
            if refused is None:
                raise error
            refused.setdefault(first + i, error)

        found = self._reader.encode_batch_fast(self._capped(texts, first, truncate, field, refuse))
        for i, length in enumerate(map(len, found)):  # before any list of ids is made: that holds the GIL
            if not length:
                refuse(i, self._empty(first + i, field))
            elif length > most and not truncate.on:
                refuse(i, self._too_long(in_words(field, first + i), length, most, f"{field}[{first + i}]"))
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

    def pack(
        self,
        sequences: Sequence[Sequence[int]],
        first: int = 0,
        *,
        truncate: Truncate = REFUSE,
        flat: bool = False,
        field: str = "input",
    ) -> TokenBatch:
        """Token ids as given: nothing is added to them.

        flat: the request wrote one list of numbers, so errors name input[position].
        InvalidInput as of `check_ids`. TooLong as in `encode`.
        """
        most, left = self._limit(truncate)
        for i, ids in enumerate(sequences, first):
            if len(ids) > most and not truncate.on:
                raise self._too_long(in_words(field, i), len(ids), most, field if flat else f"{field}[{i}]")
        self.check_ids(sequences, first, flat=flat, field=field)
        if truncate.on:
            sequences = [shortened(list(s), most, left) for s in sequences]
        return TokenBatch.of(sequences)

    def check_ids(self, sequences: Sequence[Sequence[int]], first: int, *, flat: bool, field: str) -> None:
        """InvalidInput for an empty list, a negative id, an id outside the vocabulary."""
        for i, ids in enumerate(sequences, first):
            if not ids:
                raise InvalidInput(
                    f"{in_words(field, i)} is an empty list of token ids", param=field if flat else f"{field}[{i}]"
                )
        try:
            flatly = chain.from_iterable(sequences)
            count = sum(map(len, sequences))
            # Some at a time: making an array of Python's numbers holds its lock.
            some = [np.fromiter(islice(flatly, AT_ONCE), np.int64) for _ in range(0, count, AT_ONCE)]
            numbers = some[0] if len(some) == 1 else np.concatenate(some)
            bad = (numbers < 0) | (numbers >= self.vocab_size)
        except OverflowError:
            bad = np.fromiter((not 0 <= n < self.vocab_size for n in chain.from_iterable(sequences)), bool)
        if bad.any():
            cu = np.cumsum([0, *map(len, sequences)])
            at = int(bad.argmax())
            seq = int(np.searchsorted(cu, at, side="right")) - 1
            position = at - int(cu[seq])
            raise InvalidInput(
                f"token id {_short(sequences[seq][position])} of {in_words(field, first + seq)} at position {position} is "
                f"outside this model's vocabulary, 0 to {self.vocab_size - 1}",
                param=f"{field}[{position}]" if flat else f"{field}[{first + seq}][{position}]",
            )

    def token_id(self, token: str) -> int | None:
        """The id of one token; None where there is none."""
        found: int | None = self._inner.token_to_id(token)
        return found

    def tokens_of(self, texts: Sequence[str], first: int = 0, *, special: bool, field: str = "inputs") -> bytes:
        """The tokens of each text with their places in it, as TEI's JSON: lists with commas between. TooLong for one of more
        than max_chars. special: add special tokens."""
        lists = []
        for text, e in zip(
            texts,
            self._inner.encode_batch(self._capped(texts, first, REFUSE, field), add_special_tokens=special),
            strict=True,
        ):
            told = zip(e.ids, e.tokens, e.special_tokens_mask, e.offsets, strict=True)
            pieces = []
            while some := [
                {
                    "id": i,
                    "text": token if special else text[start:stop],
                    "special": bool(special),
                    "start": None if special else start,
                    "stop": None if special else stop,
                }
                for i, token, special, (start, stop) in islice(told, AT_ONCE)
            ]:
                pieces.append(orjson.dumps(some)[1:-1])
            lists.append(b"[%b]" % b",".join(pieces))
        return b",".join(lists)

    def texts(self, sequences: Sequence[Sequence[int]], *, skip_special: bool) -> list[str]:
        """The texts that ids spell. They are within the vocabulary: `check_ids` has seen them."""
        return list(self._inner.decode_batch(sequences, skip_special_tokens=skip_special))

    # Parts

    def _limit(self, truncate: Truncate) -> tuple[int, bool]:
        """(most tokens, cut on the left)."""
        most = self.max_tokens
        if truncate.limit is not None:
            least = self._prefix + self._suffix + 1
            if not least <= truncate.limit <= most:
                raise InvalidInput(
                    f"`{truncate.field}` is {truncate.limit}; this model takes {least} to {most} tokens an input (--max-length)",
                    param=truncate.field,
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
    def around(self) -> tuple[list[int], list[int]]:
        """Special tokens before and after one text."""
        if self._prefix + self._suffix == 0:
            return [], []
        ids = self._inner.encode("a").ids
        return ids[: self._prefix], ids[len(ids) - self._suffix :]

    def _empty(self, i: int, field: str) -> InvalidInput:
        return InvalidInput(
            f"{in_words(field, i)} is empty: this model's tokenizer makes no token of it", param=f"{field}[{i}]"
        )

    def _foreign(self, i: int, field: str) -> InvalidInput:
        text = f"{in_words(field, i)} spells a special token that this model has no embedding for"
        return InvalidInput(text, param=f"{field}[{i}]")

    def _too_large(self, i: int, chars: int, field: str) -> TooLong:
        return TooLong(
            f"{in_words(field, i)} has {chars} characters, at most {self.max_chars} are read (--max-input-chars)",
            param=f"{field}[{i}]",
        )

    def _too_long(self, what: str, tokens: int, most: int, param: str, uncut: str | None = None) -> TooLong:
        """uncut: of an input that was to be cut and cannot be, why."""
        how = "send `truncate: true` (for every request: --auto-truncate) to cut its end off"
        return TooLong(
            f"{what} has {tokens} tokens, "
            + (
                f"this model takes at most {most} (--max-length)"
                if most == self.max_tokens
                else f"the limit given is {most}"
            )
            + (f"; shorten it, or {how}" if uncut is None else f", and {uncut}; shorten it"),
            param=param,
        )


def _locate(batch: TokenBatch, bad: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[int, int]:
    """(sequence, position) of the first True."""
    at = int(bad.argmax())
    seq = int(np.searchsorted(batch.cu_seqlens, at, side="right")) - 1
    return seq, at - int(batch.cu_seqlens[seq])


def _short(number: int) -> str:
    """A number for an error: one too long to read is told by its length."""
    return str(number) if abs(number) < 10**30 else f"of more than 30 digits ({number.bit_length()} bits)"
