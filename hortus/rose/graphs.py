"""Whole-model CUDA graphs, captured lazily: which shape, which way (`decide`, pure), and doing it (`Graphs`).

Does not know HTTP, queues or models: a model is a Network, a GPU is a Device. docs/graphs.md tells the why at length.

A step's shape is rounded up to a bucket. The first hit of a bucket runs eagerly *at the bucket's size*, which compiles and
loads every kernel that the capture will meet; the second captures and replays; later ones replay. So eager, capture and
replay run the same kernels on the same shapes and give the same bits.
"""

from __future__ import annotations

import enum
import functools
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from hortus.errors import StartError
from hortus.metrics import Metrics
from hortus.rose.device import Captured, Device
from hortus.rose.network import Inputs, Network
from hortus.rose.staging import Layout, Slot
from hortus.types import Int32, TokenBatch

log = logging.getLogger(__name__)


class Shape(NamedTuple):
    """What a graph is keyed by, and the sizes that an eager step is given."""

    sequences: int
    tokens: int
    longest: int
    """Bound on the longest sequence that attention may rely on."""
    typed: bool
    """With token types; without them a model adds row 0 of its table, a different kernel."""
    spans: bool = False
    """What comes out are the states of all tokens, of which spans are pooled behind the graph."""


class State(enum.Enum):
    """What is known of a shape that has been hit."""

    SEEN = "seen"
    HELD = "held"
    REFUSED = "refused"


class How(enum.Enum):
    EAGER = "eager"
    CAPTURE = "capture"
    REPLAY = "replay"


class Decision(NamedTuple):
    how: How
    shape: Shape
    bucketed: bool
    """The shape is a bucket, so the shared input block is used; else the step has memory of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What decide goes by."""

    graphs: bool
    max_tokens: int
    """Steps that round up to more rows than this run eagerly, at their own size."""
    longest_matters: bool
    """The attention backend needs a bound on the longest sequence. Without, tokens bound it and shapes are fewer."""
    spans: bool = True
    """Steps with spans may be captured: attention does not ask for their ids on the host."""
    fine: int = 64
    """Token rows are multiples of this up to 1,024, of four times this above."""


