"""The queue: first come, first served, by tokens; and the one rule of when the next batch goes out.

Pure: no clock (`now` is passed in), no asyncio, no threads. Does not know the engine, or what becomes of a work once its
sequences are taken.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from hortus.errors import InvalidInput, Overloaded
from hortus.types import Float32, Int32, TokenBatch

_INT32_MAX = 2**31 - 1


@dataclass(slots=True, eq=False)
class Work:
    """One request's sequences while they wait. The scheduler extends it with what it owes to whom."""

    batch: TokenBatch
    enqueued: float
    """Seconds on the monotonic clock."""
    deadline: float | None
    """Seconds on the monotonic clock after which nobody wants the answer; None: never."""
    sequences: int
    """Waiting: not yet taken, not dropped. Kept by the queue."""
    tokens: int
    """Waiting, as above."""
    cursor: int = 0
    """The first sequence that waits: a work too large for one batch leaves in several. Kept by the queue."""
    rows: Float32 | None = None
    """[sequences, width], made by the scheduler only for a work that is cut; the pump fills disjoint parts of it."""


W = TypeVar("W", bound=Work)


class Slice(NamedTuple, Generic[W]):
    """Sequences lo..hi-1 of one work, taken into a batch."""

    work: W
    lo: int
    hi: int


class Taken(NamedTuple, Generic[W]):
    """What take() found."""

    slices: list[Slice[W]]
    sequences: int
    tokens: int
    expired: list[tuple[W, int]]
    """Works past their deadline, dropped on the way, and how many sequences of each."""


class Queue(Generic[W]):
    """Works in order of arrival. `tokens` and `sequences` are exact at all times: the dead do not count.

    An ordered dict rather than a deque, so that a cancelled work leaves from the middle at once, memory and all. A second
    lane (short before bulk) would be a second such dict behind the same four verbs.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.tokens = 0
        self.sequences = 0
        self._works: OrderedDict[W, None] = OrderedDict()

    def __len__(self) -> int:
        """Number of works waiting, at least in part."""
        return len(self._works)

    def put(self, work: W) -> None:
        """Enqueue at the end. Raises InvalidInput when it can never fit, Overloaded when it does not fit now."""
        if self.tokens + work.tokens > self.max_tokens:
            if work.tokens > self.max_tokens:
                raise InvalidInput(
                    f"{work.tokens} tokens at once are more than the queue ever holds: {self.max_tokens} "
                    "(--max-queue-tokens); send fewer inputs a request"
                )
            raise Overloaded(
                f"the queue is full: {self.tokens} tokens wait, {work.tokens} more would pass the limit of "
                f"{self.max_tokens} (--max-queue-tokens)"
            )
        self._works[work] = None
        self.tokens += work.tokens
        self.sequences += work.sequences

    def take(self, max_tokens: int, max_sequences: int, now: float) -> Taken[W]:
        """The oldest sequences that fit into one batch.

        A work that does not fit whole is cut between two sequences. A sequence longer than the whole batch goes alone,
        so that nothing waits for ever.
        """
        slices: list[Slice[W]] = []
        expired: list[tuple[W, int]] = []
        room_tokens, room_sequences = max_tokens, max_sequences
        while self._works and room_sequences > 0:
            work = next(iter(self._works))
            if work.deadline is not None and work.deadline <= now:
                expired.append((work, self.drop(work)))
                continue
            lo, tokens, sequences = work.cursor, work.tokens, work.sequences
            if tokens > room_tokens or sequences > room_sequences:
                cu = work.batch.cu_seqlens
                sequences = fitting(cu, lo, room_tokens, room_sequences)
                if sequences == 0:
                    if slices:
                        break
                    sequences = 1
                tokens = int(cu[lo + sequences]) - int(cu[lo])
            slices.append(Slice(work, lo, lo + sequences))
            work.cursor += sequences
            work.sequences -= sequences
            work.tokens -= tokens
            room_sequences -= sequences
            room_tokens -= tokens
            self.sequences -= sequences
            self.tokens -= tokens
            if work.sequences == 0:
                del self._works[work]
        return Taken(slices, max_sequences - room_sequences, max_tokens - room_tokens, expired)

    def drop(self, work: W) -> int:
        """Forget what of a work still waits; how many sequences that was. Harmless when nothing of it waits."""
        if work not in self._works:
            return 0
        del self._works[work]
        dropped = work.sequences
        self.tokens -= work.tokens
        self.sequences -= dropped
        work.tokens = work.sequences = 0
        return dropped

    def works(self) -> list[W]:
        """What waits, at least in part, oldest first."""
        return list(self._works)


def fitting(cu_seqlens: Int32, lo: int, max_tokens: int, max_sequences: int) -> int:
    """How many sequences from `lo` on fit into both limits. One binary search, however many sequences there are."""
    last = np.int32(min(int(cu_seqlens[lo]) + max(max_tokens, 0), _INT32_MAX))
    ends = cu_seqlens[lo + 1 : lo + 1 + max_sequences]
    return int(np.searchsorted(ends, last, side="right"))


def decide(
    *,
    in_flight: int,
    waiting_sequences: int,
    waiting_tokens: int,
    max_in_flight: int,
    max_batch_tokens: int,
    overlap_sequences: int,
) -> bool:
    """Whether to hand the engine a batch now. No timers: it is asked when work arrives and when a batch is answered.

    Nothing runs: send whatever waits, one sequence too. Something runs: a batch sent now would not start before that is
    done, so it may as well grow, but not so long that the engine falls idle in between: send once it is worth it. At most
    `max_in_flight` run, so that what waits stays in the queue, where it can still be joined, cancelled and counted.
    """
    if waiting_sequences == 0 or in_flight >= max_in_flight:
        return False
    return in_flight == 0 or waiting_sequences >= overlap_sequences or 2 * waiting_tokens >= max_batch_tokens
