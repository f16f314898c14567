"""The queue: two lanes, first come, first served in each, by tokens; and the one rule of when the next batch goes out.

Pure: no clock (`now` is passed in), no asyncio, no threads. Does not know the engine, or what becomes of a work once its
sequences are taken.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
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
    bulk: bool = False
    """Which lane it waits in. Set by the queue."""
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


BULK_MOST, BULK_LEAST, BULK_QUEUE = 1 / 2, 1 / 8, 7 / 8
"""Of a batch, what bulk gets at most, ever, and at least, while short works wait too; of the queue, what bulk may fill."""


class Queue(Generic[W]):
    """Works in order of arrival. `tokens`, `bulk_tokens` and `sequences` are exact at all times: the dead do not count.

    Works of more than `bulk_over` tokens wait in a lane of their own; None: there is one lane. Ordered dicts rather than
    deques, so that a cancelled work leaves from the middle at once, memory and all.
    """

    def __init__(self, max_tokens: int, bulk_over: int | None = None, *, merge: bool = True) -> None:
        """merge: several works may share a batch."""
        self.max_tokens, self._merge = max_tokens, merge
        self.tokens = 0
        self.sequences = 0
        self._bulk_over = bulk_over
        self.bulk_tokens = 0
        self._short: OrderedDict[W, None] = OrderedDict()
        self._bulk: OrderedDict[W, None] = OrderedDict()

    def __len__(self) -> int:
        """Number of works waiting, at least in part."""
        return len(self._short) + len(self._bulk)

    def put(self, work: W) -> None:
        """Enqueue at the end of its lane. Raises InvalidInput when it can never fit, Overloaded when it does not fit now."""
        work.bulk = self._bulk_over is not None and work.tokens > self._bulk_over
        most = int(self.max_tokens * BULK_QUEUE) if work.bulk else self.max_tokens
        if self.tokens + work.tokens > self.max_tokens or (work.bulk and self.bulk_tokens + work.tokens > most):
            limit = f"{most} (--max-queue-tokens{', an eighth kept for short requests' if work.bulk else ''})"
            if work.tokens > most:
                raise InvalidInput(
                    f"{work.tokens} tokens at once are more than the queue ever holds: {limit}; send fewer inputs a request"
                )
            raise Overloaded(
                f"the queue is full: {self.tokens} tokens wait, {work.tokens} more would pass the limit of {limit}"
            )
        (self._bulk if work.bulk else self._short)[work] = None
        self._count(work.bulk, work.tokens, work.sequences)

    def take(self, max_tokens: int, max_sequences: int, now: float) -> Taken[W]:
        """The oldest sequences of each lane that fit into one batch: short works first, then bulk up to half a batch.

        While both wait, bulk gets its least share, and one sequence at least, before anything else: a flood of short works
        slows it down and does not starve it. A work that does not fit whole is cut between two sequences. A sequence longer
        than its room goes where nothing was taken before it, so that nothing waits for ever.
        """
        filling: _Filling[W] = _Filling(max_tokens, max_sequences)
        if self._bulk and self._short:
            self._fill(self._bulk, filling, int(max_tokens * BULK_LEAST), max(1, int(max_sequences * BULK_LEAST)), now)
        bulk = filling.tokens
        self._fill(self._short, filling, max_tokens - bulk, max_sequences, now)
        most = int(max_tokens * BULK_MOST) - bulk
        if self._bulk and (most > 0 or not filling.sequences):
            self._fill(self._bulk, filling, min(most, max_tokens - filling.tokens), max_sequences, now)
        return Taken([*filling.short, *filling.bulk], filling.sequences, filling.tokens, filling.expired)

    def _fill(self, lane: OrderedDict[W, None], filling: _Filling[W], tokens: int, sequences: int, now: float) -> None:
        """Take from one lane, in order, up to so many tokens and sequences."""
        slices = filling.bulk if lane is self._bulk else filling.short
        tokens_before, sequences_before = filling.tokens, filling.sequences
        room_tokens, room_sequences = tokens, min(sequences, filling.max_sequences - filling.sequences)
        while lane and room_sequences > 0 and (self._merge or not filling.sequences):
            work = next(iter(lane))
            if work.deadline is not None and work.deadline <= now:
                filling.expired.append((work, self.drop(work)))
                continue
            lo, tokens, sequences = work.cursor, work.tokens, work.sequences
            if tokens > room_tokens or sequences > room_sequences:
                cu = work.batch.cu_seqlens
                sequences = fitting(cu, lo, room_tokens, room_sequences)
                if sequences == 0:
                    if filling.sequences:
                        break
                    sequences = 1
                tokens = int(cu[lo + sequences]) - int(cu[lo])
            if slices and slices[-1].work is work:  # taken from twice, it stays one slice
                slices[-1] = Slice(work, slices[-1].lo, lo + sequences)
            else:
                slices.append(Slice(work, lo, lo + sequences))
            filling.tokens += tokens
            filling.sequences += sequences
            room_tokens -= tokens
            room_sequences -= sequences
            work.cursor += sequences
            work.sequences -= sequences
            work.tokens -= tokens
            if work.sequences == 0:
                del lane[work]
        self._count(lane is self._bulk, tokens_before - filling.tokens, sequences_before - filling.sequences)

    def drop(self, work: W) -> int:
        """Forget what of a work still waits; how many sequences that was. Harmless when nothing of it waits."""
        lane = self._lane(work)
        if work not in lane:
            return 0
        del lane[work]
        dropped = work.sequences
        self._count(work.bulk, -work.tokens, -dropped)
        work.tokens = work.sequences = 0
        return dropped

    def works(self) -> list[W]:
        """What waits, at least in part, oldest first in each lane."""
        return [*self._short, *self._bulk]

    def _lane(self, work: W) -> OrderedDict[W, None]:
        return self._bulk if work.bulk else self._short

    def _count(self, bulk: bool, tokens: int, sequences: int) -> None:
        self.tokens += tokens
        self.sequences += sequences
        if bulk:
            self.bulk_tokens += tokens


@dataclass(slots=True)
class _Filling(Generic[W]):
    """A batch while it is filled."""

    max_tokens: int
    max_sequences: int
    sequences: int = 0
    tokens: int = 0
    short: list[Slice[W]] = field(default_factory=list)
    bulk: list[Slice[W]] = field(default_factory=list)
    expired: list[tuple[W, int]] = field(default_factory=list)


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
