"""The attention a GPU model is given: the backends that can run there, and for each step the one the table names.

`open_attention` decides once what is possible (and says why the rest is not); `Picked` asks choose.py at each plan().
Steps that may be captured in a CUDA graph only get backends that need no host work before a replay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from hortus.errors import StartError
from hortus.rose.attention import Attention, Heads, fa4, flashinfer, varlen
from hortus.rose.attention.choose import Choice, Gpu, choose
from hortus.rose.attention.measured import TABLE
from hortus.rose.attention.twin import TwinAttention
from hortus.types import Int32

log = logging.getLogger(__name__)

CAPTURABLE = ("fa4", "varlen")
"""Backends whose calls read lengths on the device alone, the better first."""


def refusals(heads: Heads, gpu: Gpu, dtype: torch.dtype) -> dict[str, str | None]:
    """Every backend's name -> why it cannot run here, None where it can."""
    return {
        "fa4": fa4.refuse(heads, gpu, dtype),
        "varlen": varlen.refuse(heads, gpu, dtype),
        "flashinfer_fa3": flashinfer.refuse("fa3", heads, gpu, dtype),
        "flashinfer_fa2": flashinfer.refuse("fa2", heads, gpu, dtype),
        "twin": None,
    }


def allowed(wanted: str, refused: dict[str, str | None], graph_max_tokens: int) -> tuple[list[str], list[str]]:
    """(backends for steps that may be captured, backends for the others); StartError when there are none.

    wanted: --attention. graph_max_tokens: 0 when --cuda-graphs is off. The twin is used when asked for, or when nothing
    else can run; it plans on the host.
    """
    if wanted != "auto":
        if (why := refused[wanted]) is not None:
            raise StartError(f"--attention {wanted} cannot run here: it {why}")
        if graph_max_tokens and wanted not in CAPTURABLE:
            raise StartError(
                f"--attention {wanted} works on the host before every step, which a CUDA graph's replay would leave out: "
                "add --cuda-graphs false, or use --attention auto, which takes it for steps above --graph-max-tokens"
            )
        return [wanted], [wanted]
    able = [name for name, why in refused.items() if why is None and name != "twin"] or ["twin"]
    # One and not several in graphs: FlashAttention 4 was never more than 1 us behind, and shapes stay few.
    in_graph = [name for name in CAPTURABLE if name in able][:1]
    if graph_max_tokens and not in_graph:
        whys = "; ".join(f"{name} {why}" for name, why in refused.items() if why)
        raise StartError(f"no attention backend can run in CUDA graphs here ({whys}): add --cuda-graphs false")
    return in_graph or able, able


class Picked:
    """One Attention that is several: plan() takes the table's choice for the step, run() is that backend's."""

    def __init__(
        self,
        *,
        gpu: Gpu,
        heads: Heads,
        in_graph: list[str],
        eager: list[str],
        graph_max_tokens: int,
        make: Callable[[str], Attention],
    ) -> None:
        self._gpu, self._heads = gpu, heads
        self._in_graph, self._eager, self._graph_max_tokens = in_graph, eager, graph_max_tokens
        self._make = make
        self._made: dict[str, Attention] = {}
        self._choices: dict[tuple[int, int], Choice] = {}
        self._now: Attention | None = None
        self._rows = 0

    @property
    def longest_matters(self) -> bool:
        """Whether a graph's backend relies on max_seqlen; without, one graph serves all lengths."""
        return self._in_graph != ["fa4"]

    @property
    def name(self) -> str:
        return "|".join(dict.fromkeys((*self._in_graph, *self._eager)))

    def choice(self, tokens: int, longest: int) -> Choice:
        """For a step of this size; equal for all sizes that round up to the same powers of two (and side of the graphs'
        limit), so that what ran in the warm-up is what runs later."""
        captured = tokens <= self._graph_max_tokens
        names = self._in_graph if captured else self._eager
        key = ((int(tokens) - 1).bit_length() + (0 if captured else 64), (int(longest) - 1).bit_length())
        if (found := self._choices.get(key)) is None:
            rounded = 1 << (tokens - 1).bit_length(), 1 << (int(longest) - 1).bit_length()
            found = self._choices[key] = choose(TABLE, self._gpu, self._heads, *rounded, names)
        return found

    def describe(self) -> str:
        """One line for a person: the choice for one short text, one long one, and a large batch."""
        parts = [self.choice(n, longest) for n, longest in ((128, 128), (4096, 4096), (65536, 512))]
        return "; ".join(dict.fromkeys(c.reason for c in parts))

    def plan(self, cu_seqlens_cpu: Int32, cu_seqlens: Tensor, max_seqlen: int) -> None:
        self._rows = int(cu_seqlens_cpu[-1])
        tokens, longest = max(self._rows, 1), max(max_seqlen, 1)
        while (name := self.choice(tokens, longest).name) not in self._made:
            try:
                made = self._make(name)
                made.plan(cu_seqlens_cpu, cu_seqlens, max_seqlen)
            except torch.OutOfMemoryError:
                raise
            except Exception as e:
                # Only large steps take some backends, so no start has tried them: there, the others are as good as before.
                others = [other for other in self._eager if other != name]
                if tokens <= self._graph_max_tokens or not others:
                    raise
                log.warning("attention %s is not used any more: %s: %s", name, type(e).__name__, e)
                self._eager = others
                self._choices.clear()
                continue
            self._made[name] = self._now = made
            return
        self._now = self._made[name]
        self._now.plan(cu_seqlens_cpu, cu_seqlens, max_seqlen)

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self._now is not None, "plan() comes before run()"
        assert q.shape[0] == self._rows, "every row belongs to a sequence: padding tokens are the last one"
        return self._now.run(q, k, v)


def open_attention(
    wanted: str, heads: Heads, *, device: torch.device, dtype: torch.dtype, graph_max_tokens: int
) -> Picked:
    """The attention of a model on a CUDA device; logs what was chosen, and what cannot run and why.

    wanted: RoseConfig.attention. graph_max_tokens: steps up to this many tokens may be captured; 0 when none is.
    """
    gpu = Gpu(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    refused = refusals(heads, gpu, dtype)
    in_graph, eager = allowed(wanted, refused, graph_max_tokens)
    makers: dict[str, Callable[[], Attention]] = {
        "fa4": lambda: fa4.Fa4Attention(heads),
        "varlen": lambda: varlen.VarlenAttention(heads),
        "flashinfer_fa3": lambda: flashinfer.FlashInferAttention("fa3", heads, device, dtype),
        "flashinfer_fa2": lambda: flashinfer.FlashInferAttention("fa2", heads, device, dtype),
        "twin": lambda: TwinAttention(heads),
    }
    picked = Picked(
        gpu=gpu,
        heads=heads,
        in_graph=in_graph,
        eager=eager,
        graph_max_tokens=graph_max_tokens,
        make=lambda name: makers[name](),
    )
    for name, why in refused.items():
        if why is not None:
            log.info("attention %s is not used: it %s", name, why)
    log.info("attention: %s", picked.describe())
    return picked