def token_bucket(tokens: int, fine: int = 64) -> int:
    """16, multiples of `fine` up to 1024, of four times that above: with 64 at most half a matrix tile, or a fifth, in vain."""
    if tokens <= 16:  # the shortest queries: fewer rows to read and write, where a tile is masked
        return 16
    step = fine if tokens <= 1024 else 4 * fine
    return -(-tokens // step) * step


def sequence_bucket(sequences: int) -> int:
    """Powers of two: an empty slot costs attention one block that stops at once and pooling one row of zeros."""
    return 1 << (sequences - 1).bit_length()


def longest_bucket(longest: int) -> int:
    """64, 256, 1024, ...: only the size of a launch grid hangs on it."""
    bound = 64
    while bound < longest:
        bound *= 4
    return bound


@functools.lru_cache(maxsize=1 << 16)
def bucket(sequences: int, tokens: int, longest: int, typed: bool, *, longest_matters: bool, fine: int = 64) -> Shape:
    """The smallest bucket that a step of this size fits."""
    rows = token_bucket(tokens, fine)
    # The padding tokens are a sequence too, and may be the longest.
    bound = min(longest_bucket(max(longest, rows - tokens)), rows) if longest_matters else rows
    return Shape(sequence_bucket(sequences), rows, bound, typed)


def decide(
    sequences: int,
    tokens: int,
    longest: int,
    typed: bool,
    *,
    spans: bool = False,
    known: Mapping[Shape, State],
    rules: Rules,
) -> Decision:
    """How a step of this size is to run, given what is known of shapes. Pure."""
    if token_bucket(tokens, rules.fine) > rules.max_tokens:
        return own_size(sequences, tokens, longest, typed)
    shape = bucket(sequences, tokens, longest, typed, longest_matters=rules.longest_matters, fine=rules.fine)
    if spans:
        shape = shape._replace(spans=True)
    state = known.get(shape) if rules.graphs else None
    if state is State.HELD:
        return Decision(How.REPLAY, shape, True)
    if state is State.SEEN:
        return Decision(How.CAPTURE, shape, True)
    return Decision(How.EAGER, shape, True)


def own_size(sequences: int, tokens: int, longest: int, typed: bool) -> Decision:
    """Eagerly, in memory of the step's own."""
    # Rows are rounded to 64 all the same: free inside a matrix tile, and memory is asked for in fewer sizes.
    return Decision(How.EAGER, Shape(sequences, -(-tokens // 64) * 64, max(longest, 63), typed), False)


def warm_shapes(text: str, *, most_tokens: int, longest: int, cap: int, fine: int = 64) -> list[tuple[int, int]]:
    """(sequences, tokens in all) for --warm: `all`, or SEQUENCESxTOKENS with the tokens of each sequence.

    most_tokens: largest step that is captured. longest: the model's limit. `all` takes every token bucket with every
    sequence bucket of 16 tokens a sequence or more, larger steps first (their memory then serves the smaller), up to
    cap of them. Raises StartError naming the word that is wrong.
    """
    if text.strip() == "all":
        sizes = []
        tokens = token_bucket(1, fine)
        while tokens <= most_tokens:
            n = sequence_bucket(-(-tokens // longest))
            while n * 16 <= tokens:
                sizes.append((n, tokens))
                n *= 2
            tokens = token_bucket(tokens + 1, fine)
        return sorted(sizes, key=lambda s: (-s[1], s[0]))[:cap]
    sizes = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*([1-9]\d{0,5})x([1-9]\d{0,6})\s*", word)
        if match is None:
            raise StartError(f"--warm: {word.strip()!r} is neither `all` nor SEQUENCESxTOKENS such as 8x128")
        n, each = int(match[1]), int(match[2])
        if each > longest:
            raise StartError(f"--warm: {word.strip()} has sequences of {each} tokens; the model takes {longest}")
        sizes.append((n, n * each))
    return sorted(sizes, key=lambda s: -s[1])


class _Entry:
    """Views of a step's block of inputs. Those of a bucket, in the shared block, are made once."""

    __slots__ = ("inputs", "layout", "target")

    def __init__(self, layout: Layout, block: Tensor) -> None:
        self.layout = layout
        self.target = block[: layout.size]
        self.inputs: Inputs = layout.inputs(block)


class Graphs:
    """Runs pieces on the device: eager, capture or replay. One thread at a time.

    All buckets share one input block on the device, graphs of steps with spans one for hidden states, and all graphs one memory
    pool. That is safe by stream order alone: a step's upload is enqueued after the kernels of the step before, which are all
    that read the block; its spans are pooled, and its download is enqueued, before the next replay, which may write over both.
    """

    def __init__(self, device: Device, network: Network, rules: Rules, *, cap: int, metrics: Metrics) -> None:
        self._device = device
        self._network = network
        self._rules = rules
        self._cap = cap
        most = rules.max_tokens
        self._block = device.empty(Layout(sequence_bucket(most), most, True, most, most).size)
        self._hidden: Tensor | None = None
        self._known: dict[Shape, State] = {}
        self._entries: dict[Shape, _Entry] = {}
        self._held: OrderedDict[Shape, Captured] = OrderedDict()  # least recently used first
        self._pool_bytes = 0
        self._warm_thread: int | None = None  # the one that last ran eagerly
        self._metrics = metrics
        self._counts = {how: metrics.graph_steps.labels(how.value) for how in How}

    def __len__(self) -> int:
        """Graphs held."""
        return len(self._held)

    def latest(self) -> Captured | None:
        """The graph that was replayed last."""
        return next(reversed(self._held.values()), None)

    def holds(self, batch: TokenBatch) -> bool:
        """Whether `run` would replay a graph."""
        return self._decide(batch).how is How.REPLAY

    def run(self, batch: TokenBatch, slot: Slot, at: int) -> tuple[Tensor, int]:
        """Enqueue one piece, staged in slot's block from `at` on -> (rows on the device, where the block is free again).

        The rows, [>= batch.rows, width] float32, are good until the next run.
        """
        how, shape, bucketed = self._decide(batch)
        entry = self._entries.get(shape) if bucketed else None
        if entry is None:
            layout = Layout(shape.sequences, shape.tokens, shape.typed, batch.span_tokens, batch.span_rows)
            entry = _Entry(layout, self._block if bucketed else self._device.empty(layout.size))
            if bucketed and not shape.spans:  # those are of each step's own size
                self._entries[shape] = entry
        end = at + entry.layout.size
        host = slot.array[at:end]
        entry.layout.fill(host, batch)
        self._device.upload(entry.target, slot.part(at, end))

        self._network.look(host[: 0 if bucketed else shape.tokens], entry.layout.cu_seqlens(host))

        thread = threading.get_ident()
        if how is How.CAPTURE and (thread != self._warm_thread or not self._capture(shape, entry, host)):
            # Libraries make a handle for each thread at its first call, which a capture refuses: be eager once more.
            how = How.EAGER
        self._counts[how].inc()
        if how is How.EAGER:
            rows = self._eager(shape, entry, host)
            self._warm_thread = thread
            if bucketed:
                self._known.setdefault(shape, State.SEEN)
            return rows, end
        self._held.move_to_end(shape)
        rows = self._held[shape].replay()
        if shape.spans:
            hidden, inputs, network = self._hidden_of(shape), entry.inputs, self._network
            rows = self._device.run(lambda: network.pooled(hidden, inputs))
        return rows, end

    def _decide(self, batch: TokenBatch) -> Decision:
        rules, tokens, typed = self._rules, batch.total_tokens, batch.token_types is not None
        spans = batch.spans is not None
        # Spans that overlap may have more tokens than the shared block has room for.
        if spans and (not rules.spans or batch.span_tokens > rules.max_tokens):
            return own_size(len(batch), tokens, batch.max_seqlen, typed)
        # Found out only where it counts: looking at every length takes as long as the rest of the decision.
        longest = (
            batch.max_seqlen if rules.longest_matters or token_bucket(tokens, rules.fine) > rules.max_tokens else 0
        )
        return decide(len(batch), tokens, longest, typed, spans=spans, known=self._known, rules=rules)

    def _eager(self, shape: Shape, entry: _Entry, host: Int32) -> Tensor:
        self._plan(shape, entry, host)
        inputs, network = entry.inputs, self._network
        return self._device.run(lambda: network.forward(inputs))

    def _plan(self, shape: Shape, entry: _Entry, host: Int32) -> None:
        # The bound, not the true longest: eager and captured runs of one bucket must choose the same kernels.
        self._network.plan(entry.layout.cu_seqlens(host), entry.inputs.cu_seqlens, shape.longest)

    def _capture(self, shape: Shape, entry: _Entry, host: Int32) -> bool:
        """Make the shape's graph; False, and never again for this shape, when that fails: eager can do all it does."""
        before, started = self._device.reserved_bytes(), time.perf_counter()
        try:
            self._plan(shape, entry, host)
            graph = self._device.capture(self._captured(shape, entry.inputs))
        except Exception as e:  # noqa: BLE001  whatever cannot be captured runs eagerly, which tells real faults
            self._known[shape] = State.REFUSED
            log.warning("no graph for %d sequences, %d tokens: %s: %s", *shape[:2], type(e).__name__, e)
            return False
        self._known[shape] = State.HELD
        self._held[shape] = graph
        if len(self._held) > self._cap:
            self._evict()
        self._pool_bytes += max(0, self._device.reserved_bytes() - before)
        seconds = time.perf_counter() - started
        self._metrics.graph_capture_seconds.observe(seconds)
        self._metrics.graphs.set(len(self._held))
        self._metrics.graph_memory_bytes.set(self._pool_bytes)
        log.info(
            "graph captured: %d sequences, %d tokens, %.0f ms, %d held, pool %.0f MiB",
            *shape[:2], seconds * 1e3, len(self._held), self._pool_bytes / 2**20,
        )  # fmt: skip
        return True

    def _captured(self, shape: Shape, inputs: Inputs) -> Callable[[], Tensor]:
        """What a shape's graph does."""
        network = self._network
        if not shape.spans:
            return lambda: network.forward(inputs)
        hidden = self._hidden_of(shape)
        return lambda: hidden.copy_(network.hidden(inputs))

    def _hidden_of(self, shape: Shape) -> Tensor:
        """[tokens, hidden] of the block for hidden states, which is made for the first graph that needs it."""
        if self._hidden is None:
            self._hidden = self._network.hidden_like(self._rules.max_tokens)
        return self._hidden[: shape.tokens]

    def _evict(self) -> None:
        """Drop the least recently used graph, after its last replay is over. It must be hit twice to be made again."""
        shape, _ = self._held.popitem(last=False)
        self._device.synchronize()
        del self._known[shape]
        self._entries.pop(shape, None)
        self._metrics.graph_evictions.inc()

    def clear(self) -> None:
        """Drop all graphs and their memory."""
        self._device.synchronize()
        self._held.clear()
        self._entries.clear()
        self._hidden = None
        self._known = {s: k for s, k in self._known.items() if k is State.REFUSED}
        self._pool_bytes = 0
        self._device.drop_graphs()
        self._metrics.graphs.set(0)
        self._metrics.graph_memory_bytes.set(0)
