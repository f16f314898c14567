"""Text, or token ids, to a TokenBatch; whatever must not reach a device is refused here, by index and name.

Knows the model's tokenizer.json and its limits. Does not know HTTP, prompts or chunks.

Truncation and padding that are baked into a tokenizer file are switched off: they belong to whoever trained or exported
it, and silently win over the model's own limit otherwise. Truncation is done here, on ids, with special tokens kept, the
way transformers does it for single sequences: the text's tokens are cut to what the special tokens leave.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import tokenizers
from tokenizers import normalizers

from hortus.errors import InvalidInput, StartError, TooLong
from hortus.folder import ST_CONFIGS, ModelFolder, read_json
from hortus.ivy.split import cut
from hortus.types import TokenBatch

SLICE_CHARS = 256 * 1024
"""Characters a thread tokenises before others get their turn; a request that has gone stops there too."""


class Tokenizer:
    """A model's tokenizer with its limits. Never changed after it is made, so every thread may use it."""

    def __init__(
        self,
        folder: ModelFolder,
        *,
        max_tokens: int | None = None,
        vocab_size: int | None = None,
        inline_chars: int = 4096,
        threads: int = 2,
    ) -> None:
        """max_tokens, vocab_size: the engine's; default, what the folder says. StartError when it cannot serve."""
        file = folder.transformer / "tokenizer.json"
        self._inner = _load(file)
        if _wants_lower_case(folder):
            self._inner.normalizer = _lower_first(self._inner.normalizer)
        self._cut_left = read_json(folder.transformer / "tokenizer_config.json").get("truncation_side") == "left"
        self.max_tokens = folder.max_tokens if max_tokens is None else max_tokens
        self._prefix, self._suffix = _special_tokens(self._inner, file)
        if self.max_tokens <= self._prefix + self._suffix:
            raise StartError(
                f"a limit of {self.max_tokens} tokens (--max-length) leaves no room beside the "
                f"{self._prefix + self._suffix} special tokens of {file}"
            )
        largest = max(self._inner.get_vocab(with_added_tokens=True).values(), default=0)
        self.vocab_size = int(folder.config.get("vocab_size", largest + 1)) if vocab_size is None else vocab_size
        # Some tokenizers hold added tokens that the embedding table has no row for: only then are text's ids checked.
        self._may_exceed = largest >= self.vocab_size
        self._inline_chars = inline_chars
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")

    def close(self) -> None:
        """Stop the threads; what they are at is finished first, what waits is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def batch(self, texts: Sequence[str], *, truncate: bool) -> TokenBatch:
        """Tokens of every text, special ones added. Short requests at once, long ones slice by slice in a thread.

        Raises InvalidInput and TooLong as `encode` does.
        """
        sizes = [len(t) for t in texts]
        if sum(sizes) <= self._inline_chars:
            return self.encode(texts, truncate=truncate)
        loop = asyncio.get_running_loop()
        parts = []
        for lo, hi in cut(sizes, SLICE_CHARS, len(texts)):
            # encode_batch releases the GIL, so the loop runs on meanwhile. One slice at a time keeps it fair.
            work = functools.partial(self.encode, texts[lo:hi], lo, truncate=truncate)
            parts.append(await loop.run_in_executor(self._threads, work))
        return TokenBatch.merge(parts)

    def encode(self, texts: Sequence[str], first: int = 0, *, truncate: bool = False) -> TokenBatch:
        """Tokens of every text. `first` is the index the request gave to texts[0], for errors.

        InvalidInput: a text of no tokens. TooLong: more than max_tokens and not `truncate`.
        """
        lists: list[list[int]] = [e.ids for e in self._inner.encode_batch_fast(texts)]
        for i, ids in enumerate(lists):
            if not ids:
                raise InvalidInput(
                    f"input {first + i} is empty: this model's tokenizer makes no token of it",
                    param=f"input[{first + i}]",
                )
            if len(ids) > self.max_tokens:
                if not truncate:
                    raise self._too_long(first + i, len(ids))
                lists[i] = self._truncate(ids)
        batch = TokenBatch.of(lists)
        if self._may_exceed and batch.ids.max() >= self.vocab_size:
            seq, _ = _locate(batch, batch.ids >= self.vocab_size)
            raise InvalidInput(
                f"input {first + seq} spells a special token that this model has no embedding for",
                param=f"input[{first + seq}]",
            )
        return batch

    def _truncate(self, ids: list[int]) -> list[int]:
        end = len(ids) - self._suffix
        room = self.max_tokens - self._prefix - self._suffix
        kept = ids[end - room : end] if self._cut_left else ids[self._prefix : self._prefix + room]
        return ids[: self._prefix] + kept + ids[end:]

    def pack(self, sequences: Sequence[Sequence[int]], *, truncate: bool, flat: bool = False) -> TokenBatch:
        """Token ids as given: nothing is added to them. Cut at the end to max_tokens when `truncate`.

        flat: the request wrote one list of numbers, so errors name input[position].
        InvalidInput: an empty list, a negative id, an id outside the vocabulary. TooLong as in `encode`.
        """
        for i, ids in enumerate(sequences):
            if not ids:
                raise InvalidInput(f"input {i} is an empty list of token ids", param="input" if flat else f"input[{i}]")
            if len(ids) > self.max_tokens and not truncate:
                raise self._too_long(i, len(ids))
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
                f"token id {sequences[seq][position]!r:.40} of input {seq} at position {position} is outside this model's "
                f"vocabulary, 0 to {self.vocab_size - 1}",
                param=f"input[{position}]" if flat else f"input[{seq}][{position}]",
            )
        if truncate:
            sequences = [s[: self.max_tokens] for s in sequences]
        return TokenBatch.of(sequences)

    def _too_long(self, index: int, tokens: int) -> TooLong:
        return TooLong(
            f"input {index} has {tokens} tokens, this model takes at most {self.max_tokens} (--max-length); shorten it, or "
            "send `truncate`: true (for every request: --auto-truncate) to cut its end off",
            param=f"input[{index}]",
        )


def _locate(batch: TokenBatch, bad: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[int, int]:
    """(sequence, position) of the first True."""
    at = int(bad.argmax())
    seq = int(np.searchsorted(batch.cu_seqlens, at, side="right")) - 1
    return seq, at - int(batch.cu_seqlens[seq])


def _special_tokens(inner: tokenizers.Tokenizer, file: Path) -> tuple[int, int]:
    """How many special tokens the tokenizer puts before and after a single text."""
    total = int(inner.num_special_tokens_to_add(False))
    if total == 0:
        return 0, 0
    for probe in ("a", "1", "the"):
        mask = inner.encode(probe).special_tokens_mask
        if 0 in mask:
            before, after = mask.index(0), mask[::-1].index(0)
            if before + after == total:
                return before, after
    raise StartError(f"{file}: adds special tokens elsewhere than before and after the text, which cannot be truncated")


def _load(file: Path) -> tokenizers.Tokenizer:
    if not file.is_file():
        raise StartError(
            f"{file}: not found. A fast tokenizer file is needed; write one with "
            "transformers.AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)"
        )
    try:
        inner = tokenizers.Tokenizer.from_file(str(file))
    except Exception as e:  # noqa: BLE001  the tokenizers library raises bare Exception
        raise StartError(f"{file}: not a tokenizer file that this version can read ({e})") from None
    inner.no_truncation()
    inner.no_padding()
    return inner


def _wants_lower_case(folder: ModelFolder) -> bool:
    files = [read_json(place / name) for place in (folder.transformer, folder.path) for name in ST_CONFIGS]
    return any(f.get("do_lower_case") is True for f in files)


def _lower_first(normalizer: Any) -> Any:
    """sentence-transformers' do_lower_case: lower-casing before what the tokenizer does, unless it does that already."""
    steps: list[Any] = [] if normalizer is None else [normalizer]
    if isinstance(normalizer, normalizers.Sequence):
        steps = [*cast(Any, normalizer)]
    if any(isinstance(s, normalizers.Lowercase) for s in steps):
        return normalizer
    return normalizers.Sequence([normalizers.Lowercase(), *steps])
