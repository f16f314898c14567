"""Several texts to one sequence: pairs as the tokenizer frames them, pairs in a template, documents of chunks.

Knows the Reader (reading.py), whose limits and refusals these share; assemble.py puts the ids together. Does not know threads,
HTTP, or which of these a model reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import chain

import tokenizers

from hortus.errors import InvalidInput, StartError, TooLong
from hortus.folder import token_types
from hortus.ivy import assemble, vocabulary
from hortus.ivy.assemble import Frame, Truncate, longest_first, shortened
from hortus.ivy.fit import fit
from hortus.ivy.reading import Reader
from hortus.types import TokenBatch


class Composer(Reader):
    """A Reader of what is made of several texts. Never changed after it is made, either."""

    def prepare_documents(self) -> None:
        """Make at start what `documents` needs: it takes as long as reading the tokenizer. StartError when it cannot serve."""
        try:
            _ = (self._literal, self.around, self.separator)
        except InvalidInput as e:
            raise StartError(f"{self._file}: {e.message}") from None

    # Synchronous, as the Reader's: of neighbours from the request's `first` one on.

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
            raise InvalidInput(
                f"`{truncate.field}` is {most}: that leaves no room for a pair beside {self._frame.special} special tokens",
                param=truncate.field,
            )
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
                    uncut = "what stands around the document leaves no room for any of it" if truncate.on else None
                    raise self._too_long(f"pair {first + i}", tokens, most, f"{field}[{first + i}]", uncut)
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
                    uncut = "only its last chunk is cut, of which nothing would be left" if truncate.on else None
                    raise self._too_long(f"document {first + i}", tokens, most, f"{field}[{first + i}]", uncut)
                document[-1] = document[-1][:-over]
        return self._checked(assemble.documents(chunks, before, self.separator, after), first, field)

    # Parts

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
        typed = any(types) and self._tells_types and token_types(self._config) > 1
        return Frame(ids[:a], ids[end_a:b], ids[end_b:], told if typed else None)

    @functools.cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """The same tokenizer, which reads text that spells a special token as text."""
        inner = tokenizers.Tokenizer.from_str(self._inner.to_str())
        inner.encode_special_tokens = True
        return inner

    @functools.cached_property
    def separator(self) -> list[int]:
        """The id between the chunks of a document."""
        text = vocabulary.token_text(self._settings.get("sep_token"))
        found = None if text is None else self._inner.token_to_id(text)
        if found is None:
            raise InvalidInput("this model's tokenizer has no separator token to put between chunks")
        return [found]
